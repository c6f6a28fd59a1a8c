"""The optimizers of a training run: what is known of each, and how one is made from settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from moe_graphs.lm.options import TrainSettings
from moe_graphs.optim import AdamW, Muon, UpdateOptions
from moe_graphs.optim.muon import complete_momentum
from moe_graphs.optim.whole_matrices import received_bytes, rows_of
from moe_graphs.registry import OPTIMIZERS
from moe_graphs.training.capturable import tensor_hyperparameters


class OptimizerChoice:
    """An optimizer of ``moe-graphs train``, and all that the command has to know of it.

    The names in ``registry.OPTIMIZERS`` are those of such classes. Any other ``Optimizer`` of
    torch's interface can be named by its place (``module:Class``), and has the facts given here.

    Attributes:
        takes_update_options: whether it has states of another dtype, stochastic rounding and
            averages (``UpdateOptions``).
        updates_in_backward: whether it can update each weight as soon as its gradient is there
            (``UpdateInBackward``).
        passes: how often a step reads or writes a number for each weight; None if not known.
        needs_whole_columns: whether it cannot update the part of a matrix that a rank of tensor
            parallelism has.
    """

    takes_update_options: ClassVar[bool] = False
    updates_in_backward: ClassVar[bool] = False
    passes: ClassVar[int | None] = None
    needs_whole_columns: ClassVar[bool] = False

    def group_facts(self, model: nn.Module) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """Entries of a parameter's group that the optimizer reads; hashable values.

        All parameters have the same entries.
        """
        return {}

    def build(
        self, groups: list[dict[str, Any]], settings: TrainSettings, **options: Any
    ) -> Optimizer:
        """Makes the optimizer; ``options`` are those of ``UpdateOptions`` that were asked for."""
        raise NotImplementedError

    def complete_state(self, optimizer: Optimizer) -> None:
        """Makes the state that a first step makes, where there is none yet."""
        options = getattr(optimizer, "options", UpdateOptions())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                options.complete(optimizer.state[parameter], parameter)

    def received_bytes(self, optimizer: Optimizer) -> int:
        """Bytes that an update receives from other ranks."""
        return 0


class OurAdamW(OptimizerChoice):
    takes_update_options = updates_in_backward = True
    # It reads parameter, gradient and two states, and writes all but the gradient. Before that the
    # gradient is read once more, for the norm to clip by.
    passes = 8

    def build(
        self, groups: list[dict[str, Any]], settings: TrainSettings, **options: Any
    ) -> Optimizer:
        betas = settings.beta1, settings.beta2
        return AdamW(groups, lr=settings.learning_rate, betas=betas, **options)


class TorchAdamW(OptimizerChoice):
    passes = 8

    def build(
        self, groups: list[dict[str, Any]], settings: TrainSettings, **options: Any
    ) -> Optimizer:
        by: dict[str, Any] = dict(fused=True, capturable=True)
        betas = settings.beta1, settings.beta2
        return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, **by)


class MuonForMatrices(OptimizerChoice):
    """Muon for the matrices of layers and experts, and our AdamW for the rest."""

    needs_whole_columns = updates_in_backward = True

    def group_facts(self, model: nn.Module) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        splits = _splits_of_matrices(model)
        return {
            parameter: {"muon": parameter in splits, "split": splits.get(parameter, ())}
            for parameter in model.parameters()
        }

    def build(
        self, groups: list[dict[str, Any]], settings: TrainSettings, **options: Any
    ) -> Optimizer:
        # This adjustment makes AdamW's rate, schedule and decay right for both kinds of update.
        by: dict[str, Any] = dict(adjust_lr_fn="match_rms_adamw")
        betas = settings.beta1, settings.beta2
        return Muon(groups, lr=settings.learning_rate, betas=betas, **by)

    def complete_state(self, optimizer: Optimizer) -> None:
        options = getattr(optimizer, "options", UpdateOptions())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if group["muon"]:
                    complete_momentum(state, parameter)
                else:
                    options.complete(state, parameter)

    def received_bytes(self, optimizer: Optimizer) -> int:
        found = 0
        for group in optimizer.param_groups:
            if group["muon"]:
                rows = (rows_of(parameter) for parameter in group["params"])
                found += received_bytes([each for each in rows if each is not None])
        return found


class AnyOptimizer(OptimizerChoice):
    """An ``Optimizer`` of somebody else, with the options of ours that it accepts."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self.kind = kind

    def build(
        self, groups: list[dict[str, Any]], settings: TrainSettings, **options: Any
    ) -> Optimizer:
        # torch has both on real devices only; a plan makes states on the meta device.
        known: dict[str, Any] = {} if _is_meta(groups) else dict(fused=True, capturable=True)
        known["betas"] = settings.beta1, settings.beta2
        accepted = inspect.signature(self.kind).parameters
        by = {name: value for name, value in known.items() if name in accepted}
        kind: Any = self.kind
        optimizer: Optimizer = kind(groups, lr=settings.learning_rate, **by)
        return optimizer

    def complete_state(self, optimizer: Optimizer) -> None:
        """Makes the state by a step with gradients and rates of zero, as torch's DCP does.

        Raises:
            ValueError: if a state is no tensor, which a checkpoint cannot hold, or if the step
                reads values and there are none, on the meta device.
        """
        if not optimizer.state:
            try:
                self._step_of_zeros(optimizer)
            except RuntimeError as error:
                if not _is_meta(optimizer.param_groups):
                    raise
                raise ValueError(
                    f"optimizer: {self.kind.__name__} reads values in its step, so that its states "
                    f"cannot be planned without memory ({error}): plan with another optimizer"
                ) from error
        for state in optimizer.state.values():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    raise ValueError(
                        f"optimizer: {self.kind.__name__} keeps {name!r} as "
                        f"{type(value).__name__}, which checkpoints cannot hold: keep a tensor"
                    )

    def _step_of_zeros(self, optimizer: Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        gradients, rates = [p.grad for p in held], [g["lr"] for g in optimizer.param_groups]
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = 0.0 if _is_meta([group]) else rate * 0
        optimizer.step()
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _is_meta(groups: list[dict[str, Any]]) -> bool:
    return any(parameter.is_meta for group in groups for parameter in group["params"])


def optimizer_choice(name: str) -> OptimizerChoice:
    """The optimizer of a name, or of a place ``module:Class``.

    Raises:
        ValueError: if there is none.
    """
    found = OPTIMIZERS[name]
    if isinstance(found, type) and issubclass(found, OptimizerChoice):
        return found()
    if isinstance(found, type) and issubclass(found, Optimizer):
        return AnyOptimizer(found)
    raise ValueError(f"optimizer: {name!r} is no class of torch.optim.Optimizer: name one")


def build_optimizer(model: nn.Module, settings: TrainSettings) -> Optimizer:
    """The optimizer with weight decay on matrices only; its learning rate is a tensor.

    Eager runs have it as a tensor, too, so that they equal, bit by bit, runs with the update in a
    graph: as a tensor the rate is rounded to fp32.

    Raises:
        ValueError: if stochastic rounding is asked for but nothing is bf16; if states of 8 bits are
            asked for but no parameter can have them; or if Muon is asked for with matrices that are
            sharded, or with experts of other libraries.
    """
    options, choice = _options(model, settings), optimizer_choice(settings.optimizer)
    optimizer = choice.build(parameter_groups(model, settings), settings, **options)
    tensor_hyperparameters(optimizer)
    return optimizer


@torch.no_grad()
def make_optimizer_state(optimizer: Optimizer, settings: TrainSettings) -> None:
    """Makes the state of parameters that have none yet, as a first step finds it."""
    optimizer_choice(settings.optimizer).complete_state(optimizer)


def check_optimizer_layout(settings: TrainSettings, tp: int) -> None:
    """Checks that the optimizer can update the part of a matrix that a rank of ``tp`` has.

    Raises:
        ValueError: if it cannot.
    """
    if tp > 1 and optimizer_choice(settings.optimizer).needs_whole_columns:
        raise ValueError(
            f"optimizer: {settings.optimizer} with tp={tp}, which cuts matrices by columns, and "
            f"rows of each of their parts: use --optimizer adamw, or --tp 1 (--dp-shard, --ep and "
            f"--pp are fine)"
        )


def parameter_groups(model: nn.Module, settings: TrainSettings) -> list[dict[str, Any]]:
    """Parameter groups of the optimizer; a checkpoint of one process numbers by their order."""
    facts = optimizer_choice(settings.optimizer).group_facts(model)
    # Sharded parameters are updated together only if they lie on the same mesh.
    groups: dict[Any, dict[str, Any]] = {}
    for decayed in (True, False):
        for p in model.parameters():
            if p.requires_grad and (p.ndim >= 2) == decayed:
                decay, own = settings.weight_decay if decayed else 0.0, facts.get(p, {})
                key = (decayed, getattr(p, "device_mesh", None), *own.items())
                group = {"params": [], "weight_decay": decay, **own}
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

    Layers say it by their method ``matrices``. Embedding, head, router and norms have none.
    """
    splits: dict[nn.Parameter, tuple[int, ...]] = {}
    for module in model.modules():
        matrices = getattr(module, "matrices", None)
        if matrices is None:
            continue
        found = matrices()
        if found is None:
            raise ValueError(
                f"optimizer: muon does not know how {type(module).__name__} keeps its matrices: "
                f"write its method matrices, use --experts moe_graphs, or another optimizer"
            )
        splits |= found
    return splits
