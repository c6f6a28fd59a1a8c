"""Check of every benchmark that it times only graphs that were replayed."""

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
    """A timed call ran eagerly, on this rank or on another."""


def check_replayed(report: Counted | None) -> None:
    """Check, after the timed turns, that all calls were replayed; all ranks call it together.

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
