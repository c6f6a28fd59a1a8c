"""Forward and input gradient as warp-specialised Gluon kernels for Hopper.

    out_RN[r] = x_RK[r] @ w[e]        rows r of expert e; w_EKN, or w_ENK when TRANSPOSED
              + low_Rr[r] @ b[e]      with BESIDE, laid out as w

A CTA is one producer warp and two consumer partitions of four warps, over a ring of shared-memory
slots (see sm90_common). Two ways to share the work between the consumers:

- cooperative: both take the same 128-row tile, each its 64-row half. A slot is free when both are
  done with it, so they need no order among each other; a half without rows only releases slots.
  The best shape from about 400 rows per expert on.
- ping-pong: alternate 64-row tiles, so that one multiplies while the other stores. A consumer may
  only start waiting for slots when the other has passed all its own waits: a parity wait is valid
  within one phase of the barrier, and without the `turn` barriers a consumer would wait several
  phases early (measured: garbage, then a hang). The best shape for few rows per expert.

The last round of tiles may be cut along K (SPLITS, see tile_scheduler.py): after its whole tiles a
CTA then has a part of a tile, whose partial sum goes to its slot of `partials`.

A product beside the first one (LoRA's) is BESIDE more K steps into the same sum. Its boxes are as
large as the other steps', and TMA fills the columns behind the rank with zeros. The last step
multiplies LAST columns only, the first of a slot, which lie as the first of every step.

Measured on an H200 (sustained): 0.93-1.02 of one dense cuBLAS GEMM from 1024 rows per expert on,
0.80-0.98 at 256 to 320. Cut along K, 4.4 rounds of tiles take 4.5: 520 -> 575 TFLOP/s.
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

from moe_graphs.kernels.gemm.heuristics import Pair, Variant
from moe_graphs.kernels.gemm.sm90_common import (
    boxes_of,
    columns_of,
    make_barriers,
    matrix_descriptor,
    next_slot,
    place,
    previous_slot,
    ragged,
    ragged_descriptor,
    store_partial,
    store_rows,
    tile_constants,
    tma_load,
)
from moe_graphs.kernels.gemm.tile_scheduler import (
    COUNT_CUT,
    COUNT_LENGTH,
    COUNT_RECORDS,
    COUNT_WHOLE,
    ROW_END,
    ROW_EXPERT,
    ROW_FIRST_TILE,
    ROW_RECORD,
    ROW_START,
    ROW_TILES,
    WorkList,
)
from moe_graphs.kernels.launching import Launch, next_power_of_2


class Work(NamedTuple):
    """The work of all CTAs together: `total` tiles of `steps` K steps, those beside among them.

    `whole` tiles are done whole, and `tail` tiles in parts of `length` steps.
    """

    records_ptr: Any
    total: Any
    whole: Any
    tail: Any
    length: Any
    tiles_n: Any
    steps: Any


class Kind(NamedTuple):
    """The constants that a kernel is compiled for."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    STAGES: Any
    TRANSPOSED: Any
    PINGPONG: Any
    SPLITS: Any
    BESIDE: Any
    LAST: Any
    GRID: Any


class Ring(NamedTuple):
    """Slots in shared memory for both operands."""

    x: Any
    w: Any


class Barriers(NamedTuple):
    """Barriers of the slots, full and empty, and of whose turn it is (ping-pong)."""

    full: Any
    empty: Any
    turn: Any


@gluon.jit
def record_of(tile, work):
    """Record of a tile, loads only: issued one tile ahead, it is not waited for until it is used.

    Tiles past the end are clamped into the list.
    """
    row_tile = gl.maximum(gl.minimum(tile, work.total - 1), 0) // work.tiles_n
    record = work.records_ptr + row_tile * ROW_RECORD
    first = gl.load(record + ROW_FIRST_TILE)
    tiles_m = gl.load(record + ROW_TILES)
    e = gl.load(record + ROW_EXPERT)
    return e, first, tiles_m, gl.load(record + ROW_START), gl.load(record + ROW_END)


@gluon.jit
def _units_of(work, KIND: gl.constexpr):
    """The number of this CTA's whole tiles, and of its units: these and its part of a cut tile."""
    rounds = gl.cdiv(gl.maximum(work.whole - gl.program_id(0), 0), KIND.GRID)
    parts = work.tail * gl.cdiv(work.steps, work.length)
    return rounds, rounds + (gl.program_id(0) < parts).to(gl.int32)


@gluon.jit
def _unit(unit, rounds, work, KIND: gl.constexpr):
    """(tile, first K step, end step) of a unit of work of this CTA."""
    tile = gl.program_id(0) + unit * KIND.GRID
    first = 0
    end = work.steps
    if KIND.SPLITS:
        cut = unit >= rounds
        part = gl.program_id(0) // gl.maximum(work.tail, 1)
        tile = gl.where(cut, work.whole + gl.program_id(0) - part * work.tail, tile)
        first = gl.where(cut, part * work.length, 0)
        end = gl.where(cut, gl.minimum(first + work.length, work.steps), work.steps)
    return tile, first, end


@gluon.jit
def _load(x_desc, w_desc, rows, e, column, step, landed, ring, slot, KIND: gl.constexpr):
    """Loads both operands of a K step into a slot."""
    above, below, at = rows
    k = step * KIND.BLOCK_K
    tma_load(x_desc, [above, below, at, k], landed, ring.x.index(slot))
    at_w = [e, column, k] if KIND.TRANSPOSED else [e, k, column]
    tma_load(w_desc, at_w, landed, ring.w.index(slot))


@gluon.jit
def produce(x_desc, w_desc, low_desc, b_desc, work, ring, barriers, KIND: gl.constexpr):
    """Fills the ring with the operands of every K step of every tile of this CTA."""
    BYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    slot = 0
    phase = 1
    rounds, units = _units_of(work, KIND)
    tile, _, _ = _unit(0, rounds, work, KIND)
    next_e, next_first, next_m, next_start, next_end = record_of(tile, work)
    for unit in range(units):
        tile, first_step, end_step = _unit(unit, rounds, work, KIND)
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        rows = ragged(next_start + tile_m * KIND.BLOCK_M, end)
        column = tile_n * KIND.BLOCK_N
        next_tile, _, _ = _unit(unit + 1, rounds, work, KIND)
        next_e, next_first, next_m, next_start, next_end = record_of(next_tile, work)
        for step in range(first_step, end_step):
            mbarrier.wait(barriers.empty.index(slot), phase)
            landed = barriers.full.index(slot)
            # The box is always counted in full: rows past the group's end arrive as zeros.
            mbarrier.expect(landed, BYTES)
            if KIND.BESIDE:
                behind = step - (work.steps - KIND.BESIDE)
                if behind >= 0:
                    _load(low_desc, b_desc, rows, e, column, behind, landed, ring, slot, KIND)
                else:
                    _load(x_desc, w_desc, rows, e, column, step, landed, ring, slot, KIND)
            else:
                _load(x_desc, w_desc, rows, e, column, step, landed, ring, slot, KIND)
            slot, phase = next_slot(slot, phase, KIND.STAGES)


@gluon.jit
def _multiply_slot(
    ring, barriers, slot, phase, acc, adds,
    COLUMNS: gl.constexpr, SHIFT: gl.constexpr, HALF_M: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One K step, or its first COLUMNS; the step before it is done, where it `adds`."""
    mbarrier.wait(barriers.full.index(slot), phase)
    x = ring.x.index(slot).reshape([KIND.BLOCK_M, KIND.BLOCK_K]).slice(SHIFT, HALF_M, 0)
    w = columns_of(ring.w.index(slot), KIND.BLOCK_K, KIND.BLOCK_N, KIND.TRANSPOSED)
    if COLUMNS < KIND.BLOCK_K:
        x = x.slice(0, COLUMNS, 1)
        w = w.slice(0, COLUMNS, 0)
    acc = warpgroup_mma(x, w, acc, is_async=True, use_acc=adds)
    # One MMA stays in flight; the slot of the one before it can be refilled.
    acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
    behind = previous_slot(slot, KIND.STAGES)
    mbarrier.arrive(barriers.empty.index(behind), count=1, pred=adds)
    slot, phase = next_slot(slot, phase, KIND.STAGES)
    return acc, slot, phase


@gluon.jit
def multiply(
    ring, barriers, slot, phase, first_step, end_step, steps,
    SHIFT: gl.constexpr, HALF_M: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Rows SHIFT ... of a tile times its columns; the last MMA is in flight, its slot not free.

    The last one of all `steps` has LAST columns; 0 stands for a whole step.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KIND.BLOCK_N, 16])
    acc = warpgroup_mma_init(gl.zeros((HALF_M, KIND.BLOCK_N), gl.float32, layout))
    end_whole = end_step
    if KIND.LAST:
        end_whole = gl.minimum(end_step, steps - 1)
    for step in range(first_step, end_whole):
        acc, slot, phase = _multiply_slot(
            ring, barriers, slot, phase, acc, step > first_step, KIND.BLOCK_K, SHIFT, HALF_M, KIND
        )
    if KIND.LAST:
        for step in range(end_whole, end_step):  # one, or none where a tile is cut along K
            acc, slot, phase = _multiply_slot(
                ring, barriers, slot, phase, acc, step > first_step, KIND.LAST, SHIFT, HALF_M, KIND
            )
    return acc, slot, phase


@gluon.jit
def _consume(
    out_desc, partials_ptr, work, ring, out_buffers, barriers, ME: gl.constexpr, KIND: gl.constexpr
):
    """Multiplies and stores: half ME of every tile, or (PINGPONG) tiles ME, ME + 2, ..."""
    PINGPONG: gl.constexpr = KIND.PINGPONG
    BLOCK_M: gl.constexpr = KIND.BLOCK_M
    BLOCK_N: gl.constexpr = KIND.BLOCK_N
    STAGES: gl.constexpr = KIND.STAGES
    HALF_M: gl.constexpr = BLOCK_M if PINGPONG else BLOCK_M // 2
    SHIFT: gl.constexpr = 0 if PINGPONG else ME * HALF_M
    FIRST: gl.constexpr = ME if PINGPONG else 0
    STRIDE: gl.constexpr = 2 if PINGPONG else 1
    slot = 0
    phase = 0
    passed = FIRST * work.steps  # K steps of the tiles before this consumer's next one (ping-pong)
    rounds, units = _units_of(work, KIND)
    tile, _, _ = _unit(FIRST, rounds, work, KIND)
    _, next_first, next_m, next_start, next_end = record_of(tile, work)
    for unit in range(FIRST, units, STRIDE):
        tile, first_step, end_step = _unit(unit, rounds, work, KIND)
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        row = next_start + tile_m * BLOCK_M + SHIFT
        next_tile, _, _ = _unit(unit + STRIDE, rounds, work, KIND)
        _, next_first, next_m, next_start, next_end = record_of(next_tile, work)
        if PINGPONG:
            slot = passed % STAGES
            phase = (passed // STAGES) & 1
            passed += 2 * work.steps
            mbarrier.wait(barriers.turn.index(ME), ((unit // 2) & 1) ^ (1 - ME))
        if not PINGPONG and row >= end:
            for _step in range(first_step, end_step):
                mbarrier.wait(barriers.full.index(slot), phase)
                mbarrier.arrive(barriers.empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, STAGES)
        else:
            acc, slot, phase = multiply(
                ring, barriers, slot, phase, first_step, end_step, work.steps, SHIFT, HALF_M, KIND
            )
            if PINGPONG:
                mbarrier.arrive(barriers.turn.index(1 - ME), count=1)
            result = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(barriers.empty.index(previous_slot(slot, STAGES)), count=1)
            if KIND.SPLITS and unit >= rounds:
                part = gl.program_id(0)
                store_partial(result, partials_ptr, part, SHIFT, 0, BLOCK_M, BLOCK_N)
            else:
                store_rows(result, out_desc, out_buffers, ME, row, end, tile_n * BLOCK_N)
    tma.store_wait(pendings=0)


@gluon.jit
def rows_gluon_kernel(
    x_desc, w_desc, low_desc, b_desc, out_desc, partials_ptr, records_ptr, count_ptr, N, K,
    PINGPONG: gl.constexpr, SPLITS: gl.constexpr, TRANSPOSED: gl.constexpr, BESIDE: gl.constexpr,
    LAST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over the tiles of `records` x column tiles; grid (GRID,), num_warps=4."""
    KIND: gl.constexpr = Kind(
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED, PINGPONG, SPLITS, BESIDE, LAST, GRID,
    )  # fmt: skip
    x_ring = boxes_of(x_desc, STAGES)
    w_ring = boxes_of(w_desc, STAGES)
    out_buffers = boxes_of(out_desc, 2)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1 if PINGPONG else 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    fence_async_shared()
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr + COUNT_RECORDS) * tiles_n
    steps = gl.cdiv(K, BLOCK_K) + BESIDE
    whole = total
    tail = 0
    length = steps
    if SPLITS:
        whole = gl.load(count_ptr + COUNT_WHOLE)
        tail = gl.load(count_ptr + COUNT_CUT)
        length = gl.load(count_ptr + COUNT_LENGTH)
    work = Work(records_ptr, total, whole, tail, length, tiles_n, steps)
    ring = Ring(x_ring, w_ring)
    barriers = Barriers(full, empty, turn)
    gl.warp_specialize(
        [
            (_consume, (out_desc, partials_ptr, work, ring, out_buffers, barriers, 0, KIND)),
            (_consume, (out_desc, partials_ptr, work, ring, out_buffers, barriers, 1, KIND)),
            (produce, (x_desc, w_desc, low_desc, b_desc, work, ring, barriers, KIND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def rows_launch(
    v: Variant,
    x_RK: torch.Tensor,
    w: torch.Tensor,
    out_RN: torch.Tensor,
    work: WorkList,
    transposed: bool,
    grid: int,
    partials: torch.Tensor | None = None,
    beside: Pair | None = None,
) -> Launch:
    """The launch of the rows kernel over `work`, whose row tiles have `v.block_m` rows.

    `partials` fp32 [grid, BLOCK_M, BLOCK_N] takes what `work` cuts along K; cooperative alone.
    """
    box = (v.block_n, v.block_k) if transposed else (v.block_k, v.block_n)

    def pair(rows: torch.Tensor, matrices: torch.Tensor) -> tuple[Any, Any]:
        return ragged_descriptor(rows, (v.block_m, v.block_k)), matrix_descriptor(matrices, box)

    args = (
        *pair(x_RK, w),
        *((out_RN, out_RN) if beside is None else pair(*beside)),
        ragged_descriptor(out_RN, (v.block_m if v.pingpong else v.block_m // 2, v.block_n)),
        out_RN if partials is None else partials,
        work.records, work.count, out_RN.shape[1], x_RK.shape[1],
    )  # fmt: skip
    kind: dict[str, int]
    kind = {"PINGPONG": v.pingpong, "SPLITS": partials is not None, "TRANSPOSED": transposed}
    kind |= {"BESIDE": v.steps(beside), "LAST": last_columns(v, beside)}
    return Launch(rows_gluon_kernel, grid, args, kind | tile_constants(v, grid))


def last_columns(v: Variant, beside: Pair | None) -> int:
    """The columns of the last K step that hold all of a rank; 0 where these are all columns."""
    if beside is None:
        return 0
    rest = beside[0].shape[1] - (v.steps(beside) - 1) * v.block_k
    columns = max(next_power_of_2(rest), 16)  # a WGMMA takes 16
    return columns if columns < v.block_k else 0
