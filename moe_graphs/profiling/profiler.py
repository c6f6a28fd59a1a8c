"""Profiler of a step: runs it a few times, with and without torch.profiler."""

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

from moe_graphs.engine.partial.graphs import Graphs
from moe_graphs.errors import GraphError
from moe_graphs.profiling.floors import Floor, Rates, counted_floors, measure_rates
from moe_graphs.profiling.step_profile import StepProfile, summarize
from moe_graphs.profiling.timeline import read_timeline
from moe_graphs.profiling.traced_work import device_work, operator_work

_TIMED_STEPS, _HOST_STEPS = 10, 5


def keep_profiler_ready() -> None:
    """Keep CUPTI alive between traces; call this function before the first graph.

    Graphs crash when CUPTI starts a second time. torch/profiler/profiler.py has the same workaround
    for torch's own graphs.
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
    """Profile a training step by running it some twenty times, which trains the model further.

    On a GPU the profile has the times of kernels, grouped by name (``kernel_groups.GROUPS``); on
    the CPU it has the times that operators spend themselves.

    Args:
        step: runs one step, warm and with its graphs captured; its result is ignored.
        device: by default the GPU, if there is one.
        steps: number of steps that are traced, back to back.
        floors: least work of each group. None counts the FLOPs of one more step, under a mode in
            which graphs of scopes run eagerly.
        rates: the result of ``measure_rates``; None measures them.
        trace: file for one more step's Chrome trace (Perfetto reads it), with the host's operators;
            compressed if the name ends in .gz.

    Raises:
        ValueError: nothing of the step ran on the device, or an argument has no legal value.
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
    traced_events(step, where, 1, [activity])  # its start is in the first trace
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


def profile_graphs(
    graphs: Graphs, step: Callable[[], object], **options: Any
) -> tuple[StepProfile, StepProfile]:
    """Profile a training step twice: run eagerly, and with its graphs.

    Args:
        step: a whole step, with ``graphs.step()`` around its forwards and backwards.
        options: those of ``profile_step``, except ``name`` and ``device``.

    Raises:
        GraphError: the graphs are not captured yet.
    """
    if graphs.state != "captured":
        raise GraphError(f"profile: the graphs are {graphs.state}: run steps until they replay")
    options["device"] = graphs.backend.device
    with graphs.paused():
        eager = profile_step(step, name="eager", **options)
    return eager, profile_step(step, name="graphed", **options)


def traced_events(
    step: Callable[[], object],
    device: torch.device,
    steps: int,
    activities: list[ProfilerActivity],
    keep: Path | None = None,
) -> list[dict[str, Any]]:
    """Trace a few steps, back to back, and return the ``traceEvents``.

    ``ProfilerActivity.CUDA`` alone records only the GPU's side, which slows the host down much less
    than recording every operator.

    Args:
        keep: file that the trace is written to, if any.
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
    """Median milliseconds of steps back to back, and of a step's Python on an idle device."""
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
