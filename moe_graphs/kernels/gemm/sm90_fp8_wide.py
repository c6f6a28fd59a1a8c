"""Draft, never run: `sm90_fp8` with tiles of 128 rows and 192 columns, whose products overlap.

Tensors of 192 columns do not exist in Triton, so a tile has a block of 128 columns that share a
scale, and half of the block beside it: the right half of a tile with an even number, the left one
of a tile with an odd number. Both products of a step are begun at once, so that one runs while the
other's sum is promoted, and the rows' codes come from registers, which both products read.
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
    halves,
    make_barriers,
    matrix_descriptor,
    next_slot,
    place,
    ragged,
    ragged_descriptor,
    tile_constants,
    tma_load,
    tma_store,
)
from moe_graphs.kernels.gemm.sm90_fp8 import BLOCK, Scales, _promoted
from moe_graphs.kernels.gemm.sm90_rows import record_of
from moe_graphs.kernels.gemm.tile_scheduler import COUNT_RECORDS, WorkList
from moe_graphs.kernels.launching import Launch

HALF = gl.constexpr(64)
TILE_N = gl.constexpr(192)


class Kind(NamedTuple):
    STAGES: Any
    IN_REGISTERS: Any
    GRID: Any


class Work(NamedTuple):
    records_ptr: Any
    total: Any
    tiles_n: Any
    steps: Any


class Ring(NamedTuple):
    x: Any
    block: Any
    half: Any


@gluon.jit
def _columns(tile_n):
    """First columns of the whole block and of the half."""
    odd = tile_n % 2
    return tile_n * TILE_N + odd * HALF, tile_n * TILE_N + (1 - odd) * BLOCK


@gluon.jit
def _produce(x_desc, block_desc, half_desc, work, ring, full, empty, KIND: gl.constexpr):
    BYTES: gl.constexpr = (
        x_desc.block_type.nbytes + block_desc.block_type.nbytes + half_desc.block_type.nbytes
    )
    slot = 0
    phase = 1
    first_tile = gl.program_id(0)
    next_e, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        e = next_e
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        above, below, at = ragged(next_start + tile_m * 128, next_end)
        next_e, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        block, half = _columns(tile_n)
        for step in range(work.steps):
            mbarrier.wait(empty.index(slot), phase)
            landed = full.index(slot)
            mbarrier.expect(landed, BYTES)
            k = step * BLOCK
            tma_load(x_desc, [above, below, at, k], landed, ring.x.index(slot))
            tma_load(block_desc, [e, block, k], landed, ring.block.index(slot))
            tma_load(half_desc, [e, half, k], landed, ring.half.index(slot))
            slot, phase = next_slot(slot, phase, KIND.STAGES)


@gluon.jit
def _store(piece, desc, buffer, row, end, column):
    """Begins the store of 64 columns, whose buffer is free."""
    above, below, at = ragged(row, end)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    buffer.store(gl.convert_layout(piece.to(desc.dtype), layout).reshape(desc.block_shape))
    fence_async_shared()
    tma_store(desc, [above, below, at, column], buffer)


@gluon.jit
def _consume(
    out_desc, scales, work, ring, buffers, full, empty, ME: gl.constexpr, KIND: gl.constexpr
):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    lane = gl.arange(0, HALF, layout=gl.SliceLayout(1, wide))
    slot = 0
    phase = 0
    first_tile = gl.program_id(0)
    next_e, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        row = next_start + tile_m * 128 + ME * HALF
        next_e, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        if row >= end:
            for _step in range(work.steps):
                mbarrier.wait(full.index(slot), phase)
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, KIND.STAGES)
        else:
            block, half = _columns(tile_n)
            x_scales = scales.x_ptr + gl.minimum(row + lane, end - 1)
            of_expert = scales.w_ptr + e.to(gl.int64) * scales.blocks_n * work.steps
            block_n = gl.minimum(block // BLOCK, scales.blocks_n - 1)
            half_n = gl.minimum(half // BLOCK, scales.blocks_n - 1)
            of_block = of_expert + block_n * work.steps
            of_half = of_expert + half_n * work.steps
            total = gl.zeros((HALF, BLOCK), gl.float32, wide)
            total2 = gl.zeros((HALF, HALF), gl.float32, narrow)
            part = warpgroup_mma_init(gl.zeros((HALF, BLOCK), gl.float32, wide))
            part2 = warpgroup_mma_init(gl.zeros((HALF, HALF), gl.float32, narrow))
            next_x = gl.load(x_scales)
            later_x = gl.load(x_scales + (work.steps > 1).to(gl.int32) * scales.stride)
            next_w = gl.load(of_block)
            next_w2 = gl.load(of_half)
            for step in range(work.steps):
                scale = next_x
                w_scale = next_w
                w_scale2 = next_w2
                next_x = later_x
                later_x = gl.load(x_scales + gl.minimum(step + 2, work.steps - 1) * scales.stride)
                ahead = gl.minimum(step + 1, work.steps - 1)
                next_w = gl.load(of_block + ahead)
                next_w2 = gl.load(of_half + ahead)
                mbarrier.wait(full.index(slot), phase)
                x = ring.x.index(slot).reshape([128, BLOCK]).slice(ME * HALF, HALF, 0)
                w = ring.block.index(slot).reshape([BLOCK, BLOCK]).permute((1, 0))
                w2 = ring.half.index(slot).reshape([HALF, BLOCK]).permute((1, 0))
                if KIND.IN_REGISTERS:
                    held = x.load(gl.DotOperandLayout(0, wide, 4))
                    held2 = gl.convert_layout(held, gl.DotOperandLayout(0, narrow, 4))
                    part = warpgroup_mma(held, w, part, is_async=True, use_acc=False)
                    part2 = warpgroup_mma(held2, w2, part2, is_async=True, use_acc=False)
                else:
                    part = warpgroup_mma(x, w, part, is_async=True, use_acc=False)
                    part2 = warpgroup_mma(x, w2, part2, is_async=True, use_acc=False)
                done = warpgroup_mma_wait(num_outstanding=1, deps=(part,))
                total = _promoted(total, done, scale, w_scale)
                done2 = warpgroup_mma_wait(num_outstanding=0, deps=(part2,))
                mbarrier.arrive(empty.index(slot), count=1)
                scale2 = gl.convert_layout(scale, gl.SliceLayout(1, narrow))
                total2 = _promoted(total2, done2, scale2, w_scale2)
                part = warpgroup_mma_init(done)
                part2 = warpgroup_mma_init(done2)
                slot, phase = next_slot(slot, phase, KIND.STAGES)
            tma.store_wait(pendings=0)
            left, right = halves(total)
            _store(left, out_desc, buffers.index(ME * 3), row, end, block)
            _store(right, out_desc, buffers.index(ME * 3 + 1), row, end, block + HALF)
            _store(total2, out_desc, buffers.index(ME * 3 + 2), row, end, half)
    tma.store_wait(pendings=0)


@gluon.jit
def fp8_wide_gluon_kernel(
    x_desc, x_scales_ptr, stride, block_desc, half_desc, w_scales_ptr, out_desc, records_ptr,
    count_ptr, N, K,
    IN_REGISTERS: gl.constexpr, STAGES: gl.constexpr, GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    KIND: gl.constexpr = Kind(STAGES, IN_REGISTERS, GRID)
    ring = Ring(boxes_of(x_desc, STAGES), boxes_of(block_desc, STAGES), boxes_of(half_desc, STAGES))
    buffers = boxes_of(out_desc, 6)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    fence_async_shared()
    tiles_n = gl.cdiv(N, TILE_N)
    total = gl.load(count_ptr + COUNT_RECORDS) * tiles_n
    work = Work(records_ptr, total, tiles_n, K // BLOCK)
    scales = Scales(x_scales_ptr, stride, w_scales_ptr, N // BLOCK)
    gl.warp_specialize(
        [
            (_consume, (out_desc, scales, work, ring, buffers, full, empty, 0, KIND)),
            (_consume, (out_desc, scales, work, ring, buffers, full, empty, 1, KIND)),
            (_produce, (x_desc, block_desc, half_desc, work, ring, full, empty, KIND)),
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
    in_registers: bool = True,
) -> Launch:
    """As `sm90_fp8.fp8_rows_launch`; `v.block_m` is 128, and 192 columns make a tile."""
    args = (
        ragged_descriptor(x_RK, (128, 128)), x_scales, x_scales.shape[1],
        matrix_descriptor(w_ENK, (128, 128)), matrix_descriptor(w_ENK, (64, 128)), w_scales,
        ragged_descriptor(out_RN, (64, 64)), work.records, work.count, out_RN.shape[1], x_RK.shape[1],
    )  # fmt: skip
    constants = tile_constants(v, grid)
    kind = {k: constants[k] for k in ("STAGES", "GRID", "num_warps")}
    return Launch(fp8_wide_gluon_kernel, grid, args, {"IN_REGISTERS": in_registers} | kind)
