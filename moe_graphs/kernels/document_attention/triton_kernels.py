"""Flash attention (arXiv 2307.08691) within documents whose bounds are read on the device.

The documents of a row lie one behind the other, so the keys that a tile of queries sees are one
range: from the begin of its first query's document to its last query. A loop over that range needs
no number of documents. Masks are needed at both ends of it only.

    p = exp2(q k * scale * log2(e) - logsumexp),    o = p v
    delta = sum(do * o),    ds = p * (do v - delta),    dq = ds k,    dk = ds q,    dv = p do

One kernel gives delta and dq, by tiles of queries; one gives dk and dv, by tiles of keys, and adds
over the query heads of a kv head in order. So there are no atomics.

B batch, S sequence, H query heads, G kv heads, Q head dim, V head dim of values.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.gpu_architectures import architecture_of
from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

LOG2_E = 1.4426950408889634
BOUNDS_TILE = 4096
# Tiles of queries and keys, stages, warps. The first two rows are for Hopper and newer GPUs with
# 160 KiB of shared memory for a block, the others for all. Each second row is for wider heads.
Tiles = tuple[int, int, int, int]
FORWARD: tuple[Tiles, ...] = ((128, 64, 3, 8), (128, 64, 2, 8), (64, 32, 2, 4), (32, 32, 2, 4))
OF_QUERIES: tuple[Tiles, ...] = ((128, 64, 3, 8), (128, 32, 2, 8), (64, 32, 2, 4), (32, 32, 1, 4))
OF_KEYS: tuple[Tiles, ...] = ((32, 128, 3, 8), (32, 64, 2, 8), (32, 64, 2, 4), (32, 32, 1, 4))
HOPPER, LARGE_SHARED = 90, 160 * 1024
NARROW, WIDE = 256, 384  # columns of a query and a value together


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["S", "ends"])
def document_bounds_kernel(ids_ptr, bounds_ptr, S, ends, ids_b, ids_s, TILE: tl.constexpr):
    """Write where the document of each token begins, and behind them where it ends."""
    b = tl.program_id(0).to(tl.int64)
    ids_ptr += b * ids_b
    bounds_ptr += b * S
    tiles = tl.cdiv(S, TILE)
    begin = 0
    for tile in range(0, tiles):
        place = tile * TILE + tl.arange(0, TILE)
        at = ids_ptr + place.to(tl.int64) * ids_s
        inside = (place > 0) & (place < S)
        here = tl.load(at, mask=inside, other=0)
        before = tl.load(at - ids_s, mask=inside, other=0)
        begins = tl.associative_scan(tl.where(here != before, place, 0), 0, _larger)
        begins = tl.maximum(begins, begin)
        tl.store(bounds_ptr + place, begins, mask=place < S)
        begin = tl.max(begins, 0)
    end = S
    for tile in range(0, tiles):
        place = (tiles - 1 - tile) * TILE + tl.arange(0, TILE)
        at = ids_ptr + place.to(tl.int64) * ids_s
        inside = place < S - 1
        here = tl.load(at, mask=inside, other=0)
        behind = tl.load(at + ids_s, mask=inside, other=0)
        last = tl.where(here != behind, place + 1, S)
        last = tl.minimum(tl.associative_scan(last, 0, _smaller, reverse=True), end)
        tl.store(bounds_ptr + ends + place, last, mask=place < S)
        end = tl.min(last, 0)


@triton.jit
def _load_rows(ptr, row, stride, column, S, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Load rows [rows, columns]; those behind S and columns behind WIDTH are 0."""
    at = ptr + row[:, None] * stride + column[None, :]
    if WHOLE:
        return tl.load(at, mask=(row < S)[:, None], other=0.0)
    return tl.load(at, mask=(row < S)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _ranges(begins_ptr, tile, S, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Find the keys of a tile of queries: masked from the first, not from the second, to the third.

    Keys from the third on are masked again, up to the fourth.
    """
    end = tl.minimum(tile * QUERIES + QUERIES, S)
    first = tl.load(begins_ptr + tile * QUERIES) // KEYS * KEYS
    diagonal = tile * QUERIES // KEYS * KEYS
    whole = tl.minimum(tl.cdiv(tl.load(begins_ptr + end - 1), KEYS) * KEYS, diagonal)
    return first, whole, diagonal, end


@triton.jit
def _attend(
    sums, high, total, q, k_ptr, v_ptr, k_s, v_s, row, begin, first, end, S, scale,
    Q: tl.constexpr, V: tl.constexpr, WIDE_Q: tl.constexpr, WIDE_V: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the values of a range of keys, weighted by exp2(score - high)."""
    column_q, column_v = tl.arange(0, WIDE_Q), tl.arange(0, WIDE_V)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k = _load_rows(k_ptr, key, k_s, column_q, S, Q, Q == WIDE_Q)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            seen = (key[None, :] <= row[:, None]) & (key[None, :] >= begin[:, None])
            # A row that sees none of these keys adds them by 1, and then multiplies by 0.
            score = tl.where(seen, score, -1e30)
        higher = tl.maximum(high, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        shrunk = tl.exp2(high - higher)
        total = total * shrunk + tl.sum(p, 1)
        v = _load_rows(v_ptr, key, v_s, column_v, S, V, V == WIDE_V)
        sums = tl.dot(p.to(v.dtype), v, sums * shrunk[:, None], input_precision="ieee")
        high = higher
    return sums, high, total


@triton.jit(do_not_specialize=["S"])
def document_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp_ptr, bounds_ptr, S, scale,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, V: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_V: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest ranges first
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    g = h // (H // G)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + g * k_h
    v_ptr += b * v_b + g * v_h
    bounds_ptr += b * S
    row = tile * QUERIES + tl.arange(0, QUERIES)
    column_v = tl.arange(0, WIDE_V)
    q = _load_rows(q_ptr, row, q_s, tl.arange(0, WIDE_Q), S, Q, Q == WIDE_Q)
    begin = tl.load(bounds_ptr + row, mask=row < S, other=S)
    first, whole, diagonal, end = _ranges(bounds_ptr, tile, S, QUERIES, KEYS)
    sums = tl.zeros((QUERIES, WIDE_V), tl.float32)
    high = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums, high, total = _attend(
        sums, high, total, q, k_ptr, v_ptr, k_s, v_s, row, begin, first, whole, S, scale,
        Q, V, WIDE_Q, WIDE_V, KEYS, True,
    )  # fmt: skip
    sums, high, total = _attend(
        sums, high, total, q, k_ptr, v_ptr, k_s, v_s, row, begin, whole, diagonal, S, scale,
        Q, V, WIDE_Q, WIDE_V, KEYS, False,
    )  # fmt: skip
    sums, high, total = _attend(
        sums, high, total, q, k_ptr, v_ptr, k_s, v_s, row, begin, diagonal, end, S, scale,
        Q, V, WIDE_Q, WIDE_V, KEYS, True,
    )  # fmt: skip
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    at = out_ptr + b * out_b + h * out_h + row[:, None] * out_s + column_v[None, :]
    tl.store(at, out, mask=(row < S)[:, None] & (column_v < V)[None, :])
    logsumexp_ptr += tl.program_id(1).to(tl.int64) * S
    tl.store(logsumexp_ptr + row, high + tl.log2(total), mask=row < S)


@triton.jit
def _add_query_gradient(
    dq, q, do, delta, logsumexp, k_ptr, v_ptr, k_s, v_s, row, begin, first, end, S, scale,
    Q: tl.constexpr, V: tl.constexpr, WIDE_Q: tl.constexpr, WIDE_V: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    column_q, column_v = tl.arange(0, WIDE_Q), tl.arange(0, WIDE_V)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k = _load_rows(k_ptr, key, k_s, column_q, S, Q, Q == WIDE_Q)
        v = _load_rows(v_ptr, key, v_s, column_v, S, V, V == WIDE_V)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        p = tl.exp2(score - logsumexp[:, None])
        if MASKED:
            seen = (key[None, :] <= row[:, None]) & (key[None, :] >= begin[:, None])
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["S"])
def document_query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, out_ptr, logsumexp_ptr, delta_ptr, bounds_ptr, dq_ptr,
    S, scale, factor,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, out_b, out_h, out_s,
    dq_b, dq_h, dq_s,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, V: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_V: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    g = h // (H // G)
    k_ptr += b * k_b + g * k_h
    v_ptr += b * v_b + g * v_h
    bounds_ptr += b * S
    of_head = tl.program_id(1).to(tl.int64) * S
    row = tile * QUERIES + tl.arange(0, QUERIES)
    column_q, column_v = tl.arange(0, WIDE_Q), tl.arange(0, WIDE_V)
    do = _load_rows(do_ptr + b * do_b + h * do_h, row, do_s, column_v, S, V, V == WIDE_V)
    out = _load_rows(out_ptr + b * out_b + h * out_h, row, out_s, column_v, S, V, V == WIDE_V)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + of_head + row, delta, mask=row < S)
    q = _load_rows(q_ptr + b * q_b + h * q_h, row, q_s, column_q, S, Q, Q == WIDE_Q)
    logsumexp = tl.load(logsumexp_ptr + of_head + row, mask=row < S, other=0.0)
    begin = tl.load(bounds_ptr + row, mask=row < S, other=S)
    first, whole, diagonal, end = _ranges(bounds_ptr, tile, S, QUERIES, KEYS)
    dq = tl.zeros((QUERIES, WIDE_Q), tl.float32)
    dq = _add_query_gradient(
        dq, q, do, delta, logsumexp, k_ptr, v_ptr, k_s, v_s, row, begin, first, whole, S, scale,
        Q, V, WIDE_Q, WIDE_V, KEYS, True,
    )  # fmt: skip
    dq = _add_query_gradient(
        dq, q, do, delta, logsumexp, k_ptr, v_ptr, k_s, v_s, row, begin, whole, diagonal, S, scale,
        Q, V, WIDE_Q, WIDE_V, KEYS, False,
    )  # fmt: skip
    dq = _add_query_gradient(
        dq, q, do, delta, logsumexp, k_ptr, v_ptr, k_s, v_s, row, begin, diagonal, end, S, scale,
        Q, V, WIDE_Q, WIDE_V, KEYS, True,
    )  # fmt: skip
    at = dq_ptr + b * dq_b + h * dq_h + row[:, None] * dq_s + column_q[None, :]
    live = (row < S)[:, None] & (column_q < Q)[None, :]
    tl.store(at, (dq * factor).to(dq_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["S", "ends"])
def document_key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, logsumexp_ptr, delta_ptr, bounds_ptr, dk_ptr, dv_ptr,
    S, ends, scale, factor,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dk_b, dk_h, dk_s,
    dv_b, dv_h, dv_s,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, V: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_V: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)  # the longest ranges first
    b, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    first_head = g * (H // G)
    q_ptr += b * q_b + first_head * q_h
    do_ptr += b * do_b + first_head * do_h
    of_head = (b * H + first_head) * S
    bounds_ptr += b * S
    key = tile * KEYS + tl.arange(0, KEYS)
    column_q, column_v = tl.arange(0, WIDE_Q), tl.arange(0, WIDE_V)
    k = _load_rows(k_ptr + b * k_b + g * k_h, key, k_s, column_q, S, Q, Q == WIDE_Q)
    v = _load_rows(v_ptr + b * v_b + g * v_h, key, v_s, column_v, S, V, V == WIDE_V)
    last = tl.minimum(tile * KEYS + KEYS, S) - 1
    first = tile * KEYS // QUERIES
    count = tl.cdiv(tl.load(bounds_ptr + ends + last), QUERIES) - first
    dk = tl.zeros((KEYS, WIDE_Q), tl.float32)
    dv = tl.zeros((KEYS, WIDE_V), tl.float32)
    for step in range(0, count * (H // G)):
        h = step // count
        row = (first + step % count) * QUERIES + tl.arange(0, QUERIES)
        q = _load_rows(q_ptr + h * q_h, row, q_s, column_q, S, Q, Q == WIDE_Q)
        do = _load_rows(do_ptr + h * do_h, row, do_s, column_v, S, V, V == WIDE_V)
        at = of_head + h * S + row
        logsumexp = tl.load(logsumexp_ptr + at, mask=row < S, other=0.0)
        delta = tl.load(delta_ptr + at, mask=row < S, other=0.0)
        begin = tl.load(bounds_ptr + row, mask=row < S, other=S)  # rows behind S see no key
        score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        seen = (key[:, None] <= row[None, :]) & (key[:, None] >= begin[None, :])
        p = tl.where(seen, tl.exp2(score - logsumexp[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    live = (key < S)[:, None]
    at = dk_ptr + b * dk_b + g * dk_h + key[:, None] * dk_s + column_q[None, :]
    dk = (dk * factor).to(dk_ptr.dtype.element_ty)
    tl.store(at, dk, mask=live & (column_q < Q)[None, :])
    at = dv_ptr + b * dv_b + g * dv_h + key[:, None] * dv_s + column_v[None, :]
    tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=live & (column_v < V)[None, :])


@define_op(device="default")
def document_bounds(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Find begins and ends of the documents of tokens, within rows: int32 ``[2, B, S]``."""
    B, S = document_ids_BS.shape
    bounds_2BS = document_ids_BS.new_empty((2, B, S), dtype=torch.int32)
    args = (document_ids_BS, bounds_2BS, S, B * S, *document_ids_BS.stride())
    launch(document_bounds_kernel, (B,), args, TILE=BOUNDS_TILE, num_warps=16)
    return bounds_2BS


@torch.library.register_fake("moe_graphs::document_bounds")
def _(document_ids_BS):
    return document_ids_BS.new_empty((2, *document_ids_BS.shape), dtype=torch.int32)


@define_op(device="default")
def attend_forward(
    query_BHSQ: torch.Tensor,
    key_BGSQ: torch.Tensor,
    value_BGSV: torch.Tensor,
    bounds_2BS: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend: the output, which lies as ``[B, S, H, V]``, and sums in powers of two, fp32."""
    (B, H, S, _), V = query_BHSQ.shape, value_BGSV.shape[3]
    out, logsumexp_BHS = _empty(query_BHSQ, V), _fp32(query_BHSQ)
    given = [_with_rows(x) for x in (query_BHSQ, key_BGSQ, value_BGSV)]
    args = (*given, out, logsumexp_BHS, bounds_2BS, S, scale * LOG2_E, *_strides(*given, out))
    variant = _variant(FORWARD, query_BHSQ, key_BGSQ, V)
    launch(document_forward_kernel, (cdiv(S, variant["QUERIES"]), B * H), args, **variant)
    return out, logsumexp_BHS


@torch.library.register_fake("moe_graphs::attend_forward")
def _(query_BHSQ, key_BGSQ, value_BGSV, bounds_2BS, scale):
    return _empty(query_BHSQ, value_BGSV.shape[3]), _fp32(query_BHSQ)


@define_op(device="default")
def attend_backward(
    grad_BHSV: torch.Tensor,
    query_BHSQ: torch.Tensor,
    key_BGSQ: torch.Tensor,
    value_BGSV: torch.Tensor,
    bounds_2BS: torch.Tensor,
    output_BHSV: torch.Tensor,
    logsumexp_BHS: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, which lie as ``[B, S, heads, head dim]``."""
    (B, H, S, _), (G, V) = query_BHSQ.shape, value_BGSV.shape[1::2]
    dq, dk, dv = (_empty(x, x.shape[3]) for x in (query_BHSQ, key_BGSQ, value_BGSV))
    given = [_with_rows(x) for x in (query_BHSQ, key_BGSQ, value_BGSV, grad_BHSV)]
    delta_BHS, of_scores = _fp32(query_BHSQ), scale * LOG2_E
    variant = _variant(OF_QUERIES, query_BHSQ, key_BGSQ, V)
    args = (
        *given, output_BHSV, logsumexp_BHS, delta_BHS, bounds_2BS, dq, S, of_scores, scale,
        *_strides(*given, output_BHSV, dq),
    )  # fmt: skip
    launch(document_query_gradient_kernel, (cdiv(S, variant["QUERIES"]), B * H), args, **variant)
    variant = _variant(OF_KEYS, query_BHSQ, key_BGSQ, V)
    args = (
        *given, logsumexp_BHS, delta_BHS, bounds_2BS, dk, dv, S, B * S, of_scores, scale,
        *_strides(*given, dk, dv),
    )  # fmt: skip
    launch(document_key_gradient_kernel, (cdiv(S, variant["KEYS"]), B * G), args, **variant)
    return dq, dk, dv


@torch.library.register_fake("moe_graphs::attend_backward")
def _(grad_BHSV, query_BHSQ, key_BGSQ, value_BGSV, bounds_2BS, output_BHSV, logsumexp_BHS, scale):
    return tuple(_empty(x, x.shape[3]) for x in (query_BHSQ, key_BGSQ, value_BGSV))


def _empty(x: torch.Tensor, width: int) -> torch.Tensor:
    B, heads, S, _ = x.shape
    return x.new_empty((B, S, heads, width)).transpose(1, 2)


def _fp32(query_BHSQ: torch.Tensor) -> torch.Tensor:
    return query_BHSQ.new_empty(query_BHSQ.shape[:3], dtype=torch.float32)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _strides(*given: torch.Tensor) -> list[int]:
    return [stride for x in given for stride in x.stride()[:3]]


def _variant(
    rows: tuple[Tiles, ...], query_BHSQ: torch.Tensor, key_BGSQ: torch.Tensor, V: int
) -> dict[str, Any]:
    """The constants that a kernel is compiled for."""
    H, Q = query_BHSQ.shape[1::2]
    wide_q, wide_v = (max(16, next_power_of_2(size)) for size in (Q, V))
    gpu, width = architecture_of(query_BHSQ.device), wide_q + wide_v
    is_large = gpu.number >= HOPPER and gpu.shared >= LARGE_SHARED and width <= WIDE
    queries, keys, stages, warps = rows[2 * (not is_large) + (width > NARROW)]
    return {
        "H": H, "G": key_BGSQ.shape[1], "Q": Q, "V": V, "WIDE_Q": wide_q, "WIDE_V": wide_v,
        "QUERIES": queries, "KEYS": keys, "num_stages": stages, "num_warps": warps,
    }  # fmt: skip
