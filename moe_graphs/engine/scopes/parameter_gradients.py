"""How the gradients of parameters leave the static memory of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_graphs.engine.autograd import accumulates
from moe_graphs.engine.scopes.recording import RecordedBackward
from moe_graphs.engine.scopes.slots import Slot

_LARGE = 1 << 22  # elements


def to_parameters(
    slot: Slot, recorded: RecordedBackward, listed: Sequence[Any], nodes: Sequence[Node | None]
) -> dict[int, Tensor | None]:
    """By use, the gradients of parameters as tensors that autograd may take.

    A parameter that has a ``.grad`` already (a later microbatch) is added to by autograd in place:
    it gets the static memory itself, lent until the next replay in the slot. In every other case
    (first microbatch, hooks, ``autograd.grad``) it gets a copy, laid out like the parameter so
    that it can become ``.grad`` without another one.

    listed, nodes: per use, what was given to autograd's node, and where its gradient goes.
    """
    results: dict[int, Tensor | None] = {}
    copies, sources, lent = [], [], []
    for use, gradient, loan in zip(recorded.uses, recorded.gradients, recorded.loans, strict=True):
        parameter = listed[use]
        if not isinstance(parameter, Tensor):
            continue
        if gradient is None:
            results[use] = None
        elif _has_plain_grad(parameter) and accumulates(nodes[use]):
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
    pairs = list(zip(targets, sources, strict=True))
    small = [pair for pair in pairs if pair[0].numel() < _LARGE]
    if small:
        torch._foreach_copy_(*map(list, zip(*small, strict=True)))
    for target, source in pairs:
        if target.numel() >= _LARGE:
            target.copy_(source)


def _has_plain_grad(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or parameter._backward_hooks:
        return False
    return gradient.layout is torch.strided
