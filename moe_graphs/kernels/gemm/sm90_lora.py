"""A product with LoRA beside it, in one pass over the rows: a Gluon kernel for Hopper.

    low_Rr[r] = x_RK[r] @ a[e]                      rounded; rows r of expert e
    out_RN[r] = x_RK[r] @ w[e] + low_Rr[r] @ b[e]   one sum; w_EKN, or w_ENK when TRANSPOSED

The cooperative kernel of sm90_rows, with two sums per consumer: each K step multiplies the rows in
its slot by columns of w and by all of a. The narrow product reads the rows from registers, since a
WGMMA of 16 columns would read them from shared memory for longer than it multiplies. At the end of
the steps the second sum, `low`, is rounded in registers, and multiplies b, which has a step of its
own. Tiles of the first columns store it. So the rows are read once, where a product of its own
reads them all for `rank` columns: at rank 16 that takes a sixth of the time of the main product,
and here 16 more columns beside 256. The factors lie as the weight does, and the rank is 8, 16 or
32.
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
    columns_of,
    make_barriers,
    matrix_descriptor,
    next_slot,
    pieces_of,
    place,
    previous_slot,
    ragged,
    ragged_descriptor,
    store_rows,
    tile_constants,
    tma_load,
)
from moe_graphs.kernels.gemm.sm90_rows import Barriers, Work, record_of
from moe_graphs.kernels.gemm.tile_scheduler import COUNT_RECORDS, WorkList
from moe_graphs.kernels.launching import Launch


class Kind(NamedTuple):
    """The constants that the kernel is compiled for; STORED columns of `low` are those of b."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    STAGES: Any
    TRANSPOSED: Any
    RANK: Any
    STORED: Any
    GRID: Any


class Ring(NamedTuple):
    """Slots in shared memory for rows, weight and first factor."""

    x: Any
    w: Any
    a: Any


@gluon.jit
def _produce(x_desc, w_desc, a_desc, b_desc, work, ring, barriers, KIND: gl.constexpr):
    """Fills the ring: rows, weight and a of every K step, then b in the place of the weight."""
    OF_B: gl.constexpr = b_desc.block_type.nbytes
    BYTES: gl.constexpr = (
        x_desc.block_type.nbytes + w_desc.block_type.nbytes + a_desc.block_type.nbytes
    )
    slot = 0
    phase = 1
    first_tile = gl.program_id(0)
    next_e, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        above, below, at = ragged(next_start + tile_m * KIND.BLOCK_M, end)
        column = tile_n * KIND.BLOCK_N
        next_e, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        for step in range(work.steps):
            mbarrier.wait(barriers.empty.index(slot), phase)
            landed = barriers.full.index(slot)
            mbarrier.expect(landed, BYTES)
            k = step * KIND.BLOCK_K
            tma_load(x_desc, [above, below, at, k], landed, ring.x.index(slot))
            if KIND.TRANSPOSED:
                tma_load(w_desc, [e, column, k], landed, ring.w.index(slot))
                tma_load(a_desc, [e, 0, k], landed, ring.a.index(slot))
            else:
                tma_load(w_desc, [e, k, column], landed, ring.w.index(slot))
                tma_load(a_desc, [e, k, 0], landed, ring.a.index(slot))
            slot, phase = next_slot(slot, phase, KIND.STAGES)
        mbarrier.wait(barriers.empty.index(slot), phase)
        landed = barriers.full.index(slot)
        mbarrier.expect(landed, OF_B)
        if KIND.TRANSPOSED:
            tma_load(b_desc, [e, column, 0], landed, ring.w.index(slot))
        else:
            tma_load(b_desc, [e, 0, column], landed, ring.w.index(slot))
        slot, phase = next_slot(slot, phase, KIND.STAGES)


@gluon.jit
def store_low(low, low_ptr, row, end, wanted):
    """Stores rows `row...` before `end`, from registers, if they are wanted."""
    WIDTH: gl.constexpr = low.shape[1]
    rows = row + gl.arange(0, low.shape[0], layout=gl.SliceLayout(1, low.type.layout))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, low.type.layout))
    at = low_ptr + rows.to(gl.int64)[:, None] * WIDTH + columns[None, :]
    gl.store(at, low, mask=(rows < end)[:, None] & wanted)


@gluon.jit
def _multiply_slot(
    ring, barriers, slot, phase, acc, low, adds, SHIFT: gl.constexpr, KIND: gl.constexpr
):
    """One K step of both sums; the step before it is done, where it `adds`."""
    LOW_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KIND.RANK, 16])
    mbarrier.wait(barriers.full.index(slot), phase)
    x = ring.x.index(slot).reshape([KIND.BLOCK_M, KIND.BLOCK_K]).slice(SHIFT, KIND.BLOCK_M // 2, 0)
    w = columns_of(ring.w.index(slot), KIND.BLOCK_K, KIND.BLOCK_N, KIND.TRANSPOSED)
    a = columns_of(ring.a.index(slot), KIND.BLOCK_K, KIND.RANK, KIND.TRANSPOSED)
    # The narrow MMA goes first: when it is done, its registers are free again, and so is the slot
    # before. The wide one stays in flight.
    rows = x.load(gl.DotOperandLayout(0, LOW_LAYOUT, 2))
    low = warpgroup_mma(rows, a, low, is_async=True, use_acc=adds)
    acc = warpgroup_mma(x, w, acc, is_async=True, use_acc=adds)
    acc, low = warpgroup_mma_wait(num_outstanding=1, deps=(acc, low))
    acc = warpgroup_mma_init(acc)
    low = warpgroup_mma_init(low)
    behind = previous_slot(slot, KIND.STAGES)
    mbarrier.arrive(barriers.empty.index(behind), count=1, pred=adds)
    slot, phase = next_slot(slot, phase, KIND.STAGES)
    return acc, low, slot, phase


@gluon.jit
def _consume(
    out_desc, low_ptr, work, ring, out_buffers, barriers, ME: gl.constexpr, KIND: gl.constexpr
):
    """Multiplies and stores half ME of every tile."""
    HALF_M: gl.constexpr = KIND.BLOCK_M // 2
    SHIFT: gl.constexpr = ME * HALF_M
    RANK: gl.constexpr = KIND.RANK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KIND.BLOCK_N, 16])
    low_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RANK, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    slot = 0
    phase = 0
    first_tile = gl.program_id(0)
    _, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        row = next_start + tile_m * KIND.BLOCK_M + SHIFT
        _, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        if row >= end:
            for _step in range(work.steps + 1):
                mbarrier.wait(barriers.full.index(slot), phase)
                mbarrier.arrive(barriers.empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, KIND.STAGES)
        else:
            acc = warpgroup_mma_init(gl.zeros((HALF_M, KIND.BLOCK_N), gl.float32, layout))
            low = warpgroup_mma_init(gl.zeros((HALF_M, RANK), gl.float32, low_layout))
            for step in range(work.steps):
                acc, low, slot, phase = _multiply_slot(
                    ring, barriers, slot, phase, acc, low, step > 0, SHIFT, KIND
                )
            whole, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, low))
            mbarrier.arrive(barriers.empty.index(previous_slot(slot, KIND.STAGES)), count=1)
            rounded = rest.to(out_desc.dtype)
            stored = pieces_of(rounded, RANK // KIND.STORED)
            store_low(stored[0], low_ptr, row, end, tile_n == 0)
            left = gl.convert_layout(rounded, left_layout)
            mbarrier.wait(barriers.full.index(slot), phase)
            b = columns_of(ring.w.index(slot), KIND.BLOCK_K, KIND.BLOCK_N, KIND.TRANSPOSED)
            b = b.slice(0, RANK, 0)
            acc = warpgroup_mma(left, b, warpgroup_mma_init(whole), is_async=True)
            result = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(barriers.empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, KIND.STAGES)
            store_rows(result, out_desc, out_buffers, ME, row, end, tile_n * KIND.BLOCK_N)
    tma.store_wait(pendings=0)


@gluon.jit
def lora_rows_gluon_kernel(
    x_desc, w_desc, a_desc, b_desc, out_desc, low_ptr, records_ptr, count_ptr, N, K,
    TRANSPOSED: gl.constexpr, RANK: gl.constexpr, STORED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over the tiles of `records` x column tiles; grid (GRID,), num_warps=4."""
    KIND: gl.constexpr = Kind(BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED, RANK, STORED, GRID)
    x_ring = boxes_of(x_desc, STAGES)
    w_ring = boxes_of(w_desc, STAGES)
    a_ring = boxes_of(a_desc, STAGES)
    out_buffers = boxes_of(out_desc, 2)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    fence_async_shared()
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr + COUNT_RECORDS) * tiles_n
    steps = gl.cdiv(K, BLOCK_K)
    work = Work(records_ptr, total, total, 0, steps, tiles_n, steps)
    ring = Ring(x_ring, w_ring, a_ring)
    barriers = Barriers(full, empty, empty)
    gl.warp_specialize(
        [
            (_consume, (out_desc, low_ptr, work, ring, out_buffers, barriers, 0, KIND)),
            (_consume, (out_desc, low_ptr, work, ring, out_buffers, barriers, 1, KIND)),
            (_produce, (x_desc, w_desc, a_desc, b_desc, work, ring, barriers, KIND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def lora_rows_launch(
    v: Variant,
    x_RK: torch.Tensor,
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out_RN: torch.Tensor,
    low_Rr: torch.Tensor,
    work: WorkList,
    transposed: bool,
    grid: int,
) -> Launch:
    """The launch of the kernel over `work`, whose row tiles have `v.block_m` rows."""
    rank = low_Rr.shape[1]
    box = (v.block_n, v.block_k) if transposed else (v.block_k, v.block_n)
    columns = max(rank, 16)  # a WGMMA takes 16
    box_of_a = (columns, v.block_k) if transposed else (v.block_k, columns)
    args = (
        ragged_descriptor(x_RK, (v.block_m, v.block_k)), matrix_descriptor(w, box),
        matrix_descriptor(a, box_of_a), matrix_descriptor(b, box),
        ragged_descriptor(out_RN, (v.block_m // 2, v.block_n)),
        low_Rr, work.records, work.count, out_RN.shape[1], x_RK.shape[1],
    )  # fmt: skip
    kind = {"TRANSPOSED": transposed, "RANK": columns, "STORED": rank}
    return Launch(lora_rows_gluon_kernel, grid, args, kind | tile_constants(v, grid))
