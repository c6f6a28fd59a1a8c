"""Grouped products in FP8 on one Hopper GPU: right, and how fast; under 150 seconds.

    python benchmarks/fp8_products.py
    python benchmarks/fp8_products.py --out benchmarks/results/fp8_products_h200.jsonl

Part of kernel_check (kind `fp8:all`). First a process checks: products and gradients of weights
against fp32 products of the numbers that codes stand for, with NaN past the last end, into poisoned
outputs, twice; one capture replayed with other routings and weights; what kernels quantize against
the CPU, bit for bit. A second process times, each in a graph of several calls, contenders in random
order: TFLOP/s of the kernels' tiles, of our bf16, and of one dense product of the same FLOPs in
bf16 and by `torch._scaled_mm` with a scale per row (`use_fast_accum=False`); microseconds of the
ops that quantize beside those in bf16, and of forward and backward of projections.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import environment
from kernel_check import POISON, replay_difference
from moe_graphs.bench.timing import (
    capture_burst,
    elapsed,
    error,
    group_ends,
    group_sizes,
    matrices,
)
from moe_graphs.kernels import fp8, route_rows
from moe_graphs.kernels.fp8 import reference
from moe_graphs.kernels.gemm import launch as gemm
from moe_graphs.kernels.gemm.heuristics import Variant, row_variant, weight_variant
from moe_graphs.kernels.permute import spread_rows
from moe_graphs.kernels.routed_experts import weighted_swiglu_backward
from moe_graphs.kernels.swiglu import NO_CLAMP, swiglu_forward
from moe_graphs.layers.linear import FP8Linear, fp8_rows_linear, torch_linear

BF16 = torch.bfloat16
CASES = [  # routing, rows, experts, K, N, rows past the last end
    ("uniform", 6000, 16, 512, 1024, 77),
    ("zipf", 9000, 24, 384, 768, 133),
    ("empty", 5000, 16, 1024, 1408, 1),
    ("one", 700, 4, 128, 256, 300),
    ("uniform", 40000, 32, 768, 2048, 500),
    ("uniform", 90, 8, 128, 640, 900),
    ("zipf", 3000, 512, 256, 128, 5),
    ("none", 0, 3, 256, 384, 40),
    ("one", 20000, 8, 2048, 1536, 3),
]
SHAPES = [  # routing, rows, experts, K, N: the products of a layer of Qwen3-30B-A3B, and others
    ("uniform", 131072, 128, 2048, 1536),
    ("uniform", 131072, 128, 768, 2048),
    ("uniform", 131072, 128, 2048, 768),
    ("uniform", 131072, 128, 1536, 2048),
    ("uniform", 65536, 128, 2048, 1536),
    ("zipf", 131072, 128, 2048, 1536),
    ("uniform", 16384, 8, 4096, 28672),
    ("uniform", 65536, 32, 7168, 4096),
]

PROJECTIONS = [(8192, 4096, 14336), (8192, 14336, 4096), (16384, 2048, 5120)]  # rows, in, out


def tiles(columns: int, of_weights: bool = False) -> dict[str, Variant]:
    """A kernel's tiles by name."""
    v = weight_variant("fp8", 256, BF16) if of_weights else row_variant("fp8", 256)
    wide = replace(v, block_n=256, stages=4, pingpong=False)
    found = {"128x128": replace(wide, block_n=128, stages=5)}
    if columns > 128:
        found["128x256"] = wide
    return found | {f"{name}, by turns": replace(v, pingpong=True) for name, v in found.items()}


# ---------------------------------------------------------------- correctness


def numbers_of(rows: fp8.Rows) -> Tensor:
    blocks = rows.codes.float().unflatten(1, (-1, 128))
    return (blocks * rows.scales.t().unsqueeze(-1)).flatten(1)


def weights_of(weights: fp8.Weights, expert: int) -> Tensor:
    scales = weights.scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weights.codes[expert].float() * scales


def with_tail(rows: fp8.Rows, tail: int) -> fp8.Rows:
    """Rows of NaN behind the others, whose scales are NaN, too."""
    codes = rows.codes.view(torch.uint8)
    codes = torch.cat([codes, codes.new_full((tail, codes.shape[1]), 0x7F)]).view(rows.codes.dtype)
    nan = rows.scales.new_full((len(rows.scales), tail), float("nan"))
    return fp8.Rows(codes, torch.cat([rows.scales, nan], 1).contiguous())


def product_failures(case: tuple, seed: int) -> Iterator[str]:
    routing, rows, experts, K, N, tail = case
    torch.manual_seed(seed)
    sizes = group_sizes(routing, rows, experts, seed)
    ends, offsets = torch.cumsum(sizes, 0).tolist(), group_ends(sizes)
    x = matrices(rows, K, dtype=BF16) * torch.logspace(-3, 3, K, device="cuda").to(BF16)
    quantized = fp8.quantized(x)
    weights = fp8.quantized_weights(matrices(experts, K, N, dtype=BF16))
    exact, numbers = torch.empty(rows, N, device="cuda"), numbers_of(quantized)
    for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        exact[start:end] = numbers[start:end] @ weights_of(weights, e).t()
    codes, scales = with_tail(quantized, tail)
    allowed = 1.5 * error(exact.to(BF16), exact) + 1e-4  # products are summed with 14 bits
    for name, variant in tiles(N).items():
        found = []
        for _ in range(2):
            out = torch.full((rows + tail, N), POISON, device="cuda", dtype=BF16)
            gemm.matmul_rows_fp8(codes, scales, *weights, offsets, BF16, out=out, variant=variant)
            found.append(out)
        got = error(found[0][:rows], exact) if rows else 0.0
        if not got <= allowed:
            yield f"{case} {name}: error {got:.2e}, allowed {allowed:.2e}"
        if not bool((found[0][rows:] == POISON).all()):
            yield f"{case} {name}: rows past the last end were written"
        if not torch.equal(*found):
            yield f"{case} {name}: two runs differ"


def gradient_failures(case: tuple, seed: int) -> Iterator[str]:
    """Gradients of weights; columns behind the last group are NaN."""
    routing, rows, experts, M, N, tail = case
    torch.manual_seed(seed)
    sizes = group_sizes(routing, rows, experts, seed)
    ends, offsets = torch.cumsum(sizes, 0).tolist(), group_ends(sizes)
    wide = torch.logspace(-2, 2, rows + tail, device="cuda").to(BF16)[:, None]
    x, dy = (matrices(rows + tail, n, dtype=BF16) for n in (M, N))
    columns = [columns_of(each, offsets) for each in (x * wide, dy)]
    blocks = sum(-(-size // 128) for size in sizes.tolist())
    exact, at = torch.zeros(experts, M, N, device="cuda"), 0
    numbers = [columns_numbers(each) for each in columns]
    for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        own = slice(at, at + -(-(end - start) // 128) * 128)
        exact[e], at = numbers[0][:, own] @ numbers[1][:, own].t(), own.stop
    for codes, scales in columns:
        codes.view(torch.uint8)[:, 128 * blocks :] = 0x7F
        scales[:, blocks:] = float("nan")
    allowed = 1.5 * error(exact.to(BF16), exact) + 1e-4
    given = (*columns[0], *columns[1], offsets, rows + tail, BF16)
    for name, variant in tiles(N, of_weights=True).items():
        found = []
        for _ in range(2):
            out = torch.full((experts, M, N), POISON, device="cuda", dtype=BF16)
            gemm.matmul_weights_fp8(*given, out=out, variant=variant)
            found.append(out)
        got = error(found[0], exact) if rows else float(found[0].abs().max())
        if not got <= allowed:
            yield f"{case} {name}: gradient's error {got:.2e}, allowed {allowed:.2e}"
        if not torch.equal(*found):
            yield f"{case} {name}: two runs of the gradient differ"


def columns_of(rows_RK: Tensor, offsets: Tensor) -> fp8.Columns:
    """Columns of rows that are sorted already."""
    return fp8.columns_of(fp8.quantized(rows_RK, True), offsets)


def columns_numbers(columns: fp8.Columns) -> Tensor:
    scales = columns.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return columns.codes.float() * scales


def replay_failures() -> Iterator[str]:
    """One capture, without waiting for the host; other routings, weights and rows are replayed."""
    torch.manual_seed(5)
    rows, experts, K, N = 4096, 16, 512, 768
    x, w = matrices(rows, K, dtype=BF16), matrices(experts, K, N, dtype=BF16)
    offsets = group_ends(group_sizes("uniform", rows, experts, 1))

    def step() -> Tensor:
        return fp8.product(fp8.quantized(x), fp8.quantized_weights(w), offsets, BF16)

    def gradient() -> Tensor:
        operands = columns_of(x, offsets), columns_of(dy, offsets)
        return fp8.gradient_of_weights(*operands, offsets, rows, BF16, False)

    dy = matrices(rows, N, dtype=BF16)
    for call in (step, gradient):
        found = replay_difference(call, offsets, rows, lambda: (w.normal_(), x.normal_()))
        if found:
            yield found


def same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.cpu().float(), b.cpu().float()) for a, b in pairs)


def as_near(codes: fp8.Rows, values: Tensor, powers: bool) -> bool:
    """Whether codes are as near to values in bf16 as the codes of the latter are."""
    allowed = 1.01 * error(numbers_of(fp8.quantized(values, powers)), values.float())
    return error(numbers_of(codes), values.float()) <= allowed


def quantisation_failures(powers: bool) -> Iterator[str]:
    """Codes and scales that kernels write are those of the CPU for the values in bf16."""
    torch.manual_seed(0)
    tokens, top_k, experts, hidden, ffn = 777, 4, 16, 2176, 384
    x = (
        matrices(tokens, hidden, dtype=BF16)
        * torch.logspace(-20, 10, tokens, device="cuda")[:, None]
    )
    x = x.to(BF16)
    x[0], x[1, :128] = 0, 0
    found = fp8.quantized(x, powers)
    if not same_bits(found, reference.quantized_rows(x.cpu(), powers)):
        yield f"powers {powers}: rows differ from the CPU's"
    order = route_rows(torch.rand(tokens, experts, device="cuda").topk(top_k).indices, experts)
    inverse = order.inverse_R.view(tokens, top_k)
    for wanted in (False, True):
        rows, copied = fp8.spread_quantized(
            x, order.order_R, inverse, False, with_rows=wanted, powers=powers
        )
        expected_rows = spread_rows(x, order.order_R, inverse, None, False)
        if not same_bits(rows, reference.quantized_rows(expected_rows.cpu(), powers)):
            yield f"powers {powers}: spread rows differ from the CPU's"
        if wanted and not torch.equal(copied, expected_rows):
            yield f"powers {powers}: copied rows differ"
    gate_up = matrices(tokens * top_k, 2 * ffn, dtype=BF16)
    h = swiglu_forward(gate_up, NO_CLAMP)
    if not as_near(fp8.swiglu_quantized(gate_up, powers), h, powers):
        yield f"powers {powers}: SwiGLU is farther from the op in bf16 than its codes"
    given = gate_up, matrices(tokens * top_k, ffn, dtype=BF16), torch.rand_like(inverse.float())
    given = (*given, order.order_R, inverse, False)
    *made, rows = fp8.weighted_swiglu_backward_quantized(*given, with_result=True, powers=powers)
    # The op in bf16 writes its result in the place of the gradient.
    expected = weighted_swiglu_backward(given[0], given[1].clone(), *given[2:], NO_CLAMP,
                                        with_result=True)  # fmt: skip
    if not all(error(got, want.float()) < 1e-3 for got, want in zip(made, expected, strict=True)):
        yield f"powers {powers}: gradients of SwiGLU differ from the op in bf16"
    if not same_bits(rows, reference.quantized_rows(made[0].cpu(), powers)):
        yield f"powers {powers}: codes of gradients differ from the CPU's"
    # Another kernel to the compiler, which may fuse products and sums in other places.
    of_weights, *codes = fp8.weighted_swiglu_backward_all_quantized(*given, powers=powers)
    if not all(as_near(*pair, powers) for pair in zip(codes, (made[0], made[2]), strict=True)):
        yield f"powers {powers}: codes of SwiGLU's gradients and result differ"
    if not error(of_weights, made[1]) < 1e-5:
        yield f"powers {powers}: gradients of routing weights differ"
    w = matrices(3, 256, 384, dtype=BF16)
    for flip, weight in ((True, w), (False, w.mT)):
        found = fp8.quantized_weights(weight, powers)
        if not same_bits(found, reference.quantized_weights(w.cpu(), flip, powers)):
            yield f"powers {powers}: weights differ from the CPU's, flip {flip}"
        if not same_bits(fp8.quantized_twice(weight, powers)[0], found):
            yield f"powers {powers}: weights of one pass differ, flip {flip}"


def columns_failures() -> Iterator[str]:
    """Columns have the bits of the CPU, and so have rows that are spread beside them."""
    torch.manual_seed(0)
    tokens, top_k, experts, hidden = 777, 4, 16, 1152
    x = matrices(tokens, hidden, dtype=BF16)
    x = (x * torch.logspace(-20, 10, tokens, device="cuda")[:, None]).to(BF16)
    x[0], x[1, :128] = 0, 0
    codes = fp8.quantized(x, True)
    order = route_rows(torch.rand(tokens, experts, device="cuda").topk(top_k).indices, experts)
    ends, inverse = order.offsets_E, order.inverse_R.view(tokens, top_k)
    blocks = -(-ends.diff(prepend=ends.new_zeros(1)) // 128).sum().item()
    rows = fp8.quantized(spread_rows(x, order.order_R, inverse, None, False), True)
    want = fp8.columns_of(fp8.Rows(*(part.cpu() for part in rows)), ends.cpu())
    spread, again = fp8.spread_columns(codes, order.order_R, inverse, ends, with_rows=True)
    if not same_bits(again, rows):
        yield "rows that are spread beside columns differ"
    for name, found in (("sorted", fp8.columns_of(rows, ends)), ("spread", spread)):
        cut = [(c[:, : 128 * blocks], s[:, :blocks]) for c, s in (found, want)]
        if not same_bits(*cut):
            yield f"columns, {name}, differ from the CPU's"


def failures() -> list[str]:
    found = [each for powers in (False, True) for each in quantisation_failures(powers)]
    found += columns_failures()
    for seed, case in enumerate(CASES):
        print(f"AT {case}", flush=True)
        found += product_failures(case, seed)
        found += gradient_failures(case, seed)
    print("AT replay", flush=True)
    return [*found, *replay_failures()]


# ---------------------------------------------------------------- speed


def scaled_mm(x_RK: Tensor, w_KN: Tensor) -> Callable[[], Tensor]:
    """One dense product in FP8 with a scale per row and column."""
    rows, columns = len(x_RK), w_KN.shape[1]
    codes, w = x_RK.to(reference.CODE), w_KN.t().contiguous().to(reference.CODE).t()
    scales = torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda")
    options = dict(out_dtype=BF16, use_fast_accum=False)
    return lambda: torch._scaled_mm(codes, w, *scales, **options)


def contenders(x: Tensor, w: Tensor, offsets: Tensor) -> dict[str, Callable[[], object]]:
    """Products of the rows, each by its name."""
    quantized, weights = fp8.quantized(x), fp8.quantized_weights(w)
    given, out = (*quantized, *weights, offsets, BF16), x.new_empty(len(x), w.shape[2])
    jobs: dict[str, Callable[[], object]] = {
        "dense bf16": lambda: torch.mm(x, w[0], out=out),
        "dense fp8, scales of rows": scaled_mm(x, w[0]),
        "ours bf16": lambda: gemm.matmul_rows(x, w, offsets, out=out),
    }
    for name, variant in tiles(w.shape[2]).items():
        jobs[f"ours fp8, {name}"] = lambda v=variant: gemm.matmul_rows_fp8(
            *given, out=out, variant=v
        )
    dw, operands = torch.empty_like(w), (*columns_of(x, offsets), *columns_of(out, offsets))
    jobs["ours bf16, weights"] = lambda: gemm.matmul_weights(x, out, offsets, out=dw)
    for name, variant in tiles(w.shape[2], of_weights=True).items():
        jobs[f"ours fp8, weights, {name}"] = lambda v=variant: gemm.matmul_weights_fp8(
            *operands, offsets, len(x), BF16, out=dw, variant=v
        )
    return jobs


def products_like(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> dict[str, Callable]:
    """Forward and gradient of the rows, grouped, and dense by torch, by kernel_check's names."""
    found = {"scaled_mm fwd": scaled_mm(x, w[0]), "scaled_mm dgrad": scaled_mm(dy, w[0].t())}
    for group, rows, weight in (("fwd", x, w), ("dgrad", dy, w.mT)):
        given = (*fp8.quantized(rows), *fp8.quantized_weights(weight), offsets, BF16)
        found[f"fp8 {group}"] = lambda given=given: gemm.matmul_rows_fp8(*given)
    return found


def spent(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of a call, by its name: the median of the rounds."""
    graphs, calls = {}, {}
    for name, call in jobs.items():
        print(f"AT {name}", flush=True)
        once = elapsed(lambda c=call: (c(), c(), c())) / 3
        once = elapsed(lambda c=call: (c(), c(), c())) / 3
        calls[name] = max(2, min(60, int(6.0 / once)))
        graphs[name] = capture_burst(call, calls[name])
    found: dict[str, list[float]] = {name: [] for name in jobs}
    shuffler, names = random.Random(1), list(jobs)
    for _ in range(rounds):
        shuffler.shuffle(names)
        for name in names:
            found[name].append(elapsed(graphs[name].replay) / calls[name] * 1000)
    return {name: sorted(each)[rounds // 2] for name, each in found.items()}


def product_times(shape: tuple, rounds: int) -> dict:
    routing, rows, experts, K, N = shape
    offsets = group_ends(group_sizes(routing, rows, experts, 7))
    x, w = matrices(rows, K, dtype=BF16), matrices(experts, K, N, dtype=BF16) * K**-0.5
    us = spent(contenders(x, w, offsets), rounds)
    return {name: round(2.0 * rows * K * N / each / 1e6) for name, each in us.items()}


def op_times(rounds: int) -> dict:
    """Microseconds in the sizes of a layer of Qwen3-30B-A3B with 16,384 tokens."""
    T, top_k, experts, hidden, ffn = 16384, 8, 128, 2048, 768
    x = matrices(T, hidden, dtype=BF16)
    order = route_rows(torch.rand(T, experts, device="cuda").topk(top_k).indices, experts)
    spread, ends = (order.order_R, order.inverse_R.view(T, top_k)), order.offsets_E
    gate_up, grad = (matrices(T * top_k, n, dtype=BF16) for n in (2 * ffn, ffn))
    given = gate_up, grad, torch.rand(T, top_k, device="cuda"), *spread, False
    tokens, rows = fp8.quantized(x, True), fp8.quantized(gate_up, True)
    w1, w2 = (matrices(experts, *s, dtype=BF16) for s in ((hidden, 2 * ffn), (ffn, hidden)))
    jobs = {
        "spread bf16": lambda: spread_rows(x, *spread, None, False),
        "spread fp8": lambda: fp8.spread_quantized(x, *spread, False, with_rows=False),
        "spread fp8 and bf16": lambda: fp8.spread_quantized(x, *spread, False, with_rows=True),
        "SwiGLU bf16": lambda: swiglu_forward(gate_up, NO_CLAMP),
        "SwiGLU fp8": lambda: fp8.swiglu_quantized(gate_up),
        "backward bf16": lambda: weighted_swiglu_backward(*given, NO_CLAMP, with_result=True),
        "backward bf16 and fp8": lambda: fp8.weighted_swiglu_backward_quantized(
            *given, with_result=True
        ),
        "tokens fp8": lambda: fp8.quantized(x, True),
        "spread columns": lambda: fp8.spread_columns(tokens, *spread, ends, with_rows=False),
        "spread fp8 and columns": lambda: fp8.spread_columns(tokens, *spread, ends, with_rows=True),
        "columns of gate and up": lambda: fp8.columns_of(rows, ends),
        "backward fp8": lambda: fp8.weighted_swiglu_backward_all_quantized(*given, powers=True),
        "weights, transposed": lambda: (fp8.quantized_weights(w1), fp8.quantized_weights(w2)),
        "weights, both": lambda: (fp8.quantized_twice(w1), fp8.quantized_twice(w2)),
        "weights, as they lie": lambda: (
            fp8.quantized_weights(w1.mT), fp8.quantized_weights(w2.mT),
        ),
    }  # fmt: skip
    return {name: round(us, 1) for name, us in spent(jobs, rounds).items()}


def projection_times(shape: tuple[int, int, int], rounds: int) -> dict:
    """Microseconds of forward and backward of a projection, weights quantized in each."""
    rows, columns, out = shape
    x, dy = (matrices(rows, n, dtype=BF16) for n in (columns, out))
    kinds = {"bf16": torch_linear, "fp8": FP8Linear, "fp8_rows": fp8_rows_linear}
    jobs = {}
    for name, kind in kinds.items():
        layer = kind(columns, out, device="cuda", dtype=BF16)
        given = x.clone().requires_grad_(), layer.weight
        jobs[name] = lambda layer=layer, given=given: torch.autograd.grad(
            layer(given[0]), given, dy
        )
    return {name: round(us, 1) for name, us in spent(jobs, rounds).items()}


def time_child(rounds: int, until: float) -> None:
    print("TIME " + json.dumps({"microseconds": op_times(rounds)}), flush=True)
    for shape in PROJECTIONS:
        line = {"projection": shape, "microseconds": projection_times(shape, rounds)}
        print("TIME " + json.dumps(line), flush=True)
    for shape in SHAPES:
        if time.time() < until:
            line = {"shape": shape, "tflops": product_times(shape, rounds)}
            print("TIME " + json.dumps(line), flush=True)
            torch.cuda.empty_cache()
        else:
            print(f"budget spent: {shape} left out", flush=True)


def run_child(arguments: list[str], limit: float) -> list[str]:
    """Lines of a process that is ended when it takes too long."""
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as expired:
        seen = (expired.stdout or b"").decode().splitlines()
        return [*seen, f"ended after {limit:.0f} s: hung?"]
    failed = [f"exit {done.returncode}", done.stderr[-2000:]] if done.returncode else []
    return [*done.stdout.splitlines(), *failed]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", help="where there is no .git to ask")
    parser.add_argument("--child", choices=("check", "time"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "check":
        return print("CHECK " + json.dumps(failures()), flush=True)
    if args.child == "time":
        return time_child(args.rounds, args.until)
    print("\n".join(run_child(["--child", "check"], 70.0)[-12:]), flush=True)
    options = ["--rounds", str(args.rounds), "--until", str(time.time() + 60)]
    lines = run_child(["--child", "time", *options], 75.0)
    print("\n".join(line for line in lines if not line.startswith("AT ")), flush=True)
    if args.out is not None:
        constant = {"benchmark": "fp8_products", "environment": environment.stamp(args.commit)}
        with args.out.open("a") as file:
            for line in lines:
                if line.startswith("TIME "):
                    file.write(json.dumps(constant | json.loads(line[5:])) + "\n")


if __name__ == "__main__":
    main()
