"""Grouped GEMMs with SwiGLU in their epilogue, warp-specialised for Hopper.

    forward:   [gate | up][r] = x_RK[r] @ w[e],  h_RF[r] = silu(gate) * up
    backward:  dh = dy_RK[r] @ w[e],  [dgate | dup][r] from dh and [gate | up][r]; dh is not written

Both round where two kernels would: gate, up and dh to the tensors' dtype before SwiGLU reads them.
So the result is that of `gluon_rows` and `swiglu_triton`, bit by bit.

Forward: half the columns of a tile are gate's and half are the same columns of up. Two boxes fill a
ring slot, side by side, so the products are those of an ordinary tile and so are its registers.

Backward: a consumer fetches gate and up into buffers of its own, before its products; what it makes
of them takes their place and is stored from there. A tile goes through in column pieces, which take
turns in the buffers: registers and shared memory hold no whole tile of three operands.

Split and ping-pong as in `gluon_rows`; tiles are not cut along K.
"""
# ruff: noqa: RUF005 (Triton's frontend has no starred lists)

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from moe_graphs.kernels.gemm.gluon_parts import (
    halves,
    make_barriers,
    next_slot,
    pieces_of,
    place,
    previous_slot,
    ragged,
)
from moe_graphs.kernels.gemm.gluon_rows import (
    Barriers,
    Kind,
    Ring,
    Work,
    multiply,
    produce,
    record_of,
)
from moe_graphs.kernels.gemm.tiles import COUNT_RECORDS


class Rows(NamedTuple):
    """Descriptors of the rows that the epilogue reads or writes. Forward: gate and up, their
    product. Backward: gate and up, their gradients."""

    gate: Any
    up: Any
    out: Any
    out_up: Any


class Buffers(NamedTuple):
    """Pairs of buffers for gate and up, and their barriers: what was fetched has landed."""

    memory: Any
    arrived: Any


@gluon.jit
def _sigmoid(x):
    return 1 / (1 + gl.exp(-x))


@gluon.jit
def _stage(value, buffer):
    """Registers -> a shared buffer that nobody reads any more."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, value.shape[1], 16])
    buffer.store(gl.convert_layout(value, layout).reshape(buffer.shape))
    fence_async_shared()


@gluon.jit
def _store_product(acc, rows, buffers, ME: gl.constexpr, row, end, column):
    """acc, gate's columns and up's, -> both of them and silu(gate) * up."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, acc.shape[1] // 2, 16])
    gate, up = halves(acc)
    gate = gl.convert_layout(gate.to(rows.gate.dtype), layout)
    up = gl.convert_layout(up.to(rows.gate.dtype), layout)
    first = buffers.memory.index(2 * ME)
    second = buffers.memory.index(2 * ME + 1)
    above, below, at = ragged(row, end)
    tma.store_wait(pendings=0)
    _stage(gate, first)
    tma.async_copy_shared_to_global(rows.gate, [above, below, at, column], first)
    _stage(up, second)
    tma.async_copy_shared_to_global(rows.up, [above, below, at, column], second)
    gate = gate.to(gl.float32)
    h = gate * _sigmoid(gate) * up.to(gl.float32)
    tma.store_wait(pendings=1)  # of gate, the older one
    _stage(h.to(rows.out.dtype), first)
    tma.async_copy_shared_to_global(rows.out, [above, below, at, column], first)


@gluon.jit
def _fetch(rows, buffers, pair, row, end, column):
    """Gate and up of a piece into a pair of buffers, whose stores have been read."""
    arrived = buffers.arrived.index(pair)
    above, below, at = ragged(row, end)
    mbarrier.expect(arrived, 2 * rows.gate.block_type.nbytes)
    at_piece = [above, below, at, column]
    tma.async_copy_global_to_shared(rows.gate, at_piece, arrived, buffers.memory.index(2 * pair))
    tma.async_copy_global_to_shared(rows.up, at_piece, arrived, buffers.memory.index(2 * pair + 1))


@gluon.jit
def _fetch_first(
    rows, buffers, ME: gl.constexpr, PAIRS: gl.constexpr, WIDTH: gl.constexpr, row, end, column
):
    """Starts loading a piece into every pair of this consumer's buffers."""
    tma.store_wait(pendings=0)
    for i in gl.static_range(PAIRS):
        _fetch(rows, buffers, ME * PAIRS + i, row, end, column + i * WIDTH)


@gluon.jit
def _store_gradients(
    acc, rows, buffers, ME: gl.constexpr, PAIRS: gl.constexpr, PIECES: gl.constexpr, done, row, end,
    column,
):  # fmt: skip
    """acc, the gradient of silu(gate) * up, -> those of gate and up, in PIECES column pieces.

    `done` tiles of this consumer have gone through the buffers before.
    """
    WIDTH: gl.constexpr = acc.shape[1] // PIECES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    above, below, at = ragged(row, end)
    pieces = pieces_of(acc, PIECES)
    for i in gl.static_range(PIECES):
        pair = ME * PAIRS + i % PAIRS
        at_gate = buffers.memory.index(2 * pair)
        at_up = buffers.memory.index(2 * pair + 1)
        dh = gl.convert_layout(pieces[i].to(rows.gate.dtype), layout).to(gl.float32)
        mbarrier.wait(buffers.arrived.index(pair), (done * (PIECES // PAIRS) + i // PAIRS) & 1)
        gate = at_gate.reshape([acc.shape[0], WIDTH]).load(layout).to(gl.float32)
        up = at_up.reshape([acc.shape[0], WIDTH]).load(layout).to(gl.float32)
        s = _sigmoid(gate)
        dgate = dh * up * s * (1 + gate * (1 - s))
        _stage(dgate.to(rows.out.dtype), at_gate)
        tma.async_copy_shared_to_global(rows.out, [above, below, at, column + i * WIDTH], at_gate)
        _stage((dh * gate * s).to(rows.out.dtype), at_up)
        tma.async_copy_shared_to_global(rows.out_up, [above, below, at, column + i * WIDTH], at_up)
        if i >= PAIRS - 1 and i + 1 < PIECES:
            # The pair of the next piece: its two stores are the oldest of 2 * PAIRS in flight.
            tma.store_wait(pendings=2 * (PAIRS - 1))
            next_pair = ME * PAIRS + (i + 1) % PAIRS
            _fetch(rows, buffers, next_pair, row, end, column + (i + 1) * WIDTH)


@gluon.jit
def _produce_halves(x_desc, w_desc, F, work, ring, w_halves, barriers, KIND: gl.constexpr):
    """`gluon_rows.produce` for tiles of gate's and up's columns, F apart."""
    WIDTH: gl.constexpr = KIND.BLOCK_N // 2
    BYTES: gl.constexpr = x_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes
    slot = 0
    phase = 1
    first_tile = gl.program_id(0)
    next_e, next_first, next_m, next_start, next_end = record_of(first_tile, work)
    for tile in range(first_tile, work.total, KIND.GRID):
        e = next_e
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        above, below, at = ragged(next_start + tile_m * KIND.BLOCK_M, end)
        next_e, next_first, next_m, next_start, next_end = record_of(tile + KIND.GRID, work)
        for step in range(work.steps):
            mbarrier.wait(barriers.empty.index(slot), phase)
            landed = barriers.full.index(slot)
            k = step * KIND.BLOCK_K
            mbarrier.expect(landed, BYTES)
            tma.async_copy_global_to_shared(
                x_desc, [above, below, at, k], landed, ring.x.index(slot)
            )
            for half in gl.static_range(2):
                column = tile_n * WIDTH + half * F
                at_w = [e, k, column]
                if KIND.TRANSPOSED:
                    at_w = [e, column, k]
                tma.async_copy_global_to_shared(
                    w_desc, at_w, landed, w_halves.index(2 * slot + half)
                )
            slot, phase = next_slot(slot, phase, KIND.STAGES)


@gluon.jit
def _consume(
    rows, work, ring, buffers, barriers, ME: gl.constexpr, PAIRS: gl.constexpr, KIND: gl.constexpr
):
    """`gluon_rows`' consumer with SwiGLU behind its products: half ME of every tile, or (PINGPONG)
    tiles ME, ME + 2, ..."""
    PINGPONG: gl.constexpr = KIND.PINGPONG
    PIECES: gl.constexpr = KIND.PIECES
    STAGES: gl.constexpr = KIND.STAGES
    HALF_M: gl.constexpr = KIND.BLOCK_M if PINGPONG else KIND.BLOCK_M // 2
    SHIFT: gl.constexpr = 0 if PINGPONG else ME * HALF_M
    FIRST: gl.constexpr = ME if PINGPONG else 0
    STRIDE: gl.constexpr = 2 if PINGPONG else 1
    WIDTH: gl.constexpr = KIND.BLOCK_N if PAIRS else KIND.BLOCK_N // 2  # columns of F
    slot = 0
    phase = 0
    done = 0
    passed = FIRST * work.steps
    units = gl.cdiv(gl.maximum(work.total - gl.program_id(0), 0), KIND.GRID)
    _, next_first, next_m, next_start, next_end = record_of(
        gl.program_id(0) + FIRST * KIND.GRID, work
    )
    for unit in range(FIRST, units, STRIDE):
        tile = gl.program_id(0) + unit * KIND.GRID
        end = next_end
        tile_m, tile_n = place(tile - next_first * work.tiles_n, next_m, work.tiles_n)
        row = next_start + tile_m * KIND.BLOCK_M + SHIFT
        column = tile_n * WIDTH
        _, next_first, next_m, next_start, next_end = record_of(tile + STRIDE * KIND.GRID, work)
        if PINGPONG:
            slot = passed % STAGES
            phase = (passed // STAGES) & 1
            passed += 2 * work.steps
        if not PINGPONG and row >= end:
            for _step in range(work.steps):
                mbarrier.wait(barriers.full.index(slot), phase)
                mbarrier.arrive(barriers.empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, STAGES)
        else:
            if PAIRS:
                _fetch_first(rows, buffers, ME, PAIRS, WIDTH // PIECES, row, end, column)
            if PINGPONG:
                mbarrier.wait(barriers.turn.index(ME), ((unit // 2) & 1) ^ (1 - ME))
            acc, slot, phase = multiply(
                ring, barriers, slot, phase, 0, work.steps, SHIFT, HALF_M, KIND
            )
            if PINGPONG:
                mbarrier.arrive(barriers.turn.index(1 - ME), count=1)
            result = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(barriers.empty.index(previous_slot(slot, STAGES)), count=1)
            if PAIRS:
                _store_gradients(result, rows, buffers, ME, PAIRS, PIECES, done, row, end, column)
                done += 1
            else:
                _store_product(result, rows, buffers, ME, row, end, column)
    tma.store_wait(pendings=0)


@gluon.jit
def _work(records_ptr, count_ptr, columns, K, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr):
    tiles_n = gl.cdiv(columns, WIDTH)
    total = gl.load(count_ptr + COUNT_RECORDS) * tiles_n
    steps = gl.cdiv(K, BLOCK_K)
    return Work(records_ptr, total, total, 0, steps, tiles_n, steps)


@gluon.jit
def swiglu_gluon_kernel(
    x_desc, w_desc, gate_desc, up_desc, h_desc, records_ptr, count_ptr, F, K,
    PINGPONG: gl.constexpr, TRANSPOSED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GRID: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Forward: gate, up and their product of all tiles; grid (GRID,), num_warps=4."""
    KIND: gl.constexpr = Kind(
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED, False, PINGPONG, 1, False, GRID
    )
    WHOLE: gl.constexpr = (
        [STAGES, 1, BLOCK_N, BLOCK_K] if TRANSPOSED else [STAGES, 1, BLOCK_K, BLOCK_N]
    )
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    w_ring = gl.allocate_shared_memory(w_desc.dtype, WHOLE, w_desc.layout)
    w_halves = w_ring._reinterpret(
        w_desc.dtype, [2 * STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    memory = gl.allocate_shared_memory(h_desc.dtype, [4] + h_desc.block_type.shape, h_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1 if PINGPONG else 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    fence_async_shared()
    work = _work(records_ptr, count_ptr, F, K, BLOCK_N // 2, BLOCK_K)
    ring = Ring(x_ring, w_ring)
    barriers = Barriers(full, empty, turn)
    rows = Rows(gate_desc, up_desc, h_desc, h_desc)
    buffers = Buffers(memory, full)
    gl.warp_specialize(
        [
            (_consume, (rows, work, ring, buffers, barriers, 0, 0, KIND)),
            (_consume, (rows, work, ring, buffers, barriers, 1, 0, KIND)),
            (_produce_halves, (x_desc, w_desc, F, work, ring, w_halves, barriers, KIND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def swiglu_back_gluon_kernel(
    dy_desc, w_desc, gate_desc, up_desc, dgate_desc, dup_desc, records_ptr, count_ptr, F, K,
    PINGPONG: gl.constexpr, TRANSPOSED: gl.constexpr, PIECES: gl.constexpr, PAIRS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GRID: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Backward: the gradients of gate and up of all tiles; grid (GRID,), num_warps=4."""
    KIND: gl.constexpr = Kind(
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED, False, PINGPONG, PIECES, False, GRID
    )
    x_ring = gl.allocate_shared_memory(
        dy_desc.dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout
    )
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    memory = gl.allocate_shared_memory(
        gate_desc.dtype, [4 * PAIRS] + gate_desc.block_type.shape, gate_desc.layout
    )
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1 if PINGPONG else 2)
    turn = make_barriers(2, 1) if PINGPONG else empty
    arrived = make_barriers(2 * PAIRS, 1)
    fence_async_shared()
    work = _work(records_ptr, count_ptr, F, K, BLOCK_N, BLOCK_K)
    ring = Ring(x_ring, w_ring)
    barriers = Barriers(full, empty, turn)
    rows = Rows(gate_desc, up_desc, dgate_desc, dup_desc)
    buffers = Buffers(memory, arrived)
    gl.warp_specialize(
        [
            (_consume, (rows, work, ring, buffers, barriers, 0, PAIRS, KIND)),
            (_consume, (rows, work, ring, buffers, barriers, 1, PAIRS, KIND)),
            (produce, (dy_desc, w_desc, work, ring, barriers, KIND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
