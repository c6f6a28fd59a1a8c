"""Memsets of a captured graph become kernels, so that the graph is a straight line of kernels.

CUDA launches such a line in constant time: 1500 kernels take 5 us of the host. Every memset among
them adds 1 us there and 1.3 us on the GPU (H200, CUDA 13, 2026-11-21). cuDNN's attention, cuBLAS
and torch's sorts bring them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class _Memset:
    """``count`` elements of ``size`` bytes from ``address`` on are set to ``value``."""

    node: Any
    address: int
    size: int
    count: int
    value: int

    def fill(self, device: torch.device) -> None:
        """The same by one kernel of torch's."""
        size, count, value = self.size, self.count, self.value
        if size == 1 and self.address % 4 == 0 and count % 4 == 0:
            size, count, value = 4, count // 4, value * 0x01010101
        storage = torch._C._construct_storage_from_data_pointer(self.address, device, size * count)
        target = torch.empty(0, dtype=_DTYPES[size], device=device).set_(storage, 0, (count,), (1,))
        signed = size > 1 and value >= 1 << (8 * size - 1)
        target.fill_(value - (1 << 8 * size) if signed else value)


def replace_memsets(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """Before ``graph`` is instantiated, on the stream of its capture. Returns how many were there.

    Without the ``cuda-bindings`` package (torch's CUDA builds bring it) the graph stays as it is.
    Memsets in two dimensions stay, and those next to an edge that is no plain dependency.

    Raises:
        RuntimeError: CUDA does not edit the graph.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    raw = driver.CUgraph(init_value=graph.raw_cuda_graph())
    memsets = list(_memsets(driver, raw))
    if not memsets:
        return 0
    fills = torch.cuda.CUDAGraph(keep_graph=True)
    fills.capture_begin(capture_error_mode="thread_local")
    try:
        for memset in memsets:
            memset.fill(device)
    finally:
        fills.capture_end()
    kernels = _nodes(driver, driver.CUgraph(init_value=fills.raw_cuda_graph()))
    if len(kernels) != len(memsets):
        raise RuntimeError(f"{len(memsets)} memsets were captured as {len(kernels)} kernels")
    for memset, kernel in zip(memsets, kernels, strict=True):
        _put_in_place(driver, raw, memset.node, kernel)
    fills.reset()
    return len(memsets)


def _memsets(driver: Any, raw: Any) -> Iterator[_Memset]:
    wanted = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    for node in _nodes(driver, raw):
        if _checked(driver.cuGraphNodeGetType(node))[0] == wanted:
            found = _checked(driver.cuGraphMemsetNodeGetParams(node))[0]
            plain = _before(driver, node) is not None and _after(driver, node) is not None
            if found.height == 1 and plain:
                size = found.elementSize
                yield _Memset(node, int(found.dst), size, found.width, found.value)


def _put_in_place(driver: Any, raw: Any, memset: Any, kernel: Any) -> None:
    before, after = _before(driver, memset), _after(driver, memset)
    parameters = _checked(driver.cuGraphKernelNodeGetParams(kernel))[0]
    (new,) = _checked(driver.cuGraphAddKernelNode(raw, before, len(before), parameters))
    # The _v2 names are those of CUDA 12, where the plain ones know no kinds of edges.
    connect = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)
    if after:
        _checked(connect(raw, [new] * len(after), after, None, len(after)))
    _checked(driver.cuGraphDestroyNode(memset))


def _before(driver: Any, node: Any) -> list[Any] | None:
    query = getattr(driver, "cuGraphNodeGetDependencies_v2", driver.cuGraphNodeGetDependencies)
    return _neighbours(query, node)


def _after(driver: Any, node: Any) -> list[Any] | None:
    query = getattr(driver, "cuGraphNodeGetDependentNodes_v2", driver.cuGraphNodeGetDependentNodes)
    return _neighbours(query, node)


def _neighbours(query: Any, node: Any) -> list[Any] | None:
    """None if an edge is of another kind than a plain dependency."""
    count = _checked(query(node))[-1]
    if not count:
        return []
    nodes, edges, _ = _checked(query(node, count))
    plain = all(not (e.from_port or e.to_port or int(e.type)) for e in edges[:count])
    return list(nodes[:count]) if plain else None


def _nodes(driver: Any, raw: Any) -> list[Any]:
    count = _checked(driver.cuGraphGetNodes(raw))[-1]
    return list(_checked(driver.cuGraphGetNodes(raw, count))[0][:count]) if count else []


def _checked(answer: tuple) -> tuple:
    status, *values = answer
    if int(status):
        raise RuntimeError(f"a captured graph cannot be edited: {status.name}")
    return tuple(values)
