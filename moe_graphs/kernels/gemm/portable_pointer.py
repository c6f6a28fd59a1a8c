"""Grouped GEMMs over plain pointers: for GPUs before Hopper and for Triton's interpreter.

    rows:     out_RN[r] = x_RK[r] @ w[e]                    w_EKN, or w_ENK when TRANSPOSED
                          + low_Rr[r] @ b[e]                with BESIDE, laid out as w
    weights:  dw_EKN[e] (+)= x_RK[rows of e].T @ dy_RN[rows of e]
    gathered: dw_EKN[e] = x_TK[tokens of the rows of e].T @ dy_RN[rows of e]    for small N

The same work lists and the same results as tma, with masks where that has hardware bounds.
They alone take operands in fp32 (the variant fp32), with the precision that torch's own products
have. All matrices are contiguous. Row offsets are 64-bit: R * K may exceed 2^31.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.gemm.heuristics import Pair, Variant
from moe_graphs.kernels.gemm.tile_scheduler import (
    COUNT_RECORDS,
    EXPERT_RECORD,
    PART_END,
    PART_EXPERT,
    PART_SLOT,
    PART_START,
    ROW_END,
    ROW_EXPERT,
    ROW_FIRST_TILE,
    ROW_RECORD,
    ROW_START,
    ROW_TILES,
    WorkList,
    place,
)
from moe_graphs.kernels.launching import Launch


@triton.jit
def rows_pointer_kernel(
    x_ptr, w_ptr, low_ptr, b_ptr, out_ptr, records_ptr, count_ptr, N, K, rank,
    TRANSPOSED: tl.constexpr, BESIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BESIDE more steps than those of K have other operands."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    whole = tl.cdiv(K, BLOCK_K) * BLOCK_K if BESIDE else K
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr + COUNT_RECORDS) * tiles_n, GRID):
        record = records_ptr + (tile // tiles_n) * ROW_RECORD
        e = tl.load(record + ROW_EXPERT).to(tl.int64)
        end = tl.load(record + ROW_END)
        local = tile - tl.load(record + ROW_FIRST_TILE) * tiles_n
        tile_m, tile_n = place(local, tl.load(record + ROW_TILES), tiles_n)
        rows = tl.load(record + ROW_START) + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        live_m = (rows < end)[:, None]
        live_n = (columns < N)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, whole + BESIDE * BLOCK_K, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            of_x, of_w, width = x_ptr, w_ptr, K
            if BESIDE:
                behind = k >= whole
                of_x, of_w = tl.where(behind, low_ptr, x_ptr), tl.where(behind, b_ptr, w_ptr)
                width = tl.where(behind, rank, K)
                ks -= tl.where(behind, whole, 0)
            at_x = of_x + rows.to(tl.int64)[:, None] * width + ks[None, :]
            x = tl.load(at_x, mask=live_m & (ks < width)[None, :], other=0.0)
            if TRANSPOSED:
                at_w = of_w + e * N * width + columns[None, :] * width + ks[:, None]
            else:
                at_w = of_w + e * N * width + ks[:, None] * N + columns[None, :]
            w = tl.load(at_w, mask=live_n & (ks < width)[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        at_out = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at_out, acc.to(out_ptr.dtype.element_ty), mask=live_m & live_n)


@triton.jit
def weights_pointer_kernel(
    x_ptr, dy_ptr, dw_ptr, records_ptr, count_ptr, M, N,
    ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_expert = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr + COUNT_RECORDS) * per_expert, GRID):
        record = records_ptr + (tile // per_expert) * EXPERT_RECORD
        e = tl.load(record + PART_EXPERT).to(tl.int64)
        start = tl.load(record + PART_START)
        end = tl.load(record + PART_END)
        tile_m, tile_n = place(tile % per_expert, tiles_m, tiles_n)
        ms = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        ns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for r in tl.range(0, end - start, BLOCK_R):
            rows = (start + r + tl.arange(0, BLOCK_R)).to(tl.int64)
            live = rows < end
            at_x = x_ptr + rows[None, :] * M + ms[:, None]
            x = tl.load(at_x, mask=live[None, :] & (ms < M)[:, None], other=0.0)
            at_dy = dy_ptr + rows[:, None] * N + ns[None, :]
            dy = tl.load(at_dy, mask=live[:, None] & (ns < N)[None, :], other=0.0)
            acc = tl.dot(x, dy, acc, input_precision=PRECISION)
        at_dw = dw_ptr + e * M * N + ms[:, None] * N + ns[None, :]
        live_dw = (ms < M)[:, None] & (ns < N)[None, :]
        if ADD:
            acc += tl.load(at_dw, mask=live_dw, other=0.0)
        tl.store(at_dw, acc.to(dw_ptr.dtype.element_ty), mask=live_dw)


@triton.jit
def gathered_weights_pointer_kernel(
    x_ptr, order_ptr, dy_ptr, dw_ptr, partials_ptr, records_ptr, count_ptr, M, N, top_k,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """All N columns of dy, and BLOCK_M columns of the tokens, which all experts read in turn.

    So L2 holds these columns of all tokens. A split expert's sums go to its slots of `partials`.
    """
    records = tl.load(count_ptr + COUNT_RECORDS)
    ns = tl.arange(0, BLOCK_N)
    for tile in tl.range(tl.program_id(0), records * tl.cdiv(M, BLOCK_M), GRID):
        record = records_ptr + (tile % records) * EXPERT_RECORD
        start, end = tl.load(record + PART_START), tl.load(record + PART_END)
        slot = tl.load(record + PART_SLOT).to(tl.int64)
        ms = (tile // records) * BLOCK_M + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for r in tl.range(0, end - start, BLOCK_R):
            rows = start + r + tl.arange(0, BLOCK_R)
            live = rows < end
            tokens = (tl.load(order_ptr + rows, mask=live, other=0) // top_k).to(tl.int64)
            at_x = x_ptr + tokens[None, :] * M + ms[:, None]
            x = tl.load(at_x, mask=live[None, :] & (ms < M)[:, None], other=0.0)
            at_dy = dy_ptr + rows.to(tl.int64)[:, None] * N + ns[None, :]
            dy = tl.load(at_dy, mask=live[:, None] & (ns < N)[None, :], other=0.0)
            acc = tl.dot(x, dy, acc)
        at = ns[None, :] * M + ms[:, None] if TRANSPOSED else ms[:, None] * N + ns[None, :]
        live_dw = (ms < M)[:, None] & (ns < N)[None, :]
        if slot >= 0:
            tl.store(partials_ptr + slot * M * N + at, acc, mask=live_dw)
        else:
            e = tl.load(record + PART_EXPERT).to(tl.int64)
            tl.store(dw_ptr + e * M * N + at, acc.to(dw_ptr.dtype.element_ty), mask=live_dw)


def rows_launch(
    v: Variant,
    x_RK: torch.Tensor,
    w: torch.Tensor,
    out_RN: torch.Tensor,
    work: WorkList,
    transposed: bool,
    grid: int,
    partials: None = None,
    beside: Pair | None = None,
) -> Launch:
    """The launch of the rows kernel over `work`, whose row tiles have `v.block_m` rows."""
    low, b = beside or (x_RK, w)
    sizes = out_RN.shape[1], x_RK.shape[1], low.shape[1]
    args = (x_RK, w, low, b, out_RN, work.records, work.count, *sizes)
    tile: dict[str, Any] = {"BLOCK_M": v.block_m, "BLOCK_N": v.block_n, "BLOCK_K": v.block_k}
    tile |= {"GRID": grid, "TRANSPOSED": transposed, "BESIDE": v.steps(beside)}
    tile |= {"PRECISION": _precision(x_RK)}
    tile |= {"num_warps": v.warps, "num_stages": v.stages}
    return Launch(rows_pointer_kernel, grid, args, tile)


def weights_launch(
    v: Variant,
    x_RK: torch.Tensor,
    dy_RN: torch.Tensor,
    dw_EKN: torch.Tensor,
    work: WorkList,
    add: str,
    grid: int,
    partials: None = None,
) -> Launch:
    """The launch of the weight-gradient kernel over `work`, an expert order; see `sm90_weights`."""
    args = (x_RK, dy_RN, dw_EKN, work.records, work.count, *dw_EKN.shape[1:])
    tile: dict[str, Any] = {"BLOCK_M": v.block_m, "BLOCK_N": v.block_n, "BLOCK_R": v.block_k}
    tile |= {"GRID": grid, "ADD": add != "", "PRECISION": _precision(x_RK)}
    tile |= {"num_warps": v.warps, "num_stages": v.stages}
    return Launch(weights_pointer_kernel, grid, args, tile)


def gathered_weights_launch(
    v: Variant,
    x_TK: torch.Tensor,
    order_R: torch.Tensor,
    top_k: int,
    dy_RN: torch.Tensor,
    dw: torch.Tensor,
    work: WorkList,
    transposed: bool,
    grid: int,
    partials: torch.Tensor | None = None,
) -> Launch:
    """The launch of the gathered kernel over `work`, an expert order; `dw` may be [E, N, K]."""
    sizes = x_TK.shape[1], dy_RN.shape[1], top_k
    sums = dw if partials is None else partials
    args = (x_TK, order_R, dy_RN, dw, sums, work.records, work.count, *sizes)
    tile: dict[str, Any] = {"BLOCK_M": v.block_m, "BLOCK_N": v.block_n, "BLOCK_R": v.block_k}
    tile |= {"TRANSPOSED": transposed, "GRID": grid}
    tile |= {"num_warps": v.warps, "num_stages": v.stages}
    return Launch(gathered_weights_pointer_kernel, grid, args, tile)


def _precision(x: torch.Tensor) -> str:
    """Triton's name for the precision of torch's products in fp32."""
    is_short = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if is_short else "ieee"
