"""Grouped GEMM against dense cuBLAS, per-expert launches and torch, on shapes of published models.

The measured speeds are sustained ones: contenders take turns in random order, in bursts of about
12 ms, and the median of the rounds counts. The chip is power-limited, so only ratios within one
cell can be compared. FLOPs do not include padding. Contenders that can be captured are timed as
graph replays. Loops over experts wait for the device, so they are timed eagerly, after the others.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moe_graphs.bench import environment
from moe_graphs.bench.gemm_contenders import DIRECTIONS, Call, Problem, contenders, make_problem
from moe_graphs.bench.timing import Watch, capture_burst, elapsed, error


@dataclass(frozen=True)
class Model:
    """An MoE layer on one GPU: its local experts, hidden and expert width, and rows per token."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Sizes (K, N) of the two GEMMs."""
        return {"up": (self.hidden, 2 * self.ffn), "down": (self.ffn, self.hidden)}


MODELS = (
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Model("Mixtral-8x7B", 4096, 14336, 8, 2),
    Model("OLMoE", 2048, 1024, 64, 8),
    Model("DeepSeek-V3 EP8", 7168, 2048, 32, 8),
    Model("Qwen3-Next", 2048, 512, 512, 10),
    Model("gpt-oss-20b", 2880, 2880, 32, 4),
    Model("Qwen3-235B", 4096, 1536, 128, 8),
    Model("DeepSeek-V3 EP32", 7168, 2048, 8, 8),
    Model("DeepSeek-V3 EP64", 7168, 2048, 4, 8),
    Model("Sonic 7B n=256", 1536, 256, 128, 8),
    Model("Sonic 30B n=1024", 4096, 1024, 128, 8),
)


@dataclass(frozen=True)
class Cell:
    """One row of the table: a model, one of its GEMMs, tokens on this GPU, routing."""

    model: Model
    gemm: str
    tokens: int
    routing: str

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Numbers of rows and experts, K and N."""
        K, N = self.model.shapes()[self.gemm]
        return self.tokens * self.model.top_k, self.model.experts, K, N

    def label(self) -> str:
        return f"{self.model.name} {self.gemm} T={self.tokens} {self.routing}"


def cells(quick: bool) -> list[Cell]:
    """Cells in the order of importance, so that a small budget leaves out the others."""
    if quick:
        return [Cell(m, g, 8192, "uniform") for m in MODELS[:4] for g in ("up", "down")]
    plan = [Cell(m, g, 8192, "uniform") for m in MODELS for g in ("up", "down")]
    skewed = ("zipf", "empty", "one")
    plan += [Cell(m, "up", 8192, r) for m in (MODELS[0], MODELS[2]) for r in skewed]
    for tokens in (2048, 4096, 16384, 32768):
        plan += [Cell(m, g, tokens, "uniform") for m in MODELS[:6] for g in ("up", "down")]
    return plan


@dataclass
class Timed:
    """A contender in one direction, ready to be timed in bursts of `calls`."""

    call: Call
    graph: torch.cuda.CUDAGraph | None
    calls: int
    host_us: float
    error: float | None

    def burst(self) -> float:
        """Time one burst; return microseconds per call."""
        run = self.graph.replay if self.graph else self._eager
        return 1000 * elapsed(run) / self.calls

    def _eager(self) -> None:
        for _ in range(self.calls):
            self.call()


def prepare(call: Call, problem: Problem, direction: str, compare: bool) -> Timed:
    """Check the result, measure the host's time, and capture a burst if possible."""
    out = call()
    error = sampled_error(out, problem, direction) if compare else None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        syncs = False
    except RuntimeError:
        syncs = True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(3):
        call()
    host_us = (time.perf_counter() - started) / 3e-6
    once = elapsed(lambda: (call(), call())) / 2
    calls = max(2, min(100, int(12.0 / once)))
    graph = None if syncs else capture_burst(call, calls)
    return Timed(call, graph, calls, host_us, error)


def sampled_error(out: torch.Tensor, p: Problem, direction: str) -> float:
    """Relative error against fp32, on the first and the last expert that have rows."""
    ends = [0, *p.ends_E.tolist()]
    full = [e for e in range(len(ends) - 1) if ends[e + 1] > ends[e]]
    errors = []
    for e in {full[0], full[-1]}:
        own = slice(ends[e], ends[e + 1])
        x, w, dy = p.x_RK[own].float(), p.w_EKN[e].float(), p.dy_RN[own].float()
        left, right = {"fwd": (x, w), "dgrad": (dy, w.t()), "wgrad": (x.t(), dy)}[direction]
        errors.append(error(out[e if direction == "wgrad" else own], left @ right))
    return max(errors)


def count_launches(call: Call) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type.name == "CUDA"]
    return sum(not event.name.startswith("Mem") for event in on_gpu)


def time_cell(cell: Cell, rounds: int, watch: Watch, count: bool) -> list[dict[str, Any]]:
    """Time a cell; return one record per contender and direction."""
    problem = make_problem(*cell.size, cell.routing)
    jobs = {}
    for name, calls in contenders(problem).items():
        for direction in DIRECTIONS:
            if direction in calls:
                watch.on(f"{name} {direction}")
                jobs[name, direction] = prepare(
                    calls[direction], problem, direction, compare=name != "dense"
                )
    launches = {key: count_launches(job.call) for key, job in jobs.items()} if count else {}
    spent: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    # Every cell has another order, because the contender before, and how warm it leaves the chip,
    # changes a result by up to 5 %.
    shuffler = random.Random(cell.label())
    # Contenders that wait for the device run by themselves: the chip cools down meanwhile, and the
    # next contender would be faster.
    captured = [key for key, job in jobs.items() if job.graph]
    for order in (captured, [key for key in jobs if key not in captured]):
        for _ in range(rounds):
            shuffler.shuffle(order)
            for key in order:
                watch.on(" ".join(key))
                spent[key].append(jobs[key].burst())
    watch.off()
    common = {"model": cell.model.name, "gemm": cell.gemm, "tokens": cell.tokens}
    common |= {"routing": cell.routing, "size": cell.size, "rows": problem.rows_per_expert}
    records = []
    for key, job in jobs.items():
        measured = record(*key, job, spent[key], problem.flops)
        records.append(common | measured | {"launches": launches.get(key)})
    return records


def record(
    name: str, direction: str, job: Timed, micros: list[float], flops: float
) -> dict[str, Any]:
    micros = sorted(micros)
    p10, p50, p90 = (micros[int(q * (len(micros) - 1))] for q in (0.1, 0.5, 0.9))
    return {
        "contender": name, "direction": direction, "us": [round(u, 1) for u in (p10, p50, p90)],
        "tflops": round(flops / p50 / 1e6, 1), "host_us": round(job.host_us),
        "needs_sync": job.graph is None, "capturable": job.graph is not None, "error": job.error,
    }  # fmt: skip


def table(cell: Cell, records: list[dict[str, Any]]) -> Table:
    """Table of a cell, with one row per direction and contender."""
    ceiling = {r["direction"]: r["tflops"] for r in records if r["contender"] == "dense"}
    base = {r["direction"]: r["tflops"] for r in records if r["contender"] == "torch"}
    rows, experts, K, N = cell.size
    title = f"{cell.label()}: {rows}x{experts}x{K}x{N}, {rows / experts:.0f} rows per expert"
    columns = ("", "contender", "us p10/p50/p90", "TFLOP/s", "of dense", "x torch", "launches",
               "host us", "needs sync", "capturable", "error")  # fmt: skip
    found = Table(*columns, title=title)
    for direction in DIRECTIONS:
        for r in (r for r in records if r["direction"] == direction):
            found.add_row(
                direction, r["contender"], "/".join(f"{us:.0f}" for us in r["us"]),
                f"{r['tflops']:.0f}", f"{r['tflops'] / ceiling[direction]:.2f}",
                f"{r['tflops'] / base[direction]:.2f}", str(r["launches"] or "-"),
                str(r["host_us"]), "yes" if r["needs_sync"] else "no",
                "yes" if r["capturable"] else "no",
                "-" if r["error"] is None else f"{r['error']:.1e}",
            )  # fmt: skip
    return found


def run(
    out: Path, console: Console, *, quick: bool, budget: float, commit: str | None = None
) -> Iterator[dict[str, Any]]:
    """Measure cell after cell for at most ``budget`` seconds; append lines to ``out``."""
    started, watch = time.time(), Watch(out.with_suffix(".hung"))
    stamp = environment.stamp(commit)
    constant = {"benchmark": "grouped_gemm", "environment": stamp}
    console.print(environment.describe(stamp))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()  # a path that cannot be written fails before the measurements
    plan = cells(quick)
    for i, cell in enumerate(plan):
        if time.time() - started > budget:
            console.print(f"budget of {budget:.0f} s spent: {len(plan) - i} cells left out")
            break
        records = time_cell(cell, 5 if quick else 7, watch, count=i == 0)
        console.print(table(cell, records))
        with out.open("a") as lines:
            lines.writelines(json.dumps(r | constant) + "\n" for r in records)
        yield from records
        torch.cuda.empty_cache()


def plot(lines: Path, target: Path) -> None:
    """Draw TFLOP/s over rows per expert, per direction.

    The picture shows where the loop over experts catches up.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in lines.read_text().splitlines()]
    records = [r for r in records if r["routing"] == "uniform"]
    if not records:
        raise ValueError(f"--plot: there are no results of uniform routing in {lines}")
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), sharey=True)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for place, name in enumerate(("dense", "ours", "torch", "loop 4 streams", "loop")):
            points = defaultdict(list)
            for r in records:
                if r["contender"] == name and r["direction"] == direction:
                    points[round(r["rows"])].append(r["tflops"])
            shift = 1.05 ** (place - 2)  # so that points do not cover each other
            for rows, rates in points.items():
                axis.plot([rows * shift] * len(rates), rates, "o", color=f"C{place}", markersize=3)
            middle = [(rows * shift, median(points[rows])) for rows in sorted(points)]
            axis.plot(*zip(*middle, strict=True), color=f"C{place}", label=name)
        axis.set(title=direction, xscale="log", xlabel="rows per expert")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="TFLOP/s, unpadded")
    axes[0].legend()
    device = records[0]["environment"]["gpu"]
    figure.suptitle(f"Grouped GEMM, uniform routing, bf16, {device}: each shape, and the medians")
    figure.tight_layout()
    figure.savefig(target, dpi=110)
