"""Slots: which recording a call replays and whether it may, for microbatches in flight and shapes.

A microbatch takes a ``Slot`` with its first forward and gives it back with its last backward. The
recordings of a slot share a memory pool. So they may be replayed only in the order of their
capture: all forwards, then the backwards. A replay may leave recordings out, but it may not go
back; a comparison of two integers finds out. Every slot has a pool of its own, so microbatches in
different slots may be interleaved in any way. The backwards of several slots share one more pool
and run one at a time. What one backward leaves there is taken before the next one begins.

The first microbatch that takes a slot captures it.

A microbatch takes a free **lane** of its part of the model (``Chunk``). A lane has one slot for
each shape of microbatches. The slots of a lane share its memory pool, since one microbatch at a
time is in it: what the graphs of one shape work in, the graphs of another shape may overwrite, and
so it is with their static inputs, and with outputs that callers get as copies. Other outputs, and
gradients that outlive a replay, have memory of their own. The observed steps give the
first shape. A microbatch whose inputs differ from it in shapes and strides alone brings another
shape, and captures it at once, up to ``most`` shapes. Then a new shape takes the place of the
rarest one, if it came more often among the last microbatches.

May this call be replayed, and where does it write? ``GraphedScope`` asks ``Chunk.next_site`` for
the call site, and then ``Slot.mismatch``, in the order of this table. The first "no" is the reason
that is counted, and ``on_mismatch="error"`` names all of them. ``Slot.unreplayable`` is the same
for a backward.

| question | reason if the answer is no |
|---|---|
| can any graph serve it? (``GraphedScope.eager_reason``) | `paused`, `outside_step`, a mode, ... |
| does an integration need the Python to run? (``GraphedScope.why_eager``) | its own word |
| was the scope observed, and is a slot free? | `not_observed`, `slots_full` |
| does its replay compute what eager does? (``PlannedCall.refused``) | `differs_from_eager` |
| are the inputs those of the capture? (``Signature``) | `structure`, `shape`, `constant`, ... |
| is the state of torch that of the capture? (``TorchState``) | `autocast`, `context` |
| is all that Python can read as it was? (``Guards``) | `attribute`, `hooks`, `moved`, ... |
| is static memory that this call writes needed by no backward? | `input_moved` |
| does no caller hold that memory? (``BufferLease``) | `output_held`, `gradient_held` |
| has no capture failed on any rank, if the call is to be captured? (``Recorder.mismatch``) |
`capture_failed` |

| state of a call site | its next forward | where it writes |
|---|---|---|
| to be captured: the slot is not closed | is captured, on all ranks together | ``Slot.pool`` |
| recorded: it ``has_forward`` | is replayed | ``forward.outputs``, once they are reclaimed |
| left out: the slot is closed | runs eagerly (`not_captured`) | memory of the caller |
| refused: ``planned.refused`` | runs eagerly, by that reason | memory of the caller |

| state of its backward | the next backward | where it writes |
|---|---|---|
| to be captured: it is ``open`` | runs on autograd's graph of the capture, and is captured |
``Slot.backward_pool``, and ``Slot.pool_of_first`` for ``first`` |
| recorded: there is a ``backward`` | is replayed in the order of the capture (`out_of_order`) with
gradients laid out as before (`other_layout`, `other_outputs`) | ``first.gradients`` if there is a
``first`` and no ``.grad``, else ``backward.gradients`` |
| neither | computes its forward anew (`not_captured`) | memory of the caller |
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.autograd import keeps_graph
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.buffer_lease import BufferLease, Leases, references_of_the_engine
from moe_graphs.engine.partial.recording import (
    CallSite,
    Layouts,
    PendingBackward,
    PlannedCall,
    RecordedBackward,
)
from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.static_buffers import StaticBuffers
from moe_graphs.engine.tensors import Mismatch, Signature, TensorSpec, results_of
from moe_graphs.errors import CaptureError, GraphError

# ---- the slot of a microbatch in flight

_ATTEMPTS = 3  # number of attempts to capture a slot; a microbatch may leave scopes out
_NOT_CAPTURED = Mismatch(
    "not_captured",
    "a call before it was missing where its microbatch was captured: "
    + EAGER_CALLS["not_captured"].remedy,
)


class BackwardPool:
    """The memory pool in which backwards work, one after the other.

    Attributes:
        added: leases of gradients in the pool that autograd is adding to others just now.
    """

    def __init__(self, backend: Backend, pool: Any = None) -> None:
        self._backend, self._stream = backend, None
        self.pool = backend.new_pool() if pool is None else pool
        self.added = Leases()

    def begin(self) -> None:
        """Lets the next backward work in the pool, on the current stream."""
        stream = self._backend.current_stream()
        if self._stream is not None and stream != self._stream:
            self._backend.wait_for(self._stream)
        self._stream = stream


class Slot:
    """The recordings of one microbatch in flight, and how far the running microbatch has come.

    Args:
        pool: the memory pool of the recordings; None makes a new one.
        pool_bytes: size of the one piece that a new pool begins with.
        backward_pool: the pool that the backwards of several slots share; None lets the backwards
            work in the pool of the slot.
        first_bytes: if gradients are accumulated, size of the one piece that the pool for backwards
            of first microbatches begins with; 0 if gradients are not accumulated.
        inputs: static memory of the inputs, by call and number; None makes new memory.
        fails_alone: whether a capture that fails here leaves other slots their graphs.

    Attributes:
        clock: the position that the running microbatch has come to; -1 if it has called nothing.
        failure: the error of a capture that has failed here, if it fails alone.
    """

    def __init__(
        self,
        calls: Sequence[PlannedCall],
        backend: Backend,
        pool: Any = None,
        *,
        pool_bytes: int = 0,
        backward_pool: BackwardPool | None = None,
        first_bytes: int = 0,
        inputs: StaticBuffers | None = None,
        fails_alone: bool = False,
    ) -> None:
        self.inputs = StaticBuffers() if inputs is None else inputs
        self.fails_alone, self._given = fails_alone, pool
        self.failure: CaptureError | None = None
        self._pool_bytes, self._first_bytes, self._shared = pool_bytes, first_bytes, backward_pool
        self.accumulates = first_bytes > 0
        self.sites = tuple(CallSite(call, position) for position, call in enumerate(calls))
        self._backend = backend
        self._of_scope: dict[str, list[CallSite]] = {}
        for site in self.sites:
            self._of_scope.setdefault(site.name, []).append(site)
        self.abandoned = self._attempts = 0
        self._begin_anew(pool)

    def _begin_anew(self, pool: Any) -> None:
        self.pool = self._backend.new_pool(self._pool_bytes) if pool is None else pool
        # Weight gradients come in any order: a capture after one of them must not get the memory
        # that it works in.
        self.pool_of_weights = self._backend.new_pool()
        # Only backwards of first microbatches write where ``.grad`` stays until the next step.
        self.pool_of_first = self._backend.new_pool(self._first_bytes)
        self.backward_pool = self._shared or BackwardPool(self._backend, self.pool)
        self.in_place = Leases()  # leases of gradients that have become ``.grad``
        self.clock, self._backwards = -1, 0
        self._stream: Any = None
        # The keys are positions: a recording waits for one backward at most.
        self._pending: dict[int, weakref.ref[PendingBackward]] = {}
        self._retained: weakref.WeakSet[PendingBackward] = weakref.WeakSet()
        self.is_closed = False

    def follows(self, other: Slot) -> None:
        """Orders its next replay behind those of a slot that works in the same pool."""
        self._stream = other._stream

    # ---- being captured

    def failed(self, error: CaptureError) -> None:
        """Notes a capture that fails alone: no more calls are captured or replayed here."""
        self.failure, self.is_closed = error, True

    def may_record(self, site: CallSite) -> bool:
        """Whether a forward may be captured: forwards go in their order, before all backwards."""
        earlier = self.sites[: site.position]
        return (
            not self.is_closed
            and self._backwards == 0
            and all(each.has_forward or each.planned.refused for each in earlier)
        )

    def may_record_backward(self) -> bool:
        """Whether a backward may be captured: only after all forwards.

        Memory of the forwards lies in the pool before that of the backwards.
        """
        complete = not self.is_closed and all(
            site.has_forward or site.planned.refused for site in self.sites
        )
        if complete and self._shared is not None:
            self._shared.begin()
        return complete and self.backward_pool.added.reclaim()

    def backward_recorded(self, site: CallSite) -> None:
        """Notes a captured backward: backwards may be replayed only in the order of captures."""
        site.backward_position = len(self.sites) + self._backwards
        self._backwards += 1

    def output_at(self, leaf: Tensor) -> tuple[CallSite, int] | None:
        """The call site and the number of the output whose static memory a tensor is, or None.

        The tensor must be the object that was handed out in this microbatch.
        """
        for site in self.sites:
            index = site.handed_as(leaf)
            if index is not None:
                static = site.forward.outputs[index]
                return (site, index) if static.data_ptr() == leaf.data_ptr() else None
        return None

    def leases(self) -> list[BufferLease]:
        """The leases of all outputs."""
        return [lease for site in self.sites for lease in site.leases]

    def uses_again(self, parameter: Tensor) -> str | None:
        """The reason to copy all gradients of a parameter: autograd adds several of them up."""
        forwards = (site.forward for site in self.sites if site.has_forward)
        uses = sum(each is parameter for forward in forwards for each in forward.listed)
        return "used_twice" if uses > 1 else None

    # ---- replays

    def next_site(self, scope: str) -> CallSite | None:
        """The next call of ``scope`` that this microbatch has not reached yet."""
        for site in self._of_scope.get(scope, ()):
            if site.position > self.clock:
                return site
        return None

    def begin(self) -> None:
        """Starts a new microbatch in the slot."""
        self._retained.clear()
        self.clock = -1

    def skip(self, site: CallSite) -> None:
        """Notes a call that runs eagerly in place of its recording, so the microbatch goes on."""
        self.clock = site.position

    def mismatch(self, site: CallSite, structure: Any, leaves: Sequence[Any]) -> Mismatch | None:
        """The reason why this call cannot be replayed now, or None. Makes room for its outputs."""
        first = next(self.mismatches(site, structure, leaves), None)
        if first is not None or not site.has_forward:
            return first
        return self._make_room(site, leaves)

    def mismatches(
        self, site: CallSite, structure: Any, leaves: Sequence[Any]
    ) -> Iterator[Mismatch]:
        """The reasons why this call cannot be replayed, whoever holds the memory that it writes."""
        if site.planned.refused is not None:
            yield site.planned.refused
        if self.failure is not None:
            yield Mismatch("capture_failed", str(self.failure))
        yield from site.planned.signature.mismatches(structure, leaves)
        if site.has_forward:
            forward = site.forward
            for check in forward.conditions.checks:
                if (found := check()) is not None:
                    yield found
            asked_for = forward.conditions.guards.asked_for
            if forward.written or asked_for:
                signature = site.planned.signature
                found = signature.mismatch_of_memory(leaves, forward.written, asked_for)
                if found is not None:
                    yield found
        elif not self.may_record(site):
            yield _NOT_CAPTURED

    def _make_room(self, site: CallSite, leaves: Sequence[Any]) -> Mismatch | None:
        writes = [site]
        for index, (source, output) in site.sources.items():
            if not site.is_in_place(index, leaves[index]):
                if any(each.site.needs_output(source, output) for each in self.in_flight()):
                    name = site.planned.signature.leaves[index].name
                    message = f"input {name!r}: captured as the untouched output of another scope"
                    remedy = EAGER_CALLS["input_moved"].remedy
                    return Mismatch("input_moved", f"{message}, got another tensor: {remedy}")
                writes.append(source)
        reclaimed = list(map(CallSite.reclaim, writes))  # all are reclaimed, even if one fails
        held, kind = "output", "an output"
        if all(reclaimed):
            # Forwards may write where the gradients of the last microbatch are, unless the
            # gradients have a pool of their own.
            free = self.accumulates or self.reclaim_in_place()
            if self.backward_pool.added.reclaim() and free:
                return None
            held, kind = "gradient", "a weight's gradient"
        message = f"a view of {kind} of its last replay is still in use: clone() what you keep"
        return Mismatch(f"{held}_held", message)

    def grant(
        self, site: CallSite, *, added: list[BufferLease], in_place: list[BufferLease]
    ) -> None:
        """Notes gradients that are handed out on memory of a pool.

        Autograd holds those in ``added`` while it adds them. Those in ``in_place`` become ``.grad``
        until a graph needs their memory again.
        """
        self.backward_pool.added.add(added)
        self.in_place.add(in_place, site.backward_position)

    def reclaim_in_place(self, site: CallSite | None = None) -> bool:
        """Reclaims gradients that have become ``.grad``.

        With ``site`` given, only those that its backward may overwrite.
        """
        return self.in_place.reclaim(0 if site is None else site.backward_position)

    def in_flight(self) -> list[PendingBackward]:
        """The replayed forwards whose backward may still come."""
        alive = [pending for ref in self._pending.values() if (pending := ref()) is not None]
        self.abandoned += len(self._pending) - len(alive)
        self._pending = {each.site.position: weakref.ref(each) for each in alive}
        return alive

    def retains(self) -> bool:
        """Whether another backward of the last microbatch may come (``retain_graph=True``)."""
        return len(self._retained) > 0

    def begin_replay(self, site: CallSite, leaves: Sequence[Any]) -> PendingBackward:
        """Begins a replay before the graph of the forward runs, on the current stream."""
        stream = self._backend.current_stream()
        if self._stream is not None and stream != self._stream:
            self._backend.wait_for(self._stream)
        self._stream = stream
        random = self._backend.random_position() if site.forward.draws else None
        pending = PendingBackward(site, leaves, random)
        self.clock = site.position
        if any(site.forward.differentiable):
            self._pending[site.position] = weakref.ref(pending)
        return pending

    def cancel(self, pending: PendingBackward) -> None:
        """Forgets a replayed forward whose outputs were thrown away."""
        self._pending.pop(pending.site.position, None)

    def check(self, pending: PendingBackward) -> None:
        """Checks that a backward may run.

        Raises:
            GraphError: if it must not run at all.
        """
        self.check_alive(pending)
        if pending.is_done and pending not in self._retained:
            raise GraphError(
                f"scope {pending.site.name!r}: a second backward of the same forward: the first "
                f"one needs retain_graph=True, and all of them have to come before the next "
                f"microbatch: run other forwards within graphs.paused()"
            )
        pending.check_unmodified()

    def unreplayable(self, pending: PendingBackward, layouts: Layouts) -> str | None:
        """The reason why the recorded backward cannot serve this one, or None."""
        site = pending.site
        if site.backward is None:
            return "not_captured"
        if site.backward_position <= self.clock:
            return "out_of_order"
        if layouts != site.backward.layouts and layouts not in site.verified_layouts:
            return site.backward.other(layouts)
        mismatch = next(results_of(site.backward.conditions.checks), None)
        if mismatch is not None:
            return mismatch.reason
        added = self.backward_pool.added
        if added.reclaim():
            return None
        if site.planned.ranks.group is not None:
            # Ranks collect garbage at different times, but they have to run the same operations.
            gc.collect()
            return None if added.reclaim() else "gradient_held"
        return "gradient_held"

    def backward_to_replay(self, site: CallSite) -> RecordedBackward:
        """The recording that serves a backward which can be replayed.

        If no ``.grad`` exists and nobody holds the memory where gradients of first microbatches
        stay, it is the recording for a first microbatch.
        """
        first = site.first
        if first is not None and first.finds_no_gradient() and self.reclaim_in_place(site):
            return first
        assert site.backward is not None
        return site.backward

    def backward_done(self, pending: PendingBackward, *, replayed: bool) -> None:
        """Notes that a backward has run, or is about to be replayed."""
        if replayed:
            self.clock = pending.site.backward_position
            if self._shared is not None:
                self._shared.begin()
        pending.is_done = True
        self._forget_if_over(pending)

    def weights_done(self, pending: PendingBackward) -> None:
        """Notes that the weight gradients have been computed by a graph of their own.

        They may come in any order: the tensors that they need are kept until all weight gradients
        of the slot are captured.
        """
        self.check_alive(pending)
        if not pending.is_done or pending.weights != "pending":
            when = "a second time" if pending.is_done else "before the gradients of its inputs"
            raise GraphError(
                f"scope {pending.site.name!r}: the gradients of its weights are asked for {when}"
            )
        pending.weights = "done"
        self._forget_if_over(pending)

    def end_step(self) -> None:
        """Ends a step: backwards that have not come will not come any more.

        A capture that has begun is complete now, or it begins anew with the next microbatch.
        """
        for pending in self.in_flight():
            pending.cancelled = True
            self.abandoned += 1
        self._pending.clear()
        self._retained.clear()
        self.clock = -1
        for lease in self.in_place:
            lease.note_grad()
        begun = any(site.has_forward for site in self.sites)
        if not self.is_closed and (begun or all(site.planned.refused for site in self.sites)):
            self._close_or_begin_anew()

    def _close_or_begin_anew(self) -> None:
        self._attempts += 1
        complete = all(site.is_recorded or site.planned.refused for site in self.sites)
        if complete or self._attempts == _ATTEMPTS:
            self.is_closed = True
            self.free_autograd_graphs(self.sites)
            read = {source for site in self.sites for source, _ in site.sources.values()}
            for site in self.sites:
                if site.copies_outputs and site not in read:
                    site.lend_outputs(self._backend.borrow)
        else:
            self.release()
            self._begin_anew(self._given)

    def free_autograd_graphs(self, sites: Sequence[CallSite]) -> None:
        """Frees the autograd graphs that the captured forwards have left."""
        with references_of_the_engine(self.leases()):
            for site in sites:
                site.open = site.run = None

    def release(self) -> None:
        for site in self.sites:
            site.release()
        self.is_closed = True

    def check_alive(self, pending: PendingBackward) -> None:
        """Checks that the graphs of a backward are still there.

        Raises:
            GraphError: if the graphs are released, or the backward's step has ended.
        """
        if not pending.site.has_forward:
            raise GraphError(
                f"scope {pending.site.name!r}: its graphs were released before this backward"
            )
        if pending.cancelled:
            raise GraphError(
                f"scope {pending.site.name!r}: this backward belongs to a step that has ended: "
                f"call backward() inside the 'with graphs.step()' of its forward"
            )

    def _forget_if_over(self, pending: PendingBackward) -> None:
        if pending.is_over:
            self._pending.pop(pending.site.position, None)
            if keeps_graph():
                self._retained.add(pending)


# ---- the slots of one part of the model, for microbatches in flight and for several shapes

_RECENT = 64  # microbatches among which shapes are counted
_BY_SHAPE = frozenset({"shape", "stride"})
# Shapes and strides of the tensors that a call gets.
Layout = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass
class Shape:
    """The slots of one shape, one per lane.

    Attributes:
        layout: of the first call of its microbatches.
    """

    slots: tuple[Slot, ...]
    layout: Layout

    @property
    def is_closed(self) -> bool:
        return all(slot.is_closed for slot in self.slots)

    @property
    def in_flight(self) -> bool:
        return any(slot.in_flight() for slot in self.slots)

    @property
    def failure(self) -> CaptureError | None:
        return next((slot.failure for slot in self.slots if slot.failure is not None), None)


class Chunk:
    """The slots of one part of the model through which microbatches pass independently.

    Args:
        slots: those of the first shape, one per lane.
        most: how many shapes may have slots at once.

    Attributes:
        left: how many shapes have lost their graphs, because others came more often.
        counted: replays and audits of call sites that are gone, by scope.
    """

    def __init__(
        self, slots: Sequence[Slot], backend: Backend | None = None, most: int = 1
    ) -> None:
        self._backend, self._most = backend, most
        self.lanes = len(slots)
        self._calls = [replace(site.planned, tried=None) for site in slots[0].sites]
        # Further slots of a lane work in the pools of the first, also when that has left.
        self._first = tuple(slots)
        self._shapes = [Shape(self._first, _layout_of_signature(self._calls[0].signature))]
        self._recent: deque[Layout] = deque(maxlen=_RECENT)
        self._refused: set[Layout] = set()
        self._current: Slot | None = slots[0]
        self._lane = 0
        self._last = list(slots)  # the slot of each lane's last microbatch
        self.left = 0
        self.counted: dict[str, Counter[str]] = {}

    @property
    def slots(self) -> list[Slot]:
        """The slots of all shapes and lanes."""
        return [slot for shape in self._shapes for slot in shape.slots]

    @property
    def scopes(self) -> list[str]:
        return [call.scope.name for call in self._calls]

    @property
    def shapes(self) -> int:
        return len(self._shapes)

    @property
    def is_complete(self) -> bool:
        """Whether a shape has all of its graphs; others may come at any time."""
        return any(shape.is_closed for shape in self._shapes)

    def next_site(
        self, scope: str, structure: pytree.TreeSpec, leaves: Sequence[Any]
    ) -> tuple[Slot, CallSite] | Mismatch:
        """The slot and call site of the next call of ``scope``; a mismatch if slots are full.

        The call belongs to the microbatch whose forward is running, or it starts the next
        microbatch in a free lane.
        """
        site = self._current.next_site(scope) if self._current is not None else None
        if self._current is None or site is None or self._current.clock == -1:
            if site is None:  # else it is the first microbatch of a step
                free = [lane for lane in range(self.lanes) if not self._in_flight(lane)]
                if not free:
                    self._current = None
                    return self._full()
                self._lane = min(free, key=self._retains)
            self._current = self._begun(self._lane, scope, structure, leaves)
            site = self._current.next_site(scope)
        assert site is not None
        if not site.planned.is_signed:
            found = self._sign(site, structure, leaves)
            if found is not None:
                self._current.skip(site)
                return found
        return self._current, site

    def end_step(self) -> list[CaptureError]:
        """Ends a step. The failures are those of shapes whose graphs are gone therefore."""
        for slot in self.slots:
            slot.end_step()
        failures = []
        for shape in list(self._shapes):
            if shape.failure is not None:
                failures.append(shape.failure)
                self._refused.add(shape.layout)
                self._drop(shape)
        return failures

    def release(self) -> None:
        for slot in self.slots:
            slot.release()

    def _in_flight(self, lane: int) -> bool:
        return any(shape.slots[lane].in_flight() for shape in self._shapes)

    def _retains(self, lane: int) -> bool:
        return any(shape.slots[lane].retains() for shape in self._shapes)

    def _begun(
        self, lane: int, scope: str, structure: pytree.TreeSpec, leaves: Sequence[Any]
    ) -> Slot:
        """The slot that serves a new microbatch in a lane; that of another shape if none does."""
        shape = self._shapes[0] if self._most == 1 else self._shape(scope, structure, leaves)
        for each in self._shapes:
            each.slots[lane].begin()
        slot = (shape or self._shapes[0]).slots[lane]
        if self._last[lane] is not slot:
            slot.follows(self._last[lane])
            self._last[lane] = slot
        return slot

    def _shape(self, scope: str, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> Shape | None:
        """The shape of a microbatch that begins with this call, made now if it is to have one."""
        layout = _layout_of(leaves)
        self._recent.append(layout)
        found = next((each for each in self._shapes if each.layout == layout), None)
        if found is not None or layout in self._refused:
            return found
        call = next(call for call in self._calls if call.scope.name == scope)
        differences = {each.reason for each in call.signature.mismatches(structure, leaves)}
        if differences <= _BY_SHAPE and self._has_room(layout):
            found = Shape(self._more_slots(), layout)
            self._shapes.append(found)
        return found

    def _has_room(self, layout: Layout) -> bool:
        """Whether a new shape gets graphs. The rarest shape leaves if there are too many."""
        assert self._backend is not None
        count = Counter(self._recent)
        rarest = min(self._shapes, key=lambda shape: count[shape.layout])
        is_full = len(self._shapes) == self._most
        if is_full and (count[layout] <= count[rarest.layout] or rarest.in_flight):
            return False
        self._backend.make_room()
        if is_full:
            self.left += 1
            self._drop(rarest)
        return True

    def _more_slots(self) -> tuple[Slot, ...]:
        assert self._backend is not None
        calls = [call.of_another_shape() for call in self._calls]
        return tuple(
            Slot(
                calls,
                self._backend,
                first.pool,
                backward_pool=first.backward_pool,
                inputs=first.inputs,
                fails_alone=True,
            )
            for first in self._first
        )

    def _drop(self, shape: Shape) -> None:
        for site in (site for slot in shape.slots for site in slot.sites):
            counted = self.counted.setdefault(site.name, Counter())
            counted.update(replayed=site.replayed, audited=site.audited)
        for slot in shape.slots:
            slot.release()
        if len(self._shapes) > 1:
            self._shapes.remove(shape)

    def _sign(
        self, site: CallSite, structure: pytree.TreeSpec, leaves: Sequence[Any]
    ) -> Mismatch | None:
        """Notes the inputs of a call site of another shape at its first call.

        Returns the difference from the first shape that is none of shapes and strides, or None.
        """
        for found in site.planned.signature.mismatches(structure, leaves):
            if found.reason not in _BY_SHAPE:
                return found
        inputs = pytree.tree_unflatten(leaves, structure)
        site.planned.signature = Signature.of(inputs, site.planned.scope.name_input)
        site.planned.is_signed = True
        return None

    def _full(self) -> Mismatch:
        """The mismatch of a microbatch that found no lane; all of its calls run eagerly."""
        pending = next(p for shape in self._shapes for p in shape.slots[0].in_flight())
        message = (
            f"{self.lanes} microbatches are in flight (the backward of {pending.site.name!r} is "
            f"still to come), one more forward would make {self.lanes + 1}, and {self.lanes} were "
            f"captured, the most that the observed steps had: {EAGER_CALLS['slots_full'].remedy}"
        )
        return Mismatch("slots_full", message)


def _layout_of(leaves: Sequence[Any]) -> Layout:
    tensors = (x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided)
    return tuple((tuple(x.shape), x.stride()) for x in tensors)


def _layout_of_signature(signature: Signature) -> Layout:
    return tuple((x.shape, x.stride) for x in signature.leaves if isinstance(x, TensorSpec))
