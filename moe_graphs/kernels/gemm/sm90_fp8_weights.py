"""Weight gradient of operands in FP8, as a warp-specialised Gluon kernel for Hopper.

    dw_EMN[e] = sum over blocks r of expert e: sx[m, r] * sy[n, r] * (x_MP[:, r] @ dy_NP[:, r].T)

WGMMA takes FP8 along the sum alone, so both operands are codes of transposed rows, `[columns, P]`:
every expert's rows begin at a multiple of 128 and are filled up with zeros. A scale stands for 128
rows of 128 columns, and m, n and r are numbers of such blocks. So the scale of a step is one number
for each 128 columns of the tile. The one of x is copied once for every row of the tile, so that a
step is what it is for rows: `sm90_fp8.multiply_blocks`.

Tiles and their order are those of sm90_weights, ring and turns those of sm90_fp8. An expert without
rows has tiles of no steps, which come last.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_graphs.kernels.gemm.heuristics import Variant
from moe_graphs.kernels.gemm.sm90_common import (
    boxes_of,
    make_barriers,
    matrix_descriptor,
    next_slot,
    place,
    rounds_of,
    store_weights,
    tile_constants,
    tile_of,
    tma_load,
)
from moe_graphs.kernels.gemm.sm90_fp8 import (
    BLOCK,
    add_right,
    begin_tile,
    copy_scales,
    multiply_blocks,
    numbers,
    ring_of,
)
from moe_graphs.kernels.gemm.sm90_rows import Barriers
from moe_graphs.kernels.gemm.tile_scheduler import (
    COUNT_RECORDS,
    EXPERT_RECORD,
    PART_END,
    PART_EXPERT,
    PART_START,
    WorkList,
)
from moe_graphs.kernels.launching import Launch


class Kind(NamedTuple):
    """The constants that a kernel is compiled for; BLOCK_K are rows of a step."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    STAGES: Any
    PINGPONG: Any
    GRID: Any


class Work(NamedTuple):
    """The work: `total` tiles of M x N outputs, of which this CTA has `rounds`."""

    records_ptr: Any
    total: Any
    tiles_m: Any
    tiles_n: Any
    rounds: Any


class Scales(NamedTuple):
    """Scales of both operands, and how many there are of 128 columns; blocks of columns of dy."""

    x_ptr: Any
    dy_ptr: Any
    stride: Any
    blocks_n: Any


@gluon.jit
def _record(tile, work):
    """(expert, first and end step) of a tile, loads only; clamped into the list."""
    number = gl.maximum(gl.minimum(tile, work.total - 1), 0) // (work.tiles_m * work.tiles_n)
    record = work.records_ptr + number * EXPERT_RECORD
    first = gl.load(record + PART_START) // BLOCK
    return gl.load(record + PART_EXPERT), first, gl.load(record + PART_END) // BLOCK


@gluon.jit
def _produce(x_desc, dy_desc, scales, work, ring, barriers, KIND: gl.constexpr):
    """Fills the ring with codes and scales of every step of every tile of this CTA."""
    BYTES: gl.constexpr = x_desc.block_type.nbytes + dy_desc.block_type.nbytes
    HALVES: gl.constexpr = KIND.BLOCK_N // BLOCK
    GRID: gl.constexpr = KIND.GRID
    per_expert = work.tiles_m * work.tiles_n
    slot = 0
    phase = 1
    _, next_first, next_end = _record(tile_of(0, GRID), work)
    for round in range(work.rounds):
        first = next_first
        end = next_end
        tile_m, tile_n = place(tile_of(round, GRID) % per_expert, work.tiles_m, work.tiles_n)
        _, next_first, next_end = _record(tile_of(round + 1, GRID), work)
        steps = end - first
        of_tile = scales.x_ptr + (tile_m * scales.stride + first)
        x_places = of_tile + 0 * numbers(KIND.BLOCK_M)
        block_n = gl.minimum(tile_n * HALVES + numbers(32), scales.blocks_n - 1)
        dy_places = scales.dy_ptr + (block_n * scales.stride + first)
        for step in range(steps):
            at = (end - steps + step) * KIND.BLOCK_K
            mbarrier.wait(barriers.empty.index(slot), phase)
            landed = barriers.full.index(slot)
            copy_scales(x_places, dy_places, landed, ring, slot, HALVES)
            mbarrier.expect(landed, BYTES)
            tma_load(x_desc, [0, tile_m * KIND.BLOCK_M, at], landed, ring.x.index(slot))
            tma_load(dy_desc, [0, tile_n * KIND.BLOCK_N, at], landed, ring.w.index(slot))
            x_places += 1
            dy_places += 1
            slot, phase = next_slot(slot, phase, KIND.STAGES)


@gluon.jit
def _consume(dw_desc, work, ring, dw_buffers, barriers, ME: gl.constexpr, KIND: gl.constexpr):
    """Multiplies and stores half ME of the rows of every tile of this CTA."""
    GRID: gl.constexpr = KIND.GRID
    HALF_M: gl.constexpr = KIND.BLOCK_M // 2
    HALVES: gl.constexpr = KIND.BLOCK_N // BLOCK
    full = barriers.full
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    per_expert = work.tiles_m * work.tiles_n
    # The right half of the tile before, and its place. The first place is behind all experts, where
    # TMA stores nothing; a place before all experts (-1) is an illegal instruction.
    right = gl.zeros((HALF_M, BLOCK), gl.float32, layout)
    right_e = work.total
    right_row = 0
    right_column = 0
    slot = 0
    phase = 0
    turn = 0
    next_e, next_first, next_end = _record(tile_of(0, GRID), work)
    for round in range(work.rounds):
        e = next_e
        steps = next_end - next_first
        tile_m, tile_n = place(tile_of(round, GRID) % per_expert, work.tiles_m, work.tiles_n)
        next_e, next_first, next_end = _record(tile_of(round + 1, GRID), work)
        row = tile_m * KIND.BLOCK_M + ME * HALF_M
        column = tile_n * KIND.BLOCK_N
        if steps > 0:
            part, turn = begin_tile(ring, barriers, slot, phase, turn, ME, KIND)
            if HALVES > 1:
                store_weights(
                    right, dw_desc, dw_buffers, full, ME, 1, 1, right_e, right_row, right_column, ""
                )
            left, right, part, scale, slot, phase, turn = multiply_blocks(
                part, ring, barriers, slot, phase, turn, steps, ME, KIND
            )
            store_weights(left, dw_desc, dw_buffers, full, ME, 1, 1, e, row, column, "")
            right, part, slot, phase = add_right(
                right, part, scale, ring, barriers, slot, phase, KIND
            )
        else:
            if HALVES > 1:
                store_weights(
                    right, dw_desc, dw_buffers, full, ME, 1, 1, right_e, right_row, right_column, ""
                )
            right = gl.zeros((HALF_M, BLOCK), gl.float32, layout)
            store_weights(right, dw_desc, dw_buffers, full, ME, 1, 1, e, row, column, "")
        right_e = e
        right_row = row
        right_column = column + BLOCK
    if HALVES > 1:
        store_weights(
            right, dw_desc, dw_buffers, full, ME, 1, 1, right_e, right_row, right_column, ""
        )
    tma.store_wait(pendings=0)


@gluon.jit
def fp8_weights_gluon_kernel(
    x_desc, x_scales_ptr, dy_desc, dy_scales_ptr, dw_desc, records_ptr, count_ptr, M, N, stride,
    PINGPONG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over records x M tiles x N tiles; grid (GRID,), num_warps=4."""
    KIND: gl.constexpr = Kind(BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PINGPONG, GRID)
    ring = ring_of(x_desc, dy_desc, BLOCK_M, STAGES)
    dw_buffers = boxes_of(dw_desc, 2)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    fence_async_shared()
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr + COUNT_RECORDS) * tiles_m * tiles_n
    work = Work(records_ptr, total, tiles_m, tiles_n, rounds_of(total, GRID))
    barriers = Barriers(full, empty, turn)
    scales = Scales(x_scales_ptr, dy_scales_ptr, stride, N // BLOCK)
    gl.warp_specialize(
        [
            (_consume, (dw_desc, work, ring, dw_buffers, barriers, 0, KIND)),
            (_consume, (dw_desc, work, ring, dw_buffers, barriers, 1, KIND)),
            (_produce, (x_desc, dy_desc, scales, work, ring, barriers, KIND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def fp8_weights_launch(
    v: Variant,
    x_MP: torch.Tensor,
    x_scales: torch.Tensor,
    dy_NP: torch.Tensor,
    dy_scales: torch.Tensor,
    dw_EMN: torch.Tensor,
    work: WorkList,
    grid: int,
) -> Launch:
    """The launch of the kernel over `work`, an expert order by padded ends.

    `x_scales` fp32 [M / 128, P / 128], `dy_scales` fp32 [N / 128, P / 128].
    """
    args = (
        matrix_descriptor(x_MP.unsqueeze(0), (v.block_m, v.block_k)), x_scales,
        matrix_descriptor(dy_NP.unsqueeze(0), (v.block_n, v.block_k)), dy_scales,
        matrix_descriptor(dw_EMN, (v.block_m // 2, BLOCK.value)),
        work.records, work.count, *dw_EMN.shape[1:], x_scales.shape[1],
    )  # fmt: skip
    kind = {"PINGPONG": v.pingpong} | tile_constants(v, grid)
    return Launch(fp8_weights_gluon_kernel, grid, args, kind)
