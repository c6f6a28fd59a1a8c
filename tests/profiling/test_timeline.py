"""Busy, idle, launches and graphs in a trace."""

from __future__ import annotations

import pytest

from moe_graphs.profiling.timeline import read_timeline, union


def _event(category: str, name: str, start: float, end: float, correlation: int) -> dict:
    arguments = {"correlation": correlation}
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start,
        "args": arguments,
    }  # fmt: skip


TRACE = [
    # Two kernels launched one by one, one of them through the driver (Triton), and a copy.
    _event("cuda_runtime", "cudaLaunchKernelExC", 0, 4, 1),
    _event("cuda_driver", "cuLaunchKernelEx", 4, 8, 2),
    _event("cuda_runtime", "cudaMemcpyAsync", 8, 9, 3),
    _event("kernel", "gemm", 1000, 2000, 1),
    _event("kernel", "triton", 1500, 2500, 2),
    _event("gpu_memcpy", "copy", 3000, 3500, 3),
    # A graph of three kernels, two of which overlap, with gaps of 100 and 150.
    _event("cuda_runtime", "cudaGraphLaunch_v10000", 10, 20, 4),
    _event("kernel", "a", 4000, 4400, 4),
    _event("kernel", "b", 4500, 4700, 4),
    _event("kernel", "c", 4600, 4750, 4),
    _event("gpu_memset", "zero", 4900, 5000, 4),
    # A launch through another call, whose own correlation no kernel has; and events to ignore.
    _event("cuda_driver", "cuLaunchKernel", 1, 3, 99),
    _event("cuda_runtime", "cudaStreamSynchronize", 20, 5000, 5),
    _event("cpu_op", "aten::mm", 0, 5, 1),
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "s", "cat": "ac2g", "id": 1, "ts": 0},
]


def test_timeline_of_a_trace():
    line = read_timeline(TRACE, steps=2)
    assert line.span_ms == pytest.approx(4.0 / 2)
    # Busy from 1000 to 2500, from 3000 to 3500, and for 750 in the graph.
    assert line.busy_ms == pytest.approx(2.75 / 2)
    assert line.idle_share == pytest.approx(1 - 2.75 / 4)
    assert line.graph_span_ms == pytest.approx(1.0 / 2)
    assert line.graph_idle_share == pytest.approx(0.25)
    assert (line.kernel_launches, line.graph_launches) == (1, 0.5)
    assert (line.kernels, line.graph_kernels) == (2.5, 1.5)


def test_timeline_without_graphs_or_device():
    eager = [event for event in TRACE if event.get("args", {}).get("correlation") != 4]
    line = read_timeline(eager, steps=1)
    assert (line.graph_launches, line.graph_idle_share) == (0, None)
    assert read_timeline(TRACE[-3:], steps=1) is None


def test_union_of_intervals():
    assert union([(0, 4), (2, 5), (7, 8)]) == 6
    assert union([(7, 8), (0, 10), (2, 5)]) == 10
    assert union([]) == 0
