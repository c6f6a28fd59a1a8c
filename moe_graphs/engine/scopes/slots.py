"""May this call be replayed, and where does it write? Microbatches in flight, and their order.

A microbatch takes a ``Slot`` with its first forward and gives it back with its last backward. The
recordings of a slot share a memory pool, so they may only be replayed in the order of their
capture: all forwards, then the backwards. Leaving some out is right; going back is not, and is
found here by comparing two integers. Slots have pools of their own, so any interleaving of
microbatches that fits the slots is right. Backwards of several slots work in one more pool, which
they share: one runs after the other, and what it leaves is taken before the next one begins.

Every slot is captured by the first microbatch that takes it.

| state of a place | comes from | its next forward | its next backward |
|---|---|---|---|
| empty (``forward is None``) | ``Place.clear`` | is captured if all places before it are \
captured or refused (``may_record``), else eager: ``not_captured`` | none |
| open (``open is not None``) | ``Place.opened`` | is replayed | is computed on autograd's graph \
of the capture, and captured if all forwards are there (``may_record_backward``) |
| recorded (``is_recorded``) | ``backward_recorded`` | is replayed | is replayed |
| refused (``planned.refused``) | ``PlannedCall.differs`` | runs eagerly | is eager's own |
| released (``is_closed``, empty) | ``release`` | runs eagerly | error (``check_alive``) |

| state of a replayed forward | comes from | its backward |
|---|---|---|
| in flight | ``begin_replay`` | is replayed (``unreplayable`` says why not) |
| weights pending | ``backward_done``, if the weights' gradients are computed apart | the second \
part may come (``weights_done``), in any order |
| over | ``backward_done``, ``weights_done`` | error, unless autograd's graph was retained: then \
its forward is computed anew (``second_backward``) |
| abandoned | the caller has dropped it (``in_flight``) | never comes |
| cancelled | ``end_step`` | error |

| what is replayed | where it writes | what has to be true (the reason if it is not) |
|---|---|---|
| a forward | its static inputs and outputs (``Place.load``, ``Place.out``); another place's \
output, if that is the static input | the call is the captured one (``Signature``, \
``Surroundings``); nobody holds these outputs (``output_held``); no backward still needs that \
output (``Place.needs_output``; ``input_moved``) |
| | the pool of the slot, where gradients of the last microbatch may be | they are reclaimed \
(``gradient_held``), or lie in a pool of their own (``accumulates``) |
| a backward | the pool of the slot, or the one that slots share (``Backwards``) | its turn has \
come (``out_of_order``); the incoming gradients are laid out as captured (``other_layout``, \
``other_outputs``); gradients that autograd added are reclaimed (``gradient_held``) |
| a first microbatch's backward | ``pool_of_first`` | no ``.grad`` is there, and nobody holds \
what the last step left there; else the other recording serves (``backward_to_replay``) |
| the weights' part | ``pool_of_weights`` | its first part has run, and it has not \
(``weights_done``) |

``buffer_lease.py`` has the states of the memory itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_graphs.engine.autograd import keeps_graph
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.buffer_lease import BufferLease, Leases, references_of_the_engine
from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.scopes.place import PendingBackward, Place, PlannedCall
from moe_graphs.engine.scopes.recording import Layouts, RecordedBackward
from moe_graphs.engine.signature import Mismatch
from moe_graphs.errors import GraphError

_ATTEMPTS = 3  # to capture a slot: a microbatch may leave scopes out
_NOT_CAPTURED = Mismatch(
    "not_captured",
    "a call before it was missing where its microbatch was captured: "
    + EAGER_CALLS["not_captured"].remedy,
)


class Backwards:
    """Where backwards work, one after the other.

    Attributes:
        added: leases of gradients in the pool that autograd adds to others just now.
    """

    def __init__(self, backend: Backend, pool: Any = None) -> None:
        self._backend, self._stream = backend, None
        self.pool = backend.new_pool() if pool is None else pool
        self.added = Leases()

    def begin(self) -> None:
        """The next one works here, on the current stream."""
        stream = self._backend.current_stream()
        if self._stream is not None and stream != self._stream:
            self._backend.wait_for(self._stream)
        self._stream = stream


class Slot:
    """The recordings of one microbatch in flight, and how far the running microbatch has come.

    Args:
        pool: theirs, if it is not a new one.
        pool_bytes: of one piece, that a new one begins with.
        backwards: where those of several slots work; None: in the pool of the slot.
        first_bytes: where gradients are accumulated, what the pool of those of first microbatches
            begins with in one piece; 0: they are not.
    """

    def __init__(
        self,
        calls: Sequence[PlannedCall],
        backend: Backend,
        pool: Any = None,
        *,
        pool_bytes: int = 0,
        backwards: Backwards | None = None,
        first_bytes: int = 0,
    ) -> None:
        self._pool_bytes, self._first_bytes, self._shared = pool_bytes, first_bytes, backwards
        self.places = tuple(Place(call, position) for position, call in enumerate(calls))
        self._backend = backend
        self._of_scope: dict[str, list[Place]] = {}
        for place in self.places:
            self._of_scope.setdefault(place.name, []).append(place)
        self.abandoned = self._attempts = 0
        self._begin_anew(pool)

    def _begin_anew(self, pool: Any) -> None:
        self.pool = self._backend.new_pool(self._pool_bytes) if pool is None else pool
        # Weights' gradients come in any order: what is captured after one of them must not get
        # the memory that it works in.
        self.pool_of_weights = self._backend.new_pool()
        # Nothing but first microbatches' backwards writes where ``.grad`` is until the next step.
        self.pool_of_first = self._backend.new_pool(self._first_bytes)
        self.backwards = self._shared or Backwards(self._backend, self.pool)
        self.in_place = Leases()  # of gradients that have become ``.grad``
        self._clock, self._backwards = -1, 0
        self._stream: Any = None
        # By position: a recording waits for one backward at most.
        self._pending: dict[int, weakref.ref[PendingBackward]] = {}
        self._retained: weakref.WeakSet[PendingBackward] = weakref.WeakSet()
        self.is_closed = False

    # ---- being captured

    @property
    def accumulates(self) -> bool:
        return self._first_bytes > 0

    def may_record(self, place: Place) -> bool:
        """Forwards are captured in their order, before all backwards."""
        earlier = self.places[: place.position]
        return (
            not self.is_closed
            and self._backwards == 0
            and all(each.forward is not None or each.planned.refused for each in earlier)
        )

    def may_record_backward(self) -> bool:
        """All forwards have to be there: their memory lies before that of the backwards."""
        complete = not self.is_closed and all(
            place.forward is not None or place.planned.refused for place in self.places
        )
        if complete and self._shared is not None:
            self._shared.begin()
        return complete and self.reclaim_added()

    def backward_recorded(self, place: Place) -> None:
        """The order in which they are captured is the one in which they may be replayed."""
        place.backward_position = len(self.places) + self._backwards
        self._backwards += 1

    def output_at(self, leaf: Tensor) -> tuple[Place, int] | None:
        """The place and the number of the output, if a tensor is the static memory of one, as it
        was handed out in this microbatch."""
        for place in self.places:
            index = place.handed_as(leaf)
            if index is not None:
                static = place.forward.outputs[index]
                return (place, index) if static.data_ptr() == leaf.data_ptr() else None
        return None

    def leases(self) -> list[BufferLease]:
        """The leases of all outputs."""
        return [lease for place in self.places for lease in place.leases]

    def uses_again(self, parameter: Tensor) -> str | None:
        """Why no gradient of a parameter becomes ``.grad``: autograd adds up several of them."""
        forwards = (place.forward for place in self.places if place.forward is not None)
        uses = sum(each is parameter for forward in forwards for each in forward.listed)
        return "used_again" if uses > 1 else None

    # ---- replays

    def next_place(self, scope: str) -> Place | None:
        """The next call of ``scope`` that this microbatch has not come to yet."""
        for place in self._of_scope.get(scope, ()):
            if place.position > self._clock:
                return place
        return None

    def begin(self) -> None:
        """A new microbatch takes the slot."""
        self._retained.clear()
        self._clock = -1

    def pass_by(self, place: Place) -> None:
        """A call runs eagerly in place of its recording, which is not replayed any more."""
        self._clock = place.position

    def is_to_record(self, place: Place) -> bool:
        """Whether its next call may be the one that is captured."""
        return place.forward is None and not self.is_closed and not place.planned.refused

    def mismatch(self, place: Place, structure: Any, leaves: Sequence[Any]) -> Mismatch | None:
        """Why this call cannot be replayed now, or None. Makes room for its outputs."""
        difference = place.planned.refused or place.planned.signature.mismatch(structure, leaves)
        if difference is not None:
            return difference
        if place.forward is None:
            return None if self.may_record(place) else _NOT_CAPTURED
        difference = place.forward.surroundings.mismatch()
        if difference is not None:
            return difference
        return self._make_room(place, leaves)

    def _make_room(self, place: Place, leaves: Sequence[Any]) -> Mismatch | None:
        writes = [place]
        for index, (source, output) in place.sources.items():
            if not place.is_in_place(index, leaves[index]):
                if any(each.place.needs_output(source, output) for each in self.in_flight()):
                    name = place.planned.signature.leaves[index].name
                    message = f"input {name!r}: captured as the untouched output of another scope"
                    remedy = EAGER_CALLS["input_moved"].remedy
                    return Mismatch("input_moved", f"{message}, got another tensor: {remedy}")
                writes.append(source)
        reclaimed = [each.reclaim() for each in writes]  # all of them, come what may
        held, kind = "output", "an output"
        if all(reclaimed):
            # Forwards may write where the gradients of the last microbatch are, unless these have a
            # pool of their own.
            free = self.accumulates or self.reclaim_in_place()
            if self.reclaim_added() and free:
                return None
            held, kind = "gradient", "a weight's gradient"
        message = f"a view of {kind} of its last replay is still in use: clone() what you keep"
        return Mismatch(f"{held}_held", message)

    def lend(self, place: Place, *, added: list[BufferLease], in_place: list[BufferLease]) -> None:
        """Notes gradients in a pool's memory that are handed out: autograd holds those that it adds
        just now; the others become ``.grad``, until a graph needs their memory again."""
        self.backwards.added.add(added)
        self.in_place.add(in_place, place.backward_position)

    def reclaim_in_place(self, place: Place | None = None) -> bool:
        """Reclaims gradients that have become ``.grad``. ``place``: only where its backward may
        write."""
        return self.in_place.reclaim(0 if place is None else place.backward_position)

    def reclaim_added(self, *, collecting: bool = False) -> bool:
        """Reclaims gradients that were added to others. ``collecting``: also those that only
        garbage holds."""
        added = self.backwards.added
        if added.reclaim():
            return True
        return collecting and gc.collect() >= 0 and added.reclaim()

    def in_flight(self) -> list[PendingBackward]:
        """Replayed forwards whose backward may still come."""
        alive = [pending for ref in self._pending.values() if (pending := ref()) is not None]
        self.abandoned += len(self._pending) - len(alive)
        self._pending = {each.place.position: weakref.ref(each) for each in alive}
        return alive

    def retains(self) -> bool:
        """Another backward of the last microbatch may come (``retain_graph=True``)."""
        return len(self._retained) > 0

    def begin_replay(self, place: Place, leaves: Sequence[Any]) -> PendingBackward:
        """Before the graph of the forward runs, on the current stream."""
        stream = self._backend.current_stream()
        if self._stream is not None and stream != self._stream:
            self._backend.wait_for(self._stream)
        self._stream = stream
        random = self._backend.random_position() if place.forward.draws else None
        pending = PendingBackward(place, leaves, random)
        self._clock = place.position
        if any(place.forward.differentiable):
            self._pending[place.position] = weakref.ref(pending)
        return pending

    def cancel(self, pending: PendingBackward) -> None:
        """Its outputs were thrown away."""
        self._pending.pop(pending.place.position, None)

    def check(self, pending: PendingBackward) -> None:
        """
        Raises:
            GraphError: if its backward must not run at all.
        """
        self.check_alive(pending)
        if pending.is_done and pending not in self._retained:
            raise GraphError(
                f"scope {pending.place.name!r}: a second backward of the same forward: the first "
                f"one needs retain_graph=True, and all of them have to come before the next "
                f"microbatch: run other forwards within graphs.paused()"
            )
        pending.check_unmodified()

    def unreplayable(self, pending: PendingBackward, layouts: Layouts) -> str | None:
        """Why the recorded backward cannot serve this one, or None."""
        place = pending.place
        if place.backward is None:
            return "not_captured"
        if place.backward_position <= self._clock:
            return "out_of_order"
        if layouts != place.backward.layouts and layouts not in place.proven_layouts:
            return place.backward.other(layouts)
        mismatch = place.backward.surroundings.mismatch()
        if mismatch is not None:
            return mismatch.reason
        # When garbage goes is not the same on all ranks, and what they run has to be.
        free = self.reclaim_added(collecting=place.planned.ranks.group is not None)
        return None if free else "gradient_held"

    def backward_to_replay(self, place: Place) -> RecordedBackward:
        """The recording that serves a backward which can be replayed: that of a first microbatch if
        no ``.grad`` is there and nobody holds the memory where its gradients stay."""
        is_first = place.first is not None and place.first.finds_no_gradient()
        return place.first if is_first and self.reclaim_in_place(place) else place.backward

    def backward_done(self, pending: PendingBackward, *, replayed: bool) -> None:
        """Its backward has run, or is about to be replayed."""
        if replayed:
            self._clock = pending.place.backward_position
            if self._shared is not None:
                self._shared.begin()
        pending.is_done = True
        self._forget_if_over(pending)

    def weights_done(self, pending: PendingBackward) -> None:
        """The same for the weights' gradients of a recording that computes them apart.

        They may come in any order: what they need is kept until all of the slot are captured.
        """
        self.check_alive(pending)
        if not pending.is_done or pending.weights != "pending":
            when = "a second time" if pending.is_done else "before the gradients of its inputs"
            raise GraphError(
                f"scope {pending.place.name!r}: the gradients of its weights are asked for {when}"
            )
        pending.weights = "done"
        self._forget_if_over(pending)

    def end_step(self) -> None:
        """Backwards of a step that has ended will not come any more; a capture that has begun is
        complete now, or is begun anew with the next microbatch."""
        for pending in self.in_flight():
            pending.cancelled = True
            self.abandoned += 1
        self._pending.clear()
        self._retained.clear()
        self._clock = -1
        for lease in self.in_place:
            lease.note_grad()
        begun = any(place.forward is not None for place in self.places)
        if not self.is_closed and (begun or all(place.planned.refused for place in self.places)):
            self._close_or_begin_anew()

    def _close_or_begin_anew(self) -> None:
        self._attempts += 1
        complete = all(place.is_recorded or place.planned.refused for place in self.places)
        if complete or self._attempts == _ATTEMPTS:
            self.is_closed = True
            self.let_go_of_autograd(self.places)
        else:
            self.release()
            self._begin_anew(None)

    def let_go_of_autograd(self, places: Sequence[Place]) -> None:
        """What their forwards have left there is not needed any more."""
        with references_of_the_engine(self.leases()):
            for place in places:
                place.open = place.run = None

    def release(self) -> None:
        for place in self.places:
            place.release()
        self.is_closed = True

    def check_alive(self, pending: PendingBackward) -> None:
        """
        Raises:
            GraphError: if its graphs are gone, or its step has ended.
        """
        if pending.place.forward is None:
            raise GraphError(
                f"scope {pending.place.name!r}: its graphs were released before this backward"
            )
        if pending.cancelled:
            raise GraphError(
                f"scope {pending.place.name!r}: this backward belongs to a step that has ended: "
                f"call backward() inside the 'with graphs.step()' of its forward"
            )

    def _forget_if_over(self, pending: PendingBackward) -> None:
        if pending.is_over:
            self._pending.pop(pending.place.position, None)
            if keeps_graph():
                self._retained.add(pending)
