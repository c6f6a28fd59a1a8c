"""Grouped GEMM against dense cuBLAS, per-expert launches and torch, on the shapes the field trains.

    python benchmarks/grouped_gemm.py            all models, within --budget seconds
    python benchmarks/grouped_gemm.py --quick    four models, one token count: about two minutes
    python benchmarks/grouped_gemm.py probe      correctness of every variant, each in a process of
                                                 its own that is killed after 50 seconds
    python benchmarks/grouped_gemm.py plot       the picture from the JSON lines (no GPU)

Sustained: contenders take turns in random order, bursts of about 12 ms, median of the rounds. The
chip is power-limited, so only ratios within one row count. FLOPs are the unpadded ones. What can be
captured is timed as a graph replay; the loops over experts synchronise and are timed eagerly.
JSON lines go to benchmarks/results/grouped_gemm.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

import kernel_check as check
from gemm_contenders import DIRECTIONS, Call, Problem, contenders, make_problem

LINES = Path(__file__).parent / "results" / "grouped_gemm.jsonl"


@dataclass(frozen=True)
class Model:
    """An MoE layer on one GPU: `experts` of them here, hidden and expert width, rows per token."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(K, N) of the two GEMMs."""
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
    """One row of the table: a model, which of its GEMMs, tokens on this GPU, routing."""

    model: Model
    gemm: str
    tokens: int
    routing: str

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Rows, experts, K, N."""
        K, N = self.model.shapes()[self.gemm]
        return self.tokens * self.model.top_k, self.model.experts, K, N

    def label(self) -> str:
        return f"{self.model.name} {self.gemm} T={self.tokens} {self.routing}"


def cells(quick: bool) -> list[Cell]:
    """In order of importance, so that a budget that ends leaves the rest out."""
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
    error: float

    def burst(self) -> float:
        """Microseconds per call."""
        run = self.graph.replay if self.graph else self._eager
        return 1000 * check.elapsed(run) / self.calls

    def _eager(self) -> None:
        for _ in range(self.calls):
            self.call()


def prepare(call: Call, problem: Problem, direction: str, compare: bool) -> Timed:
    """Checks the result, measures host time, captures a burst if that is possible."""
    out = call()
    error = sampled_error(out, problem, direction) if compare else float("nan")
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
    once = check.elapsed(lambda: (call(), call())) / 2
    calls = max(2, min(100, int(12.0 / once)))
    graph = None if syncs else check.capture_burst(call, calls)
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
        errors.append(check.error(out[e if direction == "wgrad" else own], left @ right))
    return max(errors)


def count_launches(call: Call) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum("Mem" not in event.name for event in profile.events())


def time_cell(cell: Cell, rounds: int, watch: check.Watch, count: bool) -> list[dict]:
    """One record per contender and direction."""
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
    spent = {key: [] for key in jobs}
    shuffler, order = random.Random(1), list(jobs)
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


def record(name: str, direction: str, job: Timed, micros: list[float], flops: float) -> dict:
    micros = sorted(micros)
    p10, p50, p90 = (micros[int(q * (len(micros) - 1))] for q in (0.1, 0.5, 0.9))
    return {
        "contender": name, "direction": direction, "us": [round(u, 1) for u in (p10, p50, p90)],
        "tflops": round(flops / p50 / 1e6, 1), "host_us": round(job.host_us),
        "needs_sync": job.graph is None, "capturable": job.graph is not None, "error": job.error,
    }  # fmt: skip


def print_cell(cell: Cell, records: list[dict]) -> None:
    rates = {(r["contender"], r["direction"]): r["tflops"] for r in records}
    rows, experts, K, N = cell.size
    print(f"\n{cell.label()}  {rows}x{experts}x{K}x{N}, {rows / experts:.0f} rows per expert")
    for direction in DIRECTIONS:
        base, ceiling = rates["torch", direction], rates["dense", direction]
        parts = [f"dense {ceiling:.0f}"]
        for (name, other), rate in rates.items():
            if other == direction and name != "dense":
                parts.append(f"{name} {rate:.0f} ({rate / ceiling:.2f}, {rate / base:.2f}x)")
        print(f"  {direction:5} " + " | ".join(parts), flush=True)


def print_abilities(records: list[dict]) -> None:
    """Once: what a call costs the host, and whether it can be captured."""
    print(f"\n{'contender':16}{'':7}launches  host us  needs sync  capturable  error vs fp32")
    for r in records:
        flags = (
            f"{'yes' if r['needs_sync'] else 'no':>10}  {'yes' if r['capturable'] else 'no':>10}"
        )
        print(
            f"{r['contender']:16}{r['direction']:7}{r['launches']:8}{r['host_us']:9}  {flags}"
            f"  {r['error']:.1e}"
        )


def run(args: argparse.Namespace) -> None:
    started, watch = time.time(), check.Watch(LINES.with_suffix(".hung"))
    stamp = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__,
             "triton": triton.__version__, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    print(" ".join(f"{key} {value}" for key, value in stamp.items()))
    LINES.parent.mkdir(exist_ok=True)
    plan = cells(args.quick)
    for i, cell in enumerate(plan):
        if time.time() - started > args.budget:
            print(f"\nbudget of {args.budget:.0f} s spent: {len(plan) - i} cells left out")
            break
        records = time_cell(cell, 5 if args.quick else 7, watch, count=i == 0)
        print_cell(cell, records)
        if i == 0:
            print_abilities(records)
        with LINES.open("a") as lines:
            lines.writelines(json.dumps(stamp | r) + "\n" for r in records)
        torch.cuda.empty_cache()


def plot(target: Path) -> None:
    """TFLOP/s over rows per expert per direction; where the loop over experts catches up shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in LINES.read_text().splitlines()]
    records = [r for r in records if r["routing"] == "uniform"]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), sharey=True)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for name in ("dense", "ours", "torch", "loop 4 streams", "loop"):
            points = sorted((r["rows"], r["tflops"]) for r in records
                            if r["contender"] == name and r["direction"] == direction)  # fmt: skip
            axis.plot(*zip(*points, strict=True), "o", label=name, alpha=0.7, markersize=4)
        axis.set(title=direction, xscale="log", xlabel="rows per expert")
    axes[0].set(ylabel="TFLOP/s, unpadded")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(target)
    print(target)


def probe() -> None:
    for kind in check.KINDS:
        verdict = check.run_check(kind, timeout=50)
        print(json.dumps(verdict), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mode", nargs="?", choices=["run", "probe", "plot"], default="run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds, for run")
    args = parser.parse_args()
    if args.mode == "probe":
        probe()
    elif args.mode == "plot":
        plot(LINES.with_suffix(".png"))
    else:
        run(args)


if __name__ == "__main__":
    main()
