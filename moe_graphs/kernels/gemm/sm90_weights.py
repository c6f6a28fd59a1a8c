"""Weight gradient as warp-specialised Gluon kernels for Hopper.

    dw_EKN[e] (+)= x_RK[rows of e].T @ dy_RN[rows of e]

The reduction runs over a group's rows, so the number of K steps differs from tile to tile and is
known on the device only; rows past the group's end arrive as zeros from TMA. Tiles are M (columns
of x) by N (columns of dy), experts longest first. A part of an expert's rows that
tile_scheduler.py has split off goes to its slot of `partials` (SPLITS).

Cooperative and ping-pong consumers share the work as in sm90_rows. Every partition walks over all
tiles of the CTA, as the position in the ring is the sum of all steps before. The output has the
dtype of `dw_desc`. ADD accumulates into it (fp32): "reduce", "fetch" or "" for not at all, see
`store_weights`.

An expert without rows has no tiles: the producer zeros its gradient, one chunk behind the loads of
some K steps, so that it costs memory bandwidth beside the products and no time of the consumers.

Measured on an H200 (2026-11-21, sustained), of one dense cuBLAS GEMM: bf16 (cooperative) 0.91-1.02
from 1024 rows per expert on, 0.82 at 512, 0.65-0.71 at 256; fp32 (ping-pong, whose stores go beside
products) 0.87-0.96 and 0.74.
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
    fetch_weights,
    make_barriers,
    matrix_descriptor,
    next_slot,
    place,
    previous_slot,
    ragged,
    ragged_descriptor,
    rounds_of,
    store_partial,
    store_weights,
    tile_of,
    tma_load,
    zero_chunk,
)
from moe_graphs.kernels.gemm.tile_scheduler import (
    COUNT_FULL,
    COUNT_RECORDS,
    EXPERT_RECORD,
    PART_END,
    PART_EXPERT,
    PART_SLOT,
    PART_START,
    WorkList,
)
from moe_graphs.kernels.launching import Launch

# The producer zeros one number per so many multiply-adds (bf16: 0.6 TB/s on an H200), and only
# behind every fourth K step: it is one warp, and finding a chunk's place delays the next loads.
# Measured with one expert that takes all, bf16 / fp32 TFLOP/s, by (adds, steps): (2048, 1) 273 /
# 276, (1024, 2) 490 / 438, (1024, 4) 545 / 430, (1024, 8) 558 / 390, (512, 4) 578 / 428.
ADDS_PER_ZERO = gl.constexpr(1024)
STEPS_PER_CHUNK = gl.constexpr(4)


class Kind(NamedTuple):
    """The constants that a kernel is compiled for. CHUNK numbers are zeroed at once, or none."""

    PINGPONG: Any
    ADD: Any
    SPLITS: Any
    PIECES: Any
    BUFFERS: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_R: Any
    STAGES: Any
    GRID: Any
    CHUNK: Any


class Work(NamedTuple):
    """The work: `total` tiles of M x N outputs, of which this CTA has `rounds`."""

    records_ptr: Any
    count_ptr: Any
    total: Any
    M: Any
    N: Any
    tiles_m: Any
    tiles_n: Any
    rounds: Any


class Ring(NamedTuple):
    """Slots in shared memory for both operands."""

    x: Any
    dy: Any


class Barriers(NamedTuple):
    """Barriers of the slots, full and empty; of whose turn it is; of old gradients' arrival."""

    full: Any
    empty: Any
    turn: Any
    arrived: Any


@gluon.jit
def _record(tile, work):
    """(expert, first row, end row, slot) of a tile, loads only; clamped into the list."""
    part = gl.maximum(gl.minimum(tile, work.total - 1), 0) // (work.tiles_m * work.tiles_n)
    record = work.records_ptr + part * EXPERT_RECORD
    e = gl.load(record + PART_EXPERT)
    start = gl.load(record + PART_START)
    return e, start, gl.load(record + PART_END), gl.load(record + PART_SLOT)


@gluon.jit
def _empty_expert(chunk, chunks, work, per_matrix):
    """The expert whose gradient has this chunk, loads only; clamped into the list."""
    last = gl.maximum(gl.minimum(chunk, chunks - 1), 0)
    record = gl.load(work.count_ptr + COUNT_FULL) + last // per_matrix
    record = gl.minimum(record, gl.load(work.count_ptr + COUNT_RECORDS) - 1)
    return gl.load(work.records_ptr + record * EXPERT_RECORD + PART_EXPERT)


@gluon.jit
def _produce(x_desc, dy_desc, dw_ptr, work, ring, barriers, KIND: gl.constexpr):
    """Fills the ring with the operands of every K step of every tile, and zeros CHUNK numbers."""
    BYTES: gl.constexpr = x_desc.block_type.nbytes + dy_desc.block_type.nbytes
    CHUNK: gl.constexpr = KIND.CHUNK
    GRID: gl.constexpr = KIND.GRID
    per_expert = work.tiles_m * work.tiles_n
    slot = 0
    phase = 1
    chunk = gl.program_id(0)  # the next one to zero, among all of experts without rows
    chunks = 0
    per_matrix = 0
    empty_e = 0
    if CHUNK:
        per_matrix = gl.cdiv(work.M * work.N, CHUNK)
        empty = gl.load(work.count_ptr + COUNT_RECORDS) - gl.load(work.count_ptr + COUNT_FULL)
        chunks = empty * per_matrix
        empty_e = _empty_expert(chunk, chunks, work, per_matrix)
    _, next_start, next_end, _ = _record(tile_of(0, GRID), work)
    for round in range(work.rounds):
        start = next_start
        end = next_end
        tile_m, tile_n = place(tile_of(round, GRID) % per_expert, work.tiles_m, work.tiles_n)
        _, next_start, next_end, _ = _record(tile_of(round + 1, GRID), work)
        for step in range(gl.cdiv(end - start, KIND.BLOCK_R)):
            above, below, at = ragged(start + step * KIND.BLOCK_R, end)
            mbarrier.wait(barriers.empty.index(slot), phase)
            landed = barriers.full.index(slot)
            mbarrier.expect(landed, BYTES)
            tma_load(x_desc, [above, below, at, tile_m * KIND.BLOCK_M], landed, ring.x.index(slot))
            tma_load(
                dy_desc, [above, below, at, tile_n * KIND.BLOCK_N], landed, ring.dy.index(slot)
            )
            slot, phase = next_slot(slot, phase, KIND.STAGES)
            if CHUNK and step % STEPS_PER_CHUNK == 0 and chunk < chunks:
                zero_chunk(dw_ptr, chunk % per_matrix, empty_e, work.M * work.N, CHUNK)
                chunk += GRID
                empty_e = _empty_expert(chunk, chunks, work, per_matrix)
    if CHUNK:
        for rest in range(chunk, chunks, GRID):
            e = _empty_expert(rest, chunks, work, per_matrix)
            zero_chunk(dw_ptr, rest % per_matrix, e, work.M * work.N, CHUNK)


@gluon.jit
def _multiply(
    ring, barriers, slot, phase, start, end,
    SHIFT: gl.constexpr, HALF_M: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Columns SHIFT ... of x times those of dy; the last MMA is in flight, its slot not free."""
    BLOCK_N: gl.constexpr = KIND.BLOCK_N
    BLOCK_R: gl.constexpr = KIND.BLOCK_R
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = warpgroup_mma_init(gl.zeros((HALF_M, BLOCK_N), gl.float32, layout))
    for row in range(start, end, BLOCK_R):
        mbarrier.wait(barriers.full.index(slot), phase)
        x = ring.x.index(slot).reshape([BLOCK_R, KIND.BLOCK_M]).slice(SHIFT, HALF_M, 1)
        dy = ring.dy.index(slot).reshape([BLOCK_R, BLOCK_N])
        acc = warpgroup_mma(x.permute((1, 0)), dy, acc, is_async=True, use_acc=row > start)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        behind = previous_slot(slot, KIND.STAGES)
        mbarrier.arrive(barriers.empty.index(behind), count=1, pred=row > start)
        slot, phase = next_slot(slot, phase, KIND.STAGES)
    return acc, slot, phase


@gluon.jit
def _consume(
    dw_desc, partials_ptr, work, ring, dw_buffers, barriers, ME: gl.constexpr, KIND: gl.constexpr
):
    """Half ME of every tile's M, or (PINGPONG) tiles ME, ME + 2, ... of this CTA."""
    PINGPONG: gl.constexpr = KIND.PINGPONG
    ADD: gl.constexpr = KIND.ADD
    STAGES: gl.constexpr = KIND.STAGES
    GRID: gl.constexpr = KIND.GRID
    HALF_M: gl.constexpr = KIND.BLOCK_M if PINGPONG else KIND.BLOCK_M // 2
    SHIFT: gl.constexpr = 0 if PINGPONG else ME * HALF_M
    FIRST: gl.constexpr = ME * KIND.BUFFERS
    per_expert = work.tiles_m * work.tiles_n
    slot = 0
    phase = 0
    passed = 0  # K steps of all tiles before this one
    next_e, next_start, next_end, next_part = _record(tile_of(0, GRID), work)
    for round in range(work.rounds):
        e = next_e
        start = next_start
        end = next_end
        part = next_part
        tile_m, tile_n = place(tile_of(round, GRID) % per_expert, work.tiles_m, work.tiles_n)
        row_dw = tile_m * KIND.BLOCK_M + SHIFT
        next_e, next_start, next_end, next_part = _record(tile_of(round + 1, GRID), work)
        if PINGPONG:
            slot = passed % STAGES
            phase = (passed // STAGES) & 1
            passed += gl.cdiv(end - start, KIND.BLOCK_R)
        if not PINGPONG or (round & 1) == ME:
            if ADD == "fetch" and part < 0:
                fetch_weights(
                    dw_desc,
                    dw_buffers,
                    barriers.arrived,
                    FIRST,
                    KIND.BUFFERS,
                    e,
                    row_dw,
                    tile_n * KIND.BLOCK_N,
                )
            if PINGPONG:
                mbarrier.wait(barriers.turn.index(ME), ((round // 2) & 1) ^ (1 - ME))
            acc, slot, phase = _multiply(
                ring, barriers, slot, phase, start, end, SHIFT, HALF_M, KIND
            )
            if PINGPONG:
                mbarrier.arrive(barriers.turn.index(1 - ME), count=1)
            result = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            behind = previous_slot(slot, STAGES)
            mbarrier.arrive(barriers.empty.index(behind), count=1, pred=end > start)
            if KIND.SPLITS and part >= 0:
                store_partial(
                    result, partials_ptr, part, row_dw, tile_n * KIND.BLOCK_N, work.M, work.N
                )
            else:
                store_weights(
                    result, dw_desc, dw_buffers, barriers.arrived, FIRST, KIND.BUFFERS, KIND.PIECES,
                    e, row_dw, tile_n * KIND.BLOCK_N, ADD,
                )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def weights_gluon_kernel(
    x_desc, dy_desc, dw_desc, dw_ptr, partials_ptr, records_ptr, count_ptr, M, N,
    PINGPONG: gl.constexpr, ADD: gl.constexpr, SPLITS: gl.constexpr, PIECES: gl.constexpr,
    BUFFERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr, GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over records with rows x M tiles x N tiles; grid (GRID,), num_warps=4."""
    ZEROS: gl.constexpr = STEPS_PER_CHUNK * BLOCK_M * BLOCK_N * BLOCK_R // ADDS_PER_ZERO
    CHUNK: gl.constexpr = ZEROS if ADD == "" else 0
    KIND: gl.constexpr = Kind(
        PINGPONG, ADD, SPLITS, PIECES, BUFFERS, BLOCK_M, BLOCK_N, BLOCK_R, STAGES, GRID, CHUNK
    )
    x_ring = boxes_of(x_desc, STAGES)
    dy_ring = boxes_of(dy_desc, STAGES)
    dw_buffers = boxes_of(dw_desc, 2 * BUFFERS)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1 if PINGPONG else 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    arrived = make_barriers(2 * BUFFERS, 1) if ADD == "fetch" else empty
    fence_async_shared()
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr + COUNT_FULL) * tiles_m * tiles_n
    rounds = rounds_of(total, GRID)
    work = Work(records_ptr, count_ptr, total, M, N, tiles_m, tiles_n, rounds)
    ring = Ring(x_ring, dy_ring)
    barriers = Barriers(full, empty, turn, arrived)
    gl.warp_specialize(
        [
            (_consume, (dw_desc, partials_ptr, work, ring, dw_buffers, barriers, 0, KIND)),
            (_consume, (dw_desc, partials_ptr, work, ring, dw_buffers, barriers, 1, KIND)),
            (_produce, (x_desc, dy_desc, dw_ptr, work, ring, barriers, KIND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )


def weights_launch(
    v: Variant,
    x_RK: torch.Tensor,
    dy_RN: torch.Tensor,
    dw_EKN: torch.Tensor,
    work: WorkList,
    add: str,
    grid: int,
    partials: torch.Tensor | None = None,
) -> Launch:
    """The launch of the weight-gradient kernel over `work`, an expert order.

    `add` is empty, or how a float32 gradient is added to (`heuristics.accumulate_mode`).
    `partials` fp32 [slots, K, N] takes the partial sums of experts that `work` splits.
    """
    stored = v.block_m if v.pingpong else v.block_m // 2
    args = (
        ragged_descriptor(x_RK, (v.block_k, v.block_m)),
        ragged_descriptor(dy_RN, (v.block_k, v.block_n)),
        matrix_descriptor(dw_EKN, (stored, v.block_n // v.pieces)),
        dw_EKN, dw_EKN if partials is None else partials,
        work.records, work.count, *dw_EKN.shape[1:],
    )  # fmt: skip
    tile = {"BLOCK_M": v.block_m, "BLOCK_N": v.block_n, "BLOCK_R": v.block_k, "STAGES": v.stages}
    tile |= {"PIECES": v.pieces, "BUFFERS": v.buffers, "GRID": grid, "num_warps": v.warps}
    kind = {"PINGPONG": v.pingpong, "ADD": add, "SPLITS": partials is not None}
    return Launch(weights_gluon_kernel, grid, args, kind | tile)
