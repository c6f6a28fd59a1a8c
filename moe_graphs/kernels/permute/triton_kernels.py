"""Moving tokens into expert-sorted rows and back: one program per token, every byte once.

A token's program reads its vector once and writes it to its K rows, or reads its K rows and writes
their sum. Both directions go over `inverse` (pair -> row), so that no row needs to find its token,
and a backward is the other direction's kernel. Sums run in fp32 in the order of k: deterministic.

    spread    rows[inverse[t, k]] = (weights[t, k] *) source[t]           permute; d unpermute
    collect   out[t] = sum_k (weights[t, k] *) rows[inverse[t, k]]        unpermute; d permute
    dot       out[t, k] = <rows[inverse[t, k]], other[t]>                 d weights

T tokens, D model, K top-k, R rows. A negative inverse is a pair without a row (capacity): nothing
is written for it, and it counts as zero.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

WIDEST = 2048  # numbers of a vector that a program of four warps has in flight
DOT_NUMBERS, DOT_LEAST = 4096, 128  # numbers of the [K, D] tile of `dot`, and least D


@triton.jit
def spread_kernel(
    source_ptr, inverse_ptr, weights_ptr, rows_ptr, D,
    K: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    here = token.to(tl.int64)
    for base in range(0, D, BLOCK_D):
        column = base + tl.arange(0, BLOCK_D)
        live = column < D
        value = tl.load(source_ptr + here * D + column, mask=live)
        for k in tl.static_range(K):
            row = tl.load(inverse_ptr + token * K + k).to(tl.int64)
            moved = value
            if WEIGHTED:
                weight = tl.load(weights_ptr + token * K + k).to(tl.float32)
                moved = (value.to(tl.float32) * weight).to(value.dtype)
            tl.store(rows_ptr + row * D + column, moved, mask=live & (row >= 0))


@triton.jit
def collect_kernel(
    rows_ptr, inverse_ptr, weights_ptr, out_ptr, D,
    K: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    there = token.to(tl.int64)
    for base in range(0, D, BLOCK_D):
        column = base + tl.arange(0, BLOCK_D)
        live = column < D
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for k in tl.static_range(K):
            row = tl.load(inverse_ptr + token * K + k).to(tl.int64)
            at = rows_ptr + row * D + column
            value = tl.load(at, mask=live & (row >= 0), other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights_ptr + token * K + k).to(tl.float32)
            total += value
        out = out_ptr + there * D + column
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def dot_kernel(
    rows_ptr, inverse_ptr, other_ptr, out_ptr, D,
    K: tl.constexpr, K_LANES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    here = token.to(tl.int64)
    slot = tl.arange(0, K_LANES)
    row = tl.load(inverse_ptr + token * K + slot, mask=slot < K, other=-1).to(tl.int64)
    total = tl.zeros((K_LANES,), dtype=tl.float32)
    for base in range(0, D, BLOCK_D):
        column = base + tl.arange(0, BLOCK_D)
        live = column < D
        other = tl.load(other_ptr + here * D + column, mask=live, other=0.0)
        at = rows_ptr + row[:, None] * D + column[None, :]
        value = tl.load(at, mask=(row >= 0)[:, None] & live[None, :], other=0.0)
        total += tl.sum(value.to(tl.float32) * other.to(tl.float32)[None, :], 1)
    tl.store(out_ptr + token * K + slot, total.to(out_ptr.dtype.element_ty), mask=slot < K)


@define_op(device="default")
def spread_rows(
    source_TD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    num_rows: int,
    has_gaps: bool,
) -> torch.Tensor:
    """`rows_RD`: every token's vector in its K rows; rows without a pair are zero (`has_gaps`)."""
    tokens, D = inverse_TK.shape[0], source_TD.shape[1]
    make = source_TD.new_zeros if has_gaps else source_TD.new_empty
    rows_RD = make((num_rows, D))
    if tokens and D:
        source_TD, inverse_TK = source_TD.contiguous(), inverse_TK.contiguous()
        args = (source_TD, inverse_TK, _or(weights_TK, source_TD), rows_RD, D)
        tile = _tile(inverse_TK, D)
        launch(spread_kernel, (tokens,), args, WEIGHTED=weights_TK is not None, **tile)
    return rows_RD


@define_op(device="default")
def collect_rows(
    rows_RD: torch.Tensor, inverse_TK: torch.Tensor, weights_TK: torch.Tensor | None
) -> torch.Tensor:
    """`out_TD`: the weighted sum of every token's K rows, in the dtype of the rows."""
    out_TD = rows_RD.new_empty((inverse_TK.shape[0], rows_RD.shape[1]))
    collect_rows_into(out_TD, rows_RD, inverse_TK, weights_TK)
    return out_TD


def collect_rows_into(
    out_TD: torch.Tensor,
    rows_RD: torch.Tensor,
    inverse_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
) -> None:
    """`collect_rows` into contiguous memory that there is already."""
    tokens, D = inverse_TK.shape[0], out_TD.shape[1]
    if tokens and D:
        rows_RD, inverse_TK = rows_RD.contiguous(), inverse_TK.contiguous()
        args = (rows_RD, inverse_TK, _or(weights_TK, rows_RD), out_TD, D)
        tile = _tile(inverse_TK, D)
        launch(collect_kernel, (tokens,), args, WEIGHTED=weights_TK is not None, **tile)


@define_op(device="default")
def dot_rows(
    rows_RD: torch.Tensor, inverse_TK: torch.Tensor, other_TD: torch.Tensor
) -> torch.Tensor:
    """`out_TK`: the inner products of every token's K rows with its vector, in fp32."""
    (tokens, K), D = inverse_TK.shape, rows_RD.shape[1]
    out_TK = torch.zeros((tokens, K), dtype=torch.float32, device=rows_RD.device)
    if tokens and D:
        tile = _tile(inverse_TK, D) | {"K_LANES": next_power_of_2(K)}
        tile["BLOCK_D"] = min(tile["BLOCK_D"], max(DOT_LEAST, DOT_NUMBERS // tile["K_LANES"]))
        rows_RD, inverse_TK = rows_RD.contiguous(), inverse_TK.contiguous()
        args = (rows_RD, inverse_TK, other_TD.contiguous(), out_TK, D)
        launch(dot_kernel, (tokens,), args, **tile)
    return out_TK


@torch.library.register_fake("moe_graphs::spread_rows")
def _(source_TD, inverse_TK, weights_TK, num_rows, has_gaps):
    return source_TD.new_empty((num_rows, source_TD.shape[1]))


@torch.library.register_fake("moe_graphs::collect_rows")
def _(rows_RD, inverse_TK, weights_TK):
    return rows_RD.new_empty((inverse_TK.shape[0], rows_RD.shape[1]))


@torch.library.register_fake("moe_graphs::dot_rows")
def _(rows_RD, inverse_TK, other_TD):
    return rows_RD.new_empty(inverse_TK.shape, dtype=torch.float32)


def _or(given: torch.Tensor | None, anything: torch.Tensor) -> torch.Tensor:
    """The tensor that is given, or a pointer that is not read."""
    return anything if given is None else given.contiguous()


def _tile(inverse_TK: torch.Tensor, D: int) -> dict[str, Any]:
    block = min(WIDEST, next_power_of_2(D))
    warps = 4 if block > WIDEST // 4 else 2
    return {"K": inverse_TK.shape[1], "BLOCK_D": block, "num_warps": warps}
