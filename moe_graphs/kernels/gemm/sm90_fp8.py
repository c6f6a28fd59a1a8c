"""Rows in FP8 times weights in FP8, as a warp-specialised Gluon kernel for Hopper.

    out_RN[r] = sum over blocks k of sx[k, r] * sw[e, n, k] * (x_RK[r] @ w_ENK[e].T in block k)

Codes are e4m3, a block is 128 of K, and n is the block of 128 output columns. Both operands lie
along K, since WGMMA takes FP8 in no other way.

Hopper adds products of FP8 with about 14 bits, so every block's sum is promoted: it is multiplied
by both scales and added to a sum in fp32 (two-level accumulation). While a consumer partition
promotes, the other one's products run: each waits for its own products alone. With PINGPONG they
begin products by turns, so that they do not promote at the same time. A tile of 256 columns is
computed as two halves of 128, one after the other, so that one block's sum is alive beside the sums
of the tile: 64 and 128 registers a thread.

Ring, producer and work list are those of sm90_rows. Scales come straight from memory, those of rows
two steps ahead of their use, since each lies in another line.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moe_graphs.kernels.gemm.heuristics import Variant
from moe_graphs.kernels.gemm.sm90_common import (
    boxes_of,
    make_barriers,
    matrix_descriptor,
    next_slot,
    place,
    ragged_descriptor,
    store_rows,
    tile_constants,
)
from moe_graphs.kernels.gemm.sm90_rows import Barriers, Kind, Ring, Work, produce, record_of
from moe_graphs.kernels.gemm.tile_scheduler import COUNT_RECORDS, WorkList
from moe_graphs.kernels.launching import Launch

BLOCK = gl.constexpr(128)  # of K, and of output columns


class Scales(NamedTuple):
    """Scales of both operands, numbers from one block of K to the next, blocks of columns."""

    x_ptr: Any
    stride: Any
    w_ptr: Any
    blocks_n: Any


@gluon.jit
def _begin(x, w, part, barriers, turn, ME: gl.constexpr, KIND: gl.constexpr):
    """Starts the product of a block, with PINGPONG behind the one of the other consumer."""
    if KIND.PINGPONG:
        mbarrier.wait(barriers.turn.index(ME), turn ^ (1 - ME))
    part = warpgroup_mma(x, w, part, is_async=True, use_acc=False)
    if KIND.PINGPONG:
        mbarrier.arrive(barriers.turn.index(1 - ME), count=1)
    return part


@gluon.jit
def _promoted(total, part, x_scale, w_scale):
    return total + part * (x_scale * w_scale)[:, None]


@gluon.jit
def multiply_blocks(
    ring, barriers, slot, phase, turn, x_scales, stride, w_scales, w_scales2, steps,
    ME: gl.constexpr, HALF_M: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Half ME of a tile's rows times its columns: sums of the left and of the right 128 columns.

    With a tile of 128 columns the right ones are not computed.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    left = gl.zeros((HALF_M, BLOCK), gl.float32, layout)
    right = gl.zeros((HALF_M, BLOCK), gl.float32, layout)
    part = warpgroup_mma_init(gl.zeros((HALF_M, BLOCK), gl.float32, layout))
    next_x = gl.load(x_scales)
    later_x = gl.load(x_scales + (steps > 1).to(gl.int32) * stride)
    next_w = gl.load(w_scales)
    next_w2 = gl.load(w_scales2)
    for step in range(steps):
        scale = next_x
        w_scale = next_w
        w_scale2 = next_w2
        next_x = later_x
        later_x = gl.load(x_scales + gl.minimum(step + 2, steps - 1) * stride)
        ahead = gl.minimum(step + 1, steps - 1)
        next_w = gl.load(w_scales + ahead)
        next_w2 = gl.load(w_scales2 + ahead)
        mbarrier.wait(barriers.full.index(slot), phase)
        x = ring.x.index(slot).reshape([KIND.BLOCK_M, KIND.BLOCK_K]).slice(ME * HALF_M, HALF_M, 0)
        w = ring.w.index(slot).reshape([KIND.BLOCK_N, KIND.BLOCK_K])
        w_left = w.slice(0, BLOCK, 0).permute((1, 0))
        part = _begin(x, w_left, part, barriers, turn, ME, KIND)
        if KIND.PINGPONG:
            turn = turn ^ 1
        done = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        if KIND.BLOCK_N > BLOCK:
            left = _promoted(left, done, scale, w_scale)
            # Nothing is in flight: this holds the compiler to add before the next product begins.
            left = warpgroup_mma_wait(num_outstanding=0, deps=(left,))
            w_right = w.slice(BLOCK, BLOCK, 0).permute((1, 0))
            part = warpgroup_mma_init(done)
            part = _begin(x, w_right, part, barriers, turn, ME, KIND)
            if KIND.PINGPONG:
                turn = turn ^ 1
            done = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            mbarrier.arrive(barriers.empty.index(slot), count=1)
            right = _promoted(right, done, scale, w_scale2)
        else:
            mbarrier.arrive(barriers.empty.index(slot), count=1)
            left = _promoted(left, done, scale, w_scale)
        part = warpgroup_mma_init(done)
        slot, phase = next_slot(slot, phase, KIND.STAGES)
    return left, right, slot, phase, turn


@gluon.jit
def _consume(
    out_desc, scales, work, ring, out_buffers, barriers, ME: gl.constexpr, KIND: gl.constexpr
):
    """Multiplies and stores half ME of the rows of every tile of this CTA."""
    STAGES: gl.constexpr = KIND.STAGES
    HALF_M: gl.constexpr = KIND.BLOCK_M // 2
    HALVES: gl.constexpr = KIND.BLOCK_N // BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    lane = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
    slot = 0
    phase = 0
    turn = 0
    first_tile = gl.program_id(0)
    next_e, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        row = next_start + tile_m * KIND.BLOCK_M + ME * HALF_M
        next_e, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        if row >= end:
            for _step in range(work.steps):
                if KIND.PINGPONG:
                    for _half in gl.static_range(HALVES):
                        mbarrier.wait(barriers.turn.index(ME), turn ^ (1 - ME))
                        mbarrier.arrive(barriers.turn.index(1 - ME), count=1)
                        turn = turn ^ 1
                mbarrier.wait(barriers.full.index(slot), phase)
                mbarrier.arrive(barriers.empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, STAGES)
        else:
            x_scales = scales.x_ptr + gl.minimum(row + lane, end - 1)
            block_n = tile_n * HALVES
            right_n = gl.minimum(block_n + 1, scales.blocks_n - 1)
            of_expert = scales.w_ptr + e.to(gl.int64) * scales.blocks_n * work.steps
            left, right, slot, phase, turn = multiply_blocks(
                ring, barriers, slot, phase, turn, x_scales, scales.stride,
                of_expert + block_n * work.steps, of_expert + right_n * work.steps, work.steps,
                ME, HALF_M, KIND,
            )  # fmt: skip
            store_rows(left, out_desc, out_buffers, ME, row, end, tile_n * KIND.BLOCK_N)
            if HALVES > 1:
                column = tile_n * KIND.BLOCK_N + BLOCK
                store_rows(right, out_desc, out_buffers, ME, row, end, column)
    tma.store_wait(pendings=0)


@gluon.jit
def fp8_rows_gluon_kernel(
    x_desc, x_scales_ptr, stride, w_desc, w_scales_ptr, out_desc, records_ptr, count_ptr, N, K,
    PINGPONG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over the tiles of `records` x column tiles; grid (GRID,), num_warps=4."""
    KIND: gl.constexpr = Kind(BLOCK_M, BLOCK_N, BLOCK_K, STAGES, True, PINGPONG, False, 0, 0, GRID)
    x_ring = boxes_of(x_desc, STAGES)
    w_ring = boxes_of(w_desc, STAGES)
    out_buffers = boxes_of(out_desc, 2)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    fence_async_shared()
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr + COUNT_RECORDS) * tiles_n
    steps = K // BLOCK_K
    work = Work(records_ptr, total, total, 0, steps, tiles_n, steps)
    ring = Ring(x_ring, w_ring)
    barriers = Barriers(full, empty, turn)
    scales = Scales(x_scales_ptr, stride, w_scales_ptr, N // BLOCK)
    gl.warp_specialize(
        [
            (_consume, (out_desc, scales, work, ring, out_buffers, barriers, 0, KIND)),
            (_consume, (out_desc, scales, work, ring, out_buffers, barriers, 1, KIND)),
            (produce, (x_desc, w_desc, x_desc, w_desc, work, ring, barriers, KIND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def fp8_rows_launch(
    v: Variant,
    x_RK: torch.Tensor,
    x_scales: torch.Tensor,
    w_ENK: torch.Tensor,
    w_scales: torch.Tensor,
    out_RN: torch.Tensor,
    work: WorkList,
    grid: int,
) -> Launch:
    """The launch of the kernel over `work`, whose row tiles have `v.block_m` rows.

    `x_scales` fp32 [K / 128, R], `w_scales` fp32 [E, N / 128, K / 128].
    """
    args = (
        ragged_descriptor(x_RK, (v.block_m, v.block_k)), x_scales, x_scales.shape[1],
        matrix_descriptor(w_ENK, (v.block_n, v.block_k)), w_scales,
        ragged_descriptor(out_RN, (v.block_m // 2, 128)),
        work.records, work.count, out_RN.shape[1], x_RK.shape[1],
    )  # fmt: skip
    kind = {"PINGPONG": v.pingpong} | tile_constants(v, grid)
    return Launch(fp8_rows_gluon_kernel, grid, args, kind)
