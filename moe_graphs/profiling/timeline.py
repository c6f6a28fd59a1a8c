"""Timeline of the GPU in a few steps, from a profiler's trace: busy, idle, launches, graphs.

A trace is torch.profiler's Chrome trace. Its device events (``kernel``, ``gpu_memcpy``,
``gpu_memset``) have the correlation id of the host's call that launched them; all kernels of one
graph have the correlation id of their ``cudaGraphLaunch``. Times are in microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")
# These are prefixes: a name may end with a version (cudaGraphLaunch_v10000), and a launch has
# variants (cudaLaunchKernelExC, cuLaunchKernelEx).
KERNEL_LAUNCHES = (
    "cudaLaunchKernel", "cuLaunchKernel",
    "cudaLaunchCooperativeKernel", "cuLaunchCooperativeKernel",
)  # fmt: skip
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """Times and counts of the GPU, as means per step.

    Attributes:
        span_ms: time from the first device event of the trace to the end of the last.
        busy_ms: length of the union of the device events' intervals.
        idle_share: ``1 - busy / span``, from 0 to 1; the span includes the profiler's overhead.
        graph_span_ms, graph_busy_ms, graph_idle_share: the same within each graph launch, from
            its first event to its last, summed over launches. None without graph launches.
        kernel_launches: number of the host's calls that launched one kernel each.
        graph_kernels: number of kernels that ran inside graphs.
    """

    steps: int
    span_ms: float
    busy_ms: float
    idle_share: float
    graph_span_ms: float | None
    graph_busy_ms: float | None
    graph_idle_share: float | None
    kernel_launches: float
    graph_launches: float
    kernels: float
    graph_kernels: float


def read_timeline(events: Iterable[Mapping[str, Any]], steps: int) -> Timeline | None:
    """Timeline of a trace's ``traceEvents``; None if nothing in them ran on a device."""
    complete = [event for event in events if event.get("ph") == "X"]
    device = [e for e in complete if category(e) in DEVICE_CATEGORIES]
    if not device:
        return None
    host = [e for e in complete if category(e) in HOST_CATEGORIES]
    kernels = [e for e in device if category(e) == "kernel"]
    graphs = {_correlation(e) for e in host if e["name"].startswith(GRAPH_LAUNCHES)}
    # Count only calls whose id a kernel has, since one call may go through another one.
    launched = {_correlation(e) for e in kernels}
    single = {_correlation(e) for e in host if e["name"].startswith(KERNEL_LAUNCHES)}
    intervals = [interval(e) for e in device]
    span, busy = span_of(intervals), union(intervals)
    graph_span, graph_busy = _inside_graphs(device, graphs)
    return Timeline(
        steps=steps,
        span_ms=span / 1e3 / steps,
        busy_ms=busy / 1e3 / steps,
        idle_share=_idle(busy, span),
        graph_span_ms=graph_span / 1e3 / steps if graph_span else None,
        graph_busy_ms=graph_busy / 1e3 / steps if graph_span else None,
        graph_idle_share=_idle(graph_busy, graph_span) if graph_span else None,
        kernel_launches=len((single & launched) - graphs) / steps,
        graph_launches=len(graphs) / steps,
        kernels=len(kernels) / steps,
        graph_kernels=sum(_correlation(e) in graphs for e in kernels) / steps,
    )


def union(intervals: Sequence[Interval]) -> float:
    """Length covered by intervals that may overlap.

    Example: ``[(0, 4), (2, 5), (7, 8)]`` covers 6.
    """
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _inside_graphs(device: Sequence[Mapping[str, Any]], graphs: set[int]) -> tuple[float, float]:
    """Sum of the graph launches' spans, and sum of the busy time within them."""
    launches: dict[int, list[Interval]] = defaultdict(list)
    for event in device:
        if _correlation(event) in graphs:
            launches[_correlation(event)].append(interval(event))
    spans = sum(span_of(intervals) for intervals in launches.values())
    return spans, sum(union(intervals) for intervals in launches.values())


def category(event: Mapping[str, Any]) -> str:
    """Category of an event in lower case, since the case differs between versions of torch."""
    return str(event.get("cat", "")).lower()


def _correlation(event: Mapping[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def interval(event: Mapping[str, Any]) -> Interval:
    """Beginning and end of an event."""
    start = float(event["ts"])
    return start, start + float(event["dur"])


def span_of(intervals: Sequence[Interval]) -> float:
    """Length from the first beginning to the last end."""
    return max(end for _, end in intervals) - min(start for start, _ in intervals)


def _idle(busy: float, span: float) -> float:
    return 1 - busy / span if span else 0.0
