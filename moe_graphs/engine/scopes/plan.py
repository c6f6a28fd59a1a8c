"""From observed training steps to what is captured, how often, in which order. No torch in here.

A step is a list of events: forwards, backwards and weight gradients of scope calls, in the order
they happened. A **pass** is one microbatch going through one chunk of the model: calls whose
backwards ran in one backward of autograd (``Event.task``). Passes with scopes in common belong to
one **chunk**. Its most common pass is captured, once for each of the passes that were in flight
at once (a **slot**), so graphs and memory grow with the depth of a pipeline and not with the number
of microbatches. A scope that is called twice in a pass (a repeated layer) gets two recordings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_graphs.errors import CaptureError


@dataclass(frozen=True)
class Event:
    """A forward ("F"), a backward ("B") or the weight gradients ("W") of a call of ``scope``.

    call: its number in this step; -1 for the "W" of a ``graphs.backward_weight()``.
    task: of a "B", which backward of autograd it belongs to.
    delayed: of a "B", in which ``delayed_weights()`` of the step it ran, -1 for none; of a "W" of
        ``backward_weight()``, the one that it makes up for.
    alike: of an "F", the number of the calls with its scope and signature.
    """

    kind: Literal["F", "B", "W"]
    scope: str
    call: int
    task: int = -1
    alike: int = -1
    delayed: int = -1


@dataclass(frozen=True)
class PlannedChunk:
    """The calls to capture, by their ``alike``, in forward order, for each slot."""

    calls: tuple[int, ...]
    slots: int


@dataclass(frozen=True)
class Plan:
    chunks: tuple[PlannedChunk, ...]


@dataclass
class _Pass:
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
        return tuple((event.scope, event.alike) for event in self.forwards)


def plan(steps: Sequence[Sequence[Event]]) -> Plan:
    """The plan for some steps: per chunk its most common pass, the last one among equals, and as
    many slots as the last step that has passes of it had in flight at once.

    Raises:
        CaptureError: if nothing was observed.
    """
    of_step = [_passes(events) for events in steps]
    chunks = []
    for scopes in _with_common_scopes(of_step):
        of_each = [[p for p in found if scopes.issuperset(p.scopes)] for found in of_step]
        last = next(filter(None, reversed(of_each)))
        common = _most_common([each for found in of_each for each in found])
        calls = tuple(event.alike for event in common.forwards)
        chunks.append(PlannedChunk(calls, peak_in_flight([(p.start, p.end) for p in last])))
    if not chunks:
        raise CaptureError("no scope was called in the observed steps: nothing to capture")
    return Plan(tuple(chunks))


def peak_in_flight(intervals: Sequence[tuple[int, int]]) -> int:
    """The most intervals (start, end) that are open at once; at least 1."""
    changes = sorted(
        change for start, end in intervals if end > start for change in ((start, 1), (end, -1))
    )
    open_now = peak = 0
    for _, change in changes:
        open_now += change
        peak = max(peak, open_now)
    return max(1, peak)


def _passes(events: Sequence[Event]) -> list[_Pass]:
    """Calls grouped into passes, in the order of their first forwards."""
    tasks = {event.call: event.task for event in events if event.kind == "B"}
    passes: list[_Pass] = []
    of_call: dict[int, _Pass] = {}
    may_continue = False
    for position, event in enumerate(events):
        if event.kind == "F":
            task = tasks.get(event.call)
            if not may_continue or not _continues(passes[-1], event.scope, task):
                passes.append(_Pass(start=position))
            passes[-1].forwards.append(event)
            passes[-1].task = task if task is not None else passes[-1].task
            of_call[event.call] = passes[-1]
        elif event.kind == "B":
            of_call[event.call].delayed = event.delayed
            of_call[event.call].end = position
        elif event.call >= 0:
            of_call[event.call].end = position
        else:
            for each in passes:
                if each.delayed == event.delayed:
                    each.end = position
        may_continue = event.kind == "F"
    return passes


def _continues(current: _Pass, scope: str, task: int | None) -> bool:
    """Whether a forward that follows another one belongs to its pass."""
    if task is None or current.task is None:
        return scope not in current.scopes
    return task == current.task


def _with_common_scopes(of_step: Sequence[Sequence[_Pass]]) -> list[set[str]]:
    """The scopes of each chunk, in the order of their first passes. What a later step knows as
    several chunks, a pass of an earlier one (a trial of shapes) does not make one."""
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


def _most_common(passes: Sequence[_Pass]) -> _Pass:
    """By the scopes called, among those by the signatures of the calls."""
    scopes = Counter(p.scopes for p in passes)
    passes = [p for p in passes if scopes[p.scopes] == max(scopes.values())]
    patterns = Counter(p.pattern for p in passes)
    return next(p for p in reversed(passes) if patterns[p.pattern] == max(patterns.values()))
