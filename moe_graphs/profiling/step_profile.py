"""A training step as a table: pure functions from pieces of work to times by group."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_graphs.profiling.floors import Floor, Rates
from moe_graphs.profiling.kernel_groups import NAMES
from moe_graphs.profiling.timeline import Timeline, span_of, union
from moe_graphs.profiling.traced_work import Work, communication_times

LONGEST = 3  # kernels of a group that are named


@dataclass(frozen=True)
class GroupTimes:
    """One group's part of a step. Means per step.

    Attributes:
        calls: kernels, copies and memsets; operators on the CPU.
        summed_ms: their durations added up.
        busy_ms: the time in which at least one ran.
        share_ms: the same, where what runs at once shares the time equally: these add up to the
            step's ``busy_ms``.
        floor_ms: what it takes at least at the machine's rates; None if not known.
        longest: names and ``summed_ms`` of those that took most.
    """

    name: str
    calls: float
    summed_ms: float
    busy_ms: float
    share_ms: float
    floor_ms: float | None
    longest: tuple[tuple[str, float], ...]

    @property
    def reached(self) -> float | None:
        """The share of the time that the floor is; None if it is not known."""
        return None if self.floor_ms is None or not self.busy_ms else self.floor_ms / self.busy_ms


@dataclass(frozen=True)
class TracedStep:
    """What a trace says of a step. Means per step.

    Attributes:
        span_ms: from the beginning of the first work to the end of the last.
        busy_ms: with something running.
        gaps: stretches of time in between in which nothing runs; ``longest_gap_ms`` is one of them.
        overlapped_ms: what is saved by kernels that run at once: their sum less ``busy_ms``.
        communication_hidden_ms, communication_exposed_ms: of communication, with and without
            something else running.
    """

    span_ms: float
    busy_ms: float
    gaps: float
    longest_gap_ms: float
    overlapped_ms: float
    communication_hidden_ms: float
    communication_exposed_ms: float
    groups: tuple[GroupTimes, ...]

    @property
    def gaps_ms(self) -> float:
        return self.span_ms - self.busy_ms


@dataclass(frozen=True)
class StepProfile:
    """One way of running a step, as ``profile_step`` measures it.

    Attributes:
        device: "cuda", or "cpu" where work is operators.
        step_ms: median without a profiler, steps back to back.
        host_ms: median until the step's Python returns, with nothing queued before it.
        traced: under the profiler, which makes the host slower: ``busy_ms`` there holds without it.
        timeline: launches and graphs; None on the CPU.
        rates: of the machine; ``floor_ms`` is by them.
    """

    name: str
    device: str
    steps: int
    step_ms: float
    host_ms: float
    traced: TracedStep
    timeline: Timeline | None
    rates: Rates

    @property
    def idle_ms(self) -> float:
        """Of the step without a profiler: nothing runs. A little under zero says how well two
        measurements agree."""
        return self.step_ms - self.traced.busy_ms

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, properties included."""
        document = dataclasses.asdict(self)
        for group, values in zip(self.traced.groups, document["traced"]["groups"], strict=True):
            values["reached"] = group.reached
        document["traced"]["gaps_ms"] = self.traced.gaps_ms
        return document | {"idle_ms": self.idle_ms}


def summarize(
    work: Sequence[Work], steps: int, floors: Mapping[str, Floor], rates: Rates
) -> TracedStep:
    """What a few steps back to back did, as means per step.

    Raises:
        ValueError: there is no work in it, or a floor of a group that does not exist.
    """
    unknown = floors.keys() - set(NAMES)
    if unknown:
        raise ValueError(f"floors: {sorted(unknown)} are no groups: choose from {', '.join(NAMES)}")
    if not work:
        raise ValueError("the trace has no work of the device in it: does the step compute there?")
    scale = 1e-3 / steps
    intervals = [(each.start, each.end) for each in work]
    gaps = _gaps(intervals)
    busy = union(intervals)
    hidden, exposed = communication_times(work)
    groups = _groups(work, floors, rates, scale)
    return TracedStep(
        span_ms=span_of(intervals) * scale,
        busy_ms=busy * scale,
        gaps=len(gaps) / steps,
        longest_gap_ms=max(gaps, default=0.0) / 1e3,
        overlapped_ms=(sum(end - start for start, end in intervals) - busy) * scale,
        communication_hidden_ms=hidden * scale,
        communication_exposed_ms=exposed * scale,
        groups=groups,
    )


def _groups(
    work: Sequence[Work], floors: Mapping[str, Floor], rates: Rates, scale: float
) -> tuple[GroupTimes, ...]:
    """Those that ran, the longest first."""
    of_group: dict[str, list[Work]] = defaultdict(list)
    for each in work:
        of_group[each.group].append(each)
    shares = shared_time(work)
    found = []
    for name, pieces in of_group.items():
        names: dict[str, float] = defaultdict(float)
        for piece in pieces:
            names[piece.name] += piece.end - piece.start
        longest = sorted(names.items(), key=lambda item: -item[1])[:LONGEST]
        floor = floors.get(name)
        found.append(
            GroupTimes(
                name=name,
                calls=sum(piece.calls for piece in pieces) * scale * 1e3,
                summed_ms=sum(names.values()) * scale,
                busy_ms=union([(piece.start, piece.end) for piece in pieces]) * scale,
                share_ms=shares[name] * scale,
                floor_ms=None if floor is None else floor.milliseconds(rates),
                longest=tuple((n, t * scale) for n, t in longest),
            )
        )
    return tuple(sorted(found, key=lambda group: -group.share_ms))


def shared_time(work: Iterable[Work]) -> dict[str, float]:
    """The time of each group, where what runs at once shares it equally.

    Example: a from 0 to 4 and b from 2 to 6 are 3 each.
    """
    # At the same moment ends come before beginnings.
    events = sorted(
        moment for w in work for moment in ((w.start, 1, w.group), (w.end, -1, w.group))
    )
    running: Counter[str] = Counter()
    shares: dict[str, float] = defaultdict(float)
    before = 0.0
    for moment, change, group in events:
        count = running.total()
        if count and moment > before:
            for name, of_name in running.items():
                shares[name] += (moment - before) * of_name / count
        running[group] += change
        before = moment
    return shares


def _gaps(intervals: Sequence[tuple[float, float]]) -> list[float]:
    ordered = sorted(intervals)
    gaps, reached = [], ordered[0][0]
    for start, end in ordered:
        if start > reached:
            gaps.append(start - reached)
        reached = max(reached, end)
    return gaps
