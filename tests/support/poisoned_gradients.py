"""Writes to the memory of weights' gradients as later graphs of a slot may: NaN, before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from moe_graphs.engine.buffer_lease import BufferLease
from moe_graphs.engine.partial import replay
from moe_graphs.engine.partial.slots import Place, Slot

_NEVER_IN_PLACE = {
    "not_observed", "split", "several_slots", "never_unset", "used_again", "other_type",
    "shared_memory", "other_layout",
}  # fmt: skip


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replays overwrite gradients with NaN, since the CPU recorder reuses no memory by itself.

    A forward may overwrite the gradients of all backwards. A backward may overwrite its own and
    those of the backwards captured after it. If gradients are accumulated, only a first
    microbatch's graph may overwrite them.
    """
    begin, replayed, reclaim = Slot.begin_replay, replay._replayed, Slot.reclaim_in_place

    def begin_replay(slot, place, leaves):
        _overwrite([] if slot.accumulates else slot.places)
        return begin(slot, place, leaves)

    def later(slot, place):
        return [e for e in slot.places if e.backward_position >= place.backward_position]

    def backward(slot, place, incoming, nodes):
        _overwrite([] if slot.accumulates else later(slot, place))
        return replayed(slot, place, incoming, nodes)

    def begin_first(slot, place=None):
        free = reclaim(slot, place)
        if free and place is not None:
            _overwrite(later(slot, place))
        return free

    monkeypatch.setattr(Slot, "begin_replay", begin_replay)
    monkeypatch.setattr(Slot, "reclaim_in_place", begin_first)
    monkeypatch.setattr(replay, "_replayed", backward)


def in_place(places: Sequence[Place]) -> Iterator[BufferLease]:
    """Leases of gradients that are lent in place, or were until somebody kept a view."""
    for place in places:
        for lease in place.gradient_leases():
            if not _NEVER_IN_PLACE & set(lease.copied):
                yield lease


@torch.no_grad()
def _overwrite(places: Sequence[Place]) -> None:
    for lease in in_place(places):
        lease._static.data.fill_(float("nan"))
