"""How gradients leave the static memory of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_graphs.engine.autograd import accumulates
from moe_graphs.engine.buffer_lease import BufferLease
from moe_graphs.engine.scopes.place import Place
from moe_graphs.engine.scopes.recording import RecordedBackward
from moe_graphs.engine.scopes.slots import Slot
from moe_graphs.engine.stand_for import local


def outgoing(
    slot: Slot,
    place: Place,
    recorded: RecordedBackward,
    nodes: Callable[[], Sequence[Node | None]],
) -> dict[int, Tensor | None]:
    """By use, the gradients as tensors that autograd may take.

    A parameter without a ``.grad`` gets the static memory itself, if nothing else ever writes
    there: autograd makes it ``.grad``. One that has a ``.grad`` already (a later microbatch) is
    added to by autograd in place: it gets static memory lent until the next replay in the slot. In
    every other case (hooks, ``autograd.grad``, inputs) it is a copy, laid out like the parameter
    so that it can become ``.grad`` without another one.

    nodes: per use, where its gradient goes.
    """
    results: dict[int, Tensor | None] = {}
    launches = recorded.launches
    if recorded.has_some_in_place or any(map(_has_grad, recorded.parameters)):
        results |= lent(slot, place, recorded, nodes)
        launches = recorded.launches_without(tuple(results))
    for launch in launches:
        copies = list(map(torch.empty_like, launch.likes))
        targets = list(map(local, copies))
        if len(copies) == 1:
            targets[0].copy_(launch.gradients[0])
        elif copies:
            torch._foreach_copy_(targets, launch.gradients)
        results.update(zip(launch.uses, copies, strict=True))
    return results


def lent(
    slot: Slot,
    place: Place,
    recorded: RecordedBackward,
    nodes: Callable[[], Sequence[Node | None]],
    *,
    in_place_only: bool = False,
) -> dict[int, Tensor]:
    """The part of it that is static memory."""
    found: dict[int, Tensor] = {}
    added: list[BufferLease] = []
    in_place: list[BufferLease] = []
    for use, parameter, lease in recorded.of_parameters:
        there = parameter.grad
        if there is None:
            leases = in_place if lease.in_place else None
        else:
            can_be_added = lease.can_be_added and there.layout is torch.strided
            leases = added if can_be_added and not in_place_only else None
        if leases is None:
            continue
        if not parameter._backward_hooks and accumulates(nodes()[use]):
            found[use] = lease.hand_out()
            leases.append(lease)
        elif there is None:
            lease.copied["hooks" if parameter._backward_hooks else "asked_for"] += 1
    slot.lend(place, added=added, in_place=in_place)
    return found


def _has_grad(parameter: Tensor) -> bool:
    return parameter.grad is not None
