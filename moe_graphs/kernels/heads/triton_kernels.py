"""Queries and keys normalised and rotated, one kernel forward and one backward.

    n = x * r * w,  r = 1 / sqrt(mean(x^2) + eps)           over one head, or over all heads
    y1 = n1 * cos - n2 * sin,  y2 = n2 * cos + n1 * sin     1 and 2 are the halves of a head

    dn = dy turned back,  dw = sum of dn * x * r,  dx = r * (dn * w - x * r * mean(dn * w * x * r))

The kernels compute in fp32 and round once. A program has all heads of a token, one tile for each
half, so rows and angles are read once. If weights' gradients are wanted, a program of the backward
goes over tokens in steps of the number of programs and adds up in registers; a small kernel then
adds up the programs. Their number depends on the number of tokens only, so the result is
deterministic and the same on every GPU.

For ranks that exchange heads the same kernels write rows to be sent, and read gradients as they
arrive: each rank's part of the queries', keys' and values' heads lies side by side.

B batch, S sequence, H query heads, G kv heads, Q head dim, M = (H + 2G) * Q, N size of a weight,
W ranks, L = M / W.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.add_sums import PROGRAMS, add_sums
from moe_graphs.kernels.gpu_architectures import stages_that_fit
from moe_graphs.kernels.launching import launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

TILE = 4096  # numbers of a tile at most, unless all of them are normalised together
NUMBERS_PER_WARP, NUMBERS_PER_WARP_FULL = 1024, 512  # with `full` a thread also has as many weights
# A loop loads two tokens ahead, or one, if a token has at most so many bytes: a multiprocessor has
# 228 KiB for three programs.
THREE_STAGES, TWO_STAGES = 16384, 65536


@triton.jit
def _place(stride, heads, LANES: tl.constexpr, Q: tl.constexpr):
    """Element numbers of the first halves of heads, `stride` apart, and whether there is one."""
    head = tl.arange(0, LANES)[:, None]
    column = tl.arange(0, triton.next_power_of_2(Q // 2))[None, :]
    return head.to(tl.int64) * stride + column, (head < heads) & (column < Q // 2)


@triton.jit
def _place_by_rank(
    rank_stride, done,
    HEADS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """`_place` from head `done` on, where the heads of each rank lie side by side."""
    each: tl.constexpr = HEADS // RANKS
    head = done + tl.arange(0, LANES)[:, None]
    column = tl.arange(0, triton.next_power_of_2(Q // 2))[None, :]
    at = (head // each).to(tl.int64) * rank_stride + head % each * Q
    return at + column, (head < HEADS) & (column < Q // 2)


@triton.jit
def _load_at(ptr, place, Q: tl.constexpr):
    first = tl.load(ptr + place[0], mask=place[1], other=0.0)
    second = tl.load(ptr + place[0] + Q // 2, mask=place[1], other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _load_halves(ptr, stride, heads, LANES: tl.constexpr, Q: tl.constexpr):
    return _load_at(ptr, _place(stride, heads, LANES, Q), Q)


@triton.jit
def _store_at(ptr, place, halves, Q: tl.constexpr):
    tl.store(ptr + place[0], halves[0].to(ptr.dtype.element_ty), mask=place[1])
    tl.store(ptr + place[0] + Q // 2, halves[1].to(ptr.dtype.element_ty), mask=place[1])


@triton.jit
def _store_halves(ptr, halves, heads, LANES: tl.constexpr, Q: tl.constexpr):
    _store_at(ptr, _place(Q, heads, LANES, Q), halves, Q)


@triton.jit
def _load_angles(cos_ptr, sin_ptr, Q: tl.constexpr):
    at, live = _place(0, 1, 1, Q)
    cos = tl.load(cos_ptr + at, mask=live, other=0.0)
    sin = tl.load(sin_ptr + at, mask=live, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _load_weight(
    ptr, HEADS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr, FULL: tl.constexpr
):
    """A weight for each head, or one row for all of them."""
    return _load_halves(ptr, Q, HEADS if FULL else 1, LANES if FULL else 1, Q)


@triton.jit
def _mean(x, HEADS: tl.constexpr, Q: tl.constexpr, FULL: tl.constexpr):
    """The mean over all that is normalised together; `x` is the sum of both halves."""
    total = tl.sum(x, 1, keep_dims=True) / Q
    if FULL:
        total = tl.sum(total, 0, keep_dims=True) / HEADS
    return total


@triton.jit
def _forward_heads(
    x_ptr, weight_ptr, y_ptr, cos, sin,
    HEADS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, rank_stride=0, RANKS: tl.constexpr = 1,
):  # fmt: skip
    for done in range(0, HEADS, LANES):
        first, second = _load_halves(x_ptr + done * Q, Q, HEADS - done, LANES, Q)
        if NORM != "none":
            square = _mean(first * first + second * second, HEADS, Q, NORM == "full")
            scale = tl.rsqrt(square + EPS)
            weight = _load_weight(weight_ptr, HEADS, LANES, Q, NORM == "full")
            first, second = first * scale * weight[0], second * scale * weight[1]
        turned = first * cos - second * sin, second * cos + first * sin
        if RANKS == 1:
            _store_halves(y_ptr + done * Q, turned, HEADS - done, LANES, Q)
        else:
            place = _place_by_rank(rank_stride, done, HEADS, RANKS, LANES, Q)
            _store_at(y_ptr, place, turned, Q)


@triton.jit(do_not_specialize=["S"])
def heads_forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, query_ptr, key_ptr, S,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr,
    QUERY_LANES: tl.constexpr, KEY_LANES: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    angles = tl.program_id(0) % S * (Q // 2)
    cos, sin = _load_angles(cos_ptr + angles, sin_ptr + angles, Q)
    token = tl.program_id(0).to(tl.int64)
    x_ptr, query_ptr = qkv_ptr + token * (H + 2 * G) * Q, query_ptr + token * H * Q
    _forward_heads(x_ptr, query_weight_ptr, query_ptr, cos, sin, H, QUERY_LANES, Q, NORM, EPS)
    x_ptr, key_ptr = x_ptr + H * Q, key_ptr + token * G * Q
    _forward_heads(x_ptr, key_weight_ptr, key_ptr, cos, sin, G, KEY_LANES, Q, NORM, EPS)


@triton.jit(do_not_specialize=["S"])
def heads_by_rank_forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, sent_ptr, S, rank_stride,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr,
    QUERY_LANES: tl.constexpr, KEY_LANES: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    angles = tl.program_id(0) % S * (Q // 2)
    cos, sin = _load_angles(cos_ptr + angles, sin_ptr + angles, Q)
    token = tl.program_id(0).to(tl.int64)
    x_ptr, y_ptr = qkv_ptr + token * (H + 2 * G) * Q, sent_ptr + token * ((H + 2 * G) // RANKS * Q)
    _forward_heads(
        x_ptr, query_weight_ptr, y_ptr, cos, sin, H, QUERY_LANES, Q, NORM, EPS, rank_stride, RANKS
    )
    x_ptr, y_ptr = x_ptr + H * Q, y_ptr + H // RANKS * Q
    _forward_heads(
        x_ptr, key_weight_ptr, y_ptr, cos, sin, G, KEY_LANES, Q, NORM, EPS, rank_stride, RANKS
    )
    x_ptr, y_ptr = x_ptr + G * Q, y_ptr + G // RANKS * Q
    for done in range(0, G, KEY_LANES):
        value = _load_halves(x_ptr + done * Q, Q, G - done, KEY_LANES, Q)
        _store_at(y_ptr, _place_by_rank(rank_stride, done, G, RANKS, KEY_LANES, Q), value, Q)


@triton.jit
def _load_gradients(
    ptr, stride, rank_stride, done,
    HEADS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    if RANKS == 1:
        place = _place(stride, HEADS - done, LANES, Q)
        ptr += done * stride
    else:
        place = _place_by_rank(rank_stride, done, HEADS, RANKS, LANES, Q)
    return _load_at(ptr, place, Q)


@triton.jit
def _backward_heads(
    dy_ptr, dy_stride, rank_stride, x_ptr, weight_ptr, dx_ptr, cos, sin, dw_first, dw_second,
    HEADS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Writes dx of a token, and returns dw with what it adds, in a sum for each lane."""
    for done in range(0, HEADS, LANES):
        heads = HEADS - done
        dy = _load_gradients(dy_ptr, dy_stride, rank_stride, done, HEADS, RANKS, LANES, Q)
        dy_first, dy_second = dy
        # `tl.fma` says which products are fused: bits are the same with weights' gradients and
        # without.
        first = tl.fma(dy_first, cos, dy_second * sin)
        second = tl.fma(dy_second, cos, dy_first * sin * -1.0)  # a minus would be a subtraction
        if NORM != "none":
            x_first, x_second = _load_halves(x_ptr + done * Q, Q, heads, LANES, Q)
            square = tl.fma(x_first, x_first, x_second * x_second)
            square = _mean(square, HEADS, Q, NORM == "full")
            scale = tl.rsqrt(square + EPS)
            x_first, x_second = x_first * scale, x_second * scale
            dw_first, dw_second = dw_first + first * x_first, dw_second + second * x_second
            weight = _load_weight(weight_ptr, HEADS, LANES, Q, NORM == "full")
            first, second = first * weight[0], second * weight[1]
            along = tl.fma(first, x_first, second * x_second)
            along = _mean(along, HEADS, Q, NORM == "full")
            first = tl.fma(x_first, -along, first) * scale
            second = tl.fma(x_second, -along, second) * scale
        _store_halves(dx_ptr + done * Q, (first, second), heads, LANES, Q)
    return dw_first, dw_second


@triton.jit
def _store_sums(
    ptr, sums, HEADS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr, FULL: tl.constexpr
):
    if FULL:
        _store_halves(ptr, sums, HEADS, LANES, Q)
    else:
        sums = tl.sum(sums[0], 0, keep_dims=True), tl.sum(sums[1], 0, keep_dims=True)
        _store_halves(ptr, sums, 1, 1, Q)


@triton.jit(do_not_specialize=["tokens", "S"])
def heads_backward_kernel(
    dquery_ptr, dkey_ptr, dvalue_ptr, qkv_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr,
    dqkv_ptr, sums_ptr, tokens, S,
    dquery_b, dquery_s, dquery_h, dkey_b, dkey_s, dkey_h, dvalue_b, dvalue_s, dvalue_h,
    rank_stride,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr,
    QUERY_LANES: tl.constexpr, KEY_LANES: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    RANKS: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = triton.next_power_of_2(Q // 2)
    query_first = tl.zeros((QUERY_LANES, half), tl.float32)
    key_first = tl.zeros((KEY_LANES, half), tl.float32)
    query_second, key_second = query_first, key_first
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        angles = token % S * (Q // 2)
        cos, sin = _load_angles(cos_ptr + angles, sin_ptr + angles, Q)
        b, s = tl.cast(token // S, tl.int64), tl.cast(token % S, tl.int64)
        at = tl.cast(token, tl.int64) * (H + 2 * G) * Q
        query = _backward_heads(
            dquery_ptr + b * dquery_b + s * dquery_s, dquery_h, rank_stride,
            qkv_ptr + at, query_weight_ptr, dqkv_ptr + at, cos, sin, query_first, query_second,
            H, QUERY_LANES, Q, NORM, EPS, RANKS,
        )  # fmt: skip
        at += H * Q
        key = _backward_heads(
            dkey_ptr + b * dkey_b + s * dkey_s, dkey_h, rank_stride,
            qkv_ptr + at, key_weight_ptr, dqkv_ptr + at, cos, sin, key_first, key_second,
            G, KEY_LANES, Q, NORM, EPS, RANKS,
        )  # fmt: skip
        if SUMS:
            query_first, query_second = query
            key_first, key_second = key
        dvalue_at = dvalue_ptr + b * dvalue_b + s * dvalue_s
        for done in range(0, G, KEY_LANES):
            value = _load_gradients(dvalue_at, dvalue_h, rank_stride, done, G, RANKS, KEY_LANES, Q)
            _store_halves(dqkv_ptr + at + (G + done) * Q, value, G - done, KEY_LANES, Q)
    if SUMS:
        query_size: tl.constexpr = H * Q if NORM == "full" else Q
        sums_ptr += tl.program_id(0) * (query_size + (G * Q if NORM == "full" else Q))
        full: tl.constexpr = NORM == "full"
        _store_sums(sums_ptr, (query_first, query_second), H, QUERY_LANES, Q, full)
        _store_sums(sums_ptr + query_size, (key_first, key_second), G, KEY_LANES, Q, full)


@define_op(device="default")
def heads_forward(
    qkv_BSM: torch.Tensor,
    cos_SQ: torch.Tensor,
    sin_SQ: torch.Tensor,
    query_weight_N: torch.Tensor | None,
    key_weight_N: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[B, S, H, Q]` and keys `[B, S, G, Q]`, contiguous."""
    B, S, M = qkv_BSM.shape
    Q = M // (heads + 2 * kv_heads)
    query, key = qkv_BSM.new_empty((B, S, heads, Q)), qkv_BSM.new_empty((B, S, kv_heads, Q))
    if query.numel():
        qkv_BSM, weights = qkv_BSM.contiguous(), _weights(query_weight_N, key_weight_N, qkv_BSM)
        args = (qkv_BSM, cos_SQ.contiguous(), sin_SQ.contiguous(), *weights, query, key, S)
        variant = _variant(heads, kv_heads, Q, query_weight_N, key_weight_N, eps)
        launch(heads_forward_kernel, (B * S,), args, **variant)
    return query, key


@define_op(device="default")
def heads_backward(
    dquery_BSHQ: torch.Tensor,
    dkey_BSGQ: torch.Tensor,
    dvalue_BSGQ: torch.Tensor,
    qkv_BSM: torch.Tensor,
    cos_SQ: torch.Tensor,
    sin_SQ: torch.Tensor,
    query_weight_N: torch.Tensor | None,
    key_weight_N: torch.Tensor | None,
    eps: float,
    wants_weights: bool,
) -> list[torch.Tensor]:
    """The gradient of `qkv_BSM`, and if wanted those of the weights, in their dtypes."""
    weights = (query_weight_N, key_weight_N)
    made = _empty_gradients(qkv_BSM.new_empty(qkv_BSM.shape), *weights, wants_weights)
    gradients = [dy if dy.stride(3) == 1 else dy.contiguous()
                 for dy in (dquery_BSHQ, dkey_BSGQ, dvalue_BSGQ)]  # fmt: skip
    strides = [stride for dy in gradients for stride in dy.stride()[:3]]
    (H, Q), G = dquery_BSHQ.shape[2:], dkey_BSGQ.shape[2]
    kinds = {"RANKS": 1, **_variant(H, G, Q, *weights, eps)}
    inputs = (qkv_BSM.contiguous(), cos_SQ.contiguous(), sin_SQ.contiguous())
    _launch_backward(gradients, [*strides, 0], inputs, weights, made, kinds)
    return made


@define_op(device="default")
def heads_by_rank_forward(
    qkv_BSM: torch.Tensor,
    cos_SQ: torch.Tensor,
    sin_SQ: torch.Tensor,
    query_weight_N: torch.Tensor | None,
    key_weight_N: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    ranks: int,
    eps: float,
) -> torch.Tensor:
    """`[W, B, S, L]`, contiguous."""
    B, S, M = qkv_BSM.shape
    sent = qkv_BSM.new_empty((ranks, B, S, M // ranks))
    if sent.numel():
        qkv_BSM, weights = qkv_BSM.contiguous(), _weights(query_weight_N, key_weight_N, qkv_BSM)
        tensors = (qkv_BSM, cos_SQ.contiguous(), sin_SQ.contiguous(), *weights, sent)
        Q = M // (heads + 2 * kv_heads)
        variant = _variant(heads, kv_heads, Q, query_weight_N, key_weight_N, eps)
        args = (*tensors, S, sent.stride(0))
        launch(heads_by_rank_forward_kernel, (B * S,), args, RANKS=ranks, **variant)
    return sent


@define_op(device="default")
def heads_by_rank_backward(
    dsent_WBSL: torch.Tensor,
    qkv_BSM: torch.Tensor | None,
    cos_SQ: torch.Tensor,
    sin_SQ: torch.Tensor,
    query_weight_N: torch.Tensor | None,
    key_weight_N: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    eps: float,
    wants_weights: bool,
) -> list[torch.Tensor]:
    """The gradients that `heads_backward` returns. `qkv_BSM` is read where there are norms."""
    (W, B, S, L), dsent_WBSL = dsent_WBSL.shape, dsent_WBSL.contiguous()
    weights, Q = (query_weight_N, key_weight_N), W * L // (heads + 2 * kv_heads)
    dqkv = dsent_WBSL.new_empty((B, S, W * L))
    made = _empty_gradients(dqkv, *weights, wants_weights)
    starts = (0, heads * Q // W, (heads + kv_heads) * Q // W)
    gradients = [dsent_WBSL[..., start:] for start in starts]
    kinds = {"RANKS": W, **_variant(heads, kv_heads, Q, *weights, eps)}
    qkv_BSM = dqkv if qkv_BSM is None else qkv_BSM.contiguous()
    inputs = (qkv_BSM, cos_SQ.contiguous(), sin_SQ.contiguous())
    strides = [S * L, L, Q] * 3 + [B * S * L]
    _launch_backward(gradients, strides, inputs, weights, made, kinds)
    return made


@torch.library.register_fake("moe_graphs::heads_forward")
def _(qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N, heads, kv_heads, eps):
    B, S, M = qkv_BSM.shape
    Q = M // (heads + 2 * kv_heads)
    return qkv_BSM.new_empty((B, S, heads, Q)), qkv_BSM.new_empty((B, S, kv_heads, Q))


@torch.library.register_fake("moe_graphs::heads_backward")
def _(
    dquery, dkey, dvalue, qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N, eps, wants_weights
):
    dqkv = qkv_BSM.new_empty(qkv_BSM.shape)
    return _empty_gradients(dqkv, query_weight_N, key_weight_N, wants_weights)


@torch.library.register_fake("moe_graphs::heads_by_rank_forward")
def _(qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N, heads, kv_heads, ranks, eps):
    B, S, M = qkv_BSM.shape
    return qkv_BSM.new_empty((ranks, B, S, M // ranks))


@torch.library.register_fake("moe_graphs::heads_by_rank_backward")
def _(
    dsent, qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N, heads, kv_heads, eps,
    wants_weights,
):  # fmt: skip
    W, B, S, L = dsent.shape
    dqkv = dsent.new_empty((B, S, W * L))
    return _empty_gradients(dqkv, query_weight_N, key_weight_N, wants_weights)


def _empty_gradients(
    dqkv: torch.Tensor,
    query_weight_N: torch.Tensor | None,
    key_weight_N: torch.Tensor | None,
    wants_weights: bool,
) -> list[torch.Tensor]:
    if not wants_weights:
        return [dqkv]
    return [dqkv, *(w.new_empty(w.shape) for w in (query_weight_N, key_weight_N) if w is not None)]


def _weights(
    query_weight_N: torch.Tensor | None, key_weight_N: torch.Tensor | None, anything: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, or pointers that are not read."""
    if query_weight_N is None or key_weight_N is None:
        return anything, anything
    return query_weight_N.contiguous(), key_weight_N.contiguous()


def _launch_backward(
    gradients: list[torch.Tensor],
    strides: list[int],
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    made: list[torch.Tensor],
    kinds: dict[str, Any],
) -> None:
    """Write `made`. `gradients` begin where their tensors do, and `strides` lead through them."""
    dqkv, wants_weights = made[0], len(made) > 1
    B, S, _ = dqkv.shape
    programs = min(B * S, PROGRAMS) if wants_weights else B * S
    sums = dqkv  # a pointer that is not written to
    if wants_weights:
        width = sum(weight.numel() for weight in made[1:])
        sums = dqkv.new_empty((programs, width), dtype=torch.float32)
    if dqkv.numel():
        tensors = (*inputs, *_weights(*weights, dqkv), dqkv, sums)
        args = (*gradients, *tensors, B * S, S, *strides)
        stages = _stages(kinds, dqkv) if wants_weights else 1
        launch(heads_backward_kernel, (programs,), args, SUMS=wants_weights, STAGES=stages, **kinds)
    if wants_weights:
        add_sums(sums, *made[1:])


def _variant(
    H: int,
    G: int,
    Q: int,
    query_weight_N: torch.Tensor | None,
    key_weight_N: torch.Tensor | None,
    eps: float,
) -> dict[str, Any]:
    """The constants that the kernels are compiled for."""
    norm, columns = "none", 2 * next_power_of_2(Q // 2)
    limit = max(TILE // columns, 1)
    if query_weight_N is not None and key_weight_N is not None:
        norm = "head" if query_weight_N.numel() == key_weight_N.numel() == Q else "full"
    if norm == "full":
        limit = next_power_of_2(max(H, G))
    query_lanes, key_lanes = min(next_power_of_2(H), limit), min(next_power_of_2(G), limit)
    per_warp = NUMBERS_PER_WARP_FULL if norm == "full" else NUMBERS_PER_WARP
    warps = query_lanes * columns // per_warp
    return {
        "H": H, "G": G, "Q": Q, "QUERY_LANES": query_lanes, "KEY_LANES": key_lanes,
        "NORM": norm, "EPS": eps, "num_warps": max(4, min(warps, 16)),
    }  # fmt: skip


def _stages(variant: dict[str, Any], dqkv: torch.Tensor) -> int:
    """The stages of a loop with sums: it loads the next one or two tokens during one's work."""
    element_size = dqkv.element_size()
    tiles = 2 * variant["QUERY_LANES"] + 3 * variant["KEY_LANES"]
    if variant["NORM"] == "full":  # and the weights, of up to four bytes
        tiles += (variant["QUERY_LANES"] + variant["KEY_LANES"]) * 4 // element_size
    in_flight = tiles * 2 * next_power_of_2(variant["Q"] // 2) * element_size
    wanted = 3 if in_flight <= THREE_STAGES else 2 if in_flight <= TWO_STAGES else 1
    return stages_that_fit(dqkv.device, in_flight, wanted)
