"""Replays every grouped GEMM kernel beside another process; prints how many results were wrong.

A program of its own: a kernel that loses its way hangs, and takes its process along. Arguments: the
seconds for each kernel, or `hog` for the process beside.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from moe_graphs.kernels import fp8
from moe_graphs.kernels.gemm import launch as gemm
from moe_graphs.kernels.gemm.heuristics import row_variant, weight_variant

ROWS, EXPERTS, WIDTH = 32768, 32, 768
LAUNCHES = 40  # per replay


def cases() -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    torch.manual_seed(0)
    x, dy, w = random(ROWS, WIDTH), random(ROWS, WIDTH), random(EXPERTS, WIDTH, WIDTH)
    low, b = random(ROWS, 16), random(EXPERTS, 16, WIDTH)
    ends = (torch.rand(EXPERTS).softmax(0) * ROWS).cumsum(0).int()
    ends[-1] = ROWS
    ends = ends.cuda()
    for name in ("cooperative", "pingpong", "tma"):
        rows = row_variant(name, WIDTH)
        for back in (False, True):
            yield (
                f"rows {name} {back}",
                lambda v=rows, t=back: gemm.matmul_rows(x, w, ends, transposed=t, variant=v),
            )
        if rows.adds_beside:
            yield (
                f"rows {name} with LoRA",
                lambda v=rows: gemm.matmul_rows(x, w, ends, variant=v, beside=(low, b)),
            )
        for dtype in (torch.bfloat16, torch.float32):
            weights = weight_variant(name, WIDTH, dtype)
            out = torch.empty(EXPERTS, WIDTH, WIDTH, device="cuda", dtype=dtype)
            yield (
                f"weights {name} {dtype}",
                lambda v=weights, o=out: gemm.matmul_weights(x, dy, ends, out=o, variant=v),
            )
    given = (*fp8.quantized(x), *fp8.quantized_weights(w), ends, torch.bfloat16)
    columns = (part for rows in (x, dy) for part in fp8.columns_of(fp8.quantized(rows, True), ends))
    operands = (*columns, ends, len(x), torch.bfloat16)
    for block_n, stages, turns in ((128, 5, True), (256, 4, False), (256, 4, True)):
        tile = dict(block_n=block_n, stages=stages, pingpong=turns)
        rows = replace(row_variant("fp8", WIDTH), **tile)
        weights = replace(weight_variant("fp8", WIDTH, torch.bfloat16), **tile)
        yield (
            f"rows fp8 {block_n} {turns}",
            lambda v=rows: gemm.matmul_rows_fp8(*given, variant=v),
        )
        yield (
            f"weights fp8 {block_n} {turns}",
            lambda v=weights: gemm.matmul_weights_fp8(*operands, variant=v),
        )
    total = torch.zeros(EXPERTS, WIDTH, WIDTH, device="cuda")

    def accumulated() -> torch.Tensor:
        return gemm.matmul_weights(x, dy, ends, out=total.zero_(), accumulate=True)

    yield "accumulated", accumulated
    a = random(EXPERTS, WIDTH, 16)
    yield "rows with LoRA in one pass", lambda: gemm.matmul_with_lora(x, w, a, b, ends)[0]


def wrong_results(function: Callable[[], torch.Tensor], seconds: float) -> tuple[int, int]:
    """(results that differ from the first, of how many)."""
    expected = function().clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            wrong += (function() != expected).any()
    replays, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        graph.replay()
        torch.cuda.synchronize()
        replays += 1
    return int(wrong), replays * LAUNCHES


def hog() -> None:
    """Keeps the GPU busy, so that it has to be shared in slices of time."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while True:
        for _ in range(8):
            a @ a
        torch.cuda.synchronize()


def main(seconds: float) -> None:
    beside = [subprocess.Popen([sys.executable, __file__, "hog"]) for _ in range(2)]
    try:
        time.sleep(8)  # until they compute
        for name, function in cases():
            wrong, results = wrong_results(function, seconds)
            print(f"{name}: {wrong} of {results} wrong", flush=True)
        if any(process.poll() is not None for process in beside):
            sys.exit("a process beside has stopped")
    finally:
        for process in beside:
            process.kill()


if __name__ == "__main__":
    hog() if sys.argv[1] == "hog" else main(float(sys.argv[1]))
