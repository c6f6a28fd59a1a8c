"""Share of communication between GPUs in a step, from a profiler's trace."""

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
    """Shares of the time from the first kernel of a step to its last, on one rank, from 0 to 1.

    Attributes:
        share: time in which a kernel of NCCL or of a dispatcher runs, which includes waiting for
            other ranks.
        exposed: time in which such a kernel runs and no other.
        span_ms: the whole time, in milliseconds.
    """

    share: float
    exposed: float
    span_ms: float

    def __str__(self) -> str:
        return f"{self.share:.1%} of a step, {self.exposed:.1%} with nothing else beside it"


def traced_communication(
    step: Callable[[], object], device: torch.device, steps: int = 1
) -> Communication:
    """Measure communication in ``steps`` steps, back to back, under torch's profiler.

    Call ``keep_profiler_ready`` before the first graph. On the CPU the time that operators spend
    themselves is counted; the trace does not show gloo's own threads.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    events = traced_events(step, device, steps, [activity])
    return communication_of(device_work(events) if on_gpu else operator_work(events), steps)


def communication_of(work: Sequence[Work], steps: int = 1) -> Communication:
    """Compute the shares from the ``work`` of ``steps`` steps, whose times are in microseconds."""
    if not work:
        return Communication(0.0, 0.0, 0.0)
    span = span_of([(each.start, each.end) for each in work])
    hidden, exposed = communication_times(work)
    return Communication((hidden + exposed) / span, exposed / span, span / 1e3 / steps)
