"""A stack of rows in plain torch: what the kernels are held against, and the path on the CPU, which
looks at the numbers on the host, inside of ops.

Shapes: R rows that a call has room for, C rows of a stack, W width of a part, F ffn, e experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_graphs.kernels import swiglu_reference

# Of a state: its first words, and how many frames may be open at once.
HEAD, TAIL, FIRST, LAST, SERIAL, WANTED, MOST = range(7)
HEADER, FRAMES = 8, 4096


def push_frame(state: Tensor, offsets_e: Tensor, room: int) -> Tensor:
    """Example: room for 10 rows, head 14, tail 6: frames of 2 rows and no more. If the tail was 9,
    5 rows would lie at 4 to 8, and 7 rows nowhere, though there is room for 6: those at 4 to 9."""
    head, tail, first, last, serial, wanted, most = state[:7].tolist()
    rows = int(offsets_e[-1])
    serial, wanted = serial + 1, wanted + rows
    place = head % room
    skipped = room - place if place + rows > room else 0
    after = head + skipped + rows
    most = max(most, wanted, after - tail)
    number = last % FRAMES
    frame = [0, 0, 0, number, rows]
    if after - tail <= room and last - first < FRAMES:
        frame = [(place + skipped) % room, rows, serial, number, rows]
        state[HEADER + 2 * number], state[HEADER + 2 * number + 1] = head, serial
        head, last = after, last + 1
    state[:7] = torch.tensor([head, tail, first, last, serial, wanted, most])
    return torch.tensor(frame, dtype=torch.int64, device=state.device)


def pop_frame(state: Tensor, frame_5: Tensor) -> None:
    head, tail, first, last, serial, wanted, most = state[:7].tolist()
    _, _, own, number, rows = frame_5.tolist()
    heads, serials = state[HEADER::2].tolist(), state[HEADER + 1 :: 2].tolist()
    is_open = own != 0 and serials[number] == own
    if is_open:
        state[HEADER + 2 * number + 1] = serials[number] = 0
    if is_open or own == 0:
        wanted -= rows
    while last > first and serials[(last - 1) % FRAMES] == 0:
        last -= 1
        head = heads[last % FRAMES]
    while last > first and serials[first % FRAMES] == 0:
        first += 1
        tail = heads[first % FRAMES]
    if last == first:
        head = tail = first = last = 0
    state[:7] = torch.tensor([head, tail, first, last, serial, wanted, most])


def store_rows(rows_RW: Tensor, frame_5: Tensor, part_CW: Tensor) -> None:
    place, rows, *_ = frame_5.tolist()
    part_CW[place : place + rows].copy_(rows_RW[:rows])


def load_rows(state: Tensor, frame_5: Tensor, part_CW: Tensor, num_rows: int) -> Tensor:
    place, rows, own, number, wanted = frame_5.tolist()
    rows_RW = part_CW.new_zeros(num_rows, part_CW.shape[1])
    rows_RW[:rows] = part_CW[place : place + rows]
    if own != 0 and state[HEADER + 2 * number + 1] != own:
        rows_RW[:wanted] = math.nan
    return rows_RW


def swiglu(gate_up_R2F: Tensor, frame_5: Tensor, part_CW: Tensor) -> Tensor:
    store_rows(gate_up_R2F, frame_5, part_CW)
    return swiglu_reference.swiglu_forward(gate_up_R2F)


def swiglu_again(state: Tensor, frame_5: Tensor, part_CW: Tensor, num_rows: int) -> Tensor:
    return swiglu_reference.swiglu_forward(load_rows(state, frame_5, part_CW, num_rows))


def swiglu_backward(state: Tensor, dh_RF: Tensor, frame_5: Tensor, part_CW: Tensor) -> Tensor:
    gate_up_R2F = load_rows(state, frame_5, part_CW, dh_RF.shape[0])
    return swiglu_reference.swiglu_backward(gate_up_R2F, dh_RF)
