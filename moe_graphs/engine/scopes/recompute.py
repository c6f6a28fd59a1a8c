"""A backward that no graph was captured for: the forward is computed anew, eagerly.

A loss that uses other outputs than it used to, a backward out of order, a number that changed in
between. What the forward needs is still there: its static inputs, and where the random numbers
stood. That it computes the very same outputs is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.autograd import LeafUses
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.scopes.place import PendingBackward, Place
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.stand_ins import StandIns
from moe_graphs.engine.static_memory import static_copy
from moe_graphs.engine.verify import Difference, first_difference
from moe_graphs.errors import GraphError


def recompute(
    backend: Backend, pending: PendingBackward, incoming: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients per use of the replayed forward. Synchronises.

    Raises:
        GraphError: if the forward does not compute what it did.
    """
    difference, gradients = compute_anew(backend, pending, incoming)
    if difference is not None:
        raise GraphError(
            f"scope {pending.place.name!r}: its backward was not captured for this loss, and its "
            f"forward, computed anew, differs: {difference}; run such forwards within "
            f"graphs.paused()"
        )
    return gradients


def compute_anew(
    backend: Backend, pending: PendingBackward, incoming: Sequence[Tensor | None]
) -> tuple[Difference | None, list[Tensor | None]]:
    """How the outputs differ from those of the replay, and the gradients per use. Synchronises."""
    place, forward = pending.place, pending.place.forward
    inputs = [_leaf(leaf, i in forward.linked) for i, leaf in enumerate(forward.inputs)]
    for number, first in enumerate(forward.signature.first):
        inputs[number] = inputs[first] if isinstance(inputs[number], Tensor) else inputs[number]
    module = place.planned.scope.module
    stand_ins = StandIns([module])
    now = backend.random_position() if forward.draws else None
    written = Snapshot(values=forward.written)
    scales = forward.scales or contextlib.nullcontext()
    try:
        if forward.draws:
            backend.return_to(pending.random)
        with (
            torch.enable_grad(),
            stand_ins.in_place(),
            forward.surroundings.context.autocast(inputs),
            scales,
        ):
            tree = pytree.tree_unflatten(inputs, forward.signature.structure)
            outputs, _ = place.planned.scope.run(tree, forward.arguments, capturing=True)
        if forward.draws:
            backend.return_to(now)
        live, found = _outputs(place, outputs)
        names = [f"output {number}" for number in range(len(found))]
        difference = first_difference(names, forward.outputs, found)
        return difference, _gradients(place, stand_ins, inputs, live, incoming)
    finally:
        if forward.draws:
            backend.return_to(now)
        written.put_back()  # behind the backward, which may look for what its forward has written


def _leaf(leaf: object, is_lent: bool) -> object:
    """A lent one is copied: what of this run is left to be collected would hold it."""
    if not isinstance(leaf, Tensor):
        return leaf
    own = static_copy(leaf) if is_lent else leaf.detach()
    return own.requires_grad_(leaf.requires_grad)


def _outputs(place: Place, outputs: object) -> tuple[list[Tensor], list[Tensor]]:
    """Those with a history, and all that the graph makes; one that is returned twice is one.

    Raises:
        GraphError: if what the capture returned as one tensor are several.
    """
    found: dict[int, Tensor] = {}
    for leaf, output in zip(place.forward.output_leaves, pytree.tree_leaves(outputs), strict=True):
        if leaf.source == "graph" and found.setdefault(leaf.value, output) is not output:
            raise GraphError(
                f"scope {place.name!r}: its forward, computed anew, does something else"
            )
    made = [found[number] for number in range(len(place.forward.outputs))]
    needed = zip(made, place.forward.differentiable, strict=True)
    return [output for output, differentiable in needed if differentiable], made


def _gradients(
    place: Place,
    stand_ins: StandIns,
    inputs: Sequence[object],
    live: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
) -> list[Tensor | None]:
    leaves: dict[int, Tensor] = {}
    for each in place.forward.listed:
        leaf = inputs[each] if isinstance(each, int) else stand_ins.stand_in(each)
        leaves[id(leaf)] = leaf
    uses = LeafUses(live, list(leaves.values()))
    if len(uses.of) != len(place.forward.listed):
        raise GraphError(f"scope {place.name!r}: its forward, computed anew, does something else")
    used = [(o, g) for o, g in zip(live, incoming, strict=True) if g is not None]
    if not used:
        return [None] * len(uses.of)
    outputs, gradients = zip(*used, strict=True)
    return uses.gradients(outputs, gradients)
