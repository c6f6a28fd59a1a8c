"""Warps beside the producer of a product in FP8, which turn codes of rows into columns meanwhile.

The bits are those of `fp8_columns_kernel`. The rows are those of the product, by experts, and
operands of gradients of weights: several jobs, one after the other. One warp has a block of 128
rows and 128 columns: a lane four rows, and COLUMNS columns at a time.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_graphs.kernels.fp8.triton_kernels import SMALLEST, exponent, in_words
from moe_graphs.kernels.gemm.sm90_quantize import WARPS
from moe_graphs.kernels.gemm.tile_scheduler import (
    COUNT_RECORDS,
    ROW_END,
    ROW_FIRST_TILE,
    ROW_RECORD,
    ROW_START,
)

BLOCK = gl.constexpr(128)
COLUMNS = gl.constexpr(16)


class Job(NamedTuple):
    """Codes [sources, columns] of rows, or of tokens with the order of their pairs; the results."""

    rows_ptr: Any
    row_scales_ptr: Any
    order_ptr: Any
    codes_ptr: Any
    scales_ptr: Any
    columns: Any
    sources: Any


@gluon.jit
def _scales_of(job, at, first, live, word, TOP_K: gl.constexpr):
    """Where a lane's four rows lie (-1: nowhere), their factors, and the scale of the block."""
    SORTED: gl.constexpr = job.order_ptr is None
    source_of = ()  # type: Any
    scale_of = ()  # type: Any
    for i in gl.static_range(4):
        line = word * 4 + i
        if SORTED:
            source = gl.where(line < live, first + line, -1)
        else:
            pair = gl.load(job.order_ptr + first + line, mask=line < live, other=-1)
            source = gl.where(pair >= 0, pair // TOP_K, -1)
        place = at.to(gl.int64) * job.sources + source
        scale_of += (gl.load(job.row_scales_ptr + place, mask=source >= 0, other=0.0),)
        source_of += (source,)
    largest = gl.maximum(gl.maximum(scale_of[0], scale_of[1]), gl.maximum(scale_of[2], scale_of[3]))
    scale = gl.maximum(gl.max(largest, 0), SMALLEST)
    factor_of = ()  # type: Any
    for i in gl.static_range(4):
        smaller = gl.maximum(exponent(scale_of[i]) - exponent(scale) + 127, 0) << 23
        factor_of += (smaller.to(gl.float32, bitcast=True).to(gl.float16)[:, None],)
    return source_of, factor_of, scale


@gluon.jit
def _turn(
    job, records_ptr, count_ptr, P, ME: gl.constexpr, GRID: gl.constexpr, TOP_K: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [1, 1], [1, 0])
    word = gl.arange(0, BLOCK // 4, layout=gl.SliceLayout(1, layout))
    lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    tiles = gl.load(count_ptr + COUNT_RECORDS)
    words_ptr = job.codes_ptr.to(gl.pointer_type(gl.uint32))
    for item in range(gl.program_id(0) * WARPS + ME, tiles * (job.columns // BLOCK), GRID * WARPS):
        at = item // tiles
        block = item - at * tiles
        record = records_ptr + block * ROW_RECORD
        tile = block - gl.load(record + ROW_FIRST_TILE)
        first = gl.load(record + ROW_START) + tile * BLOCK
        live = gl.load(record + ROW_END) - first
        source_of, factor_of, scale = _scales_of(job, at, first, live, word, TOP_K)
        gl.store(job.scales_ptr + at * (P // BLOCK) + block, scale)
        to_ptr = words_ptr + at.to(gl.int64) * BLOCK * (P // 4) + block * (BLOCK // 4)
        to = lane[None, :] * (P // 4) + word[:, None]
        column = at * BLOCK + lane[None, :]
        for _ in range(BLOCK // COLUMNS):
            codes_of = ()  # type: Any
            for i in gl.static_range(4):
                there = source_of[i].to(gl.int64)[:, None] * job.columns + column
                wanted = (source_of[i] >= 0)[:, None]
                codes_of += (gl.load(job.rows_ptr + there, mask=wanted, other=0.0),)
            lowered_of = ()  # type: Any
            for i in gl.static_range(4):
                values = codes_of[i].to(gl.float16) * factor_of[i]
                lowered_of += (values.to(gl.float8e4nv).to(gl.uint8, bitcast=True),)
            gl.store(to_ptr + to, in_words(*lowered_of))
            column += COLUMNS
            to += COLUMNS * (P // 4)


@gluon.jit
def turn_columns(
    jobs, records_ptr, count_ptr, P, ME: gl.constexpr, GRID: gl.constexpr, JOBS: gl.constexpr,
    TOP_K: gl.constexpr,
):  # fmt: skip
    """The blocks of warp ME of this CTA, of all jobs."""
    for i in gl.static_range(JOBS):
        _turn(jobs[i], records_ptr, count_ptr, P, ME, GRID, TOP_K)
