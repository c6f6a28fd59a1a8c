"""Which recording a call replays, and whether it may: microbatches in flight and their order.

A microbatch takes a ``Slot`` with its first forward and gives it back with its last backward. The
recordings of a slot share a memory pool, so they may only be replayed in the order of their
capture: all forwards, then the backwards in reverse. Leaving some out is right; going back is not,
and is refused here by comparing two integers. Slots have pools of their own, so any interleaving of
microbatches that fits the slots is right.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from moe_graphs.engine.scopes.memory import MemoryPlan
from moe_graphs.engine.scopes.recording import Recording
from moe_graphs.engine.signature import Mismatch
from moe_graphs.errors import GraphError


class Flight:
    """One replayed forward until its backward. Lives as long as the autograd graph needs it.

    weights: "with_backward" where one graph computes all gradients, else whether the second one,
        for the weights, is still to come ("pending") or was replayed ("done").
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.versions: list[int] = []
        self.landed = False
        self.cancelled = False
        self.weights = "with_backward" if recording.weights is None else "pending"
        self.gradients: list[weakref.ref | None] = []

    @property
    def is_over(self) -> bool:
        return self.landed and self.weights != "pending"

    def note_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if self.weights == "pending":
            self.gradients = [None if g is None else weakref.ref(g) for g in gradients]

    def check_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The weights' part goes on from the very gradients that the first part was given."""
        if self.weights == "pending":
            known = [None if ref is None else ref() for ref in self.gradients]
            if any(a is not b for a, b in zip(known, gradients, strict=True)):
                raise GraphError(
                    f"scope {self.recording.scope.name!r}: the gradients of its weights are asked "
                    f"for with other output gradients than those of its inputs were: a graph's "
                    f"saved tensors serve one backward"
                )


class Slot:
    """The recordings of one microbatch in flight, and how far the running microbatch has come."""

    def __init__(self, recordings: Sequence[Recording], pool: Any) -> None:
        self.recordings = tuple(recordings)
        self.pool = pool
        self._of_scope: dict[str, list[Recording]] = {}
        for recording in self.recordings:
            self._of_scope.setdefault(recording.scope.name, []).append(recording)
        self._clock = -1
        # By position: a recording is in the air once at most.
        self._flights: dict[int, weakref.ref[Flight]] = {}
        self.abandoned = 0

    def complete(self) -> None:
        """After all captures."""
        uses = Counter(id(p) for recording in self.recordings for p in recording.parameters)
        linked = frozenset(r.inputs[i].data_ptr() for r in self.recordings for i in r.linked)
        for recording in self.recordings:
            recording.complete(uses, linked)

    def next_recording(self, scope: str) -> Recording | None:
        """The next recording of ``scope`` that this microbatch has not come to yet."""
        for recording in self._of_scope.get(scope, ()):
            if recording.position > self._clock:
                return recording
        return None

    def begin(self) -> None:
        """A new microbatch takes the slot."""
        self._clock = -1

    def pass_by(self, recording: Recording) -> None:
        """A call runs eagerly in place of its recording, which is not replayed any more."""
        self._clock = recording.position

    def mismatch(
        self, recording: Recording, structure: Any, leaves: Sequence[Any]
    ) -> Mismatch | None:
        """Why this call cannot be replayed now, or None. Makes room for its outputs."""
        difference = recording.mismatch(structure, leaves)
        if difference is not None:
            return difference
        for index, source in recording.linked.items():
            moved = leaves[index].data_ptr() != recording.inputs[index].data_ptr()
            if moved and any(flight.recording is source for flight in self.in_flight()):
                name = recording.signature.leaves[index].name
                message = f"input {name!r}: captured as the untouched output of another scope"
                return Mismatch("input_moved", f"{message}, got another tensor")
        if not recording.rescue_outputs():
            message = (
                "a view of an output of its last replay is still in use: clone() what you keep"
            )
            return Mismatch("output_held", message)
        return None

    def in_flight(self) -> list[Flight]:
        """Replayed forwards whose backward may still come."""
        alive = [flight for ref in self._flights.values() if (flight := ref()) is not None]
        self.abandoned += len(self._flights) - len(alive)
        self._flights = {f.recording.position: weakref.ref(f) for f in alive}
        return alive

    def take_off(self, recording: Recording) -> Flight:
        flight = Flight(recording)
        self._clock = recording.position
        if recording.has_backward:
            self._flights[recording.position] = weakref.ref(flight)
        return flight

    def land(self, flight: Flight) -> None:
        """Checks that the backward of a flight may run now, and marks it as run."""
        recording = flight.recording
        name = recording.scope.name
        self._check_alive(flight)
        if flight.landed:
            raise GraphError(
                f"scope {name!r}: a second backward of the same forward; a graph's saved tensors "
                f"serve one: put such forwards into graphs.paused()"
            )
        position = 2 * len(self.recordings) - 1 - recording.position
        if position <= self._clock:
            raise GraphError(
                f"scope {name!r}: its backward comes out of the captured order, and memory it "
                f"needs may have been reused"
            )
        changed = [o._version for o in recording.saved_outputs] != flight.versions
        if changed:
            raise GraphError(
                f"scope {name!r}: an output was modified in place before the backward that needs "
                f"it: clone it before modifying it"
            )
        self._clock = position
        flight.landed = True
        self._forget_if_over(flight)

    def land_weights(self, flight: Flight) -> None:
        """The same for the weights' gradients of a recording that computes them apart.

        They may come in any order: what they need is kept until all of the slot are captured.
        """
        self._check_alive(flight)
        if not flight.landed or flight.weights != "pending":
            when = "a second time" if flight.landed else "before the gradients of its inputs"
            raise GraphError(
                f"scope {flight.recording.scope.name!r}: the gradients of its weights are asked "
                f"for {when}"
            )
        flight.weights = "done"
        self._forget_if_over(flight)

    def end_step(self) -> None:
        """Flights of a step that has ended will not be continued."""
        for flight in self.in_flight():
            flight.cancelled = True
            self.abandoned += 1
        self._flights.clear()
        self._clock = -1

    def _check_alive(self, flight: Flight) -> None:
        name = flight.recording.scope.name
        if not flight.recording.has_backward:
            raise GraphError(f"scope {name!r}: its graphs were released before this backward")
        if flight.cancelled:
            raise GraphError(
                f"scope {name!r}: this backward belongs to a step that has ended: call backward() "
                f"inside the 'with graphs.step()' of its forward"
            )

    def _forget_if_over(self, flight: Flight) -> None:
        if flight.is_over:
            del self._flights[flight.recording.position]


class Chunk:
    """The slots of one part of the model through which microbatches pass independently."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._current = self.slots[0]
        for first, *others in zip(*(slot.recordings for slot in self.slots), strict=True):
            for recording in others:  # the same call in another slot: its outputs go the same way
                recording.copied_outputs = first.copied_outputs

    def next_recording(self, scope: str) -> tuple[Slot, Recording] | Mismatch:
        """Where the next call of ``scope`` is replayed: further in the microbatch whose forward is
        running, or at the start of the next one, in a free slot."""
        recording = self._current.next_recording(scope)
        if recording is None:
            free = next((slot for slot in self.slots if not slot.in_flight()), None)
            if free is None:
                return self._full()
            free.begin()
            self._current = free
            recording = free.next_recording(scope)
        return self._current, recording

    def _full(self) -> Mismatch:
        waiting = self._current.in_flight()[0].recording.scope.name
        message = (
            f"{len(self.slots)} microbatches are in flight (the backward of {waiting!r} is still "
            f"to come), one more forward would make {len(self.slots) + 1}, and "
            f"{len(self.slots)} were captured, the most that the observed step had: observe a "
            f"step of the same schedule"
        )
        return Mismatch("slots_full", message)


class Captured:
    """Everything that was captured of a model: chunks of slots of recordings."""

    def __init__(
        self, chunks: Sequence[Chunk], shared: Sequence[torch.Tensor], memory: MemoryPlan
    ) -> None:
        self.chunks = tuple(chunks)
        self.memory = memory
        self.shared = tuple(shared)  # static memory that recordings of several slots use
        self._of_scope = {
            recording.scope.name: chunk
            for chunk in self.chunks
            for recording in chunk.slots[0].recordings
        }

    @property
    def slots(self) -> list[Slot]:
        return [slot for chunk in self.chunks for slot in chunk.slots]

    @property
    def recordings(self) -> list[Recording]:
        return [recording for slot in self.slots for recording in slot.recordings]

    @property
    def pools(self) -> list[Any]:
        return [slot.pool for slot in self.slots]

    def static_tensors(self) -> list[torch.Tensor]:
        own = (t for recording in self.recordings for t in recording.static_tensors())
        return [*self.shared, *own]

    @property
    def abandoned(self) -> int:
        return sum(slot.abandoned for slot in self.slots)

    def next_recording(self, scope: str) -> tuple[Slot, Recording] | Mismatch:
        """Where the next call of ``scope`` is replayed, or why it cannot be."""
        chunk = self._of_scope.get(scope)
        if chunk is None:
            return Mismatch(
                "not_observed", "this call was not observed in warm-up: nothing to replay"
            )
        return chunk.next_recording(scope)

    def end_step(self) -> None:
        for slot in self.slots:
            slot.end_step()

    def release(self) -> None:
        for recording in self.recordings:
            recording.release()
