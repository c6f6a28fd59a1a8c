"""The optimizer of a training run, made from its settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_graphs.layers.attention import Attention
from moe_graphs.layers.expert_backends import ExpertsBackend
from moe_graphs.layers.experts import GroupedExperts
from moe_graphs.layers.latent_attention import LatentAttention
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.lm.options import OPTIMIZERS, TrainSettings
from moe_graphs.optim import AdamW, Muon, UpdateOptions
from moe_graphs.optim.muon import complete_momentum
from moe_graphs.training.capturable import tensor_hyperparameters

BUILT: dict[str, Callable[..., torch.optim.AdamW]] = {
    "adamw": AdamW,
    "torch_adamw": functools.partial(torch.optim.AdamW, fused=True, capturable=True),
    # This makes AdamW's learning rate, schedule and decay right for both of its kinds of update.
    "muon": functools.partial(Muon, adjust_lr_fn="match_rms_adamw"),
}
assert tuple(BUILT) == OPTIMIZERS


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
    optimizer = BUILT[settings.optimizer](
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
    groups: dict[Any, dict[str, Any]] = {}
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
