"""Memsets in captured graphs: replaced by kernels that do the same."""

from __future__ import annotations

import pytest
import torch

from moe_graphs.capture.backends.cuda import CudaGraphs

pytestmark = pytest.mark.gpu


def test_memsets_become_kernels():
    driver = pytest.importorskip("cuda.bindings.driver")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    x = torch.empty(64, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)

    def block() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        x.fill_(7)
        at = x.data_ptr()
        for status, *_ in (
            driver.cuMemsetD8Async(at, 0xAB, 16, stream),
            driver.cuMemsetD8Async(at + 16, 0xCD, 3, stream),
            driver.cuMemsetD16Async(at + 32, 0xBEEF, 8, stream),
            driver.cuMemsetD32Async(at + 64, 0xDEADBEEF, 5, stream),
            runtime.cudaMemsetAsync(at + 128, 0, 64, stream),
        ):
            assert int(status) == 0
        torch.add(x, 1, out=out)

    block()
    expected = out.clone()
    backend = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    with backend.session(), backend.record(backend.new_pool()) as graphs:
        block()
    (graph,) = graphs
    assert graph.kernels == 7
    for _ in range(2):
        x.zero_()
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    graph.release()


def test_a_graph_that_begins_and_ends_with_memsets():
    runtime = pytest.importorskip("cuda.bindings.runtime")
    x = torch.ones(32, dtype=torch.int32, device="cuda")
    backend = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    with backend.session(), backend.record(backend.new_pool()) as graphs:
        stream = torch.cuda.current_stream().cuda_stream
        runtime.cudaMemsetAsync(x.data_ptr(), 0, 64, stream)
        runtime.cudaMemsetAsync(x.data_ptr() + 64, 1, 64, stream)
    (graph,) = graphs
    assert graph.kernels == 2
    graph.replay()
    assert x.tolist() == [0] * 16 + [0x01010101] * 16
    graph.release()
