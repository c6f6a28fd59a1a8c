"""From one observed training step to what is captured, in which order. No torch in here.

A step is a list of events: forwards and backwards of scope calls, in the order they happened. A
microbatch is a run of forwards followed by their backwards in reverse order; a scope that is
called twice in it (a repeated layer) gets two recordings. All recordings of a microbatch share a
slot: one memory pool, replayed in the order of capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_graphs.capture.errors import CaptureError


@dataclass(frozen=True)
class Event:
    """A forward ("F") or backward ("B") of call number ``call`` of this step, of ``scope``."""

    kind: Literal["F", "B"]
    scope: str
    call: int


@dataclass(frozen=True)
class Plan:
    """The calls to capture, as numbers of observed calls in forward order, for every slot.

    ``slots`` is the number of microbatches in flight at once; more than one needs a schedule and
    is refused for now.
    """

    calls: tuple[int, ...]
    slots: int = 1


def plan(events: Sequence[Event]) -> Plan:
    """The plan for a step: its most common microbatch, the last one among equals.

    Raises:
        CaptureError: if two microbatches were in flight at once, or nothing was observed.
    """
    microbatches = _microbatches(events)
    if not microbatches:
        raise CaptureError("no scope was called in the observed step: nothing to capture")
    patterns = Counter(tuple(event.scope for event in forwards) for forwards in microbatches)
    most = max(patterns.values())
    chosen = next(
        forwards
        for forwards in reversed(microbatches)
        if patterns[tuple(event.scope for event in forwards)] == most
    )
    return Plan(tuple(event.call for event in chosen))


def _microbatches(events: Sequence[Event]) -> list[list[Event]]:
    """The forwards of each microbatch; checks that each one's backwards end before the next."""
    microbatches: list[list[Event]] = []
    pending: list[Event] = []  # forwards whose backward may still come, latest last
    backward_before = True
    for event in events:
        if event.kind == "F":
            if backward_before:
                microbatches.append([])
                pending = []
            microbatches[-1].append(event)
            pending.append(event)
            backward_before = False
            continue
        backward_before = True
        while pending and pending[-1].call != event.call:
            pending.pop()  # a forward without a backward
        if not pending:
            raise CaptureError(
                f"two microbatches are in flight at once: the backward of scope {event.scope!r} "
                f"came out of order, and one microbatch in flight is what this version captures: "
                f"run each microbatch's backward before the next one's forward"
            )
        pending.pop()
    return microbatches
