"""No line may give the time of a graph that was not replayed: what every benchmark asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist


class Counted(Protocol):
    """A report of an engine: ``Report``, ``FullIterationReport``."""

    @property
    def replayed(self) -> int: ...

    @property
    def eager_calls(self) -> Mapping[str, int]: ...


class NotReplayed(RuntimeError):
    """What was timed ran eagerly, on this rank or on another."""


def check_replayed(report: Counted | None) -> None:
    """Behind the timed turns. All ranks of the process group call it, if there is one.

    Args:
        report: None where nothing is graphed.

    Raises:
        NotReplayed: on all ranks, if on one of them a call behind the warm-up was not replayed.
    """
    found = [_problem(report)]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, found[0])
    for rank, problem in enumerate(found):
        if problem:
            raise NotReplayed(f"rank {rank}: {problem}")


def _problem(report: Counted | None) -> str:
    if report is None:
        return ""
    eager = sum(count for reason, count in report.eager_calls.items() if reason != "warmup")
    if report.replayed and not eager:
        return ""
    return f"{report.replayed} replayed, eager calls {dict(report.eager_calls)}: no time of a graph"
