"""How much of a step is communication between GPUs, from a profiler's trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

from moe_graphs.profiling.kernel_groups import COMMUNICATION
from moe_graphs.profiling.profiler import traced_events
from moe_graphs.profiling.timeline import span_of, union
from moe_graphs.profiling.traced_work import Work, device_work


@dataclass(frozen=True)
class Communication:
    """Of the time from the first kernel of a step to its last, on one rank.

    Attributes:
        share: in which a kernel of NCCL or of a dispatcher runs; it waits there for other ranks,
            too.
        exposed: in which nothing else does.
    """

    share: float
    exposed: float

    def __str__(self) -> str:
        return f"{self.share:.1%} of a step, {self.exposed:.1%} with nothing else beside it"


def traced_communication(step: Callable[[], object], device: torch.device) -> Communication:
    """Runs the step once, under torch's profiler. Call ``keep_profiler_ready`` before graphs."""
    return communication_of(device_work(traced_events(step, device, 1, [ProfilerActivity.CUDA])))


def communication_of(work: Sequence[Work]) -> Communication:
    """``work`` of one step on a GPU."""
    every = [(each.start, each.end) for each in work]
    if not every:
        return Communication(0.0, 0.0)
    between = [(each.start, each.end) for each in work if each.group == COMMUNICATION]
    others = [(each.start, each.end) for each in work if each.group != COMMUNICATION]
    span = span_of(every)
    return Communication(union(between) / span, (union(every) - union(others)) / span)
