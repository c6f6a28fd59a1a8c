"""Optimizer steps that never wait for the device: unscale, clip, update, average, zero.

    step = DeviceStep(optimizer, scaler=GradScaler(device), clip_norm=1.0)
    for batch in batches:
        step.scale(model(batch).loss).backward()
        result = step()       # tensors; only reading one of them waits for the device
        scheduler.step()

A graph can hold any part of such a step, alone or with the forward and backward before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from moe_graphs.kernels.local_part import local_part
from moe_graphs.optim.gradient_factor import by_dtype, multiply
from moe_graphs.training.capturable import (
    applies_tensor_decay,
    check_capturable_optimizer,
    decay_weights,
)
from moe_graphs.training.ema import ExponentialMovingAverage
from moe_graphs.training.grad_norm import clip_factor, total_norm
from moe_graphs.training.grad_scaler import GradScaler


class StepResult(NamedTuple):
    """Findings of a step, as 0-dim fp32 tensors on the device; a tuple, so a graph can return it.

    Attributes:
        grad_norm: 2-norm of all unscaled gradients before clipping; None without ``clip_norm``.
        found_inf: 1.0 if a gradient was not finite and the step was skipped, else 0.0; None without
            a scaler.
        scale: factor of this step's loss; None without a scaler.
        overflowed: 1.0 if the step was skipped because a rank had no room for some rows, else 0.0;
            None if no ``overflow`` was given.
    """

    grad_norm: Tensor | None
    found_inf: Tensor | None
    scale: Tensor | None
    overflowed: Tensor | None = None


class DeviceStep:
    """One optimizer step; if the scaler finds inf or NaN, only the scaler changes.

    The step may be called with ``overflow`` (``ModelOutput.dropped_tokens``, summed over the
    microbatches). If that is above 0 on any rank, the step changes nothing, not even the scaler:
    some tokens' experts had no room (``rows_factor``), so the gradients are wrong, and the step has
    to be run again (``training.overflow``).

    Args:
        optimizer: a capturable optimizer. With a scaler or ``overflow`` it has to be fused, since
            only fused ones can skip parameters, state and step counter by a flag on the device.
        clip_norm: the largest global gradient norm; ``math.inf`` measures without clipping.
        process_group: ranks that all skip the step if one of them found inf or NaN, or overflowed.
            With pipelines it has the ranks of all stages, and the ranks of ``tp``.
        shard_group: ranks that hold disjoint parts of the parameters; the norm is over all parts.
            Not for parameters that some of these ranks share, nor for DTensors, which know their
            ranks.
        stage_group: ranks of a pipeline (``mesh["pp"].get_group()``): the norm is over all stages,
            whether their parameters are DTensors or not.
        set_to_none: drop gradients instead of zeroing them. This is right if the backward is in the
            same graph as this step, or if nothing is captured. A graph of this step alone reads
            gradients at fixed addresses, so they have to stay.

    Raises:
        ValueError: the optimizer cannot be captured or cannot skip a step; the message has the
            remedy.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        clip_norm: float | None = None,
        ema: ExponentialMovingAverage | None = None,
        process_group: dist.ProcessGroup | None = None,
        shard_group: dist.ProcessGroup | None = None,
        stage_group: dist.ProcessGroup | None = None,
        set_to_none: bool = False,
    ) -> None:
        check_capturable_optimizer(optimizer)
        if scaler is not None:
            _check_skippable(optimizer)
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm: {clip_norm} must be above 0, or None for no clipping")
        self.optimizer, self.scaler, self.ema = optimizer, scaler, ema
        self.clip_norm, self.set_to_none = clip_norm, set_to_none
        self.process_group, self.shard_group = process_group, shard_group
        self.stage_group = stage_group

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scaler's factor, if any; call ``backward`` on the result."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @torch.no_grad()
    def __call__(self, *, overflow: Tensor | None = None) -> StepResult:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        found_inf = scale = norm = factor = None
        overflowed = None if overflow is None else self._overflowed(overflow)
        if self.scaler is not None:
            scale = self.scaler.scale_factor.clone()
            found_inf = self.scaler.unscale_(list(map(local_part, gradients)), self.process_group)
            self.scaler.update(found_inf, unless=overflowed)
        skipped = _either(found_inf, overflowed)
        if self.clip_norm is not None:
            norm = total_norm(gradients, self.shard_group, self.stage_group)
            factor = clip_factor(self.clip_norm, norm)
        if not applies_tensor_decay(self.optimizer):  # a deep copy has lost its hooks
            decay_weights(self.optimizer, skipped)
        with _skipped_if(self.optimizer, skipped), multiplied(self.optimizer, gradients, factor):
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update(skipped)
        self._zero(gradients)
        return StepResult(norm, found_inf, scale, overflowed)

    def _zero(self, gradients: list[Tensor]) -> None:
        if self.set_to_none or not any(hasattr(each, "to_local") for each in gradients):
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
            return
        # Torch's zero_grad takes all gradients of a dtype at once, and fails if DTensors and plain
        # tensors are mixed.
        for same in by_dtype(list(map(local_part, gradients))):
            torch._foreach_zero_(same)

    def _overflowed(self, overflow: Tensor) -> Tensor:
        """1.0 if ``overflow`` is above 0 on any rank, else 0.0."""
        if overflow.ndim or overflow.is_floating_point():
            raise ValueError(
                f"overflow: a tensor {tuple(overflow.shape)} of {overflow.dtype}: pass the 0-dim "
                f"count that the model returns (dropped_tokens)"
            )
        _check_skippable(self.optimizer)
        overflowed = (overflow > 0).float()
        if self.process_group is not None:
            dist.all_reduce(overflowed, op=dist.ReduceOp.MAX, group=self.process_group)
        return overflowed


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return torch.maximum(first, second)


@contextlib.contextmanager
def _skipped_if(optimizer: Optimizer, skipped: Tensor | None) -> Iterator[None]:
    """Context with ``found_inf`` on the optimizer, as ``torch.amp.GradScaler`` sets it.

    Torch's fused optimizers read this attribute and skip the step if it is 1.0.
    """
    if skipped is None:
        yield
        return
    _make_momentum(optimizer)
    flagged: Any = optimizer  # torch declares neither of the two attributes
    flagged.found_inf, flagged.grad_scale = skipped, None
    try:
        yield
    finally:
        del flagged.found_inf, flagged.grad_scale


@contextlib.contextmanager
def multiplied(
    optimizer: Optimizer, gradients: list[Tensor], factor: Tensor | None
) -> Iterator[None]:
    """Context in which the optimizer's gradients count times ``factor``.

    ``moe_graphs.optim.AdamW`` multiplies gradients as it reads them and leaves them unchanged. For
    other optimizers the gradients are multiplied in place.
    """
    if factor is None or not getattr(optimizer, "takes_grad_factor", False):
        if factor is not None:
            multiply(gradients, factor)
        yield
        return
    flagged: Any = optimizer
    flagged.grad_factor = factor
    try:
        yield
    finally:
        del flagged.grad_factor


def _make_momentum(optimizer: Optimizer) -> None:
    """Give fused SGD a momentum of zeros before its first step.

    Torch leaves the momentum uninitialised if the first step is skipped (torch 2.13). From zeros
    the first step is the same as without: the momentum becomes the gradient.
    """
    for group in optimizer.param_groups:
        if not isinstance(optimizer, torch.optim.SGD) or not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _check_skippable(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if not all(group.get("fused") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer: {name} would move its momentum and step counter also in a step that is "
            f"skipped (by a scaler, or by overflow): pass fused=True (Adam, AdamW, SGD, Adagrad)"
        )
    if any(group.get("dampening") for group in optimizer.param_groups):
        raise ValueError(
            f"dampening: {name} does not apply it in its first step, and whether a step is the "
            f"first depends on the ones skipped: pass dampening=0"
        )
