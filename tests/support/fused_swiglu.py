"""Checks one tile of the GEMMs with SwiGLU in their epilogue on a GPU; prints what was wrong.

A program of its own, since a kernel that loses its way hangs. Arguments: forward or backward, and
the number of the tile in the lists of `benchmarks/swiglu_gemm.py`. The last line it prints is `ok`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kernel_check as check
from moe_graphs.kernels import swiglu_reference
from moe_graphs.kernels.gemm import launch
from moe_graphs.kernels.gemm.launch_swiglu import swiglu_back_launch, swiglu_launch
from moe_graphs.kernels.gemm.tiles import row_tiles
from moe_graphs.kernels.gemm.variants import Variant, row_variant, sm_count
from moe_graphs.kernels.swiglu_triton import swiglu_backward, swiglu_forward
from swiglu_gemm import BACKWARD, FORWARD

POISON = check.POISON


def gemm(x_RK: Tensor, w: Tensor, groups: check.Rows, transposed: bool, out: Tensor) -> Tensor:
    """By a kernel that never cuts sums: two runs of the same steps."""
    variant = row_variant("pingpong", out.shape[1])
    return launch.matmul_rows(
        x_RK, w, groups.offsets, transposed=transposed, out=out, variant=variant
    )


def by_expert(x_RK: Tensor, w: Tensor, groups: check.Rows, transposed: bool) -> Tensor:
    """By torch, in the dtype of the operands."""
    parts = [
        x_RK[start:end] @ (w[e].t() if transposed else w[e])
        for e, (start, end) in enumerate(groups.bounds)
    ]
    return torch.cat(parts)


def forward(variant: Variant, case: tuple, seed: int, dtype: torch.dtype, transposed: bool) -> str:
    _, rows, experts, K, N, tail = case
    groups, F = check.Rows.of(case, seed), -(-N // 16) * 8
    x = groups.operand(K, dtype)
    shape = (experts, 2 * F, K) if transposed else (experts, K, 2 * F)
    w = check.matrices(*shape, dtype=dtype) * K**-0.5
    want = gemm(x, w, groups, transposed, x.new_full((rows + tail, 2 * F), POISON))
    wide = by_expert(x.float(), w.float(), groups, transposed)
    narrow = by_expert(x, w, groups, transposed)
    exact, plain = (swiglu_reference.swiglu(t) for t in (wide, narrow))

    def run() -> tuple[Tensor, Tensor]:
        gate_up = x.new_full((rows + tail, 2 * F), POISON)
        product = x.new_full((rows + tail, F), POISON)
        work = row_tiles(groups.offsets, rows + tail, variant.block_m)
        grid = sm_count(x.device)
        swiglu_launch(variant, x, w, gate_up, product, work, transposed, grid).run()
        return gate_up, product

    product = torch.cat([swiglu_forward(want[:rows]), x.new_full((tail, F), POISON)])
    return compare(run, (want, product), rows, (None, exact), (None, plain))


def backward(variant: Variant, case: tuple, seed: int, dtype: torch.dtype, transposed: bool) -> str:
    _, rows, experts, K, N, tail = case
    groups, F = check.Rows.of(case, seed), -(-N // 16) * 8
    dy, gate_up = groups.operand(K, dtype), groups.operand(2 * F, dtype)
    shape = (experts, F, K) if transposed else (experts, K, F)
    w = check.matrices(*shape, dtype=dtype) * K**-0.5
    dh = gemm(dy, w, groups, transposed, dy.new_full((rows + tail, F), POISON))
    wide = by_expert(dy.float(), w.float(), groups, transposed)
    narrow = by_expert(dy, w, groups, transposed)
    exact = swiglu_reference.swiglu_backward(gate_up[:rows].float(), wide)
    plain = swiglu_reference.swiglu_backward(gate_up[:rows], narrow)

    def run() -> tuple[Tensor]:
        found = torch.full_like(gate_up, POISON)
        work = row_tiles(groups.offsets, rows + tail, variant.block_m)
        grid = sm_count(dy.device)
        swiglu_back_launch(variant, dy, w, gate_up, found, work, transposed, grid).run()
        return (found,)

    right = swiglu_backward(gate_up[:rows], dh[:rows])
    want = torch.cat([right, dy.new_full((tail, 2 * F), POISON)])
    return compare(run, (want,), rows, (exact,), (plain,))


def compare(
    run: Callable[[], tuple[Tensor, ...]],
    expected: tuple[Tensor, ...],
    rows: int,
    exact: tuple[Tensor | None, ...],
    plain: tuple[Tensor | None, ...],
) -> str:
    """Empty if three runs give the expected bits, and errors of at most twice torch's."""
    for _ in range(3):
        found = run()
        torch.cuda.synchronize()
        for number, (got, want) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(got[rows:], want[rows:]):
                return f"output {number}: rows past the last end were written"
            if not torch.equal(got, want):
                wrong = (got != want).nonzero()
                return f"output {number}: {len(wrong)} other bits, first at {wrong[0].tolist()}"
    for got, want, other in zip(found, exact, plain, strict=True):
        if want is not None and rows:
            error, allowed = check.error(got[:rows], want), check.error(other, want)
            if not error <= 2 * allowed + 1e-6:
                return f"error {error:.2e}, torch's {allowed:.2e}"
    return ""


def main(op: str, number: int) -> None:
    case_of, variants = (forward, FORWARD) if op == "forward" else (backward, BACKWARD)
    for seed, case in enumerate(check.CASES):
        for dtype in (torch.bfloat16, torch.float16)[: 2 if seed == 0 else 1]:
            for transposed in (False, True):
                at = f"case {seed} {case[0]} {dtype} {transposed}"
                print("at", at, flush=True)
                wrong = case_of(variants[number], case, seed, dtype, transposed)
                if wrong:
                    sys.exit(f"{variants[number]}, {at}: {wrong}")
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
