"""Check and time every grouped GEMM variant on one GPU; self-contained, under six minutes.

    python benchmarks/kernel_check.py                 everything, table at the end
    python benchmarks/kernel_check.py --check-only    correctness only, about a minute
    python benchmarks/kernel_check.py --quick         fewer shapes and rounds

Correctness: one process per kernel, killed after 75 seconds (a hang costs one kernel), against
fp32 products per expert, into poisoned outputs, for uneven routings; then captured once and
replayed with other routings, bitwise against the eager call, which `set_sync_debug_mode("error")`
watches.

Speed: contenders interleaved in random order in one process, each as a CUDA graph of about 12 ms of
calls, work lists included; median of the rounds. The chip is power-limited: only ratios within one
shape and one regime count. `cool` lets the chip idle for 60 ms before about 3 ms of work.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from moe_graphs.bench.timing import (  # noqa: E402
    Watch,
    capture_burst,
    elapsed,
    error,
    group_ends,
    group_sizes,
    matrices,
)

POISON = 777.0
KERNELS = ("cooperative", "pingpong", "tma", "pointer")
KINDS = [
    *(f"{op}:{name}" for op in ("rows", "weights") for name in KERNELS),
    "ops:all",
    "fp8:all",
]
# (routing, rows, experts, K, N, rows past the last end)
CASES = [
    ("uniform", 6000, 16, 512, 1024, 77),
    ("zipf", 9000, 24, 448, 768, 133),
    ("empty", 5000, 16, 1024, 1408, 1),
    ("one", 700, 4, 64, 256, 300),
    ("uniform", 40000, 32, 768, 2048, 500),
    ("uniform", 90, 8, 128, 512, 900),
    ("zipf", 3000, 512, 72, 200, 5),
    ("none", 0, 3, 256, 384, 40),
    ("one", 20000, 8, 512, 1024, 3),
    ("zipf", 30000, 16, 256, 512, 65),
    # Sums of 4096 and more: a last round of 36 tiles on 132 SMs is cut along K, or the only one.
    ("uniform", 3600, 8, 5120, 1536, 40),
    ("zipf", 500, 6, 4104, 392, 9),
]
RANKS = (16, 72)  # of a product beside
SHAPES = [  # rows, experts, K, N
    (65536, 128, 2048, 1536), (65536, 128, 768, 2048), (131072, 128, 2048, 1536),
    (131072, 64, 2048, 2048), (16384, 8, 4096, 28672), (32768, 32, 7168, 4096),
    (131072, 128, 4096, 2048), (131072, 128, 1024, 4096), (16384, 128, 2048, 1536),
    (32768, 128, 2048, 1536), (163840, 512, 2048, 1024), (163840, 512, 512, 2048),
    (65536, 32, 2880, 2880),
]  # fmt: skip
EIGHT = SHAPES[:8]


# ---------------------------------------------------------------- correctness


@dataclass(frozen=True)
class Rows:
    """Groups of rows of one case: their sizes, where each begins and ends, and the ends on the GPU.

    Operands have `tail` rows of NaN past the last end.
    """

    sizes: torch.Tensor
    bounds: list[tuple[int, int]]
    offsets: torch.Tensor
    tail: int

    @staticmethod
    def of(case: tuple, seed: int) -> "Rows":
        routing, rows, experts, _, _, tail = case
        torch.manual_seed(seed)
        sizes = group_sizes(routing, rows, experts, seed)
        ends = torch.cumsum(sizes, 0).tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        return Rows(sizes, bounds, group_ends(sizes), tail)

    def operand(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        rows = self.bounds[-1][1]
        x = matrices(rows + self.tail, columns, dtype=dtype)
        x[rows:] = float("nan")
        return x


def rows_case(
    name: str, case: tuple, seed: int, dtype: torch.dtype, transposed: bool, rank: int = 0
) -> str:
    """Empty if right, otherwise what was wrong; with a rank for a sum with a product beside.

    The oracle of the sum has the same rounded operands. torch rounds both products and their sum.
    """
    from moe_graphs.kernels.gemm.heuristics import row_variant
    from moe_graphs.kernels.gemm.launch import matmul_rows

    _, rows, experts, K, N, tail = case
    groups = Rows.of(case, seed)
    x, offsets = groups.operand(K, dtype), groups.offsets
    pairs = []
    for columns, rows_RK in ((K, x), (rank, groups.operand(rank, dtype) if rank else None)):
        shape = (experts, N, columns) if transposed else (experts, columns, N)
        if rows_RK is not None:
            pairs.append((rows_RK, matrices(*shape, dtype=dtype)))
    reference, torch_out = torch.zeros(rows, N, device="cuda"), torch.zeros(rows, N, device="cuda")
    for e, (start, end) in enumerate(groups.bounds):
        own = slice(start, end)
        for rows_RK, w in pairs:
            weight = w[e].t() if transposed else w[e]
            reference[own] += rows_RK[own].float() @ weight.float()
            torch_out[own] = (torch_out[own] + (rows_RK[own] @ weight)).to(dtype).float()
    first, beside = None, pairs[1] if rank else None
    for _ in range(3):
        out = torch.full((rows + tail, N), POISON, device="cuda", dtype=dtype)
        matmul_rows(
            *pairs[0],
            offsets,
            transposed=transposed,
            out=out,
            variant=row_variant(name, N),
            beside=beside,
        )
        torch.cuda.synchronize()
        got, allowed = error(out[:rows], reference), 2 * error(torch_out, reference) + 1e-6
        if got > allowed:
            return f"error {got:.2e}, allowed {allowed:.2e}"
        # The variant tma sums two products, also in rows past the last end.
        if not (rank and name == "tma") and not bool((out[rows:] == POISON).all()):
            return "rows past the last end were written"
        first = out[:rows] if first is None else first
        if not torch.equal(first, out[:rows]):
            return "two runs differ"
    return ""


def weights_case(name: str, case: tuple, seed: int, dtype: torch.dtype, mode: str) -> str:
    """Empty if right, otherwise what was wrong. Modes: same (dtype of x), float32, add."""
    from moe_graphs.kernels.gemm.heuristics import weight_variant
    from moe_graphs.kernels.gemm.launch import matmul_weights

    _, rows, experts, K, N, _ = case
    groups = Rows.of(case, seed)
    x, dy, offsets = groups.operand(K, dtype), groups.operand(N, dtype), groups.offsets
    out_dtype = dtype if mode == "same" else torch.float32
    before = torch.randn(experts, K, N, device="cuda")
    reference, torch_out = torch.zeros_like(before), torch.zeros_like(before)
    for e, (start, end) in enumerate(groups.bounds):
        own = slice(start, end)
        reference[e] = x[own].float().t() @ dy[own].float()
        torch_out[e] = (x[own].t() @ dy[own]).float()
    # fp32 sums lose a bit per doubling of their length: 1e-5 up to 4096 rows, more only beyond.
    # (20,000 rows of one expert measured 2.3e-5 on an H200 with kernels that do not split them.)
    allowed = max(2 * error(torch_out, reference), 1e-6)
    if mode != "same":
        allowed = 1e-5 * max(1, rows / 4096)
    if mode == "add":
        reference += before
    first = None
    for _ in range(3):
        out = torch.full((experts, K, N), POISON, device="cuda", dtype=out_dtype)
        if mode == "add":
            out.copy_(before)
        variant = weight_variant(name, N, out_dtype)
        matmul_weights(x, dy, offsets, out=out, accumulate=mode == "add", variant=variant)
        torch.cuda.synchronize()
        got = error(out, reference)
        if got > allowed:
            return f"error {got:.2e}, allowed {allowed:.2e}"
        empty = (groups.sizes == 0).nonzero().flatten().cuda()
        expected = reference[empty].to(out_dtype)
        if not torch.equal(out[empty], expected):
            return "an empty expert's gradient is not what it was" if mode == "add" else "not zero"
        first = out if first is None else first
        if not torch.equal(first, out):
            return "two runs differ"
    return ""


def replay_difference(
    call: Callable[[], torch.Tensor],
    offsets: torch.Tensor,
    rows: int,
    change: Callable[[], object] = lambda: None,
) -> str:
    """Capture once without synchronising, replay with another routing: bitwise the eager result.

    `change` puts other numbers into the operands before each replay.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for routing in ("zipf", "empty", "one", "uniform"):
        offsets.copy_(group_ends(group_sizes(routing, rows, len(offsets), 9)))
        change()
        captured.fill_(POISON)
        graph.replay()
        if not torch.equal(captured, call()):
            return f"replay with routing {routing} differs from eager"
    return ""


def replay_case(op: str, name: str, K: int, rank: int = 0) -> str:
    """Replays of one kernel, with a product of `rank` beside it if that is not 0."""
    from moe_graphs.kernels.gemm import launch as g

    torch.manual_seed(5)
    rows, experts, N = 4096, 16, 768
    x, w = matrices(rows, K, dtype=torch.bfloat16), matrices(experts, K, N, dtype=torch.bfloat16)
    dy = matrices(rows, N, dtype=torch.bfloat16)
    offsets = group_ends(group_sizes("uniform", rows, experts, 1))
    if op == "rows":
        variant, beside = g.row_variant(name, N), None
        if rank:
            low = matrices(rows, rank, dtype=torch.bfloat16)
            beside = low, matrices(experts, rank, N, dtype=torch.bfloat16)
        call = lambda: g.matmul_rows(x, w, offsets, variant=variant, beside=beside)  # noqa: E731
    else:
        variant = g.weight_variant(name, N, torch.bfloat16)
        call = lambda: g.matmul_weights(x, dy, offsets, variant=variant)  # noqa: E731
    return replay_difference(call, offsets, rows)


def check_kind(kind: str) -> None:
    """Child process: all cases of one kernel; prints where it is, and a verdict."""
    op, name = kind.split(":")
    failures, started = [], time.time()
    if op == "ops":
        import ops_check

        failures = ops_check.failures()
        return print_verdict(kind, failures, started)
    if op == "fp8":
        import fp8_products

        failures = fp8_products.failures()
        return print_verdict(kind, failures, started)
    half = torch.float16
    for seed, case in enumerate(CASES):
        runs = [(torch.bfloat16, False), (torch.bfloat16, True)]
        if op == "weights":
            runs = [(torch.bfloat16, mode) for mode in ("same", "float32", "add")]
        if seed == 0:
            runs += [(half, mode) for _, mode in runs]
        for dtype, mode in runs:
            print(f"AT case {seed} {case[0]} {str(dtype)[6:]} {mode}", flush=True)
            if op == "weights":
                wrong = weights_case(name, case, seed, dtype, mode)
            else:
                wrong = rows_case(name, case, seed, dtype, mode)
                if not wrong:
                    rank = RANKS[(seed + mode) % len(RANKS)]
                    wrong = rows_case(name, case, seed, dtype, mode, rank)
                    wrong = wrong and f"with rank {rank} beside: {wrong}"
            if wrong:
                failures.append(f"case {seed} {case[0]} {str(dtype)[6:]} {mode}: {wrong}")
    print("AT capture and replay", flush=True)
    for K, rank in ((512, 0), (4096, 0), (512, 16), (4096, 8)):
        if rank and op == "weights":
            continue
        wrong = replay_case(op, name, K, rank)
        if wrong:
            failures.append(f"K = {K}, rank {rank}: {wrong}")
    print_verdict(kind, failures, started)


def print_verdict(kind: str, failures: list[str], started: float) -> None:
    verdict = {"kind": kind, "ok": not failures, "failures": failures[:6]}
    print("CHECK " + json.dumps(verdict | {"seconds": round(time.time() - started, 1)}), flush=True)


def run_check(kind: str, timeout: float = 75) -> dict:
    """Parent: one kind in its own process, killed when it hangs."""
    command = [sys.executable, __file__, "--kind", kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        seen = (expired.stdout or b"").decode().splitlines()
        return {"kind": kind, "ok": False, "failures": ["killed: hang?", *seen[-1:]]}
    for line in done.stdout.splitlines():
        if line.startswith("CHECK "):
            return json.loads(line[6:])
    return {"kind": kind, "ok": False, "failures": [f"exit {done.returncode}", done.stderr[-1500:]]}


# ---------------------------------------------------------------- speed


def contenders(shape: tuple, routing: str, good: set[str]) -> dict:
    """Contenders by name: group, call, and the output to compare with torch's, or None."""
    from moe_graphs.kernels.gemm import launch as g
    from moe_graphs.kernels.gemm.tile_scheduler import row_tiles

    rows, experts, K, N = shape
    offsets = group_ends(group_sizes(routing, rows, experts, 7))
    bf16 = torch.bfloat16
    x, w = matrices(rows, K, dtype=bf16), matrices(experts, K, N, dtype=bf16)
    dy = matrices(rows, N, dtype=bf16)
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    dw, dw32 = torch.empty_like(w), torch.zeros(w.shape, device="cuda")
    jobs = {
        "dense": ("dense", lambda: torch.mm(x, w[0], out=y), None),
        "torch fwd": ("fwd", lambda: torch._grouped_mm(x, w, offs=offsets), None),
        "torch dgrad": (
            "dgrad",
            lambda: torch._grouped_mm(dy, w.transpose(1, 2), offs=offsets),
            None,
        ),
        "torch wgrad": ("wgrad", lambda: torch._grouped_mm(x.t(), dy, offs=offsets), None),
    }

    def add(name, group, call, out):
        jobs[name] = (group, call, out)

    for name in ("cooperative", "pingpong", "tma"):
        if f"rows:{name}" in good:
            vy, vx = g.row_variant(name, N), g.row_variant(name, K)
            add(
                f"{name} fwd", "fwd", lambda v=vy: g.matmul_rows(x, w, offsets, out=y, variant=v), y
            )
            add(
                f"{name} dgrad",
                "dgrad",
                lambda v=vx: g.matmul_rows(dy, w, offsets, transposed=True, out=dx, variant=v),
                dx,
            )
        if f"weights:{name}" in good:
            v16, v32 = g.weight_variant(name, N, bf16), g.weight_variant(name, N, torch.float32)
            add(
                f"{name} wgrad",
                "wgrad",
                lambda v=v16: g.matmul_weights(x, dy, offsets, out=dw, variant=v),
                dw,
            )
            add(
                f"{name} wgrad f32",
                "wgrad f32",
                lambda v=v32: g.matmul_weights(x, dy, offsets, out=dw32, variant=v),
                dw32,
            )
            add(
                f"{name} wgrad add",
                "wgrad add",
                lambda v=v32: g.matmul_weights(
                    x, dy, offsets, out=dw32, accumulate=True, variant=v
                ),
                None,
            )
    if "fp8:all" in good and not K % 128 and not N % 128:
        from fp8_products import products_like

        for group, call in products_like(x, w, dy, offsets).items():
            add(group, group.split(" ")[1], call, None)
    if "rows:cooperative" in good:  # what the work list costs: the GEMM alone, list made beforehand
        v = g.row_variant("cooperative", N)
        kernels, grid = g.kernels_of(v, x.device), g.sm_count(x.device)
        launch = kernels.rows_launch(v, x, w, y, row_tiles(offsets, rows, v.block_m), False, grid)
        add("cooperative fwd alone", "fwd", launch.run, y)
    return jobs  # fmt: skip


def verify(jobs: dict, watch: Watch) -> None:
    """Compares our outputs with torch's at the timed shape; drops those that differ."""
    references = {group: jobs[f"torch {group}"][1]() for group in ("fwd", "dgrad", "wgrad")}
    for name, (group, call, out) in list(jobs.items()):
        if out is None:
            continue
        watch.on(name)
        out.fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        reference = references[group.split(" ")[0]].reshape(-1)[: 1 << 26].float()
        got = error(out.reshape(-1)[: 1 << 26], reference)
        if not got < 1e-2 or bool(torch.isnan(out).any()):
            print("WRONG", name, got, flush=True)
            jobs.pop(name)
    watch.off()


def time_shape(
    shape: tuple, routing: str, good: set, rounds: int, cool: bool, watch: Watch, only: str = ""
) -> dict:
    """TFLOP/s [p10, p50, p90] per contender on unpadded FLOPs; host microseconds per eager call."""
    rows, _, K, N = shape
    jobs = contenders(shape, routing, good)
    verify(jobs, watch)
    jobs = {n: job for n, job in jobs.items() if n == "dense" or only in n}
    flops = 2.0 * rows * K * N
    graphs, calls, host = {}, {}, {}
    for name, (_, call, _) in jobs.items():
        watch.on(name)
        once = elapsed(lambda c=call: (c(), c(), c())) / 3
        calls[name] = max(2, min(100, int((3.0 if cool else 12.0) / once)))
        graphs[name] = capture_burst(call, calls[name])
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(5):
            call()
        host[name] = round((time.perf_counter() - before) / 5e-6)
        torch.cuda.synchronize()
    spent = {name: [] for name in jobs}
    shuffler = random.Random(1)
    for _ in range(rounds):
        order = list(jobs)
        shuffler.shuffle(order)
        for name in order:
            watch.on(name)
            if cool:
                time.sleep(0.06)
                jobs[name][1]()
            spent[name].append(elapsed(graphs[name].replay) / calls[name])
    watch.off()
    rates = {}
    for name, ms in spent.items():
        ms = sorted(ms)
        picks = (ms[-1 - len(ms) // 10], ms[len(ms) // 2], ms[len(ms) // 10])
        rates[name] = [round(flops / m / 1e9, 1) for m in picks]
    return {"shape": shape, "routing": routing, "cool": cool, "tflops": rates, "host_us": host}


def plan(quick: bool) -> list[tuple]:
    """(shape, routing, rounds, cool) in order of importance."""
    if quick:
        return [(s, "uniform", 5, False) for s in (*SHAPES[:2], SHAPES[4], SHAPES[9])]
    jobs = [(s, "uniform", 9, False) for s in SHAPES]
    for routing in ("zipf", "empty", "one"):
        jobs += [(s, routing, 5, False) for s in (SHAPES[0], SHAPES[7])]
    return jobs + [(s, "uniform", 5, True) for s in (*SHAPES[:2], SHAPES[3], SHAPES[4])]


def time_child(args: argparse.Namespace) -> None:
    out = Path(args.out)
    watch = Watch(out / "hung.txt")
    done = {line.split("\t")[0] for line in read_lines(out / "done.txt")}
    good = set(args.good.split(",")) - {
        f"{'rows' if line.split(' ')[1] in ('fwd', 'dgrad') else 'weights'}:{line.split(' ')[0]}"
        for line in read_lines(out / "hung.txt")
    }
    for shape, routing, rounds, cool in plan(args.quick):
        key = f"{shape} {routing} {cool}"
        if key in done:
            continue
        row = time_shape(shape, routing, good, rounds, cool, watch, args.only)
        print("TIME " + json.dumps(row), flush=True)
        with (out / "done.txt").open("a") as f:
            f.write(key + "\n")
        torch.cuda.empty_cache()
    if "ops:all" in good:
        import ops_check

        ops_check.print_times()


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def run_times(args: argparse.Namespace, good: list[str], budget: float) -> list[dict]:
    """The timing child, restarted without a contender that hung, until the budget is spent."""
    rows, until = [], time.time() + budget
    command = [sys.executable, __file__, "--time", "--good", ",".join(good), "--out", args.out]
    command += ["--only", args.only]
    for _ in range(4):
        child = subprocess.Popen(
            command + (["--quick"] if args.quick else []),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        killer = threading.Timer(max(1.0, until - time.time()), child.kill)
        killer.start()
        for line in child.stdout:
            if line.startswith("TIME "):
                rows.append(json.loads(line[5:]))
                print_row(rows[-1])
            else:
                print(line.rstrip()[:1000], flush=True)
        killer.cancel()
        if child.wait() == 0 or time.time() > until:
            break
    return rows


def print_row(row: dict) -> None:
    """One block per shape: TFLOP/s, fraction of dense, ratio to torch."""
    rates = {name: pick[1] for name, pick in row["tflops"].items()}
    dense = rates["dense"]
    head = "x".join(map(str, row["shape"]))
    head += f" {row['routing']}{' cool' if row['cool'] else ''}"
    shown = ("torch", "cooperative ")
    host = {name: us for name, us in row["host_us"].items() if name.startswith(shown)}
    print(f"\n{head}  dense {dense:.0f}  host us {host}")
    for group in ("fwd", "dgrad", "wgrad"):
        if f"torch {group}" not in rates:
            continue
        base = rates[f"torch {group}"]
        cells = [f"torch {base:.0f}"]
        for name, rate in rates.items():
            kind, _, rest = name.partition(" ")
            if rest.split(" ")[0] == group and kind != "torch":
                label = f"{kind}{rest[len(group) :]}"
                cells.append(f"{label} {rate:.0f} ({rate / dense:.2f} {rate / base:.2f}x)")
        print(f"  {group:5} " + " | ".join(cells), flush=True)


def print_means(rows: list[dict]) -> None:
    """Geometric means over the first eight shapes, sustained, uniform routing."""
    wanted = [r for r in rows if not r["cool"] and r["routing"] == "uniform"]
    chosen = [r for r in wanted if tuple(r["shape"]) in EIGHT]
    if not chosen:
        return
    print(f"\ngeometric means over {len(chosen)} shapes, and the least ratio to torch")
    names = {n for r in chosen for n in r["tflops"] if not n.startswith(("dense", "torch"))}
    for name in sorted(names, key=lambda n: (n.split(" ")[1:], n)):
        group = name.split(" ")[1]
        pairs = [(r["tflops"][name][1], r["tflops"]["dense"][1], r["tflops"][f"torch {group}"][1])
                 for r in chosen if name in r["tflops"]]  # fmt: skip
        dense = torch.tensor([a / d for a, d, _ in pairs]).log().mean().exp()
        ratios = torch.tensor([a / t for a, _, t in pairs])
        mean, least = ratios.log().mean().exp(), ratios.min()
        print(f"  {name:22} {dense:.3f} dense  {mean:.3f}x torch  min {least:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--out", default=str(ROOT / "benchmarks" / "results"), help="folder for JSON lines"
    )
    parser.add_argument("--budget", type=float, default=230.0, help="seconds for the timings")
    parser.add_argument("--only", default="", help="fwd, dgrad or wgrad")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--good", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        return check_kind(args.kind)
    if args.time:
        return time_child(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("done.txt", "hung.txt"):
        (out / name).unlink(missing_ok=True)
    device = torch.cuda.get_device_name(0)
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    with ThreadPoolExecutor(4) as pool:
        checks = list(pool.map(run_check, KINDS))
    for c in checks:
        print(
            f"{'ok   ' if c['ok'] else 'WRONG'} {c['kind']:18} {c.get('seconds', '')}", flush=True
        )
        for failure in c["failures"]:
            print("       " + failure, flush=True)
    good = [c["kind"] for c in checks if c["ok"]]
    rows = [] if args.check_only else run_times(args, good, args.budget)
    print_means(rows)
    stamp = {"device": device, "torch": torch.__version__, "triton": triton.__version__,
             "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    with (out / "kernel_check.jsonl").open("a") as f:
        for row in [*checks, *rows]:
            f.write(json.dumps(stamp | row) + "\n")
    for name in ("done.txt", "hung.txt"):
        (out / name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
