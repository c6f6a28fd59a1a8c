"""How gradients leave the static memory of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_graphs.engine.autograd import accumulates
from moe_graphs.engine.scopes.recording import RecordedBackward
from moe_graphs.engine.scopes.slots import Slot


def outgoing(
    slot: Slot, recorded: RecordedBackward, nodes: Callable[[], Sequence[Node | None]]
) -> dict[int, Tensor | None]:
    """By use, the gradients as tensors that autograd may take.

    A parameter that has a ``.grad`` already (a later microbatch) is added to by autograd in place:
    it gets the static memory itself, lent until the next replay in the slot. In every other case
    (first microbatch, hooks, ``autograd.grad``, inputs) it is a copy, laid out like the parameter
    so that it can become ``.grad`` without another one.

    nodes: per use, where its gradient goes.
    """
    results: dict[int, Tensor | None] = {}
    copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    lent = []
    for use, parameter, gradient, loan, launch in recorded.rows:
        if gradient is None:
            results[use] = None
        elif _has_plain_grad(parameter) and accumulates(nodes()[use]):
            results[use] = gradient.detach()
            loan.hand([weakref.ref(results[use])])
            lent.append(loan)
        else:
            like = gradient if parameter is None else parameter
            copy = results[use] = torch.empty_like(like, requires_grad=False)
            if launch is None:
                copy.copy_(gradient)
            else:
                targets, sources = copies.setdefault(launch, ([], []))
                targets.append(copy)
                sources.append(gradient)
    slot.lend(lent)
    for targets, sources in copies.values():
        torch._foreach_copy_(targets, sources)
    return results


def add_to_grad(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """What autograd would do with the weights' part of a backward that was delayed."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        else:
            parameter.grad.add_(gradient)


def _has_plain_grad(parameter: Tensor | None) -> bool:
    gradient = None if parameter is None else parameter.grad
    if gradient is None or parameter._backward_hooks:
        return False
    return gradient.layout is torch.strided
