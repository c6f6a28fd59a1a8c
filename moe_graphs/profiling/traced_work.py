"""Pieces of work in a profiler's trace: events on a GPU, or operators on the CPU.

A trace is torch.profiler's Chrome trace, as in ``timeline.py``. Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_graphs.profiling.kernel_groups import (
    COMMUNICATION,
    COPIES,
    MEMSETS,
    OTHER,
    group_of_kernel,
    group_of_operator,
)
from moe_graphs.profiling.timeline import DEVICE_CATEGORIES, category, interval, union

# In a trace, an optimizer's step is a range with this name, and not an operator.
_CPU_CATEGORIES = ("cpu_op", "user_annotation")
_RANGE = "Optimizer.step"


@dataclass(frozen=True)
class Work:
    """A piece of work without a break.

    Attributes:
        calls: 1; 0 for a later piece of an operator, after an operator that it has called.
        stream: stream of the GPU, or thread of the CPU.
    """

    name: str
    group: str
    start: float
    end: float
    stream: int = 0
    calls: int = 1


def device_work(events: Iterable[Mapping[str, Any]]) -> list[Work]:
    """Kernels, copies and memsets, in the order of the trace."""
    found = []
    for event in events:
        kind = category(event)
        if event.get("ph") != "X" or kind not in DEVICE_CATEGORIES:
            continue
        name = str(event["name"])
        by_kind = {"gpu_memcpy": COPIES, "gpu_memset": MEMSETS}
        group = by_kind.get(kind) or group_of_kernel(name)
        stream = int(event.get("args", {}).get("stream", 0))
        found.append(Work(name, group, *interval(event), stream))
    return found


def communication_times(work: Sequence[Work]) -> tuple[float, float]:
    """Time of communication beside other work, and time of communication alone."""
    talk = [(w.start, w.end) for w in work if w.group == COMMUNICATION]
    others = [(w.start, w.end) for w in work if w.group != COMMUNICATION]
    exposed = union([*talk, *others]) - union(others)
    return union(talk) - exposed, exposed


def operator_work(events: Iterable[Mapping[str, Any]]) -> list[Work]:
    """Operators of the CPU, each with the time that it spends outside of operators it calls."""
    threads: dict[int, list[tuple[float, float, str]]] = {}
    for event in events:
        if event.get("ph") != "X" or category(event) not in _CPU_CATEGORIES:
            continue
        name = str(event["name"])
        if category(event) == "cpu_op" or name.startswith(_RANGE):
            threads.setdefault(int(event["tid"]), []).append((*interval(event), name))
    return [work for thread, calls in threads.items() for work in _own_time(thread, calls)]


def _own_time(thread: int, calls: list[tuple[float, float, str]]) -> list[Work]:
    """Split nested operators into pieces: at any moment the innermost open operator runs."""
    found: list[Work] = []
    open_: list[tuple[float, str, str]] = []  # end, name and group of each open operator
    fresh: list[int] = []  # 1 until the operator has its first piece
    reached = float("-inf")

    def run_until(moment: float) -> None:
        nonlocal reached
        end, name, group = open_[-1]
        moment = min(moment, end)
        # An optimizer's own time is Python around operators, which counts as a gap, not as work.
        if moment > reached and not name.startswith(_RANGE):
            found.append(Work(name, group, reached, moment, thread, fresh[-1]))
            fresh[-1] = 0
        reached = max(reached, moment)

    for start, end, name in sorted(calls, key=lambda call: (call[0], -call[1])):
        while open_ and open_[-1][0] <= start:
            run_until(open_[-1][0])
            open_.pop()
            fresh.pop()
        if open_:
            run_until(start)
        inside_of = open_[-1][2] if open_ else OTHER
        open_.append((end, name, group_of_operator(name, inside_of)))
        fresh.append(1)
        reached = max(reached, start)
    while open_:
        run_until(open_[-1][0])
        open_.pop()
        fresh.pop()
    return found
