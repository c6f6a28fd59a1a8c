"""Parts of both warp-specialised Gluon kernels for Hopper: ring, tile placement, epilogue, copies.

The kernels have one producer warp that fills a ring of shared-memory slots by TMA, and two consumer
partitions of four warps that multiply out of it. Two mbarriers belong to a slot: `full` (the TMA
bytes have landed) and `empty` (its readers are done). Position in the ring is a pair (slot, phase);
`phase` is the parity a waiter waits for, 0 for the first consumer, 1 for the first producer.

Three rules of Triton 3.6 that this code obeys (`tests/kernels/test_compiled_kernels.py` checks our
kernels, and holds reproductions of the first two, which are silent miscompiles, also in 3.7.1):

1. `previous = current` before a loop and again inside it is not carried: the loop keeps the entry
   value. Hence `previous_slot(slot)` instead of a second variable.
2. A loop-carried value that is used only as the bound of a nested loop is dropped. Hence bounds are
   also used in the loop body.
3. Memory of a barrier that no partition uses goes to the arguments that the partitions get. The
   hardware does not take it for plain memory again: when another process gets the GPU in between,
   a partition may read the barrier's initial value, 0x1ffffe, instead of its argument.
"""
# ruff: noqa: RUF005 (Triton's frontend has no starred lists)

import functools
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_graphs.kernels.gemm.heuristics import Variant
from moe_graphs.kernels.gemm.portable_tma import ragged_template
from moe_graphs.kernels.gemm.tile_scheduler import BAND
from moe_graphs.kernels.launching import on_memory

# Base of a ragged TMA coordinate: see `ragged` below and triton.tools.ragged_tma.
BILLION = gl.constexpr(1 << 30)


# The older names are still there in Triton 3.9, and raise.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """`tma_store` that adds instead of overwriting (cp.reduce.async.bulk).

    Triton 3.6 has the operation but no Gluon name for it. Every element is added to once per
    launch, so the result does not depend on the order of tiles.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    slot = slot + 1
    wrapped = slot == STAGES
    return gl.where(wrapped, 0, slot), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def previous_slot(slot, STAGES: gl.constexpr):
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def place(local, tiles_m, tiles_n):
    """Number of a tile inside its expert -> row tile and column tile."""
    width = BAND * tiles_n
    band = local // width
    first_m = band * BAND
    height = gl.minimum(tiles_m - first_m, BAND)
    rest = local - band * width
    column = rest // height
    return first_m + rest - column * height, column


@gluon.jit
def ragged(row, end):
    """Leading three coordinates of row `row` of a group that ends at row `end`.

    A ragged descriptor has two extra dimensions of stride -1 row and +1 row. Reading at
    (2^30, end, 2^30 - end + row) lands on `row`, and the bound 2^30 of the third dimension is hit
    exactly at `end`: loads past it give zeros, stores past it are dropped, in hardware.
    """
    return BILLION, end, BILLION - end + row


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers that complete a phase after ARRIVALS arrivals. The caller fences.

    Make only what a partition uses (see rule 3).
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def boxes_of(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def columns_of(slot, K: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """A slot of a matrix as [K, COLUMNS], which lies as [COLUMNS, K] if TRANSPOSED."""
    if TRANSPOSED:
        columns = slot.reshape([COLUMNS, K]).permute((1, 0))
    else:
        columns = slot.reshape([K, COLUMNS])
    return columns


@gluon.jit
def halves(x):
    """[M, N] -> two [M, N/2]; renames registers, moves nothing."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    left, right = x.reshape([M, 2, N // 2]).permute(0, 2, 1).split()
    return left, right


@gluon.jit
def pieces_of(acc, PIECES: gl.constexpr):
    """Column pieces of acc, from left to right."""
    pieces = (acc,)
    if PIECES >= 2:
        pieces = halves(acc)
    if PIECES >= 4:
        pieces = halves(pieces[0]) + halves(pieces[1])  # type: ignore[misc]
    return pieces


@gluon.jit
def store_rows(acc, desc, buffers, FIRST: gl.constexpr, row, end, column):
    """Store acc into rows `row...` before `end` of a ragged output; asynchronous, one buffer.

    The buffer is written as soon as the store that last used it has read it.
    """
    buffer = buffers.index(FIRST)
    above, below, at = ragged(row, end)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, acc.shape[1], 16])
    tma.store_wait(pendings=0)
    value = gl.convert_layout(acc.to(desc.dtype), layout)
    buffer.store(value.reshape(desc.block_shape))
    fence_async_shared()
    tma_store(desc, [above, below, at, column], buffer)


@gluon.jit
def _fetch(desc, buffer, arrived, e, row, column):
    mbarrier.expect(arrived, desc.block_type.nbytes)
    tma_load(desc, [e, row, column], arrived, buffer)


@gluon.jit
def fetch_weights(
    desc, buffers, arrived, FIRST: gl.constexpr, BUFFERS: gl.constexpr, e, row, column
):
    """Starts loading what `store_weights` adds to first: one piece for every buffer."""
    tma.store_wait(pendings=0)
    for i in gl.static_range(BUFFERS):
        _fetch(
            desc, buffers.index(FIRST + i), arrived.index(FIRST + i),
            e, row, column + i * desc.block_shape[2],
        )  # fmt: skip


@gluon.jit
def store_weights(
    acc, desc, buffers, arrived, FIRST: gl.constexpr, BUFFERS: gl.constexpr, PIECES: gl.constexpr,
    e, row, column, ADD: gl.constexpr,
):  # fmt: skip
    """Store acc into matrix `e` of [E, K, N], in PIECES column pieces through BUFFERS buffers.

    Pieces rotate through `buffers[FIRST : FIRST + BUFFERS]`. ADD (fp32 outputs) adds to what is
    there, "reduce" in L2, "fetch" here: then it comes into the buffer first, by `fetch_weights`,
    and a buffer's next piece as soon as the last is stored. Every buffer is used an even number of
    times per tile, so the parity of its barrier follows from the piece.
    """
    WIDTH: gl.constexpr = acc.shape[1] // PIECES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    pieces = pieces_of(acc, PIECES)
    for i in gl.static_range(PIECES):
        buffer = buffers.index(FIRST + i % BUFFERS)
        value = gl.convert_layout(pieces[i].to(desc.dtype), layout)
        if ADD == "fetch":
            mbarrier.wait(arrived.index(FIRST + i % BUFFERS), (i // BUFFERS) & 1)
            value += buffer.reshape([acc.shape[0], WIDTH]).load(layout)
        else:
            tma.store_wait(pendings=BUFFERS - 1)
        buffer.store(value.reshape(desc.block_shape))
        fence_async_shared()
        if ADD == "reduce":
            tma_add(desc, [e, row, column + i * WIDTH], buffer)
        else:
            tma_store(desc, [e, row, column + i * WIDTH], buffer)
        if ADD == "fetch" and i >= BUFFERS - 1 and i + 1 < PIECES:
            # The buffer of the next piece: its store is the oldest of BUFFERS in flight.
            tma.store_wait(pendings=BUFFERS - 1)
            _fetch(
                desc, buffers.index(FIRST + (i + 1) % BUFFERS),
                arrived.index(FIRST + (i + 1) % BUFFERS), e, row, column + (i + 1) * WIDTH,
            )  # fmt: skip


@gluon.jit
def store_partial(acc, partials_ptr, slot, row, column, M, N):
    """Store acc into matrix `slot` of fp32 [slots, M, N], from registers: rare, so kept simple."""
    layout: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    at = partials_ptr + slot.to(gl.int64) * M * N + rows[:, None] * N + columns[None, :]
    gl.store(at, acc, mask=(rows < M)[:, None] & (columns < N)[None, :])


@gluon.jit
def rounds_of(total, GRID: gl.constexpr):
    """The number of this CTA's tiles among `total`, in the order of `tile_of`."""
    full = total // GRID
    place_in_last = gl.where((full & 1) == 1, GRID - 1 - gl.program_id(0), gl.program_id(0))
    return full + (place_in_last < total - full * GRID).to(gl.int32)


@gluon.jit
def tile_of(round, GRID: gl.constexpr):
    """The CTA's tile in a round. Every second round is dealt backwards, since tiles get shorter."""
    return round * GRID + gl.where((round & 1) == 1, GRID - 1 - gl.program_id(0), gl.program_id(0))


@gluon.jit
def zero_chunk(out_ptr, chunk, e, size, CHUNK: gl.constexpr):
    """Zeros chunk number `chunk` of matrix `e`, of `size` numbers. One warp, plain stores."""
    WIDTH: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([WIDTH], [32], [1], [0])
    at = chunk * CHUNK + gl.arange(0, CHUNK, layout=layout)
    zero = gl.zeros([CHUNK], out_ptr.dtype.element_ty, layout=layout)
    gl.store(out_ptr + e.to(gl.int64) * size + at, zero, mask=at < size)


def tile_constants(v: Variant, grid: int) -> dict[str, int]:
    """The constants of a variant's tile, and of the grid, for a kernel over rows in steps of K."""
    return {
        "BLOCK_M": v.block_m, "BLOCK_N": v.block_n, "BLOCK_K": v.block_k, "STAGES": v.stages,
        "GRID": grid, "num_warps": v.warps,
    }  # fmt: skip


def ragged_descriptor(rows: torch.Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """The descriptor of `portable_tma.ragged_descriptor`, with a layout in shared memory."""
    return on_memory(rows, _ragged_template(rows.dtype, rows.shape[1], rows.stride(0), box))


def matrix_descriptor(matrices: torch.Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """The descriptor of `portable_tma.matrix_descriptor`, with a layout in shared memory."""
    return on_memory(matrices, _matrix_template(matrices.dtype, matrices.shape, box))


@functools.cache
def _ragged_template(dtype: torch.dtype, columns: int, stride: int, box: tuple[int, int]) -> Any:
    made = ragged_template(dtype, columns, stride, box)
    layout = _layout(dtype.itemsize, 4)
    return TensorDescriptor(made.base, made.shape, made.strides, made.block_shape, layout)


@functools.cache
def _matrix_template(dtype: torch.dtype, shape: torch.Size, box: tuple[int, int]) -> Any:
    matrices = torch.empty(shape, dtype=dtype, device="meta")
    layout = _layout(dtype.itemsize, 3, min(128, box[1] * dtype.itemsize))
    return TensorDescriptor.from_tensor(matrices, [1, *box], layout)


def _layout(element_size: int, rank: int, swizzle: int = 128) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * element_size, rank=rank
    )
