"""Warps beside the producer of a product in FP8, which quantize another weight meanwhile.

A product leaves three warps of its producer's warpgroup idle, and most of the bandwidth of memory.
Quantizing is bound by that bandwidth, so both together take little longer than the product.

One warp quantizes a block of 128x128 numbers at a time, with the bits of `fp8_weights_kernel`:

    both      codes as the weight lies and transposed; the block is read twice, since its largest
              number decides about its codes
    lying     codes as it lies, by factors that are known
    flipped   transposed codes, by factors that are known

Registers are few, so LOADS loads of 16 bytes are in flight for a lane; for transposed codes COLUMNS
columns of four rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_graphs.kernels.fp8.triton_kernels import factor_and_scale, in_words

WARPS = gl.constexpr(3)  # with the producer they are a warpgroup
BLOCK = gl.constexpr(128)
LOADS = gl.constexpr(8)
COLUMNS = gl.constexpr(8)
PARTS = gl.constexpr(1)
FIRST_LOADS = gl.constexpr(4)
FETCHED = gl.constexpr(True)
TWO_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))


class Weight(NamedTuple):
    """A weight [E, M, N] with its codes and scales, as it lies and transposed, and factors."""

    w_ptr: Any
    codes_ptr: Any
    scales_ptr: Any
    flipped_ptr: Any
    flipped_scales_ptr: Any
    factors_ptr: Any
    blocks: Any
    M: Any
    N: Any


@gluon.jit
def _two_rows(N):
    """Where two rows of a block lie, 16 bytes for a lane."""
    row = gl.arange(0, 2, layout=gl.SliceLayout(1, TWO_ROWS))
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, TWO_ROWS))
    return row[:, None] * N + lane[None, :]


@gluon.jit
def _fetch(w_ptr, N):
    """Begins to bring a block into L2, all of it at once: registers hold a few rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [1, 0])
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, layout))
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
        [w_ptr + row[:, None] * N + half[None, :] * (BLOCK // 2)],
        dtype=gl.uint32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _largest_of(w_ptr, N):
    at = w_ptr + _two_rows(N)
    largest = gl.zeros((2, BLOCK), gl.float32, TWO_ROWS)
    for _ in range(BLOCK // (2 * FIRST_LOADS)):
        w_of = ()  # type: Any
        for i in gl.static_range(FIRST_LOADS):
            w_of += (gl.load(at + i * 2 * N),)
        for i in gl.static_range(FIRST_LOADS):
            largest = gl.maximum(largest, gl.abs(w_of[i].to(gl.float32)))
        at += FIRST_LOADS * 2 * N
    return gl.max(gl.max(largest, 1), 0)


@gluon.jit
def _lying(w_ptr, codes_ptr, factor, N):
    at = _two_rows(N)
    for _ in range(BLOCK // (2 * LOADS)):
        w_of = ()  # type: Any
        for i in gl.static_range(LOADS):
            w_of += (gl.load(w_ptr + at + i * 2 * N),)
        for i in gl.static_range(LOADS):
            codes = (w_of[i].to(gl.float32) * factor).to(gl.float8e4nv)
            gl.store(codes_ptr + at + i * 2 * N, codes)
        at += LOADS * 2 * N


@gluon.jit
def _flipped(weight, at, to, factor, LYING: gl.constexpr):
    """Transposed codes, and with LYING the others: a lane has four rows, a word of each column."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [1, 1], [1, 0])
    word = gl.arange(0, BLOCK // 4, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    w_ptr = weight.w_ptr + at
    words_ptr = (weight.flipped_ptr + to).to(gl.pointer_type(gl.uint32))
    at_word = column[None, :] * (weight.M // 4) + word[:, None]
    at_row = word[:, None] * 4 * weight.N + column[None, :]
    for _ in range(BLOCK // (COLUMNS * PARTS)):
        w_of = ()  # type: Any
        for i in gl.static_range(4 * PARTS):
            w_of += (gl.load(w_ptr + at_row + (i % 4) * weight.N + i // 4 * COLUMNS),)
        for part in gl.static_range(PARTS):
            codes_of = ()  # type: Any
            for i in gl.static_range(4):
                codes = (w_of[part * 4 + i].to(gl.float32) * factor).to(gl.float8e4nv)
                if LYING:
                    to_row = at_row + i * weight.N + part * COLUMNS
                    gl.store(weight.codes_ptr + at + to_row, codes)
                codes_of += (codes.to(gl.uint8, bitcast=True),)
            gl.store(words_ptr + at_word + part * COLUMNS * (weight.M // 4), in_words(*codes_of))
        at_row += COLUMNS * PARTS
        at_word += COLUMNS * PARTS * (weight.M // 4)


@gluon.jit
def quantize(
    weight, ME: gl.constexpr, GRID: gl.constexpr, KIND: gl.constexpr, POWERS: gl.constexpr
):
    """The blocks of warp ME of this CTA."""
    across = weight.N // BLOCK
    for block in range(gl.program_id(0) * WARPS + ME, weight.blocks, GRID * WARPS):
        line = block // across
        n = block - line * across
        at = line.to(gl.int64) * BLOCK * weight.N + n * BLOCK
        if FETCHED:
            _fetch(weight.w_ptr + at, weight.N)
        if KIND == "lying":
            factor = gl.load(weight.factors_ptr + block)
            _lying(weight.w_ptr + at, weight.codes_ptr + at, factor, weight.N)
        else:
            if KIND == "both":
                largest = _largest_of(weight.w_ptr + at, weight.N)
            down = weight.M // BLOCK
            e = line // down
            m = line - e * down
            turned = e * across + n
            if KIND == "both":
                factor, scale = factor_and_scale(largest, POWERS)
                gl.store(weight.scales_ptr + block, scale)
                gl.store(weight.flipped_scales_ptr + turned * down + m, scale)
            else:
                factor = gl.load(weight.factors_ptr + block)
            to = turned.to(gl.int64) * BLOCK * weight.M + m * BLOCK
            _flipped(weight, at, to, factor, KIND == "both")
