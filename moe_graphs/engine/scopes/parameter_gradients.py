"""How the gradients of parameters leave the static memory of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_graphs.engine.autograd import accumulates
from moe_graphs.engine.scopes.recording import RecordedBackward
from moe_graphs.engine.scopes.slots import Slot

_LARGE = 1 << 22  # elements


def to_parameters(
    slot: Slot, recorded: RecordedBackward, nodes: Callable[[], Sequence[Node | None]]
) -> dict[int, Tensor | None]:
    """By use, the gradients of parameters as tensors that autograd may take.

    A parameter that has a ``.grad`` already (a later microbatch) is added to by autograd in place:
    it gets the static memory itself, lent until the next replay in the slot. In every other case
    (first microbatch, hooks, ``autograd.grad``) it gets a copy, laid out like the parameter so
    that it can become ``.grad`` without another one.

    nodes: per use, where its gradient goes.
    """
    results: dict[int, Tensor | None] = {}
    copies, sources, lent = [], [], []
    for use, parameter, gradient, loan in recorded.of_parameters:
        if gradient is None:
            results[use] = None
        elif _has_plain_grad(parameter) and accumulates(nodes()[use]):
            results[use] = gradient.detach()
            loan.hand([weakref.ref(results[use])])
            lent.append(loan)
        else:
            results[use] = torch.empty_like(parameter, requires_grad=False)
            copies.append(results[use])
            sources.append(gradient)
    slot.lend(lent)
    _copy_all(copies, sources)
    return results


def add_to_grad(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """What autograd would do with the weights' part of a backward that was delayed."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        else:
            parameter.grad.add_(gradient)


@torch.no_grad()
def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Small tensors in one launch. Large ones each by themselves: the kernel for many tensors
    moves 2.6 TB/s on an H200, the one for a single tensor 4.3 (2026-11-21)."""
    small = [target.numel() < _LARGE for target in targets]
    if not all(small):
        for target, source, is_small in zip(targets, sources, small, strict=True):
            if not is_small:
                target.copy_(source)
        targets, sources = (list(compress(each, small)) for each in (targets, sources))
    if targets:
        torch._foreach_copy_(targets, sources)


def _has_plain_grad(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or parameter._backward_hooks:
        return False
    return gradient.layout is torch.strided
