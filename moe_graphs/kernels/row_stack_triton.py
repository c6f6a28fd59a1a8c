"""A stack of rows: kernels that read sizes and places on the device.

Taking and giving back room is one program of scalars. What moves rows is a fixed number of
programs that share the rows there are: its time follows them, not what the call has room for.
Pre-activations are kept by the kernel that reads them for the activations, and read by those of the
backward where they lie; only what a GEMM needs by TMA is copied back.

Bytes that a layer moves beside what it would without a stack, per row in bf16 (D model, F ffn):
received rows 8 D (stored and loaded), pre-activations 4 F (written) and 6 F (activations again),
returned rows 4 D (stored; the gradient of the weights reads them where they lie).

R rows that a call has room for, C rows of a stack, W width of a part, F ffn.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch
from moe_graphs.kernels.row_stack_reference import FRAMES as _FRAMES
from moe_graphs.kernels.row_stack_reference import HEADER as _HEADER
from moe_graphs.kernels.swiglu_triton import gradients_of, silu_times

FRAMES, HEADER = tl.constexpr(_FRAMES), tl.constexpr(_HEADER)
GRID = 1056  # programs that move rows: eight for each SM
TILE = {"ROWS": 8, "COLS": 256}


@triton.jit
def stack_push_kernel(state_ptr, offsets_ptr, frame_ptr, experts, room):
    head = tl.load(state_ptr)
    tail = tl.load(state_ptr + 1)
    first = tl.load(state_ptr + 2)
    last = tl.load(state_ptr + 3)
    serial = tl.load(state_ptr + 4) + 1
    rows = tl.load(offsets_ptr + experts - 1).to(tl.int64)
    wanted = tl.load(state_ptr + 5) + rows
    most = tl.load(state_ptr + 6)
    place = head % room
    skipped = tl.where(place + rows > room, room - place, 0)
    after = head + skipped + rows
    number = last % FRAMES
    fits = (after - tail <= room) & (last - first < FRAMES)
    tl.store(state_ptr + HEADER + 2 * number, head, mask=fits)
    tl.store(state_ptr + HEADER + 2 * number + 1, serial, mask=fits)
    tl.store(state_ptr, tl.where(fits, after, head))
    tl.store(state_ptr + 3, tl.where(fits, last + 1, last))
    tl.store(state_ptr + 4, serial)
    tl.store(state_ptr + 5, wanted)
    tl.store(state_ptr + 6, tl.maximum(most, tl.maximum(wanted, after - tail)))
    tl.store(frame_ptr, tl.where(fits, (place + skipped) % room, 0))
    tl.store(frame_ptr + 1, tl.where(fits, rows, 0))
    tl.store(frame_ptr + 2, tl.where(fits, serial, 0))
    tl.store(frame_ptr + 3, number)
    tl.store(frame_ptr + 4, rows)


@triton.jit
def _is_popped(state_ptr, frame, number):
    """Whether a frame has been popped, or is the one that is being popped."""
    index = frame % FRAMES
    return (tl.load(state_ptr + HEADER + 2 * index + 1) == 0) | (index == number)


@triton.jit
def stack_pop_kernel(state_ptr, frame_ptr):
    head = tl.load(state_ptr)
    tail = tl.load(state_ptr + 1)
    first = tl.load(state_ptr + 2)
    last = tl.load(state_ptr + 3)
    own = tl.load(frame_ptr + 2)
    number = tl.load(frame_ptr + 3)
    is_open = (own != 0) & (tl.load(state_ptr + HEADER + 2 * number + 1) == own)
    popped = tl.where(is_open, number, -1)
    # The loops read what lies in memory, and this program writes only behind them.
    while (last > first) & _is_popped(state_ptr, last - 1, popped):
        last -= 1
        head = tl.load(state_ptr + HEADER + 2 * (last % FRAMES))
    while (last > first) & _is_popped(state_ptr, first, popped):
        first += 1
        tail = tl.load(state_ptr + HEADER + 2 * (first % FRAMES))
    is_empty = last == first
    wanted = tl.load(state_ptr + 5)
    rows = tl.load(frame_ptr + 4)
    tl.debug_barrier()
    tl.store(state_ptr + HEADER + 2 * number + 1, tl.zeros_like(own), mask=is_open)
    tl.store(state_ptr, tl.where(is_empty, 0, head))
    tl.store(state_ptr + 1, tl.where(is_empty, 0, tail))
    tl.store(state_ptr + 2, tl.where(is_empty, 0, first))
    tl.store(state_ptr + 3, tl.where(is_empty, 0, last))
    tl.store(state_ptr + 5, tl.where(is_open | (own == 0), wanted - rows, wanted))


@triton.jit
def _tiles(rows, per_row, ROWS: tl.constexpr):
    return tl.cdiv(rows, ROWS).to(tl.int32) * per_row


@triton.jit
def _tile(block, per_row, rows, W, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows and columns of a tile, and its mask."""
    row = ((block // per_row) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = ((block % per_row) * COLS + tl.arange(0, COLS))[None, :]
    return row, column, (row < rows) & (column < W)


@triton.jit
def _is_stale(state_ptr, frame_ptr):
    own = tl.load(frame_ptr + 2)
    return (own != 0) & (tl.load(state_ptr + HEADER + 2 * tl.load(frame_ptr + 3) + 1) != own)


@triton.jit
def _kept(part_ptr, at, live, stale):
    """What a frame has, in fp32: zero where it has none, NaN where it is not its own any more."""
    return tl.where(
        stale, float("nan"), tl.load(part_ptr + at, mask=live, other=0.0).to(tl.float32)
    )


@triton.jit
def stack_store_kernel(rows_ptr, frame_ptr, part_ptr, W, ROWS: tl.constexpr, COLS: tl.constexpr):
    place = tl.load(frame_ptr)
    rows = tl.load(frame_ptr + 1)
    per_row = tl.cdiv(W, COLS)
    for block in range(tl.program_id(0), _tiles(rows, per_row, ROWS), tl.num_programs(0)):
        row, column, live = _tile(block, per_row, rows, W, ROWS, COLS)
        value = tl.load(rows_ptr + row * W + column, mask=live)
        tl.store(part_ptr + (place + row) * W + column, value, mask=live)


@triton.jit
def stack_load_kernel(
    state_ptr, frame_ptr, part_ptr, rows_ptr, W, ROWS: tl.constexpr, COLS: tl.constexpr
):
    place = tl.load(frame_ptr)
    rows = tl.load(frame_ptr + 1)
    wanted = tl.load(frame_ptr + 4)
    stale = _is_stale(state_ptr, frame_ptr)
    per_row = tl.cdiv(W, COLS)
    for block in range(tl.program_id(0), _tiles(wanted, per_row, ROWS), tl.num_programs(0)):
        row, column, live = _tile(block, per_row, wanted, W, ROWS, COLS)
        value = _kept(part_ptr, (place + row) * W + column, live & (row < rows), stale)
        tl.store(rows_ptr + row * W + column, value.to(rows_ptr.dtype.element_ty), mask=live)


@triton.jit
def stack_swiglu_kernel(
    gate_up_ptr, frame_ptr, part_ptr, h_ptr, F, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Activations of all rows of the call, whose pre-activations are kept if there is room."""
    place = tl.load(frame_ptr)
    rows = tl.load(frame_ptr + 1)
    wanted = tl.load(frame_ptr + 4)
    per_row = tl.cdiv(F, COLS)
    for block in range(tl.program_id(0), _tiles(wanted, per_row, ROWS), tl.num_programs(0)):
        row, column, live = _tile(block, per_row, wanted, F, ROWS, COLS)
        at = row * 2 * F + column
        gate = tl.load(gate_up_ptr + at, mask=live, other=0.0)
        up = tl.load(gate_up_ptr + at + F, mask=live, other=0.0)
        h = silu_times(gate.to(tl.float32), up.to(tl.float32))
        tl.store(h_ptr + row * F + column, h.to(h_ptr.dtype.element_ty), mask=live)
        kept = part_ptr + (place + row) * 2 * F + column
        tl.store(kept, gate, mask=live & (row < rows))
        tl.store(kept + F, up, mask=live & (row < rows))


@triton.jit
def stack_swiglu_again_kernel(
    state_ptr, frame_ptr, part_ptr, h_ptr, F, ROWS: tl.constexpr, COLS: tl.constexpr
):
    place = tl.load(frame_ptr)
    rows = tl.load(frame_ptr + 1)
    wanted = tl.load(frame_ptr + 4)
    stale = _is_stale(state_ptr, frame_ptr)
    per_row = tl.cdiv(F, COLS)
    for block in range(tl.program_id(0), _tiles(wanted, per_row, ROWS), tl.num_programs(0)):
        row, column, live = _tile(block, per_row, wanted, F, ROWS, COLS)
        at = (place + row) * 2 * F + column
        gate = _kept(part_ptr, at, live & (row < rows), stale)
        up = _kept(part_ptr, at + F, live & (row < rows), stale)
        h = silu_times(gate, up)
        tl.store(h_ptr + row * F + column, h.to(h_ptr.dtype.element_ty), mask=live)


@triton.jit
def stack_swiglu_backward_kernel(
    state_ptr, frame_ptr, part_ptr, dh_ptr, dx_ptr, F, ROWS: tl.constexpr, COLS: tl.constexpr
):
    place = tl.load(frame_ptr)
    rows = tl.load(frame_ptr + 1)
    wanted = tl.load(frame_ptr + 4)
    stale = _is_stale(state_ptr, frame_ptr)
    per_row = tl.cdiv(F, COLS)
    for block in range(tl.program_id(0), _tiles(wanted, per_row, ROWS), tl.num_programs(0)):
        row, column, live = _tile(block, per_row, wanted, F, ROWS, COLS)
        at = (place + row) * 2 * F + column
        gate = _kept(part_ptr, at, live & (row < rows), stale)
        up = _kept(part_ptr, at + F, live & (row < rows), stale)
        dh = tl.load(dh_ptr + row * F + column, mask=live, other=0.0).to(tl.float32)
        dgate, dup = gradients_of(gate, up, dh)
        out = dx_ptr + row * 2 * F + column
        tl.store(out, dgate.to(dx_ptr.dtype.element_ty), mask=live)
        tl.store(out + F, dup.to(dx_ptr.dtype.element_ty), mask=live)


def push_frame(state: torch.Tensor, offsets_e: torch.Tensor, room: int) -> torch.Tensor:
    frame_5 = torch.empty(5, dtype=torch.int64, device=state.device)
    args = (state, offsets_e, frame_5, offsets_e.numel(), room)
    launch(stack_push_kernel, (1,), args, num_warps=1)
    return frame_5


def pop_frame(state: torch.Tensor, frame_5: torch.Tensor) -> None:
    launch(stack_pop_kernel, (1,), (state, frame_5), num_warps=1)


def store_rows(rows_RW: torch.Tensor, frame_5: torch.Tensor, part_CW: torch.Tensor) -> None:
    rows, W = rows_RW.shape
    if rows:
        args = (rows_RW.contiguous(), frame_5, part_CW, W)
        launch(stack_store_kernel, _grid(rows, W), args, **TILE)


def load_rows(
    state: torch.Tensor, frame_5: torch.Tensor, part_CW: torch.Tensor, num_rows: int
) -> torch.Tensor:
    W = part_CW.shape[1]
    rows_RW = part_CW.new_empty((num_rows, W))
    if num_rows:
        args = (state, frame_5, part_CW, rows_RW, W)
        launch(stack_load_kernel, _grid(num_rows, W), args, **TILE)
    return rows_RW


def swiglu(gate_up_R2F: torch.Tensor, frame_5: torch.Tensor, part_CW: torch.Tensor) -> torch.Tensor:
    """Rows behind the frame's are not written."""
    rows, F = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    h_RF = gate_up_R2F.new_empty((rows, F))
    if rows:
        args = (gate_up_R2F.contiguous(), frame_5, part_CW, h_RF, F)
        launch(stack_swiglu_kernel, _grid(rows, F), args, **TILE)
    return h_RF


def swiglu_again(
    state: torch.Tensor, frame_5: torch.Tensor, part_CW: torch.Tensor, num_rows: int
) -> torch.Tensor:
    F = part_CW.shape[1] // 2
    h_RF = part_CW.new_empty((num_rows, F))
    if num_rows:
        args = (state, frame_5, part_CW, h_RF, F)
        launch(stack_swiglu_again_kernel, _grid(num_rows, F), args, **TILE)
    return h_RF


def swiglu_backward(
    state: torch.Tensor, dh_RF: torch.Tensor, frame_5: torch.Tensor, part_CW: torch.Tensor
) -> torch.Tensor:
    rows, F = dh_RF.shape
    dx_R2F = dh_RF.new_empty((rows, 2 * F))
    if rows:
        args = (state, frame_5, part_CW, dh_RF.contiguous(), dx_R2F, F)
        launch(stack_swiglu_backward_kernel, _grid(rows, F), args, **TILE)
    return dx_R2F


def _grid(rows: int, width: int) -> tuple[int]:
    return (min(GRID, cdiv(rows, TILE["ROWS"]) * cdiv(width, TILE["COLS"])),)
