"""Common parts of benchmarks under torchrun: process group, lines, and the time of a turn."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_graphs.profiling.communication_share import Communication, traced_communication


@contextlib.contextmanager
def process_group(smoke: bool) -> Iterator[torch.device]:
    """Context with this rank's device, in a group of all ranks: a test's group, if there is one."""
    device = torch.device("cpu" if smoke else "cuda")
    if not smoke:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo" if smoke else "nccl")
    yield device
    if started:
        dist.destroy_process_group()


def keep(line: Mapping[str, Any], constant: Mapping[str, Any], out: Path | None) -> None:
    """Rank 0 prints the line, and appends it to ``out`` with what is the same in all of them."""
    if dist.get_rank() != 0:
        return
    print(json.dumps(line), flush=True)
    if out:
        with out.open("a") as lines:
            lines.write(json.dumps({**line, **constant}) + "\n")


def is_late(deadline: float, device: torch.device) -> bool:
    """Whether any rank's ``time.monotonic`` is past it: all ranks stop, or none."""
    left = torch.tensor(deadline - time.monotonic(), device=device)
    dist.all_reduce(left, op=dist.ReduceOp.MIN)
    return bool(left < 0)


def milliseconds_of(step: Callable[[], object], steps: int) -> float:
    """Milliseconds of a step in a turn of ``steps``, which all ranks begin and end together."""
    _synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize()
    return 1e3 * (time.perf_counter() - began) / steps


def communication_in(
    step: Callable[[], object], steps: int, device: torch.device
) -> Communication | None:
    """Communication in steps of all ranks, from rank 0's trace; None on other ranks.

    Tracing makes rank 0's host the slowest, so the trace has little waiting for other ranks.
    """
    found = None
    for count in (1, steps):  # the first trace pays for starting the profiler
        _synchronize()
        if dist.get_rank() == 0:
            found = traced_communication(step, device, count)
        else:
            for _ in range(count):
                step()
    _synchronize()
    return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
