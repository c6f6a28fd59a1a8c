"""How gradients leave the static memory of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_graphs.engine.autograd import accumulates
from moe_graphs.engine.scopes.recording import RecordedBackward
from moe_graphs.engine.scopes.slots import Slot

_grad_of = attrgetter("grad")


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
    lent: dict[int, Tensor] = {}
    launches = recorded.launches
    if any(map(is_not, map(_grad_of, recorded.parameters), repeat(None))):
        lent = _lent(slot, recorded, nodes)
        launches = [launch.without(lent) for launch in launches]
    results: dict[int, Tensor | None] = {**lent}
    for launch in launches:
        copies = list(map(torch.empty_like, launch.likes))
        if len(copies) == 1:
            copies[0].copy_(launch.gradients[0])
        elif copies:
            torch._foreach_copy_(copies, launch.gradients)
        results.update(zip(launch.uses, copies, strict=True))
    return results


def _lent(
    slot: Slot, recorded: RecordedBackward, nodes: Callable[[], Sequence[Node | None]]
) -> dict[int, Tensor]:
    found, loans = {}, []
    for use, parameter, gradient, loan in recorded.of_parameters:
        if _has_plain_grad(parameter) and accumulates(nodes()[use]):
            found[use] = gradient.detach()
            loan.hand([weakref.ref(found[use])])
            loans.append(loan)
    slot.lend(loans)
    return found


def add_to_grad(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """What autograd would do with the weights' part of a backward that was delayed."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        else:
            parameter.grad.add_(gradient)


def _has_plain_grad(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or parameter._backward_hooks:
        return False
    return gradient.layout is torch.strided
