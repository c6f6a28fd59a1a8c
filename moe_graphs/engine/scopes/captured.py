"""Everything that was, or is to be, captured of a model: chunks of slots of places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.scopes.memory import MemoryPlan
from moe_graphs.engine.scopes.place import Place
from moe_graphs.engine.scopes.recorder import Recorder
from moe_graphs.engine.scopes.slots import Slot
from moe_graphs.engine.signature import Mismatch


class Chunk:
    """The slots of one part of the model through which microbatches pass independently."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._current: Slot | None = self.slots[0]

    def next_place(self, scope: str) -> tuple[Slot, Place] | Mismatch:
        """Where the next call of ``scope`` is replayed: further in the microbatch whose forward is
        running, or at the start of the next one, in a free slot."""
        place = self._current.next_place(scope) if self._current is not None else None
        if place is None:
            free = [slot for slot in self.slots if not slot.in_flight()]
            self._current = min(free, key=Slot.retains, default=None)
            if self._current is None:
                return self._full()
            self._current.begin()
            place = self._current.next_place(scope)
        return self._current, place

    def _full(self) -> Mismatch:
        """The microbatch that found no slot keeps running eagerly: it has none to go on in."""
        waiting = self.slots[0].in_flight()[0].place.name
        message = (
            f"{len(self.slots)} microbatches are in flight (the backward of {waiting!r} is still "
            f"to come), one more forward would make {len(self.slots) + 1}, and "
            f"{len(self.slots)} were captured, the most that the observed steps had: "
            f"{EAGER_CALLS['slots_full'].remedy}"
        )
        return Mismatch("slots_full", message)


class Captured:
    """The chunks, what records them, and the memory that was predicted."""

    def __init__(self, chunks: Sequence[Chunk], recorder: Recorder, memory: MemoryPlan) -> None:
        self.chunks, self.recorder, self.memory = tuple(chunks), recorder, memory
        self._of_scope = {
            place.name: chunk for chunk in self.chunks for place in chunk.slots[0].places
        }

    @property
    def slots(self) -> list[Slot]:
        return [slot for chunk in self.chunks for slot in chunk.slots]

    @property
    def places(self) -> list[Place]:
        return [place for slot in self.slots for place in slot.places]

    @property
    def pools(self) -> list[Any]:
        of_slots = (
            (s.pool, s.pool_of_first, s.pool_of_weights, s.backwards.pool) for s in self.slots
        )
        return list(dict.fromkeys(pool for pools in of_slots for pool in pools))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be captured."""
        return all(slot.is_closed for slot in self.slots)

    @property
    def abandoned(self) -> int:
        return sum(slot.abandoned for slot in self.slots)

    def static_tensors(self) -> list[Tensor]:
        recorded = (place.forward for place in self.places if place.forward is not None)
        own = (tensor for forward in recorded for tensor in forward.static_tensors())
        return [*self.recorder.shared.values(), *own]

    def next_place(self, scope: str) -> tuple[Slot, Place] | Mismatch:
        """Where the next call of ``scope`` is replayed, or why it cannot be."""
        chunk = self._of_scope.get(scope)
        if chunk is None:
            return Mismatch("not_observed", str(EAGER_CALLS["not_observed"]))
        return chunk.next_place(scope)

    def end_step(self) -> None:
        for slot in self.slots:
            slot.end_step()

    def release(self) -> None:
        for slot in self.slots:
            slot.release()
        self.recorder.shared.clear()
