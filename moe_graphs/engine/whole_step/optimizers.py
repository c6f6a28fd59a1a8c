"""Optimizers inside a graph: which can be, and state that their first step has yet to make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from moe_graphs.errors import CaptureError

# A first step from zeros is the same, bit for bit, as a first step without any state.
_START_FROM_ZEROS = (
    optim.Adadelta, optim.Adam, optim.Adamax, optim.AdamW, optim.RAdam, optim.RMSprop, optim.SGD,
)  # fmt: skip


def check_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Refuses by name what a graph cannot hold.

    Raises:
        CaptureError: with what to use instead.
    """
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                raise CaptureError(
                    f"{kind}.param_groups[{number}][{key!r}] is a tensor on {value.device}, whose "
                    f"value a graph would freeze: put it on {device}"
                )
        remedy = _remedy(optimizer, group, device)
        if remedy is not None:
            raise CaptureError(f"{kind} cannot be in a graph: {remedy}")


def _remedy(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> str | None:
    example = "AdamW(..., fused=True, capturable=True)"
    if isinstance(optimizer, (optim.LBFGS, optim.SparseAdam)):
        return f"it reads values on the host: use {example}, or step outside of it"
    fused, on_cuda = group.get("fused"), device.type == "cuda"
    if "capturable" in group and not (group["capturable"] if on_cuda else fused):
        flags = ["capturable=True"] if on_cuda else []
        flags += ["fused=True"] if "fused" in group else []
        wanted = f"pass {', '.join(flags)}" if flags else f"use {example}"
        return f"it reads its step counter on the host: {wanted}"
    if not fused and "capturable" not in group and isinstance(group.get("lr"), torch.Tensor):
        return f"it reads a tensor lr on the host: pass fused=True if it knows it, or use {example}"
    return None


class LateState:
    """State that a rehearsal made: taken away again until the first replay, which needs it.

    Until then the optimizer looks as if it had never run.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._before = [set(optimizer.state) for optimizer in optimizers]
        self._made: list[tuple[Optimizer, torch.Tensor, dict[str, Any]]] = []

    def check(self) -> None:
        """Raises ``CaptureError`` if what an optimizer starts from is not known."""
        for optimizer, before in zip(self._optimizers, self._before, strict=True):
            made = any(optimizer.state[p] for p in optimizer.state if p not in before)
            if made and not _starts_from_zeros(optimizer):
                raise CaptureError(
                    f"{type(optimizer).__name__} makes its state in its first step, which a graph "
                    f"would repeat: take one step before the capture"
                )

    def take_away(self) -> None:
        for optimizer, before in zip(self._optimizers, self._before, strict=True):
            for parameter in [p for p in optimizer.state if p not in before]:
                state = optimizer.state.pop(parameter)
                self._made.append((optimizer, parameter, state))
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()

    def put_in(self) -> None:
        """Idempotent; leaves alone what somebody has loaded in the meantime."""
        for optimizer, parameter, state in self._made:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = state
        self._made.clear()


def _starts_from_zeros(optimizer: Optimizer) -> bool:
    dampened = any(group.get("dampening") for group in optimizer.param_groups)
    return type(optimizer) in _START_FROM_ZEROS and not dampened
