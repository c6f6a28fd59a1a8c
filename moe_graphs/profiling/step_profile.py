"""Times of a training step by group, computed from pieces of work by pure functions."""

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

LONGEST = 3  # number of kernels of a group that are named


@dataclass(frozen=True)
class GroupTimes:
    """One group's part of a step, as means per step; times in milliseconds.

    Attributes:
        calls: number of kernels, copies and memsets; on the CPU, of operators.
        summed_ms: sum of their durations.
        busy_ms: time in which at least one of them ran.
        share_ms: like ``busy_ms``, but groups that run at once share the time equally, so that all
            groups together have the step's ``busy_ms``.
        floor_ms: least time at the machine's rates; None if not known.
        longest: names and ``summed_ms`` of the kernels that took most time.
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
        """Floor divided by the time; None if the floor is not known."""
        return None if self.floor_ms is None or not self.busy_ms else self.floor_ms / self.busy_ms


@dataclass(frozen=True)
class TracedStep:
    """Times of a traced step, as means per step in milliseconds.

    Attributes:
        span_ms: time from the beginning of the first work to the end of the last.
        busy_ms: time in which something runs.
        gaps: number of intervals within the span in which nothing runs; the longest one takes
            ``longest_gap_ms``.
        overlapped_ms: time saved by kernels that run at once: sum of durations less ``busy_ms``.
        communication_hidden_ms: time in which communication and something else run.
        communication_exposed_ms: time in which only communication runs.
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
    """Profile of one way of running a step, as ``profile_step`` measures it.

    Attributes:
        device: "cuda", or "cpu", where operators are the work.
        step_ms: median time of a step without a profiler, steps back to back.
        host_ms: median time until the step's Python returns, with nothing queued before it.
        traced: times under the profiler, which makes the host slower; its ``busy_ms`` holds without
            a profiler, too.
        timeline: launches and graphs; None on the CPU.
        rates: the machine's rates, by which ``floor_ms`` is computed.
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
        """Milliseconds of a step without a profiler in which nothing runs.

        The two times are measured apart, so the difference may be a little below zero.
        """
        return self.step_ms - self.traced.busy_ms

    def __str__(self) -> str:
        """Two lines: how long the device is idle, and what it does; ``profile_table`` has all."""
        share = self.idle_ms / self.step_ms if self.step_ms else 0.0
        groups = ", ".join(f"{group.name} {group.share_ms:.3f}" for group in self.traced.groups)
        return (
            f"{self.name}: {self.step_ms:.3f} ms a step, {self.device} busy "
            f"{self.traced.busy_ms:.3f} ms and idle {self.idle_ms:.3f} ms ({share:.0%}); the host "
            f"takes {self.host_ms:.3f} ms\nms by kind of work: {groups}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values of all fields and properties."""
        document = dataclasses.asdict(self)
        for group, values in zip(self.traced.groups, document["traced"]["groups"], strict=True):
            values["reached"] = group.reached
        document["traced"]["gaps_ms"] = self.traced.gaps_ms
        return document | {"idle_ms": self.idle_ms}


def summarize(
    work: Sequence[Work], steps: int, floors: Mapping[str, Floor], rates: Rates
) -> TracedStep:
    """Summarize the work of a few steps, back to back, as means per step.

    Raises:
        ValueError: there is no work, or a floor has the name of no group.
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
    """Times of the groups that ran, the longest first."""
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
    """Time of each group, if groups that run at once share the time equally.

    Example: work of group a from 0 to 4 and of group b from 2 to 6 gives 3 each.
    """
    # Sort ends before beginnings at the same moment.
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
