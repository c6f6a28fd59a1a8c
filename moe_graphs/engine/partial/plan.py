"""The plan: what is captured after observed steps, how often, in which order, in how much memory.

A step is a list of events: forwards, backwards and weight gradients of scope calls, in the order in
which they happened. A microbatch goes through one **chunk** of the model: its calls are those whose
backwards ran in one backward of autograd (``Event.task``). Microbatches with scopes in common
belong to one chunk. The most common sequence of calls of a chunk is captured once for each of the
microbatches that were in flight at once (a **slot**). So graphs and memory grow with the depth of a
pipeline and not with the number of microbatches. If a microbatch calls a scope twice (a repeated
layer), the scope gets two call sites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from moe_graphs.errors import CaptureError
from moe_graphs.report_tables import format_bytes


@dataclass(frozen=True)
class Event:
    """A forward ("F"), a backward ("B") or the weight gradients ("W") of a call of ``scope``.

    Attributes:
        call: the number of the call in this step; -1 for the "W" of a ``graphs.backward_weight()``.
        task: for a "B", the backward of autograd that it belongs to.
        delayed: for a "B", the number of the ``delayed_weights()`` of the step in which it ran, -1
            for none; for the "W" of a ``backward_weight()``, the number of the one that it belongs
            to.
        signature_id: for an "F", the number of the calls with its scope and signature.
    """

    kind: Literal["F", "B", "W"]
    scope: str
    call: int
    task: int = -1
    signature_id: int = -1
    delayed: int = -1


@dataclass(frozen=True)
class PlannedChunk:
    """The calls to capture for each slot, by their ``signature_id``, in forward order."""

    calls: tuple[int, ...]
    slots: int


@dataclass(frozen=True)
class Plan:
    chunks: tuple[PlannedChunk, ...]


@dataclass
class _Microbatch:
    forwards: list[Event] = field(default_factory=list)
    task: int | None = None
    delayed: int = -1
    start: int = -1  # position of its first forward in the list of events
    end: int = -1  # position in the list of events of its last backward or weight gradient

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(event.scope for event in self.forwards)

    @property
    def pattern(self) -> tuple[tuple[str, int], ...]:
        return tuple((event.scope, event.signature_id) for event in self.forwards)


def plan(steps: Sequence[Sequence[Event]]) -> Plan:
    """The plan for some steps: per chunk a microbatch and a number of slots.

    The microbatch is the most common one of the chunk, or the last one among equally common ones.
    There are as many slots as microbatches were in flight at once in the last step that has such
    microbatches.

    Raises:
        CaptureError: if nothing was observed.
    """
    of_step = [_microbatches(events) for events in steps]
    chunks = []
    for scopes in _with_common_scopes(of_step):
        of_each = [[p for p in found if scopes.issuperset(p.scopes)] for found in of_step]
        last = next(filter(None, reversed(of_each)))
        common = _most_common([each for found in of_each for each in found])
        calls = tuple(event.signature_id for event in common.forwards)
        chunks.append(PlannedChunk(calls, peak_in_flight([(p.start, p.end) for p in last])))
    if not chunks:
        raise CaptureError("no scope was called in the observed steps: nothing to capture")
    return Plan(tuple(chunks))


def peak_in_flight(intervals: Sequence[tuple[int, int]]) -> int:
    """The largest number of intervals (start, end) that are open at once; at least 1."""
    changes = sorted(
        change for start, end in intervals if end > start for change in ((start, 1), (end, -1))
    )
    open_now = peak = 0
    for _, change in changes:
        open_now += change
        peak = max(peak, open_now)
    return max(1, peak)


def _microbatches(events: Sequence[Event]) -> list[_Microbatch]:
    """Calls grouped into microbatches, in the order of their first forwards."""
    tasks = {event.call: event.task for event in events if event.kind == "B"}
    microbatches: list[_Microbatch] = []
    of_call: dict[int, _Microbatch] = {}
    may_continue = False
    for position, event in enumerate(events):
        if event.kind == "F":
            task = tasks.get(event.call)
            if not may_continue or not _continues(microbatches[-1], event.scope, task):
                microbatches.append(_Microbatch(start=position))
            microbatches[-1].forwards.append(event)
            microbatches[-1].task = task if task is not None else microbatches[-1].task
            of_call[event.call] = microbatches[-1]
        elif event.kind == "B":
            of_call[event.call].delayed = event.delayed
            of_call[event.call].end = position
        elif event.call >= 0:
            of_call[event.call].end = position
        else:
            for each in microbatches:
                if each.delayed == event.delayed:
                    each.end = position
        may_continue = event.kind == "F"
    return microbatches


def _continues(current: _Microbatch, scope: str, task: int | None) -> bool:
    """Whether a forward that follows another one belongs to the same microbatch."""
    if task is None or current.task is None:
        return scope not in current.scopes
    return task == current.task


def _with_common_scopes(of_step: Sequence[Sequence[_Microbatch]]) -> list[set[str]]:
    """The scopes of each chunk, in the order of their first microbatches.

    If a later step has several chunks, a microbatch of an earlier step (a trial of shapes) does not
    join them.
    """
    components: list[set[str]] = []
    for found in reversed(of_step):
        later = list(components)
        for each in found:
            if sum(not scopes.isdisjoint(each.scopes) for scopes in later) > 1:
                continue
            touching = [scopes for scopes in components if not scopes.isdisjoint(each.scopes)]
            merged = set(each.scopes).union(*touching)
            components = [scopes for scopes in components if scopes not in touching] + [merged]
    order = [scope for found in of_step for each in found for scope in each.scopes]
    return sorted(components, key=lambda scopes: min(map(order.index, scopes)))


def _most_common(microbatches: Sequence[_Microbatch]) -> _Microbatch:
    """The most common microbatch by the scopes called, then by the signatures of the calls."""
    scopes = Counter(p.scopes for p in microbatches)
    microbatches = [p for p in microbatches if scopes[p.scopes] == max(scopes.values())]
    patterns = Counter(p.pattern for p in microbatches)
    return next(p for p in reversed(microbatches) if patterns[p.pattern] == max(patterns.values()))


# ---- how much memory graphs will take, by trial runs, before anything is captured


@dataclass(frozen=True)
class CallMemory:
    """Bytes of one call of a scope.

    Attributes:
        inputs: static inputs of its own.
        linked: inputs that are another scope's output in place.
        outputs: outputs of the graph.
        saved: outputs and saved tensors of the backward.
        forward: the most that is allocated at once during the forward, ``saved`` included.
        backward: the most that is allocated at once during the backward.
        gradients: incoming gradients, for which calls share buffers.
        weights: weight gradients that stay in place, as ``.grad``; also included in ``backward``.
        recomputed: saved tensors that the backward computes anew, and that nothing keeps.
    """

    scope: str
    inputs: int
    linked: int
    outputs: int
    saved: int
    forward: int
    backward: int
    gradients: int
    weights: int = 0
    recomputed: int = 0

    def anew(self) -> CallMemory:
        """Bytes of such a call that keeps its inputs only, so its backward runs it again."""
        return replace(
            self,
            saved=self.outputs,
            backward=self.saved + self.backward,
            recomputed=self.saved - self.outputs,
        )

    @property
    def eager_bytes(self) -> int:
        """The most that an eager forward and backward allocate at once."""
        return max(self.forward, self.saved + self.backward) + self.inputs


@dataclass(frozen=True)
class ChunkMemory:
    """Memory of one chunk: its calls in forward order, and how many slots it gets.

    Attributes:
        shares_backwards: whether backwards work in a pool that all slots of all chunks share.
        first_gradients: if gradients are accumulated, bytes of the pool for backwards of first
            microbatches. Their gradients stay there, as ``.grad``.
    """

    calls: tuple[CallMemory, ...]
    slots: int
    split: bool
    shares_backwards: bool = False
    first_gradients: int = 0

    def pool(self) -> int:
        """Bytes that the pool of one slot needs at least.

        It holds all forwards and then, unless they work in a shared pool, all backwards.
        """
        saved, peak = 0, 0
        for call in self.calls:
            peak = max(peak, saved + call.forward)
            saved += call.saved
        for call in () if self.shares_backwards else reversed(self.calls):
            peak = max(peak, saved + call.backward)
            if not self.split:
                saved -= call.saved - call.outputs - call.weights
        return peak

    def piece(self) -> int:
        """Bytes of the one piece that a pool begins with.

        Weight gradients that stay do not fit into the gaps that single activations leave, and the
        allocator joins free memory within a piece only.
        """
        return self.pool() if any(call.weights for call in self.calls) else 0

    def inputs(self) -> int:
        return sum(call.inputs for call in self.calls)

    def unshared(self) -> int:
        """Bytes of one slot if every call had a pool and buffers of its own."""
        return sum(
            c.inputs + c.linked + c.gradients + max(c.forward, c.saved + c.backward)
            for c in self.calls
        )


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a capture is predicted to take. ``print`` shows it as a table.

    Attributes:
        gradients: incoming gradients, shared by all slots; with a split backward each slot has its
            own.
    """

    chunks: tuple[ChunkMemory, ...]
    gradients: int

    @property
    def backwards(self) -> int:
        """Bytes of the pool that backwards share."""
        sharing = (chunk.calls for chunk in self.chunks if chunk.shares_backwards)
        return max((call.backward for calls in sharing for call in calls), default=0)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools at least; fragmentation and the allocator's rounding come on top."""
        own = (chunk.slots * chunk.pool() + chunk.first_gradients for chunk in self.chunks)
        return self.backwards + sum(own)

    @property
    def total_bytes(self) -> int:
        inputs = sum(chunk.slots * chunk.inputs() for chunk in self.chunks)
        return self.pool_bytes + inputs + self.gradients

    @property
    def saved_by_sharing(self) -> int:
        return sum(chunk.slots * chunk.unshared() for chunk in self.chunks) - self.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        totals = ("backwards", "pool_bytes", "total_bytes", "saved_by_sharing")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        """A line per scope, and one per chunk."""
        headings = ("scope", "inputs", "linked", "outputs", "saved", "forward", "backward")
        calls = [call for chunk in self.chunks for call in chunk.calls]
        rows = [
            (c.scope, *(format_bytes(getattr(c, name)) for name in headings[1:])) for c in calls
        ]
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in (headings, *rows)
        ]
        for number, chunk in enumerate(self.chunks):
            first = chunk.first_gradients
            lines.append(
                f"chunk {number}: microbatches in flight {chunk.slots}, each with a pool of "
                f"{format_bytes(chunk.pool())} and inputs of {format_bytes(chunk.inputs())}"
                + (f"; gradients {format_bytes(first)}" if first else "")
            )
        if self.backwards:
            lines.append(f"backwards, by turns {format_bytes(self.backwards)}")
        lines.append(
            f"incoming gradients {format_bytes(self.gradients)}; total "
            f"{format_bytes(self.total_bytes)}, sharing saves {format_bytes(self.saved_by_sharing)}"
        )
        return "\n".join(lines)


def memory_plan(
    plan: Plan,
    measured: Mapping[int, CallMemory],
    split: bool,
    copied: Collection[str] | None = None,
    *,
    accumulates: bool = False,
) -> MemoryPlan:
    """The memory that a plan will take.

    Args:
        measured: memory of calls by ``signature_id``.
        copied: names of scopes whose weight gradients are copied; None means all scopes.
        accumulates: whether microbatches of a step add to the gradients of the first.
    """
    chunks = []
    for chunk in plan.chunks:
        calls = [measured[n] for n in chunk.calls if n in measured]
        stay = copied is not None and chunk.slots == 1 and not split
        of_first = 0
        if stay and accumulates:
            temporaries = max((call.backward - call.weights for call in calls), default=0)
            of_first = temporaries + sum(call.weights for call in calls)
        at_once = set(copied or ()) if stay and not of_first else {c.scope for c in calls}
        calls = [replace(c, weights=0) if c.scope in at_once else c for c in calls]
        shares = copied is not None and chunk.slots > 1 and not split
        chunks.append(ChunkMemory(tuple(calls), chunk.slots, split, shares, of_first))
    gradients = [call.gradients for chunk in chunks for call in chunk.calls]
    own = sum(chunk.slots * call.gradients for chunk in chunks for call in chunk.calls)
    return MemoryPlan(tuple(chunks), own if split else max(gradients, default=0))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
