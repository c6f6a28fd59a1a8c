"""Common parts of GPU benchmarks: random groups, bursts as graphs, a watch over hung kernels."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch


def group_sizes(routing: str, rows: int, experts: int, seed: int) -> torch.Tensor:
    """Random numbers of rows per expert, on the CPU, with ``rows`` as their sum.

    Args:
        routing: uniform, zipf, empty (a quarter of the experts gets no rows) or one (one expert
            gets all rows).
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.ones(experts)
    if routing == "zipf":
        weight = 1.0 / torch.arange(1, experts + 1)
        weight = weight[torch.randperm(experts, generator=generator)]
    elif routing == "empty":
        weight[torch.randperm(experts, generator=generator)[: max(experts // 4, 1)]] = 0
        weight[0] = 0
    elif routing == "one":
        weight = torch.zeros(experts)
        weight[experts // 2] = 1
    if rows == 0:
        return torch.zeros(experts, dtype=torch.int64)
    drawn = torch.multinomial(weight / weight.sum(), rows, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=experts)


def group_ends(sizes: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(sizes, 0).to(torch.int32).cuda()


def matrices(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative Frobenius error; inf for NaN."""
    if torch.isnan(got).any():
        return float("inf")
    return ((got.float() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def capture_burst(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Capture several calls in one graph; keep ``call``, since the graph reads its tensors."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def elapsed(run: Callable[[], object]) -> float:
    """Milliseconds of ``run`` on the GPU; waits for the end."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Watch:
    """Watch that ends the process if a contender runs for over 25 seconds, and says which."""

    def __init__(self, hung: Path) -> None:
        self.hung, self.what = hung, ""
        self.since: float | None = None
        threading.Thread(target=self._loop, daemon=True).start()

    def on(self, what: str) -> None:
        self.what, self.since = what, time.time()

    def off(self) -> None:
        self.since = None

    def _loop(self) -> None:
        while True:
            time.sleep(0.5)
            since = self.since
            if since and time.time() - since > 25.0:
                with self.hung.open("a") as f:
                    f.write(self.what + "\n")
                print("HUNG", self.what, file=sys.stderr, flush=True)
                os._exit(17)
