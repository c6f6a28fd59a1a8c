"""Codes and scales in FP8, written where the values are made.

    quantize    codes of rows
    spread      codes of every token in its K rows, and the rows themselves if they are wanted
    swiglu      codes of silu(gate) * up
    backward    gradients of the weighted SwiGLU (as in `routed_experts`), and codes of dx
    weights     codes of blocks of 128x128, as the weight lies, transposed, or both

Products that add up rows want codes of transposed rows, in blocks of 128 rows of one expert by 128
columns:

    columns     codes of columns from codes of rows, whose scales are powers of two

Codes are those of the values as they are rounded to the rows' dtype, so a kernel here has the bits
of the op in bf16 with `quantize` behind it. A block is BLOCK numbers of a row; its tile of a
program has whole blocks. Scales of rows lie block by block, [K / BLOCK, R], as the product reads
them.

R rows, D model, F ffn, T tokens, K top-k, E experts, P rows of experts that each begin at a
multiple of 128.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.fp8.reference import CODE
from moe_graphs.kernels.fp8.reference import LARGEST as LARGEST_OF_E4M3
from moe_graphs.kernels.fp8.reference import SMALLEST as SMALLEST_SCALE
from moe_graphs.kernels.fp8.reference import TINY as TINY_BLOCK
from moe_graphs.kernels.gemm.tile_scheduler import (
    COUNT_RECORDS,
    ROW_END,
    ROW_FIRST_TILE,
    ROW_RECORD,
    ROW_START,
    row_tiles,
)
from moe_graphs.kernels.gpu_architectures import architecture_of
from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.routed_experts.triton_kernels import gradients_of_tile, rows_of_program
from moe_graphs.kernels.swiglu.triton_kernels import gate_and_up_at, gated

BLOCK = tl.constexpr(128)
WORDS = tl.constexpr(32)  # of four rows' codes each, in a column of a block
LARGEST, TINY = tl.constexpr(LARGEST_OF_E4M3), tl.constexpr(TINY_BLOCK)
SMALLEST = tl.constexpr(SMALLEST_SCALE)
INFINITY = tl.constexpr(0x7F800000)  # its bits
ROWS = 16  # of a program's tile, one block wide
ROWS_OF_BACKWARD = 4  # of a program of one warp
WARPS = 8  # for a block of 128x128 of a weight
WARPS_OF_COLUMNS = 4
WIDEST = 2048  # numbers of a token that a program of four warps has in flight

# Bytes 0 to 3 of $4 to $7, column by column.
FOUR_BY_FOUR = tl.constexpr("""{
    .reg .b32 low, low2, high, high2;
    prmt.b32 low, $4, $5, 0x5140;
    prmt.b32 low2, $6, $7, 0x5140;
    prmt.b32 high, $4, $5, 0x7362;
    prmt.b32 high2, $6, $7, 0x7362;
    prmt.b32 $0, low, low2, 0x5410;
    prmt.b32 $1, low, low2, 0x7632;
    prmt.b32 $2, high, high2, 0x5410;
    prmt.b32 $3, high, high2, 0x7632;
}""")

# Two numbers, rounded to bf16.
ROUND_TWO = tl.constexpr("""{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xffff0000;
}""")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Numbers of fp32 as `dtype` has them, in fp32.

    The compiler converts numbers to bf16 one by one where nothing is stored, at an eighth of the
    rate.
    """
    if dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            ROUND_TWO, "=f,=f,f,f", (x,), dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def factor_and_scale(largest, POWERS: tl.constexpr):
    """`reference.factors`."""
    largest = tl.maximum(largest, TINY)
    if POWERS:  # without a division: 448 is 1.75 * 2^8, so what is above 1.75 is carried
        bits = largest.to(tl.int32, bitcast=True)
        power = ((bits + 0x1FFFFF) >> 23) - 8
        scale = tl.where(bits < INFINITY, power << 23, INFINITY).to(tl.float32, bitcast=True)
        factor = tl.where(bits < INFINITY, (254 - power) << 23, 0).to(tl.float32, bitcast=True)
    else:
        factor = tl.math.div_rn(1.0, largest) * LARGEST
        scale = tl.math.div_rn(1.0, factor)
    return factor, scale


@triton.jit
def coded(x, POWERS: tl.constexpr):
    """Codes of [rows, BLOCK], and the scale of each row."""
    x = x.to(tl.float32)
    factor, scale = factor_and_scale(tl.max(tl.abs(x), 1), POWERS)
    return (x * factor[:, None]).to(tl.float8e4nv), scale


@triton.jit
def in_words(first, second, third, fourth):
    """Codes of four rows in words of 32 bits, the first row's lowest; four columns at a time.

    A transpose then moves words. To move bytes takes three times the instructions.
    """
    codes = (first, second, third, fourth)
    return tl.inline_asm_elementwise(
        FOUR_BY_FOUR, "=&r,=&r,=&r,=&r,r,r,r,r", codes, dtype=tl.uint32, is_pure=True, pack=4
    )


@triton.jit
def store_codes(codes_ptr, scales_ptr, coded_rows, row, inside, at, columns, rows):
    """Codes and scales of a block of rows."""
    column = at * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(codes_ptr + row[:, None] * columns + column, coded_rows[0], mask=inside[:, None])
    tl.store(scales_ptr + tl.cast(at, tl.int64) * rows + row, coded_rows[1], mask=inside)


@triton.jit(do_not_specialize=["rows"])
def fp8_quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, rows, columns, POWERS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * columns + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = row < rows
    x = tl.load(x_ptr + at, mask=live[:, None], other=0.0)
    store_codes(codes_ptr, scales_ptr, coded(x, POWERS), row, live, tl.program_id(1), columns, rows)


@triton.jit(do_not_specialize=["num_rows"])
def fp8_spread_kernel(
    source_ptr, inverse_ptr, codes_ptr, scales_ptr, rows_ptr, D, num_rows,
    K: tl.constexpr, BLOCKS: tl.constexpr, COPIED: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    here = token.to(tl.int64)
    for base in range(0, D, BLOCKS * BLOCK):
        block = base // BLOCK + tl.arange(0, BLOCKS)
        column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = block < D // BLOCK
        value = tl.load(source_ptr + here * D + column, mask=live[:, None], other=0.0)
        codes, scale = coded(value, POWERS)
        for k in tl.static_range(K):
            row = tl.load(inverse_ptr + token * K + k).to(tl.int64)
            wanted = live & (row >= 0)
            tl.store(codes_ptr + row * D + column, codes, mask=wanted[:, None])
            tl.store(scales_ptr + block.to(tl.int64) * num_rows + row, scale, mask=wanted)
            if COPIED:
                tl.store(rows_ptr + row * D + column, value, mask=wanted[:, None])


@triton.jit(do_not_specialize=["rows"])
def fp8_swiglu_kernel(
    x_ptr, codes_ptr, scales_ptr, rows, F, POWERS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = row < rows
    gate_at, up_at = gate_and_up_at(row[:, None], column, F, False)
    gate = tl.load(x_ptr + gate_at, mask=live[:, None], other=0.0).to(tl.float32)
    up = tl.load(x_ptr + up_at, mask=live[:, None], other=0.0).to(tl.float32)
    h = rounded(gated(gate, up, 0.0, 0.0, 0.0, False), x_ptr.dtype.element_ty)
    store_codes(codes_ptr, scales_ptr, coded(h, POWERS), row, live, tl.program_id(1), F, rows)


@triton.jit(do_not_specialize=["rows"])
def fp8_weighted_swiglu_backward_kernel(
    x_ptr, dh_ptr, order_ptr, weights_ptr, dx_ptr, dweights_ptr, h_ptr, codes_ptr, scales_ptr,
    h_codes_ptr, h_scales_ptr, rows, F,
    RESULT: tl.constexpr, POWERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The kernel of `routed_experts`, one block at a time, with codes of dx.

    RESULT: "values" writes dx and the weighted result, too, "codes" codes of the latter.
    """
    row, pair, weight, pairs = rows_of_program(order_ptr, weights_ptr, rows, ROWS)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    live = line < rows
    for block in range(0, F // BLOCK):
        column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        gate_at, up_at, dgate, dup, h, product = gradients_of_tile(
            x_ptr, dh_ptr, row, column, pairs, weight, F, 0.0, 0.0, 0.0, False, False
        )
        products += product
        dgate = rounded(dgate, dx_ptr.dtype.element_ty)
        dup = rounded(dup, dx_ptr.dtype.element_ty)
        weighted = rounded(h * weight, h_ptr.dtype.element_ty)
        if RESULT == "values":
            tl.store(dx_ptr + gate_at, dgate, mask=live[:, None])
            tl.store(dx_ptr + up_at, dup, mask=live[:, None])
            tl.store(h_ptr + row * F + column, weighted, mask=live[:, None])
        if RESULT == "codes":
            made = coded(weighted, POWERS)
            store_codes(h_codes_ptr, h_scales_ptr, made, line, live, block, F, rows)
        made = coded(dgate, POWERS)
        store_codes(codes_ptr, scales_ptr, made, line, live, block, 2 * F, rows)
        made, of_up = coded(dup, POWERS), F // BLOCK + block
        store_codes(codes_ptr, scales_ptr, made, line, live, of_up, 2 * F, rows)
    dweight = tl.sum(products, 1).to(dweights_ptr.dtype.element_ty)
    tl.store(dweights_ptr + pair, dweight, mask=pair >= 0)


@triton.jit
def exponent(x):
    """The exponent of a positive number, plus 127."""
    return x.to(tl.int32, bitcast=True) >> 23


@triton.jit
def lowered(codes, scale, largest):
    """Codes for a scale that is larger by a power of two, as bytes."""
    smaller = exponent(scale) - exponent(largest)
    smaller = (tl.maximum(smaller + 127, 0) << 23).to(tl.float32, bitcast=True)
    values = codes.to(tl.float16) * smaller.to(tl.float16)[:, None]
    return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit(do_not_specialize=["rows", "sources"])
def fp8_columns_kernel(
    rows_ptr, row_scales_ptr, order_ptr, records_ptr, count_ptr, codes_ptr, scales_ptr,
    spread_ptr, spread_scales_ptr, columns, sources, rows, P,
    K: tl.constexpr, SORTED: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """128 rows of one expert and a block of columns. Grid (P / BLOCK, columns / BLOCK).

    The block's scale is the largest of its rows', and codes become as many powers of two smaller as
    their row's scale is. Programs go through all rows before the next columns, so that the codes
    of tokens that they read stay in L2.
    """
    block = tl.program_id(0)
    if block < tl.load(count_ptr + COUNT_RECORDS):
        record = records_ptr + block * ROW_RECORD
        first = tl.load(record + ROW_START) + (block - tl.load(record + ROW_FIRST_TILE)) * BLOCK
        live = tl.load(record + ROW_END) - first
        here, at = first.to(tl.int64), tl.program_id(1).to(tl.int64)
        word, lane = tl.arange(0, WORDS), tl.arange(0, BLOCK)
        coded_of = ()  # type: Any
        largest = tl.full((WORDS,), SMALLEST, tl.float32)
        for i in tl.static_range(4):  # every fourth row from 0, 1, 2, 3
            line = word * 4 + i
            if SORTED:
                source = tl.where(line < live, first + line, -1)
            else:
                pair = tl.load(order_ptr + here + line, mask=line < live, other=-1)
                source = tl.where(pair >= 0, pair // K, -1)
            wanted = source >= 0
            scale = tl.load(row_scales_ptr + at * sources + source, mask=wanted, other=0.0)
            largest = tl.maximum(largest, scale)
            place = (source.to(tl.int64) * columns + at * BLOCK)[:, None] + lane[None, :]
            codes = tl.load(rows_ptr + place, mask=wanted[:, None], other=0.0)
            coded_of += ((codes, scale),)
        if SPREAD:
            for i in tl.static_range(4):  # behind all loads, which would wait for stores
                row = here + word * 4 + i
                inside = row < here + live
                store_codes(
                    spread_ptr, spread_scales_ptr, coded_of[i], row, inside, at, columns, rows
                )
        largest = tl.max(largest, 0)
        words = in_words(
            lowered(coded_of[0][0], coded_of[0][1], largest),
            lowered(coded_of[1][0], coded_of[1][1], largest),
            lowered(coded_of[2][0], coded_of[2][1], largest),
            lowered(coded_of[3][0], coded_of[3][1], largest),
        )
        to = codes_ptr.to(tl.pointer_type(tl.uint32)) + at * BLOCK * (P // 4) + block * WORDS
        tl.store(to + (lane[:, None] * (P // 4) + word[None, :]), tl.trans(words))
        tl.store(scales_ptr + at * (P // BLOCK) + block, largest)


@triton.jit
def fp8_weights_kernel(
    w_ptr, codes_ptr, scales_ptr, flipped_ptr, flipped_scales_ptr, M, N,
    LYING: tl.constexpr, FLIPPED: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """One block of one expert, as it lies, transposed, or both. Grid (N / BLOCK, M / BLOCK, E)."""
    e = tl.program_id(2).to(tl.int64)
    m, n = tl.program_id(1), tl.program_id(0)
    word, lane = tl.arange(0, WORDS), tl.arange(0, BLOCK)
    at = e * M * N + (m * BLOCK + word * 4)[:, None].to(tl.int64) * N + n * BLOCK + lane[None, :]
    w_of = ()  # type: Any
    largest = tl.zeros((WORDS, BLOCK), tl.float32)
    for i in tl.static_range(4):
        w = tl.load(w_ptr + at + i * N).to(tl.float32)
        w_of += (w,)
        largest = tl.maximum(largest, tl.abs(w))
    factor, scale = factor_and_scale(tl.max(tl.max(largest, 1), 0), POWERS)
    codes_of = ()  # type: Any
    for i in tl.static_range(4):
        codes = (w_of[i] * factor).to(tl.float8e4nv)
        if LYING:
            tl.store(codes_ptr + at + i * N, codes)
        codes_of += (codes.to(tl.uint8, bitcast=True),)
    if LYING:
        tl.store(scales_ptr + (e * (M // BLOCK) + m) * (N // BLOCK) + n, scale)
    if FLIPPED:
        words = in_words(codes_of[0], codes_of[1], codes_of[2], codes_of[3])
        line = (e * N + n * BLOCK + lane)[:, None] * (M // 4)
        to = flipped_ptr.to(tl.pointer_type(tl.uint32)) + line + (m * WORDS + word)[None, :]
        tl.store(to, tl.trans(words))
        tl.store(flipped_scales_ptr + (e * (N // BLOCK) + n) * (M // BLOCK) + m, scale)


@define_op(device="default")
def fp8_quantize(x_RK: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[R, K]` and scales `[K / 128, R]`."""
    (rows, columns), x_RK = x_RK.shape, x_RK.contiguous()
    codes, scales = _codes_of_rows(x_RK, rows, columns, False)
    if codes.numel():
        grid = (cdiv(rows, ROWS), columns // BLOCK.value)
        _launch(
            fp8_quantize_kernel,
            grid,
            (x_RK, codes, scales, rows, columns),
            POWERS=powers,
            ROWS=ROWS,
        )
    return codes, scales


@define_op(device="default")
def fp8_spread(
    source_TD: torch.Tensor, inverse_TK: torch.Tensor, num_rows: int, has_gaps: bool,
    with_rows: bool, powers: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Codes, scales and, `with_rows`, copies of every token in its rows; zero in gaps."""
    tokens, D = inverse_TK.shape[0], source_TD.shape[1]
    codes, scales = _codes_of_rows(source_TD, num_rows, D, has_gaps)
    make = source_TD.new_zeros if has_gaps else source_TD.new_empty
    rows_RD = make((num_rows, D) if with_rows else (0,))
    if tokens and D:
        blocks = min(WIDEST, next_power_of_2(D)) // BLOCK.value
        args = (
            source_TD.contiguous(),
            inverse_TK.contiguous(),
            codes,
            scales,
            rows_RD,
            D,
            num_rows,
        )
        kind = {"K": inverse_TK.shape[1], "BLOCKS": blocks, "COPIED": with_rows, "POWERS": powers}
        _launch(fp8_spread_kernel, (tokens,), args, **kind)
    return codes, scales, rows_RD


@define_op(device="default")
def fp8_swiglu(x_R2F: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[R, F]` and scales `[F / 128, R]`."""
    (rows, width), x_R2F = x_R2F.shape, x_R2F.contiguous()
    codes, scales = _codes_of_rows(x_R2F, rows, width // 2, False)
    if codes.numel():
        grid = (cdiv(rows, ROWS), width // 2 // BLOCK.value)
        _launch(
            fp8_swiglu_kernel,
            grid,
            (x_R2F, codes, scales, rows, width // 2),
            POWERS=powers,
            ROWS=ROWS,
        )
    return codes, scales


@define_op(device="default")
def fp8_weighted_swiglu_backward(
    x_R2F: torch.Tensor,
    dh_RF: torch.Tensor,
    weights_TK: torch.Tensor,
    order_R: torch.Tensor,
    has_gaps: bool,
    result: str,
    powers: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Gradients of `x_R2F` and `weights_TK`, the weighted result, codes and scales of dx, of it.

    The first and the third are empty but with the `result` "values", the last two but with "codes".
    """
    x_R2F, dh_RF = x_R2F.contiguous(), dh_RF.contiguous()
    made = _results_like(x_R2F, dh_RF, weights_TK, result)
    if has_gaps or not dh_RF.numel():
        made[1].zero_()  # pairs without a row
    if dh_RF.numel():
        rows, F = dh_RF.shape
        args = (x_R2F, dh_RF, order_R, weights_TK.contiguous(), *made, rows, F)
        kind = {"RESULT": result, "POWERS": powers, "ROWS": ROWS_OF_BACKWARD, "num_warps": 1}
        _launch(fp8_weighted_swiglu_backward_kernel, (cdiv(rows, ROWS_OF_BACKWARD),), args, **kind)
    return made


def columns(
    codes_XK: torch.Tensor,
    scales_GX: torch.Tensor,
    order_R: torch.Tensor | None,
    offsets_E: torch.Tensor,
    rows: int,
    top_k: int,
    spread: bool,
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """The op `fp8_columns`, into what it returns."""
    sources, width = codes_XK.shape
    if not rows or not width:
        return
    work, P = row_tiles(offsets_E, rows, BLOCK.value), made[0].shape[1]
    given = codes_XK, scales_GX, offsets_E if order_R is None else order_R
    args = (*given, work.records, work.count, *made, width, sources, rows, P)
    kind = {"K": top_k, "SORTED": order_R is None, "SPREAD": spread, "num_warps": WARPS_OF_COLUMNS}
    _launch(fp8_columns_kernel, (P // BLOCK.value, width // BLOCK.value), args, **kind)


@define_op(device="default")
def fp8_weights(
    w_EMN: torch.Tensor, lying: bool, flipped: bool, powers: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.quantized_weights` as they lie, and transposed; empty where it is not wanted.

    `w_EMN` is contiguous.
    """
    made = _codes_of_weights(w_EMN, lying, flipped)
    if w_EMN.numel():
        experts, M, N = w_EMN.shape
        kind = {"LYING": lying, "FLIPPED": flipped, "POWERS": powers, "num_warps": WARPS}
        grid = (N // BLOCK.value, M // BLOCK.value, experts)
        _launch(fp8_weights_kernel, grid, (w_EMN, *made, M, N), **kind)
    return made


@torch.library.register_fake("moe_graphs::fp8_quantize")
def _(x_RK, powers):
    return _codes_of_rows(x_RK, x_RK.shape[0], x_RK.shape[1], False)


@torch.library.register_fake("moe_graphs::fp8_spread")
def _(source_TD, inverse_TK, num_rows, has_gaps, with_rows, powers):
    made = _codes_of_rows(source_TD, num_rows, source_TD.shape[1], False)
    return *made, source_TD.new_empty((num_rows, source_TD.shape[1]) if with_rows else (0,))


@torch.library.register_fake("moe_graphs::fp8_swiglu")
def _(x_R2F, powers):
    return _codes_of_rows(x_R2F, x_R2F.shape[0], x_R2F.shape[1] // 2, False)


@torch.library.register_fake("moe_graphs::fp8_weighted_swiglu_backward")
def _(x_R2F, dh_RF, weights_TK, order_R, has_gaps, result, powers):
    return _results_like(x_R2F, dh_RF, weights_TK, result)


@torch.library.register_fake("moe_graphs::fp8_weights")
def _(w_EMN, lying, flipped, powers):
    return _codes_of_weights(w_EMN, lying, flipped)


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **constants: Any) -> None:
    gpu = architecture_of(args[0].device)
    if "fp8" not in gpu.gemms:
        raise ValueError(
            f"precision='fp8' has kernels for Hopper GPUs (sm_90) alone, and {args[0].device} is "
            f"{gpu.name} ({gpu.gpus}): leave the experts in their weights' precision"
        )
    launch(kernel, grid, args, **constants)


def _codes_of_rows(
    like: torch.Tensor, rows: int, columns: int, zeroed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    make = like.new_zeros if zeroed else like.new_empty
    codes = make((rows, columns), dtype=torch.uint8).view(CODE)
    return codes, make((columns // BLOCK.value, rows), dtype=torch.float32)


def _codes_of_weights(
    w_EMN: torch.Tensor, lying: bool, flipped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    E, M, N = w_EMN.shape
    m, n = M // BLOCK.value, N // BLOCK.value
    return (
        w_EMN.new_empty((E, M, N) if lying else (0,), dtype=CODE),
        w_EMN.new_empty((E, m, n) if lying else (0,), dtype=torch.float32),
        w_EMN.new_empty((E, N, M) if flipped else (0,), dtype=CODE),
        w_EMN.new_empty((E, n, m) if flipped else (0,), dtype=torch.float32),
    )


def _results_like(
    x_R2F: torch.Tensor, dh_RF: torch.Tensor, weights_TK: torch.Tensor, result: str
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    (rows, width), wanted = x_R2F.shape, result == "values"
    return (
        x_R2F.new_empty((rows, width) if wanted else (0,)),
        weights_TK.new_empty(weights_TK.shape),
        x_R2F.new_empty((rows, width // 2) if wanted else (0,)),
        *_codes_of_rows(x_R2F, rows, width, False),
        *_codes_of_rows(x_R2F, rows if result == "codes" else 0, width // 2, False),
    )
