"""Grouped GEMMs with SwiGLU in their epilogue against a GEMM and a kernel for SwiGLU.

    python benchmarks/swiglu_gemm.py --out swiglu_gemm_h200.jsonl     (a Hopper GPU, about a minute)

Gate first: every tile gives the bits of the two kernels (here without a last round that is cut
along K, as `expected` of the layer has it at 4096 columns); a line says `bitwise`, and a wrong
result ends the run. Then bf16, each contender as a CUDA graph of several calls with work lists, in
turns in random order, median of the rounds. `gemm` is the GEMM without SwiGLU. `layer` is forward
and backward of both GEMMs. Ratios are of the time of `separate`: above 1 is faster. `--tiny` runs
on the CPU, where there is nothing to choose: a test of this file.

Shapes: R rows, D model, F ffn, E experts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measured_cases import measure_cases
from moe_graphs.bench.timing import Watch, capture_burst, elapsed, group_sizes
from moe_graphs.kernels import grouped_gemm, swiglu, swiglu_gemms
from moe_graphs.kernels.gemm.variants import Variant, choose_rows, fused_swiglu, row_variant

BURST_MS = 6.0
FORWARD = (
    Variant("split", 128, 256, 64, 3),
    Variant("pingpong", 64, 256, 64, 4),
    Variant("split", 128, 128, 64, 5),
    Variant("pingpong", 128, 128, 64, 5),
    Variant("pingpong", 64, 128, 64, 6),
)
BACKWARD = (
    Variant("split", 128, 256, 64, 3, pieces=4, buffers=2),
    Variant("split", 128, 256, 64, 4, pieces=4, buffers=1),
    Variant("split", 128, 128, 64, 5, pieces=2, buffers=2),
    Variant("split", 128, 128, 64, 5, pieces=2, buffers=1),
    Variant("split", 128, 128, 64, 5, pieces=1, buffers=1),
    Variant("pingpong", 64, 256, 64, 4, pieces=4, buffers=2),
    Variant("pingpong", 64, 128, 64, 6, pieces=2, buffers=2),
)
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """Random operands; `ends` of the experts' rows."""

    name: str
    x_RD: Tensor
    w1_ED2F: Tensor
    w2_EFD: Tensor
    ends_E: Tensor

    @staticmethod
    def of(name: str, rows: int, experts: int, D: int, F: int, device: str) -> Case:
        torch.manual_seed(0)

        def matrix(*shape: int) -> Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made.normal_(std=shape[-2] ** -0.5 if len(shape) == 3 else 1.0)

        ends = group_sizes("uniform", rows, experts, 1).cumsum(0).to(torch.int32).to(device)
        weights = matrix(experts, D, 2 * F), matrix(experts, F, D)
        return Case(name, matrix(rows, D), *weights, ends)


def cases(device: str, tiny: bool) -> Iterator[Case]:
    if tiny:
        yield Case.of("tiny", 40, 3, 16, 24, device)
        return
    yield Case.of("Qwen3-30B-A3B, 4k tokens", 32768, 128, 2048, 768, device)
    yield Case.of("Qwen3-30B-A3B, 16k tokens", 131072, 128, 2048, 768, device)
    yield Case.of("Mixtral-8x7B, 8k tokens", 16384, 8, 4096, 14336, device)
    yield Case.of("small, 512 tokens", 2048, 32, 768, 384, device)


def label(v: Variant) -> str:
    return f"{v.name} {v.block_m}x{v.block_n} s{v.stages} p{v.pieces} b{v.buffers}"


def forward_calls(case: Case) -> Calls:
    from moe_graphs.kernels.gemm import launch, launch_swiglu
    from moe_graphs.kernels.swiglu_triton import swiglu_forward

    x, w1, ends = case.x_RD, case.w1_ED2F, case.ends_E

    def separate(variant: Variant | None = None) -> tuple[Tensor, Tensor]:
        gate_up = launch.matmul_rows(x, w1, ends, variant=variant)
        return gate_up, swiglu_forward(gate_up)

    calls: Calls = {"expected": lambda: separate(_uncut(x, w1)), "separate": separate}
    calls["gemm"] = lambda: launch.matmul_rows(x, w1, ends)
    for v in FORWARD:
        calls[label(v)] = lambda v=v: launch_swiglu.swiglu_rows(x, w1, ends, v)
    return calls


def backward_calls(case: Case) -> Calls:
    from moe_graphs.kernels.gemm import launch, launch_swiglu
    from moe_graphs.kernels.swiglu_triton import swiglu_backward

    dy, w2, ends = torch.randn_like(case.x_RD), case.w2_EFD, case.ends_E
    gate_up = launch.matmul_rows(case.x_RD, case.w1_ED2F, ends)

    def gemm(variant: Variant | None = None) -> Tensor:
        return launch.matmul_rows(dy, w2, ends, transposed=True, variant=variant)

    calls: Calls = {"expected": lambda: (swiglu_backward(gate_up, gemm(_uncut(dy, w2.mT))),)}
    calls["separate"] = lambda: (swiglu_backward(gate_up, gemm()),)
    calls["gemm"] = gemm
    for v in BACKWARD:
        calls[label(v)] = lambda v=v: (launch_swiglu.swiglu_back_rows(dy, w2.mT, gate_up, ends, v),)
    return calls


def layer_calls(case: Case) -> Calls:
    x, w1, w2 = (t.detach().requires_grad_() for t in (case.x_RD, case.w1_ED2F, case.w2_EFD))
    dy = torch.randn_like(case.x_RD)

    def separate() -> tuple[Tensor, ...]:
        out = swiglu_gemms(x, w1, w2, case.ends_E)
        return out.detach(), *torch.autograd.grad(out, (x, w1, w2), dy)

    def fused() -> tuple[Tensor, ...]:
        with fused_swiglu():
            return separate()

    def today() -> tuple[Tensor, ...]:
        rows = swiglu(grouped_gemm(x, w1, case.ends_E, zero_tail=False))
        out = grouped_gemm(rows, w2, case.ends_E, zero_tail=False)
        return out.detach(), *torch.autograd.grad(out, (x, w1, w2), dy)

    return {"expected": today, "separate": separate, "fused": fused}


def _uncut(x_RK: Tensor, w_EKN: Tensor) -> Variant:
    """The GEMM's usual tile, but never cut along K."""
    name = choose_rows(x_RK.device, x_RK.shape[0], w_EKN.shape[0])
    return row_variant("pingpong" if x_RK.shape[1] >= 4096 else name, w_EKN.shape[2])


def measure(op: str, case: Case, calls: Calls, rounds: int, watch: Watch | None) -> Iterator[dict]:
    """A record per contender. Raises where one is wrong and not only rounded otherwise."""
    expected = calls.pop("expected")()
    records = {}
    for name, call in calls.items():
        record = records[name] = {"op": op, "shape": case.name, "contender": name}
        if watch:
            watch.on(f"{op}, {case.name}, {name}")
        if name != "gemm":
            found = call()
            record["bitwise"] = all(map(torch.equal, found, expected))
            for got, want in zip(found, expected, strict=True):
                off = ((got.float() - want.float()).norm() / want.float().norm()).item()
                if not off < 1e-2:
                    raise RuntimeError(f"{op}, {case.name}, {name}: off by {off:.1e}")
            del found
        if watch:
            watch.off()
    del expected
    if case.x_RD.is_cuda:
        _time(calls, records, rounds)
    yield from records.values()


def _time(calls: Calls, records: dict[str, dict], rounds: int) -> None:
    graphs, counts, spent = {}, {}, {}
    for name, call in calls.items():
        once = min(elapsed(call) for _ in range(2))
        counts[name] = max(1, min(20, round(BURST_MS / once)))
        graphs[name], spent[name] = capture_burst(call, counts[name]), []
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            spent[name].append(elapsed(graphs[name].replay) / counts[name] * 1e3)
    median = {name: sorted(times)[len(times) // 2] for name, times in spent.items()}
    for name, record in records.items():
        record["us"] = round(median[name], 1)
        record["ratio"] = round(median["separate"] / median[name], 3)


def main(arguments: list[str] | None = None) -> None:
    def records(args: argparse.Namespace) -> Iterator[dict]:
        device = "cpu" if args.tiny else "cuda"
        hung = Path(tempfile.gettempdir()) / "swiglu_gemm_hung.txt"
        watch = None if args.tiny else Watch(hung)
        for case in cases(device, args.tiny):
            if not args.tiny:
                yield from measure("forward", case, forward_calls(case), args.rounds, watch)
                yield from measure("backward", case, backward_calls(case), args.rounds, watch)
            yield from measure("layer", case, layer_calls(case), args.rounds, watch)

    measure_cases("swiglu_gemm", __doc__, 7, records, arguments)


if __name__ == "__main__":
    main()
