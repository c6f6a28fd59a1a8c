"""Chains of small kernels with and without programmatic dependent launch, eager and as graphs.

    python benchmarks/dependent_launch.py            (a Hopper GPU, under half a minute)

A line per chain and size: microseconds per kernel with it (`pdl`) and without (`plain`), whether
both give the same bits (three replays over other numbers), and how many edges of the captured graph
are programmatic, of how many. Chains, always 50 kernels of ours and each reads and overwrites what
the one before it has touched:

    own      nothing else between
    torch    every fifth is followed by a kernel of torch's
    memset   every fifth by a memset, and what it zeroes is added
    copy     every fifth by a copy
    fork     every tenth goes on beside, on another stream, and is waited for
    norms    rms_norm forward and backward in turns, as a model has them

An error ends one chain and is its line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
import triton.language as tl

from moe_graphs.bench.timing import elapsed
from moe_graphs.kernels import rms_norm_triton
from moe_graphs.kernels.launching import (
    cdiv,
    dependent_launch,
    launch,
    wait_for_previous,
)

KERNELS, BLOCK = 50, 1024
Chain = Callable[[Tensor, Tensor, Tensor], None]


@triton.jit
def mix_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """y = a mix of x and y: wrong if either is read or written too early. From the far end, so that
    what a program reads was written by another one."""
    wait_for_previous(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    far = n - 1 - at
    x = tl.load(x_ptr + far, mask=at < n)
    y = tl.load(y_ptr + at, mask=at < n)
    tl.store(y_ptr + at, 0.75 * x + 0.25 * y + 0.001, mask=at < n)


def mix(x: Tensor, y: Tensor) -> None:
    n = x.numel()
    launch(mix_kernel, (cdiv(n, BLOCK),), (x, y, n), BLOCK=BLOCK)


def own(a: Tensor, b: Tensor, _: Tensor) -> None:
    for i in range(KERNELS):
        mix(*((a, b) if i % 2 else (b, a)))


def torch_between(a: Tensor, b: Tensor, _: Tensor) -> None:
    for i in range(KERNELS):
        mix(*((a, b) if i % 2 else (b, a)))
        if i % 5 == 0:
            torch.add(b, a, alpha=0.5, out=b)


def memset_between(a: Tensor, b: Tensor, c: Tensor) -> None:
    for i in range(KERNELS):
        mix(*((a, b) if i % 2 else (b, a)))
        if i % 5 == 0:
            mix(b, c)
            c.zero_()
            mix(c, b)


def copy_between(a: Tensor, b: Tensor, c: Tensor) -> None:
    for i in range(KERNELS):
        mix(*((a, b) if i % 2 else (b, a)))
        if i % 5 == 0:
            c.copy_(a)
            mix(c, b)


def fork(a: Tensor, b: Tensor, c: Tensor) -> None:
    main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    for i in range(KERNELS):
        mix(*((a, b) if i % 2 else (b, a)))
        if i % 10 == 0:
            beside.wait_stream(main)
            with torch.cuda.stream(beside):
                mix(a, c)
                mix(a, c)
            mix(a, b)
            main.wait_stream(beside)
            mix(c, b)


def norms(a: Tensor, b: Tensor, _: Tensor) -> None:
    x, y = a.view(-1, 1024), b.view(-1, 1024)
    weight = torch.ones(1024, device=a.device)
    for _ in range(KERNELS // 3):  # ours: one forward, two backward
        y.add_(rms_norm_triton.rms_norm_forward(x, weight, 1e-6, False))
        dx, dw = rms_norm_triton.rms_norm_backward(y, x, weight, 1e-6, False, True)
        torch.tanh(dx, out=x)  # what it was in is free now, and may be the next one's
        weight = 1 + torch.tanh(dw)


CHAINS: dict[str, Chain] = {
    "own": own, "torch": torch_between, "memset": memset_between, "copy": copy_between,
    "fork": fork, "norms": norms,
}  # fmt: skip


def programmatic_edges(graph: torch.cuda.CUDAGraph) -> str:
    """How many of how many edges, as the driver counts them (CUDA 12.3 and later)."""
    driver = ctypes.CDLL("libcuda.so.1")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    status = driver.cuGraphGetEdges_v2(raw, None, None, None, ctypes.byref(count))
    nodes = ctypes.c_void_p * count.value
    starts, ends, data = nodes(), nodes(), (ctypes.c_uint8 * (8 * count.value))()
    status |= driver.cuGraphGetEdges_v2(raw, starts, ends, data, ctypes.byref(count))
    if status:
        return f"driver error {status}"
    return f"{sum(kind == 1 for kind in data[2::8])} of {count.value}"  # ports 0 and 1, type 2


def run(chain: Chain, size: int) -> dict[str, object]:
    """Bits of both ways, eager and replayed, and their times. The record of a line."""
    record: dict[str, object] = {}
    results: dict[str, list[Tensor]] = {}
    for name in ("plain", "pdl"):
        with dependent_launch(name == "pdl"):
            memory = [torch.empty(size, device="cuda") for _ in range(3)]
            found = results[name] = []
            for seed in range(3):
                _fill(memory, seed)
                chain(*memory)
                found += [m.clone() for m in memory[:2]]
            record[f"{name}_eager_us"] = _per_kernel(lambda m=memory: chain(*m), 10)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                chain(*memory)
            record[f"{name}_edges"] = programmatic_edges(graph)
            graph.instantiate()
            for seed in range(3):
                _fill(memory, seed)
                graph.replay()
                found += [m.clone() for m in memory[:2]]
            record[f"{name}_graph_us"] = _per_kernel(graph.replay, 20)
    record["bitwise"] = all(map(torch.equal, results["plain"], results["pdl"]))
    record["replays_eager"] = all(map(torch.equal, results["pdl"][:6], results["pdl"][6:]))
    return record


def _fill(memory: list[Tensor], seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for m in memory:
        m.normal_(generator=generator)


def _per_kernel(call: Callable[[], object], times: int) -> float:
    """The least of some, in microseconds by number of kernels of the plainest chain."""
    torch.cuda.synchronize()
    return round(min(elapsed(call) for _ in range(times)) / KERNELS * 1e3, 2)


def records() -> Iterator[dict[str, object]]:
    for name, chain in CHAINS.items():
        for size in (1 << 12, 1 << 18, 1 << 22):
            line: dict[str, object] = {"chain": name, "numbers": size}
            try:
                line |= run(chain, size)
            except RuntimeError as error:
                yield line | {"error": str(error)[:300]}
                if "CUDA error" in str(error):  # nothing works in this process any more
                    return
                break
            yield line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    args = parser.parse_args()
    for record in records():
        print(json.dumps(record), flush=True)
        if args.out:
            with args.out.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
