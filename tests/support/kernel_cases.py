"""A call of every kernel on the largest blocks it takes, for tests that compile them all.

The calls are those that users' calls lead to: what they choose depends on the GPU. Tensors are the
CPU's, so a call must be compiled only (`compiled.launch_compiler`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_graphs import kernels
from moe_graphs.kernels import fp8
from moe_graphs.kernels.adamw import triton_kernels as adamw_triton
from moe_graphs.kernels.choose_experts import triton_kernels as choose_experts_triton
from moe_graphs.kernels.cross_entropy import triton_kernels as cross_entropy_triton
from moe_graphs.kernels.document_attention import triton_kernels as document_triton
from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton
from moe_graphs.kernels.gemm import launch as gemm
from moe_graphs.kernels.gemm import tile_scheduler
from moe_graphs.kernels.gpu_architectures import architecture_of
from moe_graphs.kernels.heads import triton_kernels as heads_triton
from moe_graphs.kernels.packed_weights import FORMATS
from moe_graphs.kernels.packed_weights import triton_kernels as packed_weights_triton
from moe_graphs.kernels.peer_rows import triton_kernels as peer_rows_triton
from moe_graphs.kernels.permute import triton_kernels as permute_triton
from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton
from moe_graphs.kernels.rotary.triton_kernels import turn_heads
from moe_graphs.kernels.routed_experts import triton_kernels as routed_experts_triton
from moe_graphs.kernels.row_order import triton_kernels as row_order_triton
from moe_graphs.kernels.swiglu import NO_CLAMP, ClampedGate
from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton
from moe_graphs.kernels.transpose import triton_kernels as transpose_triton

BF16, FP32 = torch.bfloat16, torch.float32
PROGRAMS = 132
GATES = (NO_CLAMP, ClampedGate(1.702, 7.0), ClampedGate(1.0, 7.0, 0.0, by_turns=False))


def kernel_cases() -> dict[str, Callable[[], None]]:
    """Name -> calls of the kernels of that name, one after the other."""
    cases = {
        "grouped GEMM, rows": lambda: _rows(1024),
        "grouped GEMM, narrow rows": lambda: _rows(384),
        "grouped GEMM, long sums": lambda: _rows(1024, K=4096),
        "grouped GEMM, rows with LoRA": _rows_with_lora,
        "grouped GEMM, gathered weights": _gathered_weights,
        "grouped GEMM, weights": lambda: _weights(1024),
        "grouped GEMM, narrow weights": lambda: _weights(384),
        "grouped GEMM, fp32": _products_of_fp32,
        "work lists": _work_lists,
        "order of rows": lambda: _order_of_rows(512),
        "permutation": _permutation,
        "SwiGLU": _swiglu,
        "SwiGLU, weighted": _weighted_swiglu,
        "router": lambda: _router(128, 8, 1, 1),
        "router, groups": lambda: _router(512, 8, 8, 4),
        "cross entropy": _cross_entropy,
        "rotary positions": _rotary,
        "transpose": _transpose,
        "attention within documents": _document_attention,
        "AdamW": _adamw,
        "AdamW, states of 8 bits": _adamw_8bit,
        "rows between ranks": _peer_rows,
        "weights in few bits": _packed_weights,
        "FP8, quantisation": _fp8,
        "FP8, columns": _fp8_columns,
        "FP8, products": _fp8_products,
    }
    for norm in ("none", "head", "full"):
        cases[f"heads, norm {norm}"] = lambda norm=norm: _heads(norm)
    for size in (128, 2048, 4096, 8192):
        cases[f"RMS norm, {size}"] = lambda size=size: _rms_norm(size)
        cases[f"RMS norm of a sum, {size}"] = lambda size=size: _add_rms_norm(size)
    return cases


def _offsets(experts: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.int32)


def _rows(columns: int, K: int = 512) -> None:
    """Call products with many rows per expert and with few, for which Hopper has other kernels."""
    for experts in (4, 64):
        x, out = torch.empty(4096, K, dtype=BF16), torch.empty(4096, columns, dtype=BF16)
        for transposed in (False, True):
            shape = (experts, columns, K) if transposed else (experts, K, columns)
            w = torch.empty(shape, dtype=BF16)
            gemm.matmul_rows(x, w, _offsets(experts), transposed=transposed, out=out)


def _rows_with_lora() -> None:
    low, x, out = (torch.empty(4096, width, dtype=BF16) for width in (16, 512, 1024))
    for experts, transposed in ((4, False), (64, True)):
        pairs = []
        for rows in (x, low):
            shape = (experts, rows.shape[1], 1024)
            w = torch.empty(shape, dtype=BF16)
            pairs.append((rows, w.view(experts, 1024, -1) if transposed else w))
        gemm.matmul_rows(
            *pairs[0], _offsets(experts), transposed=transposed, out=out, beside=pairs[1]
        )


def _gathered_weights() -> None:
    hidden, order = torch.empty(512, 512, dtype=BF16), torch.zeros(4096, dtype=torch.int64)
    for rank, transposed in ((16, True), (64, False)):
        grad = torch.empty(4096, rank, dtype=BF16)
        gemm.matmul_weights_gathered(hidden, order, 8, grad, _offsets(8), transposed=transposed)


def _weights(columns: int) -> None:
    for experts in (4, 8):  # 1024 rows per expert, or 512
        x, dy = torch.empty(4096, 512, dtype=BF16), torch.empty(4096, columns, dtype=BF16)
        for dtype, add in ((BF16, False), (FP32, False), (FP32, True)):
            dw = torch.empty(experts, 512, columns, dtype=dtype)
            gemm.matmul_weights(x, dy, _offsets(experts), out=dw, accumulate=add)


def _products_of_fp32() -> None:
    x, dy, dw = torch.empty(512, 256), torch.empty(512, 384), torch.empty(8, 256, 384)
    for transposed in (False, True):
        w = torch.empty((8, 384, 256) if transposed else (8, 256, 384))
        gemm.matmul_rows(x, w, _offsets(8), transposed=transposed, out=dy)
    for add in (False, True):
        gemm.matmul_weights(x, dy, _offsets(8), out=dw, accumulate=add)


def _work_lists() -> None:
    offsets = _offsets(1024)
    tail = tile_scheduler.LastRound(16, 64, PROGRAMS)
    rows = tile_scheduler.row_tiles(offsets, 4096, 128, tail)
    tile_scheduler.add_cut_tiles_(
        torch.empty(64, 512, dtype=BF16), torch.empty(PROGRAMS, 128, 256), rows, tail
    )
    order = tile_scheduler.expert_order(offsets, skip_empty=True, limit=512)
    tile_scheduler.add_partials_(torch.empty(8, 64, 64), torch.empty(4, 64, 64), order, True)
    tile_scheduler.zero_tail_(torch.empty(64, 512, dtype=BF16), offsets)


def _order_of_rows(experts: int) -> None:
    row_order_triton.sort_pairs(torch.zeros(16384, 8, dtype=torch.int64), experts)


def _permutation() -> None:
    inverse, weights = torch.zeros(64, 8, dtype=torch.int64), torch.zeros(64, 8)
    for dtype in (BF16, FP32):
        hidden, rows = torch.empty(64, 8192, dtype=dtype), torch.empty(512, 8192, dtype=dtype)
        for given in (weights, None):
            permute_triton.spread_rows(hidden, inverse, given, 512, False)
            permute_triton.collect_rows(rows, inverse, given)
        permute_triton.dot_rows(rows, inverse, hidden)


def _swiglu() -> None:
    for dtype in (BF16, FP32):
        rows = torch.empty(512, 2880, dtype=dtype)
        for gate in GATES:
            swiglu_triton.swiglu_forward(rows, *gate)
        for with_result in (True, False):
            swiglu_triton.swiglu_backward(rows, rows[:, :1440], with_result)


def _weighted_swiglu() -> None:
    order, weights = torch.zeros(512, dtype=torch.int64), torch.empty(64, 8)
    for dtype in (BF16, FP32):
        rows = torch.empty(512, 2880, dtype=dtype)
        for gate in GATES:
            routed_experts_triton.weighted_swiglu(rows, weights, order, *gate)
            for with_result in (True, False):
                routed_experts_triton.weighted_swiglu_backward(
                    rows,
                    rows[:, :1440].contiguous(),
                    weights,
                    order,
                    rows,
                    False,
                    with_result,
                    *gate,
                )


def _router(experts: int, top_k: int, groups: int, top_groups: int) -> None:
    logits, weights = torch.empty(64, experts), torch.empty(64, top_k)
    chosen, counts = torch.zeros(64, top_k, dtype=torch.int16), torch.zeros(experts).long()
    rule = kernels.RoutingRule(top_k, groups > 1, True, 2.5, groups, top_groups, 0.01, 0.01)
    choose_experts_triton.choose_experts(logits, torch.empty(experts), *rule)
    choose_experts_triton.choose_experts(logits, None, *rule, chosen.long())
    given = (logits, chosen, counts, weights, torch.zeros(()), True)
    choose_experts_triton.choose_experts_backward(*given, *rule[:4], 0.01, 0.01)


def _cross_entropy() -> None:
    targets = torch.zeros(4, dtype=torch.int64)
    for dtype in (BF16, FP32):
        logits = torch.empty(4, 151936, dtype=dtype)
        cross_entropy_triton.scaled(logits, torch.zeros(()), BF16)
        losses, logsumexp = cross_entropy_triton.cross_entropy_rows(logits, targets, -100)
        mean, count = cross_entropy_triton.mean_of_counted(losses, targets, -100)
        for divisor in (count, None):
            cross_entropy_triton.cross_entropy_backward(
                logits, targets, logsumexp, mean, divisor, -100
            )
        rule = kernels.LossRule(logit_cap=30.0).numbers(logits.shape[1])
        cross_entropy_triton.cross_entropy_rows_by_rule(logits, targets, -100, rule)
        cross_entropy_triton.cross_entropy_backward(
            logits, targets, logsumexp, mean, None, -100, part=True, rule=rule
        )


def _transpose() -> None:
    for dtype in (BF16, FP32):
        other = FP32 if dtype == BF16 else BF16
        transpose_triton.transpose(torch.empty(4096, 128, dtype=dtype), 2.0,
                                   torch.empty(128, 4096, dtype=other))  # fmt: skip


def _rotary() -> None:
    for dtype, columns in ((BF16, 128), (FP32, 64)):
        query, key = (torch.empty(2, 64, n, 128, dtype=dtype) for n in (64, 8))
        table = torch.empty(1, 64, columns, dtype=dtype)
        for back in (False, True):
            turn_heads(query.transpose(1, 2), key.transpose(1, 2), table, table, back)


def _document_attention() -> None:
    for heads, kv_heads, *sizes in ((32, 4, 128, 128), (16, 16, 192, 128), (8, 2, 256, 256)):
        counts = (heads, kv_heads, kv_heads)
        given = [
            torch.empty(1, 64, count, size, dtype=BF16).transpose(1, 2)
            for count, size in zip(counts, (sizes[0], *sizes), strict=True)
        ]
        bounds = document_triton.document_bounds(torch.zeros(1, 64, dtype=torch.int64))
        out, logsumexp = document_triton.attend_forward(*given, bounds, 0.1)
        document_triton.attend_backward(out, *given, bounds, out, logsumexp, 0.1)


def _heads(norm: str) -> None:
    for dtype, heads, kv_heads, size in ((BF16, 32, 4, 128), (FP32, 64, 8, 64)):
        qkv = torch.empty(2, 64, (heads + 2 * kv_heads) * size, dtype=dtype)
        table, counts = torch.empty(64, size // 2), (heads, kv_heads)
        spans = {"none": None, "head": (1, 1), "full": counts}[norm]
        weights = [None if spans is None else torch.empty(span * size) for span in spans or "ab"]
        grads = [torch.empty(2, n, 64, size, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
        grads = [dy.transpose(1, 2) for dy in grads]
        heads_triton.heads_forward(qkv, table, table, *weights, *counts, 1e-5)
        for wanted in {norm != "none", False}:
            heads_triton.heads_backward(*grads, qkv, table, table, *weights, 1e-5, wanted)
        sent = heads_triton.heads_by_rank_forward(qkv, table, table, *weights, *counts, 2, 1e-5)
        given = (sent, None if norm == "none" else qkv, table, table, *weights, *counts, 1e-5)
        heads_triton.heads_by_rank_backward(*given, norm != "none")


def _rms_norm(size: int) -> None:
    for dtype in (BF16, FP32):
        x = torch.empty(64, size, dtype=dtype)
        for weight in {torch.empty(size, dtype=kind) for kind in {dtype, FP32}}:
            rms_norm_triton.rms_norm_forward(x, weight, 1e-6, True)
            for wanted in (True, False):
                rms_norm_triton.rms_norm_backward(x, x, weight, 1e-6, True, wanted)


def _add_rms_norm(size: int) -> None:
    for dtype, update_dtype in ((BF16, BF16), (FP32, BF16), (FP32, FP32)):
        x, update = torch.empty(64, size, dtype=dtype), torch.empty(64, size, dtype=update_dtype)
        for gradient in {dtype, FP32}:  # of the sum, and of its norm
            weight, dy = torch.empty(size, dtype=dtype), torch.empty(64, size, dtype=gradient)
            rms_norm_triton.add_rms_norm_forward(x, update, weight, 1e-6, False)
            for wanted in (True, False):
                rms_norm_triton.rms_norm_backward(dy, x, weight, 1e-6, False, wanted, x)


def _adamw() -> None:
    for dtype, states, of_gradients in ((BF16, BF16, BF16), (FP32, FP32, FP32), (BF16, FP32, FP32)):
        p, m, v, g = (
            torch.empty(1 << 16, dtype=kind) for kind in (dtype, states, states, of_gradients)
        )
        options = (0.1, None, 0.9, 0.999, 1e-8, 0.01, False, None, None, None, [], 0.0)
        rounded = dtype == BF16
        keys = [1 << 62] if rounded else []
        given = ([p], [g], [m], [v], [torch.ones(())])
        adamw_triton.adamw_update(*given, *options, keys, [], [], rounded)


def _adamw_8bit() -> None:
    p, g = (torch.empty(1 << 16, dtype=BF16) for _ in range(2))
    m, v = (torch.empty(1 << 16, dtype=torch.uint8) for _ in range(2))
    scales = [torch.empty((1 << 16) // adamw_triton.NUMBERS, dtype=torch.uint8) for _ in range(2)]
    options = (0.1, None, 0.9, 0.999, 1e-8, 0.01, False, None, None, None, [], 0.0, [1 << 62])
    given = ([p], [g], [m], [v], [torch.ones(())])
    adamw_triton.adamw_update(*given, *options, *([scale] for scale in scales), True)


def _peer_rows() -> None:
    for dtype in (BF16, FP32):
        source, experts = torch.empty(64, 8192, dtype=dtype), torch.zeros(64, 8).long()
        weights, where = torch.empty(64, 8), torch.zeros(3, 8, dtype=torch.int64)
        peer_rows_triton.push_rows(source, experts, weights, where, 0, 4)
        peer_rows_triton.pull_rows(source, weights, experts, where, 0, 4)


def _packed_weights() -> None:
    for kind in FORMATS.values():
        shapes = kind.packed_shapes((2, 256, 256))
        pairs = zip(shapes, kind.dtypes, strict=True)
        stored = [torch.empty(shape, dtype=dtype) for shape, dtype in pairs]
        for dtype in (BF16, FP32):
            out = torch.empty(2, 256, 256, dtype=dtype)
            packed_weights_triton.unpack(kind, stored, out)


def _fp8() -> None:
    """Hopper's alone."""
    if not _has_fp8():
        return
    rows, hidden = torch.empty(512, 1536, dtype=BF16), torch.empty(64, 7168, dtype=BF16)
    inverse, order = torch.zeros(64, 8, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    for powers in (False, True):
        fp8_triton.fp8_quantize(rows, powers)
        weights = torch.empty(64, 8)
        fp8_triton.fp8_swiglu(rows, powers)
        for result in ("none", "values", "codes"):
            fp8_triton.fp8_weighted_swiglu_backward(
                rows, rows[:, :768], weights, order, False, result, powers
            )
        for wanted in (False, True):
            fp8_triton.fp8_spread(hidden, inverse, 512, False, wanted, powers)
            for dtype in (BF16, FP32):
                fp8_triton.fp8_weights(torch.empty(4, 256, 512, dtype=dtype), True, wanted, powers)


def _fp8_columns() -> None:
    if not _has_fp8():
        return
    order = torch.zeros(512, dtype=torch.int32)
    for sources, order_R in ((512, None), (64, order)):
        codes = torch.zeros(sources, 7168, dtype=torch.uint8).view(torch.float8_e4m3fn)
        for spread in (False, order_R is not None):
            given = codes, torch.empty(56, sources), order_R, _offsets(4), 512, 8, spread
            fp8_triton.columns(*given, fp8._columns_like(*given[:2], _offsets(4), 512, spread))


def _fp8_products() -> None:
    if not _has_fp8():
        return
    for columns in (1024, 384):
        codes = [torch.zeros(s, dtype=torch.uint8) for s in ((4096, 512), (4, columns, 512))]
        x, w = (code.view(torch.float8_e4m3fn) for code in codes)
        scales = torch.empty(4, 4096), torch.empty(4, columns // 128, 4)
        gemm.matmul_rows_fp8(x, scales[0], w, scales[1], _offsets(4), BF16)
        given = x, torch.empty(32, 4), w[0], torch.empty(columns // 128, 4)
        gemm.matmul_weights_fp8(*given, _offsets(4), 512, BF16)


def _has_fp8() -> bool:
    return "fp8" in architecture_of(torch.device("cpu")).gemms
