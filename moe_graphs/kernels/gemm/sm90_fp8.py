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

Work list and barriers are those of sm90_rows. The producer copies the scales of a step into the
ring beside its codes, by `cp.async`: TMA loads no numbers that begin at any of a row.
Consumers that read the scales from memory themselves would wait for them.

A tile's left half is stored while the last product of its right half runs, and the right half while
the first product of the next tile runs.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
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
    ragged,
    ragged_descriptor,
    store_rows,
    tile_constants,
    tma_load,
)
from moe_graphs.kernels.gemm.sm90_rows import Barriers, Kind, Work, record_of
from moe_graphs.kernels.gemm.tile_scheduler import COUNT_RECORDS, WorkList
from moe_graphs.kernels.launching import Launch

BLOCK = gl.constexpr(128)  # of K, and of output columns


class Scales(NamedTuple):
    """Scales of both operands, numbers from one block of K to the next, blocks of columns."""

    x_ptr: Any
    stride: Any
    w_ptr: Any
    blocks_n: Any


class Ring(NamedTuple):
    """Slots in shared memory for the codes of both operands and for their scales."""

    x: Any
    w: Any
    x_scales: Any
    w_scales: Any


@gluon.jit
def ring_of(x_desc, w_desc, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for STAGES steps."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M, 1], plain)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 1], plain)
    return Ring(boxes_of(x_desc, STAGES), boxes_of(w_desc, STAGES), x_scales, w_scales)


@gluon.jit
def numbers(COUNT: gl.constexpr):
    """0, 1, ... as a column, for the places of COUNT scales that one warp copies."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [1, 0])
    return gl.arange(0, COUNT, layout=gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def copy_scales(x_places, w_places, landed, ring, slot, HALVES: gl.constexpr):
    """Starts copying the scales of a step; `landed` waits for them. Call it before `expect`.

    `x_places` points to those of all rows, `w_places` to 32, of which HALVES are used.
    """
    async_copy.async_copy_global_to_shared(ring.x_scales.index(slot), x_places)
    used = numbers(32) < HALVES
    async_copy.async_copy_global_to_shared(ring.w_scales.index(slot), w_places, mask=used)
    async_copy.mbarrier_arrive(landed)


@gluon.jit
def _produce(x_desc, w_desc, scales, work, ring, barriers, KIND: gl.constexpr):
    """Fills the ring with codes and scales of every step of every tile of this CTA."""
    BYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    HALVES: gl.constexpr = KIND.BLOCK_N // BLOCK
    slot = 0
    phase = 1
    first_tile = gl.program_id(0)
    next_e, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        row = next_start + tile_m * KIND.BLOCK_M
        next_e, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        above, below, at = ragged(row, end)
        x_places = scales.x_ptr + gl.minimum(row + numbers(KIND.BLOCK_M), end - 1)
        block_n = gl.minimum(tile_n * HALVES + numbers(32), scales.blocks_n - 1)
        w_places = scales.w_ptr + (e.to(gl.int64) * scales.blocks_n + block_n) * work.steps
        for step in range(work.steps):
            mbarrier.wait(barriers.empty.index(slot), phase)
            landed = barriers.full.index(slot)
            copy_scales(x_places, w_places, landed, ring, slot, HALVES)
            # The box is always counted in full: rows past the group's end arrive as zeros.
            mbarrier.expect(landed, BYTES)
            k = step * KIND.BLOCK_K
            tma_load(x_desc, [above, below, at, k], landed, ring.x.index(slot))
            tma_load(w_desc, [e, tile_n * KIND.BLOCK_N, k], landed, ring.w.index(slot))
            x_places += scales.stride
            w_places += 1
            slot, phase = next_slot(slot, phase, KIND.STAGES)


@gluon.jit
def _begin(
    part, ring, barriers, slot, turn, COLUMN: gl.constexpr, ME: gl.constexpr, KIND: gl.constexpr
):
    """Starts the product of a block, with PINGPONG behind the one of the other consumer.

    It is half ME of a slot's rows times 128 of its columns, from COLUMN on.
    """
    HALF_M: gl.constexpr = KIND.BLOCK_M // 2
    x = ring.x.index(slot).reshape([KIND.BLOCK_M, KIND.BLOCK_K]).slice(ME * HALF_M, HALF_M, 0)
    w = ring.w.index(slot).reshape([KIND.BLOCK_N, KIND.BLOCK_K]).slice(COLUMN, BLOCK, 0)
    if KIND.PINGPONG:
        mbarrier.wait(barriers.turn.index(ME), turn ^ (1 - ME))
    part = warpgroup_mma(x, w.permute((1, 0)), part, is_async=True, use_acc=False)
    if KIND.PINGPONG:
        mbarrier.arrive(barriers.turn.index(1 - ME), count=1)
        turn = turn ^ 1
    return part, turn


@gluon.jit
def _begin_left(part, ring, barriers, slot, phase, turn, ME: gl.constexpr, KIND: gl.constexpr):
    mbarrier.wait(barriers.full.index(slot), phase)
    return _begin(part, ring, barriers, slot, turn, 0, ME, KIND)


@gluon.jit
def _add_left(left, part, ring, barriers, slot, turn, ME: gl.constexpr, KIND: gl.constexpr):
    """Waits for the product of the left columns, adds it, and starts the one of the right ones.

    Returns the scale of the right ones, too. A tile of 128 columns has left ones only.
    """
    HALF_M: gl.constexpr = KIND.BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    x_scales = ring.x_scales.index(slot).slice(ME * HALF_M, HALF_M, 0).load(layout)
    left_scale = x_scales * ring.w_scales.index(slot).slice(0, 1, 0).load(layout)
    right_scale = x_scales * ring.w_scales.index(slot).slice(1, 1, 0).load(layout)
    done = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
    left = left + done * left_scale
    part = warpgroup_mma_init(done)
    if KIND.BLOCK_N > BLOCK:
        # Nothing is in flight: this holds the compiler to add before the next product begins.
        left = warpgroup_mma_wait(num_outstanding=0, deps=(left,))
        part, turn = _begin(part, ring, barriers, slot, turn, BLOCK, ME, KIND)
    return left, part, right_scale, turn


@gluon.jit
def add_right(right, part, scale, ring, barriers, slot, phase, KIND: gl.constexpr):
    """Waits for the product of the right columns and adds it; frees the slot."""
    done = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
    mbarrier.arrive(barriers.empty.index(slot), count=1)
    if KIND.BLOCK_N > BLOCK:
        right = right + done * scale
    slot, phase = next_slot(slot, phase, KIND.STAGES)
    return right, warpgroup_mma_init(done), slot, phase


@gluon.jit
def begin_tile(ring, barriers, slot, phase, turn, ME: gl.constexpr, KIND: gl.constexpr):
    """Starts the first product of a tile, for `multiply_blocks`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    part = warpgroup_mma_init(gl.zeros((KIND.BLOCK_M // 2, BLOCK), gl.float32, layout))
    return _begin_left(part, ring, barriers, slot, phase, turn, ME, KIND)


@gluon.jit
def multiply_blocks(
    part, ring, barriers, slot, phase, turn, steps, ME: gl.constexpr, KIND: gl.constexpr
):
    """Half ME of a tile's rows times its columns, in at least one step.

    Returns the sums of the left and of the right 128 columns, and the last product of the right
    ones, which is in flight, for `add_right`.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    left = gl.zeros((KIND.BLOCK_M // 2, BLOCK), gl.float32, layout)
    right = gl.zeros((KIND.BLOCK_M // 2, BLOCK), gl.float32, layout)
    left, part, scale, turn = _add_left(left, part, ring, barriers, slot, turn, ME, KIND)
    for _step in range(steps - 1):
        right, part, slot, phase = add_right(right, part, scale, ring, barriers, slot, phase, KIND)
        part, turn = _begin_left(part, ring, barriers, slot, phase, turn, ME, KIND)
        left, part, scale, turn = _add_left(left, part, ring, barriers, slot, turn, ME, KIND)
    return left, right, part, scale, slot, phase, turn


@gluon.jit
def _consume(out_desc, work, ring, out_buffers, barriers, ME: gl.constexpr, KIND: gl.constexpr):
    """Multiplies and stores half ME of the rows of every tile of this CTA."""
    HALF_M: gl.constexpr = KIND.BLOCK_M // 2
    HALVES: gl.constexpr = KIND.BLOCK_N // BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    # The right half of the tile before, and where it belongs: a place that has no rows at first.
    right = gl.zeros((HALF_M, BLOCK), gl.float32, layout)
    right_row = 0
    right_end = 0
    right_column = 0
    slot = 0
    phase = 0
    turn = 0
    first_tile = gl.program_id(0)
    _, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        row = next_start + tile_m * KIND.BLOCK_M + ME * HALF_M
        _, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        if row >= end:
            for _step in range(work.steps):
                if KIND.PINGPONG:
                    for _half in gl.static_range(HALVES):
                        mbarrier.wait(barriers.turn.index(ME), turn ^ (1 - ME))
                        mbarrier.arrive(barriers.turn.index(1 - ME), count=1)
                        turn = turn ^ 1
                mbarrier.wait(barriers.full.index(slot), phase)
                mbarrier.arrive(barriers.empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, KIND.STAGES)
        else:
            part, turn = begin_tile(ring, barriers, slot, phase, turn, ME, KIND)
            if HALVES > 1:
                store_rows(right, out_desc, out_buffers, ME, right_row, right_end, right_column)
            left, right, part, scale, slot, phase, turn = multiply_blocks(
                part, ring, barriers, slot, phase, turn, work.steps, ME, KIND
            )
            column = tile_n * KIND.BLOCK_N
            store_rows(left, out_desc, out_buffers, ME, row, end, column)
            right, part, slot, phase = add_right(
                right, part, scale, ring, barriers, slot, phase, KIND
            )
            right_row = row
            right_end = end
            right_column = column + BLOCK
    if HALVES > 1:
        store_rows(right, out_desc, out_buffers, ME, right_row, right_end, right_column)
    tma.store_wait(pendings=0)


@gluon.jit
def fp8_rows_gluon_kernel(
    x_desc, x_scales_ptr, stride, w_desc, w_scales_ptr, out_desc, records_ptr, count_ptr, N, K,
    PINGPONG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over the tiles of `records` x column tiles; grid (GRID,), num_warps=4."""
    KIND: gl.constexpr = Kind(BLOCK_M, BLOCK_N, BLOCK_K, STAGES, True, PINGPONG, False, 0, 0, GRID)
    ring = ring_of(x_desc, w_desc, BLOCK_M, STAGES)
    out_buffers = boxes_of(out_desc, 2)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    fence_async_shared()
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr + COUNT_RECORDS) * tiles_n
    steps = K // BLOCK_K
    work = Work(records_ptr, total, total, 0, steps, tiles_n, steps)
    barriers = Barriers(full, empty, turn)
    scales = Scales(x_scales_ptr, stride, w_scales_ptr, N // BLOCK)
    gl.warp_specialize(
        [
            (_consume, (out_desc, work, ring, out_buffers, barriers, 0, KIND)),
            (_consume, (out_desc, work, ring, out_buffers, barriers, 1, KIND)),
            (_produce, (x_desc, w_desc, scales, work, ring, barriers, KIND)),
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
