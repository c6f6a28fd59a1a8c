"""Forward and input gradient as warp-specialised Gluon kernels for Hopper.

    out_RN[r] = x_RK[r] @ w[e]        rows r of expert e; w_EKN, or w_ENK when TRANSPOSED

A CTA is one producer warp and two consumer partitions of four warps, over a ring of shared-memory
slots (see gluon_parts). Two ways to share the work between the consumers:

- split: both take the same 128-row tile, each its 64-row half. A slot is free when both are done
  with it, so they need no order among each other; a half without rows only releases slots.
  The best shape from about 400 rows per expert on.
- ping-pong: alternate 64-row tiles, so that one multiplies while the other stores. A consumer may
  only start waiting for slots when the other has passed all its own waits: a parity wait is valid
  within one phase of the barrier, and without the `turn` barriers a consumer would wait several
  phases early (measured: garbage, then a hang). The best shape for few rows per expert.

The last round of tiles may be cut along K (SPLITS, see tiles.py): after its whole tiles a CTA then
has a part of a tile, whose partial sum goes to its slot of `partials`.

Gathered rows (GATHER) come through an index list instead: TMA of Hopper has no gather, so four
producer warps copy them with cp.async, 16 bytes a thread, and the consumers fence before WGMMA
reads what cp.async wrote. A row past the group's end is replaced by the group's last one, never by
a row of another group: what it makes is not stored, but must be finite where that one is.

Measured on an H200 (sustained): 0.93-1.02 of one dense cuBLAS GEMM from 1024 rows per expert on,
0.80-0.98 at 256 to 320. Cut along K, 4.4 rounds of tiles take 4.5: 520 -> 575 TFLOP/s.
"""
# ruff: noqa: RUF005, SIM108 (Triton's frontend has no starred lists)

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

from moe_graphs.kernels.gluon_parts import (
    make_barriers,
    next_slot,
    place,
    previous_slot,
    ragged,
    store_partial,
    store_rows,
)


@gluon.jit
def _record(tile, total, records_ptr, tiles_n):
    """Record of a tile, loads only: issued one tile ahead, it is not waited for until it is used.

    Tiles past the end are clamped into the list.
    """
    record = records_ptr + (gl.maximum(gl.minimum(tile, total - 1), 0) // tiles_n) * 8
    first = gl.load(record + 1)
    tiles_m = gl.load(record + 2)
    return gl.load(record), first, tiles_m, gl.load(record + 3), gl.load(record + 4)


@gluon.jit
def _units_of(whole, tail, length, steps, GRID: gl.constexpr):
    """How many whole tiles this CTA has, and how many units of work with its part of a cut one."""
    rounds = gl.cdiv(gl.maximum(whole - gl.program_id(0), 0), GRID)
    return rounds, rounds + (gl.program_id(0) < tail * gl.cdiv(steps, length)).to(gl.int32)


@gluon.jit
def _unit(unit, rounds, whole, tail, length, steps, SPLITS: gl.constexpr, GRID: gl.constexpr):
    """(tile, first K step, end step) of a unit of work of this CTA."""
    tile = gl.program_id(0) + unit * GRID
    first = 0
    end = steps
    if SPLITS:
        cut = unit >= rounds
        part = gl.program_id(0) // gl.maximum(tail, 1)
        tile = gl.where(cut, whole + gl.program_id(0) - part * tail, tile)
        first = gl.where(cut, part * length, 0)
        end = gl.where(cut, gl.minimum(first + length, steps), steps)
    return tile, first, end


@gluon.jit
def _produce(
    x_desc, w_desc, records_ptr, total, whole, tail, length, tiles_n, steps, x_ring, w_ring, full,
    empty, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GRID: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Fills the ring with the operands of every K step of every tile of this CTA."""
    BYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    slot = 0
    phase = 1
    rounds, units = _units_of(whole, tail, length, steps, GRID)
    tile, _, _ = _unit(0, rounds, whole, tail, length, steps, SPLITS, GRID)
    next_e, next_first, next_m, next_start, next_end = _record(tile, total, records_ptr, tiles_n)
    for unit in range(units):
        tile, first_step, end_step = _unit(unit, rounds, whole, tail, length, steps, SPLITS, GRID)
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * tiles_n, next_m, tiles_n)
        above, below, at = ragged(next_start + tile_m * BLOCK_M, end)
        next_tile, _, _ = _unit(unit + 1, rounds, whole, tail, length, steps, SPLITS, GRID)
        next_e, next_first, next_m, next_start, next_end = _record(
            next_tile, total, records_ptr, tiles_n
        )
        for step in range(first_step, end_step):
            mbarrier.wait(empty.index(slot), phase)
            landed = full.index(slot)
            k = step * BLOCK_K
            # The box is always counted in full: rows past the group's end arrive as zeros.
            mbarrier.expect(landed, BYTES)
            tma.async_copy_global_to_shared(
                x_desc, [above, below, at, k], landed, x_ring.index(slot)
            )
            if TRANSPOSED:
                at_w = [e, tile_n * BLOCK_N, k]
            else:
                at_w = [e, k, tile_n * BLOCK_N]
            tma.async_copy_global_to_shared(w_desc, at_w, landed, w_ring.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _produce_gathered(
    x_ptr, order_ptr, top_k, w_desc, records_ptr, total, tiles_n, steps, K, x_ring, w_ring, full,
    empty, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GRID: gl.constexpr,
):  # fmt: skip
    """The same for rows `order[r] // top_k` of x. Four warps; K is a multiple of BLOCK_K."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = 0
    phase = 1
    first_tile = gl.program_id(0)
    next_e, next_first, next_m, next_start, next_end = _record(
        first_tile, total, records_ptr, tiles_n
    )
    for tile in range(first_tile, total, GRID):
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * tiles_n, next_m, tiles_n)
        row = next_start + tile_m * BLOCK_M
        next_e, next_first, next_m, next_start, next_end = _record(
            tile + GRID, total, records_ptr, tiles_n
        )
        rows = gl.minimum(row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout)), end - 1)
        source = gl.load(order_ptr + rows).to(gl.int32) // top_k
        columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
        at = x_ptr + source.to(gl.int64)[:, None] * K + columns[None, :]
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            landed = full.index(slot)
            mbarrier.expect(landed, w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                w_desc, [e, step * BLOCK_K, tile_n * BLOCK_N], landed, w_ring.index(slot)
            )
            async_copy.async_copy_global_to_shared(x_ring.index(slot), at)
            async_copy.mbarrier_arrive(landed, increment_count=False)
            at += BLOCK_K
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _multiply(
    x_ring, w_ring, full, empty, slot, phase, first_step, end_step,
    SHIFT: gl.constexpr, HALF_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Rows SHIFT ... of a tile times its columns; the last MMA is in flight, its slot not free."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = warpgroup_mma_init(gl.zeros((HALF_M, BLOCK_N), gl.float32, layout))
    for step in range(first_step, end_step):
        mbarrier.wait(full.index(slot), phase)
        if GATHER:
            fence_async_shared()
        x = x_ring.index(slot).reshape([BLOCK_M, BLOCK_K]).slice(SHIFT, HALF_M, 0)
        if TRANSPOSED:
            w = w_ring.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
        else:
            w = w_ring.index(slot).reshape([BLOCK_K, BLOCK_N])
        acc = warpgroup_mma(x, w, acc, is_async=True, use_acc=step > first_step)
        # One MMA stays in flight; the slot of the one before it can be refilled.
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        behind = previous_slot(slot, STAGES)
        mbarrier.arrive(empty.index(behind), count=1, pred=step > first_step)
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _consume(
    out_desc, partials_ptr, records_ptr, total, whole, tail, length, tiles_n, steps, x_ring, w_ring,
    out_buffers, full, empty, turn,
    ME: gl.constexpr, PINGPONG: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GRID: gl.constexpr,
    TRANSPOSED: gl.constexpr, GATHER: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores: half ME of every tile, or (PINGPONG) tiles ME, ME + 2, ..."""
    HALF_M: gl.constexpr = BLOCK_M if PINGPONG else BLOCK_M // 2
    SHIFT: gl.constexpr = 0 if PINGPONG else ME * HALF_M
    FIRST: gl.constexpr = ME if PINGPONG else 0
    STRIDE: gl.constexpr = 2 if PINGPONG else 1
    slot = 0
    phase = 0
    passed = FIRST * steps  # K steps of the tiles before this consumer's next one (ping-pong)
    rounds, units = _units_of(whole, tail, length, steps, GRID)
    tile, _, _ = _unit(FIRST, rounds, whole, tail, length, steps, SPLITS, GRID)
    _, next_first, next_m, next_start, next_end = _record(tile, total, records_ptr, tiles_n)
    for unit in range(FIRST, units, STRIDE):
        tile, first_step, end_step = _unit(unit, rounds, whole, tail, length, steps, SPLITS, GRID)
        end = next_end
        tile_m, tile_n = place(tile - next_first * tiles_n, next_m, tiles_n)
        row = next_start + tile_m * BLOCK_M + SHIFT
        next_tile, _, _ = _unit(unit + STRIDE, rounds, whole, tail, length, steps, SPLITS, GRID)
        _, next_first, next_m, next_start, next_end = _record(
            next_tile, total, records_ptr, tiles_n
        )
        if PINGPONG:
            slot = passed % STAGES
            phase = (passed // STAGES) & 1
            passed += 2 * steps
            mbarrier.wait(turn.index(ME), ((unit // 2) & 1) ^ (1 - ME))
        if not PINGPONG and row >= end:
            for _step in range(first_step, end_step):
                mbarrier.wait(full.index(slot), phase)
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, STAGES)
        else:
            acc, slot, phase = _multiply(
                x_ring, w_ring, full, empty, slot, phase, first_step, end_step, SHIFT, HALF_M,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED, GATHER,
            )  # fmt: skip
            if PINGPONG:
                mbarrier.arrive(turn.index(1 - ME), count=1)
            result = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), count=1)
            if SPLITS and unit >= rounds:
                part = gl.program_id(0)
                store_partial(result, partials_ptr, part, SHIFT, 0, BLOCK_M, BLOCK_N)
            else:
                store_rows(result, out_desc, out_buffers, ME, PIECES, row, end, tile_n * BLOCK_N)
    tma.store_wait(pendings=0)


@gluon.jit
def rows_gluon_kernel(
    x_desc, w_desc, out_desc, partials_ptr, records_ptr, count_ptr, N, K,
    PINGPONG: gl.constexpr, SPLITS: gl.constexpr, TRANSPOSED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GRID: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over the tiles of `records` x column tiles; grid (GRID,), num_warps=4."""
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    out_buffers = gl.allocate_shared_memory(
        out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout
    )
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1 if PINGPONG else 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    fence_async_shared()
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr) * tiles_n
    steps = gl.cdiv(K, BLOCK_K)
    whole = total
    tail = 0
    length = steps
    if SPLITS:
        whole = gl.load(count_ptr + 1)
        tail = gl.load(count_ptr + 2)
        length = gl.load(count_ptr + 3)
    gl.warp_specialize(
        [
            (_consume, (out_desc, partials_ptr, records_ptr, total, whole, tail, length, tiles_n,
                        steps, x_ring, w_ring, out_buffers, full, empty, turn, 0, PINGPONG, SPLITS,
                        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GRID, TRANSPOSED, False, 1)),
            (_consume, (out_desc, partials_ptr, records_ptr, total, whole, tail, length, tiles_n,
                        steps, x_ring, w_ring, out_buffers, full, empty, turn, 1, PINGPONG, SPLITS,
                        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GRID, TRANSPOSED, False, 1)),
            (_produce, (x_desc, w_desc, records_ptr, total, whole, tail, length, tiles_n, steps,
                        x_ring, w_ring, full, empty, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                        GRID, TRANSPOSED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def gathered_rows_gluon_kernel(
    x_ptr, order_ptr, top_k, w_desc, out_desc, records_ptr, count_ptr, N, K,
    PIECES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`rows_gluon_kernel` (split) over rows `order[r] // top_k` of x; grid (GRID,), num_warps=4."""
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_layout)
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    out_buffers = gl.allocate_shared_memory(
        out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout
    )
    full = make_barriers(STAGES, 1 + 128)  # the bytes of w, and every thread's copies
    empty = make_barriers(STAGES, 2)
    fence_async_shared()
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(count_ptr) * tiles_n
    steps = gl.cdiv(K, BLOCK_K)
    gl.warp_specialize(
        [
            (_consume, (out_desc, order_ptr, records_ptr, total, total, 0, steps, tiles_n, steps,
                        x_ring, w_ring, out_buffers, full, empty, empty, 0, False, False, BLOCK_M,
                        BLOCK_N, BLOCK_K, STAGES, GRID, False, True, PIECES)),
            (_consume, (out_desc, order_ptr, records_ptr, total, total, 0, steps, tiles_n, steps,
                        x_ring, w_ring, out_buffers, full, empty, empty, 1, False, False, BLOCK_M,
                        BLOCK_N, BLOCK_K, STAGES, GRID, False, True, PIECES)),
            (_produce_gathered, (x_ptr, order_ptr, top_k, w_desc, records_ptr, total, tiles_n,
                                 steps, K, x_ring, w_ring, full, empty, BLOCK_M, BLOCK_N, BLOCK_K,
                                 STAGES, GRID)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
