"""Runs a step a few times, with and without torch.profiler, and says where its time goes."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from moe_graphs.profiling.floors import Floor, Rates, counted_floors, measure_rates
from moe_graphs.profiling.step_profile import StepProfile, summarize
from moe_graphs.profiling.timeline import read_timeline
from moe_graphs.profiling.traced_work import device_work, operator_work

_TIMED_STEPS, _HOST_STEPS = 10, 5


def keep_profiler_ready() -> None:
    """Before the first graph: the profiler must not tear CUPTI down between traces.

    Graphs crash on its second start; torch/profiler/profiler.py does the same for its own graphs.
    """
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")


def profile_step(
    step: Callable[[], object],
    *,
    name: str = "step",
    device: torch.device | str | None = None,
    steps: int = 3,
    floors: Mapping[str, Floor] | None = None,
    rates: Rates | None = None,
    trace: Path | str | None = None,
) -> StepProfile:
    """Where the time of a training step goes. Runs it some twenty times: training goes on.

    On a GPU by kernels, each in a group by its name (``kernel_groups.GROUPS``); on the CPU by
    operators and the time that they spend themselves.

    Args:
        step: one step, warm and with its graphs captured. Its result is not looked at.
        device: by default the GPU, if there is one.
        steps: how many are traced, back to back.
        floors: what groups need at least; None counts the FLOPs of one more step, under a mode in
            which graphs of scopes run eagerly.
        rates: of ``measure_rates``; None measures them.
        trace: a file for one more step's Chrome trace (Perfetto reads it), operators of the host
            included; compressed if it ends in .gz.

    Raises:
        ValueError: nothing of the step ran on the device, or an argument cannot be.
    """
    if steps < 1:
        raise ValueError(f"steps: {steps} must be at least 1")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in ("cuda", "cpu"):
        raise ValueError(f"device: {where} is neither a CUDA GPU nor the CPU")
    keep_profiler_ready()
    step()
    step_ms, host_ms = _timed(step, where)
    rates = measure_rates(where) if rates is None else rates
    if floors is None:
        floors = counted_floors(step)
    on_gpu = where.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    traced_events(step, where, 1, [activity])  # the first trace pays for starting the profiler
    events = traced_events(step, where, steps, [activity])
    if trace is not None:
        both = [ProfilerActivity.CPU, *([activity] if on_gpu else [])]
        traced_events(step, where, 1, both, Path(trace))
    work = device_work(events) if on_gpu else operator_work(events)
    return StepProfile(
        name=name,
        device=where.type,
        steps=steps,
        step_ms=step_ms,
        host_ms=host_ms,
        traced=summarize(work, steps, floors, rates),
        timeline=read_timeline(events, steps) if on_gpu else None,
        rates=rates,
    )


def traced_events(
    step: Callable[[], object],
    device: torch.device,
    steps: int,
    activities: list[ProfilerActivity],
    keep: Path | None = None,
) -> list[dict[str, Any]]:
    """The ``traceEvents`` of a few steps back to back.

    With ``ProfilerActivity.CUDA`` alone only the GPU's side is recorded: recording every operator
    slows the host down much more.

    Args:
        keep: where to leave the trace.
    """
    _synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            step()
        _synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        content = path.read_bytes()
    if keep is not None:
        keep.write_bytes(gzip.compress(content) if keep.suffix == ".gz" else content)
    return json.loads(content.decode(errors="replace"))["traceEvents"]


def _timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Median milliseconds of steps back to back, and of the host's part of a step by itself."""
    _synchronize(device)
    whole = []
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_STEPS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        marks[-1].synchronize()
        whole = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    host = []
    for _ in range(_HOST_STEPS):
        _synchronize(device)
        started = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - started))
    _synchronize(device)
    return statistics.median(whole or host), statistics.median(host)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
