"""How much of a step is communication between GPUs, from a profiler's trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

from moe_graphs.profiling.profiler import traced_events
from moe_graphs.profiling.timeline import span_of
from moe_graphs.profiling.traced_work import (
    Work,
    communication_times,
    device_work,
    operator_work,
)


@dataclass(frozen=True)
class Communication:
    """Of the time from the first kernel of a step to its last, on one rank.

    Attributes:
        share: in which a kernel of NCCL or of a dispatcher runs; it waits there for other ranks,
            too.
        exposed: in which nothing else does.
        span_ms: that time, in milliseconds.
    """

    share: float
    exposed: float
    span_ms: float

    def __str__(self) -> str:
        return f"{self.share:.1%} of a step, {self.exposed:.1%} with nothing else beside it"


def traced_communication(
    step: Callable[[], object], device: torch.device, steps: int = 1
) -> Communication:
    """Runs so many steps, back to back, under torch's profiler. Call ``keep_profiler_ready`` before
    graphs.

    On the CPU operators are counted, by the time that they spend themselves: what gloo sends on its
    own threads is not seen.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    events = traced_events(step, device, steps, [activity])
    return communication_of(device_work(events) if on_gpu else operator_work(events), steps)


def communication_of(work: Sequence[Work], steps: int = 1) -> Communication:
    """``work``: of so many steps; its times are microseconds."""
    if not work:
        return Communication(0.0, 0.0, 0.0)
    span = span_of([(each.start, each.end) for each in work])
    hidden, exposed = communication_times(work)
    return Communication((hidden + exposed) / span, exposed / span, span / 1e3 / steps)
