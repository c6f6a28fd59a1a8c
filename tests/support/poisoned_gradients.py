"""Writes to the memory of weights' gradients as later graphs of a slot may: NaN, before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from moe_graphs.engine.buffer_lease import BufferLease
from moe_graphs.engine.partial.graphed_scope import Backward
from moe_graphs.engine.partial.recording import CallSite
from moe_graphs.engine.partial.slots import Slot

_NEVER_IN_PLACE = {
    "not_observed", "split", "several_slots", "several_shapes", "grad_never_none", "used_twice",
    "other_type", "shared_memory", "other_layout",
}  # fmt: skip


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replays overwrite gradients with NaN, since the CPU recorder reuses no memory by itself.

    A forward may overwrite the gradients of all backwards. A backward may overwrite its own and
    those of the backwards captured after it. If gradients are accumulated, only a first
    microbatch's graph may overwrite them.
    """
    begin, replayed, reclaim = Slot.begin_replay, Backward.replayed, Slot.reclaim_in_place

    def begin_replay(slot, site, leaves):
        _overwrite([] if slot.accumulates else slot.sites)
        return begin(slot, site, leaves)

    def later(slot, site):
        return [e for e in slot.sites if e.backward_position >= site.backward_position]

    def backward(running, incoming):
        _overwrite([] if running.slot.accumulates else later(running.slot, running.site))
        return replayed(running, incoming)

    def begin_first(slot, site=None):
        free = reclaim(slot, site)
        if free and site is not None:
            _overwrite(later(slot, site))
        return free

    monkeypatch.setattr(Slot, "begin_replay", begin_replay)
    monkeypatch.setattr(Slot, "reclaim_in_place", begin_first)
    monkeypatch.setattr(Backward, "replayed", backward)


def in_place(sites: Sequence[CallSite]) -> Iterator[BufferLease]:
    """Leases of gradients that are lent in place, or were until somebody kept a view."""
    for site in sites:
        for lease in site.gradient_leases():
            if not _NEVER_IN_PLACE & set(lease.copied):
                yield lease


@torch.no_grad()
def _overwrite(sites: Sequence[CallSite]) -> None:
    for lease in in_place(sites):
        lease._static.data.fill_(float("nan"))
