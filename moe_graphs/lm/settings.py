"""Settings of a training run, as values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_graphs.layers.attention import Attention
from moe_graphs.layers.expert_backends import ExpertsBackend
from moe_graphs.layers.experts import GroupedExperts
from moe_graphs.layers.latent_attention import LatentAttention
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.optim import AdamW, Muon, UpdateOptions
from moe_graphs.optim.muon import complete_momentum
from moe_graphs.training.capturable import tensor_hyperparameters

OPTIMIZERS: dict[str, Callable[..., torch.optim.AdamW]] = {
    "adamw": AdamW,
    "torch_adamw": functools.partial(torch.optim.AdamW, fused=True, capturable=True),
    # This makes AdamW's learning rate, schedule and decay right for both of its kinds of update.
    "muon": functools.partial(Muon, adjust_lr_fn="match_rms_adamw"),
}
STATE_DTYPES = {
    "parameter": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "8bit": torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run of the training loop.

    Attributes:
        batch_size: sequences in one optimizer step, all microbatches together.
        learning_rate: the peak, reached after ``warmup_steps``. A cosine then goes down to a tenth
            of it (``final_fraction``) at step ``steps``.
        optimizer: ``adamw`` is our AdamW and ``torch_adamw`` is torch's fused one; both compute the
            same on the CPU and have the same state anywhere. ``muon`` is Muon for the matrices of
            layers and experts and our AdamW for the rest, at the same learning rate.
        optimizer_state: the dtype of our AdamW's states: ``parameter`` (the parameter's),
            ``float32``, ``bfloat16``, or ``8bit``, which is rounded stochastically from ``seed``.
        stochastic_rounding: whether bf16 parameters and states are rounded stochastically, from
            ``seed``.
        ema_decay: decay of averages of the parameters, which evaluations and samples then use.
    """

    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    microbatches: int = 1
    warmup_steps: int = 20
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    optimizer: str = "adamw"
    optimizer_state: str = "parameter"
    stochastic_rounding: bool = False
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps: {self.warmup_steps} must not be negative")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: {self.seed} must be from -2**63 to 2**64 - 1, as torch's are")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        if self.optimizer_state not in STATE_DTYPES:
            raise ValueError(
                f"optimizer_state: {self.optimizer_state!r} is not one of {', '.join(STATE_DTYPES)}"
            )
        is_default = self.update_options.is_default  # or is told what is wrong with one
        if self.optimizer != "adamw" and not is_default:
            raise ValueError(
                f"optimizer: {self.optimizer} has no optimizer_state, stochastic_rounding or "
                f"ema_decay: use adamw, or drop them"
            )
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches: {self.microbatches} does not divide the batch of "
                f"{self.batch_size} sequences: choose a divisor"
            )

    @property
    def update_options(self) -> UpdateOptions:
        dtype = STATE_DTYPES[self.optimizer_state]
        return UpdateOptions(dtype, self.stochastic_rounding, self.ema_decay)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def learning_rate_at(self, step: int) -> float:
        """The learning rate at a step: linear warm-up, then a cosine.

        It is a function of the step, so there is no state to save.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        span = max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / span)))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW or Muon with weight decay on matrices only; its learning rate is a tensor.

    Eager runs have it as a tensor, too, so that they equal, bit by bit, runs with the update in a
    graph: as a tensor the rate is rounded to fp32.

    Raises:
        ValueError: if stochastic rounding is asked for but nothing is bf16; if states of 8 bits are
            asked for but no parameter can have them; or if Muon is asked for with matrices that are
            sharded, or with experts of other libraries.
    """
    options = _options(model, settings)
    optimizer = OPTIMIZERS[settings.optimizer](
        parameter_groups(model, settings),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        **options,
    )
    tensor_hyperparameters(optimizer)
    return optimizer


@torch.no_grad()
def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes AdamW's and Muon's state of parameters that have none yet, as a first step finds it."""
    options = getattr(optimizer, "options", UpdateOptions())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if group.get("muon"):
                complete_momentum(state, parameter)
            else:
                options.complete(state, parameter)


def check_optimizer_layout(settings: TrainSettings, tp: int) -> None:
    """Checks that the optimizer can update the part of a matrix that a rank of ``tp`` has.

    Raises:
        ValueError: if it is Muon, which cannot.
    """
    if settings.optimizer == "muon" and tp > 1:
        raise ValueError(
            f"optimizer: muon with tp={tp}, which cuts matrices by columns, and rows of each of "
            f"their parts: use --optimizer adamw, or --tp 1 (--dp-shard, --ep and --pp are fine)"
        )


def parameter_groups(model: nn.Module, settings: TrainSettings) -> list[dict[str, Any]]:
    """Parameter groups of the optimizer; a checkpoint of one process numbers by their order."""
    splits = _splits_of_matrices(model) if settings.optimizer == "muon" else {}
    # Sharded parameters are updated together only if they lie on the same mesh.
    groups: dict[tuple, dict] = {}
    for decayed in (True, False):
        for p in model.parameters():
            if p.requires_grad and (p.ndim >= 2) == decayed:
                decay = settings.weight_decay if decayed else 0.0
                group = {"params": [], "weight_decay": decay}
                if settings.optimizer == "muon":
                    group |= {"muon": p in splits, "split": splits.get(p, ())}
                mesh = getattr(p, "device_mesh", None)
                key = (decayed, mesh, splits.get(p))
                groups.setdefault(key, group)["params"].append(p)
    return list(groups.values())


def _options(model: torch.nn.Module, settings: TrainSettings) -> dict[str, Any]:
    """Options of our AdamW; empty if they are as torch's."""
    asked = settings.update_options
    of_bf16 = {asked.state_dtype, *(p.dtype for p in model.parameters())} & {torch.bfloat16}
    if asked.stochastic_rounding and not of_bf16:
        raise ValueError(
            "stochastic_rounding: no parameter and no state is of bf16, so that nothing would be "
            "rounded: use bfloat16 parameters (--dtype) or states (--optimizer-state), or drop it"
        )
    if asked.is_default:
        return {}
    if asked.state_dtype == torch.uint8 and not any(map(asked.has_codes, model.parameters())):
        raise ValueError(
            "optimizer_state: 8bit: no parameter is a matrix of 4,096 numbers in rows that 64 "
            "divides, so that all states would be float32: use another one"
        )
    seed = {"seed": settings.seed % (1 << 64)} if asked.needs_random_bits else {}
    return dataclasses.asdict(asked) | seed


def states_of_8_bits(model: nn.Module, settings: TrainSettings) -> str | None:
    """Number of states of 8 bits, in words; for pipeline stages, those of this rank."""
    asked, held = settings.update_options, list(model.parameters())
    if asked.state_dtype != torch.uint8:
        return None
    coded, all_ = (sum(p.numel() for p in x) for x in (filter(asked.has_codes, held), held))
    return f"AdamW's states: 8 bits for {coded:,} of {all_:,} parameters, float32 for the others"


def _splits_of_matrices(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """Weights between hidden states, for Muon, and how one that holds several is split.

    Embedding, head, router and norms are not among them.
    """
    splits: dict[nn.Parameter, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            splits |= {module.qkv.weight: module.sizes, module.out.weight: ()}
        elif isinstance(module, LatentAttention):
            splits[module.down.weight] = tuple(size for size in module.down_sizes if size)
            others = (module.query_up, module.kv_up, module.out)
            splits |= dict.fromkeys((projection.weight for projection in others), ())
        elif isinstance(module, SwiGLU):
            splits |= {module.w1.weight: (len(module.w1.weight) // 2,) * 2, module.w2.weight: ()}
        elif isinstance(module, GroupedExperts):
            splits |= {module.w1: (module.w1.shape[-1] // 2,) * 2, module.w2: ()}
        elif isinstance(module, ExpertsBackend):
            raise ValueError(
                f"optimizer: muon does not know how {type(module).__name__} keeps its matrices: "
                f"use --experts moe_graphs, or another optimizer"
            )
    return splits
