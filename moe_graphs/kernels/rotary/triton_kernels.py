"""Queries and keys turned by their positions, one kernel for both, and for forward and backward.

    y1 = x1 * cos1 - x2 * sin1,     y2 = x2 * cos2 + x1 * sin2      1 and 2 are halves of R columns
    dx1 = dy1 * cos1 + dy2 * sin2,  dx2 = dy2 * cos2 - dy1 * sin1

A program has all heads of a token. It computes in fp32 and rounds once.

B batch, S sequence, H query heads, G kv heads, Q head dim, R columns of it that turn.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

TILE = 2048  # numbers of a tile at most


@triton.jit
def _turn(
    x_ptr, x_head, y_ptr, y_head, cos, sin,
    HEADS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = R // 2
    column = tl.arange(0, triton.next_power_of_2(half))[None, :]
    for done in range(0, HEADS, LANES):
        head = done + tl.arange(0, LANES)[:, None]
        live = (head < HEADS) & (column < half)
        x_at = x_ptr + head.to(tl.int64) * x_head
        y_at = y_ptr + head.to(tl.int64) * y_head
        first = tl.load(x_at + column, mask=live, other=0.0).to(tl.float32)
        second = tl.load(x_at + column + half, mask=live, other=0.0).to(tl.float32)
        if BACK:
            turned = first * cos[0] + second * sin[1], second * cos[1] - first * sin[0]
        else:
            turned = first * cos[0] - second * sin[0], second * cos[1] + first * sin[1]
        tl.store(y_at + column, turned[0].to(y_ptr.dtype.element_ty), mask=live)
        tl.store(y_at + column + half, turned[1].to(y_ptr.dtype.element_ty), mask=live)
        if Q > R:
            rest = R + tl.arange(0, triton.next_power_of_2(Q - R))[None, :]
            live = (head < HEADS) & (rest < Q)
            tl.store(y_at + rest, tl.load(x_at + rest, mask=live), mask=live)


@triton.jit
def _load_table(ptr, row, R: tl.constexpr):
    half: tl.constexpr = R // 2
    column = tl.arange(0, triton.next_power_of_2(half))[None, :]
    at = ptr + row.to(tl.int64) * R + column
    first = tl.load(at, mask=column < half, other=0.0)
    second = tl.load(at + half, mask=column < half, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit(do_not_specialize=["S", "rows"])
def turn_heads_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, turned_query_ptr, turned_key_ptr, S, rows,
    query_b, query_h, query_s, key_b, key_h, key_s,
    to_query_b, to_query_h, to_query_s, to_key_b, to_key_h, to_key_s,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    QUERY_LANES: tl.constexpr, KEY_LANES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    row = token % rows  # there are S of them, or B * S
    cos, sin = _load_table(cos_ptr, row, R), _load_table(sin_ptr, row, R)
    _turn(
        query_ptr + b * query_b + s * query_s, query_h,
        turned_query_ptr + b * to_query_b + s * to_query_s, to_query_h,
        cos, sin, H, QUERY_LANES, Q, R, BACK,
    )  # fmt: skip
    _turn(
        key_ptr + b * key_b + s * key_s, key_h,
        turned_key_ptr + b * to_key_b + s * to_key_s, to_key_h,
        cos, sin, G, KEY_LANES, Q, R, BACK,
    )  # fmt: skip


@define_op(device="default")
def turn_heads(
    query_BHSQ: torch.Tensor,
    key_BGSQ: torch.Tensor,
    cos_BSR: torch.Tensor,
    sin_BSR: torch.Tensor,
    back: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both turned, or turned back by the transposed matrix; their layouts are the inputs'."""
    (B, H, S, Q), G, R = query_BHSQ.shape, key_BGSQ.shape[1], cos_BSR.shape[-1]
    turned = _empty(query_BHSQ), _empty(key_BGSQ)
    if B * S:
        given = [x if x.stride(3) == 1 else x.contiguous() for x in (query_BHSQ, key_BGSQ)]
        tables = cos_BSR.reshape(-1, R).contiguous(), sin_BSR.reshape(-1, R).contiguous()
        strides = [stride for x in (*given, *turned) for stride in x.stride()[:3]]
        args = (*given, *tables, *turned, S, tables[0].shape[0], *strides)
        launch(turn_heads_kernel, (B * S,), args, **_variant(H, G, Q, R), BACK=back)
    return turned


@torch.library.register_fake("moe_graphs::turn_heads")
def _(query_BHSQ, key_BGSQ, cos_BSR, sin_BSR, back):
    return _empty(query_BHSQ), _empty(key_BGSQ)


def _empty(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor in the layout of x, or contiguous if a head of x is not."""
    made = torch.empty_like(x)
    return made if made.stride(3) == 1 else x.new_empty(x.shape)


def _variant(H: int, G: int, Q: int, R: int) -> dict[str, Any]:
    """The constants that the kernels are compiled for."""
    limit = max(TILE // next_power_of_2(R // 2), 1)
    query_lanes, key_lanes = (min(next_power_of_2(n), limit) for n in (H, G))
    return {
        "H": H, "G": G, "Q": Q, "R": R, "QUERY_LANES": query_lanes, "KEY_LANES": key_lanes,
        "num_warps": 4,
    }  # fmt: skip
