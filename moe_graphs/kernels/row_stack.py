"""Rows that are kept from forward to backward, in memory for as many as there really are.

A stack is one array per part of a layer (what its experts received, their pre-activations, what
they returned), with room for as many rows each, and its ``state`` on the device. A *frame* is the
rows of one call, at the same place in every part. ``push_frame`` takes as much room as the last of
the offsets says, ``pop_frame`` gives it back. Nothing here waits for the device, and all of it can
be captured: places are numbers on the device, made anew in every replay.

Frames may be popped in any order. Room is taken at one end and given back from both: what was
pushed last and popped first (layers of a microbatch) is reused at once, and so is what was pushed
first and popped first (one microbatch after the other); a frame popped between two others waits for
one of them. A frame is never cut in two.

    state   head, tail: rows taken so far, and given back (place: modulo the room); first, last:
            numbers of the frames between them; serial: of the last push; wanted, most: rows that
            all open frames ask for, now and at most; then per frame its head and its serial, which
            is 0 once it has been popped
    frame   place, rows that there was room for (all or none), serial (0 for none), number, rows
            that were asked for

A frame that there was no room for keeps nothing, and reads as zeros: its rows are counted by
whoever pushed it, and the step is not to be used. A frame that is read after its room was given
back reads as NaN.

Shapes: R rows that a call has room for, C rows of a stack, W width of a part, F ffn, e experts.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.kernels import row_stack_reference
from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.row_stack_reference import FRAMES, HEADER, MOST

GATE_UP, RETURNED, RECEIVED = range(3)  # the parts; the last one may be missing


@dataclass(frozen=True)
class KeptRows:
    """A frame, and the stack that has it.

    Attributes:
        frame_5: int64, as ``push_frame`` makes it.
        stack: its number.
    """

    state: Tensor
    frame_5: Tensor
    stack: int

    def lost(self) -> Tensor:
        """0-dim int64 on the device: rows that there was no room for."""
        return self.frame_5[4] - self.frame_5[1]

    def store(self, part: int, rows_RW: Tensor) -> None:
        store_rows(rows_RW, self.frame_5, self.stack, part)

    def load(self, part: int, num_rows: int) -> Tensor:
        """``[num_rows, W]``; behind the rows that were stored anything."""
        return load_rows(self.state, self.frame_5, self.stack, part, num_rows)

    def swiglu(self, gate_up_R2F: Tensor) -> Tensor:
        """The activations ``[R, F]``; keeps the pre-activations."""
        return stack_swiglu(gate_up_R2F, self.frame_5, self.stack)

    def swiglu_again(self, num_rows: int) -> Tensor:
        return stack_swiglu_again(self.state, self.frame_5, self.stack, num_rows)

    def swiglu_backward(self, dh_RF: Tensor) -> Tensor:
        """The gradient of the pre-activations ``[R, 2F]``."""
        return stack_swiglu_backward(self.state, dh_RF, self.frame_5, self.stack)

    def pop(self) -> None:
        pop_frame(self.state, self.frame_5, room_of(self.stack))


pytree.register_dataclass(KeptRows)


def new_state(device: torch.device | str | None) -> Tensor:
    return torch.zeros(HEADER + 2 * FRAMES, dtype=torch.int64, device=device)


def most_rows(state: Tensor) -> Tensor:
    """0-dim view: the most rows that were asked for at once, whether there was room or not."""
    return state[MOST]


def empty_(state: Tensor) -> None:
    """Gives the room of all frames back, whoever still has them, and keeps ``most`` and serials."""
    state[:4].zero_()
    state[5].zero_()
    state[HEADER:].zero_()


# Ops take numbers: what lies above the head is nobody's, so that graphs and proofs have nothing to
# put back but the state, and keep no copies of a memory as large as a model's activations.
_parts: dict[int, tuple[Tensor, ...]] = {}
_numbers = itertools.count()


def number_of(parts: tuple[Tensor, ...], owner: Any) -> int:
    """What the ops below call this memory by, as long as the owner is there."""
    number = next(_numbers)
    _parts[number] = parts
    weakref.finalize(owner, _parts.pop, number)
    return number


def part_of(stack: int, part: int) -> Tensor:
    """``[C, W]``."""
    return _parts[stack][part]


def room_of(stack: int) -> int:
    """C."""
    return _parts[stack][0].shape[0]


@define_op(device="default", mutates_args=("state",))
def push_frame(state: Tensor, offsets_e: Tensor, room: int) -> Tensor:
    """``frame_5`` of as many rows as the last of ``offsets_e`` (int32) says."""
    if state.is_cuda:
        from moe_graphs.kernels import row_stack_triton

        return row_stack_triton.push_frame(state, offsets_e, room)
    return row_stack_reference.push_frame(state, offsets_e, room)


@define_op(device="default", mutates_args=("state",))
def pop_frame(state: Tensor, frame_5: Tensor, room: int) -> None:
    """Gives back its room. Does nothing for a frame that has none."""
    if state.is_cuda:
        from moe_graphs.kernels import row_stack_triton

        row_stack_triton.pop_frame(state, frame_5)
    else:
        row_stack_reference.pop_frame(state, frame_5)


@define_op(device="default")
def store_rows(rows_RW: Tensor, frame_5: Tensor, stack: int, part: int) -> None:
    """Copies the frame's rows into a part, as many as it has."""
    part_CW = _parts[stack][part]
    if has_kernel(rows_RW):
        from moe_graphs.kernels import row_stack_triton

        row_stack_triton.store_rows(rows_RW, frame_5, part_CW)
    else:
        row_stack_reference.store_rows(rows_RW, frame_5, part_CW)


@define_op(device="default")
def load_rows(state: Tensor, frame_5: Tensor, stack: int, part: int, num_rows: int) -> Tensor:
    part_CW = _parts[stack][part]
    if has_kernel(part_CW):
        from moe_graphs.kernels import row_stack_triton

        return row_stack_triton.load_rows(state, frame_5, part_CW, num_rows)
    return row_stack_reference.load_rows(state, frame_5, part_CW, num_rows)


@define_op(device="default")
def stack_swiglu(gate_up_R2F: Tensor, frame_5: Tensor, stack: int) -> Tensor:
    part_CW = _parts[stack][GATE_UP]
    if has_kernel(gate_up_R2F):
        from moe_graphs.kernels import row_stack_triton

        return row_stack_triton.swiglu(gate_up_R2F, frame_5, part_CW)
    return row_stack_reference.swiglu(gate_up_R2F, frame_5, part_CW)


@define_op(device="default")
def stack_swiglu_again(state: Tensor, frame_5: Tensor, stack: int, num_rows: int) -> Tensor:
    part_CW = _parts[stack][GATE_UP]
    if has_kernel(part_CW):
        from moe_graphs.kernels import row_stack_triton

        return row_stack_triton.swiglu_again(state, frame_5, part_CW, num_rows)
    return row_stack_reference.swiglu_again(state, frame_5, part_CW, num_rows)


@define_op(device="default")
def stack_swiglu_backward(state: Tensor, dh_RF: Tensor, frame_5: Tensor, stack: int) -> Tensor:
    part_CW = _parts[stack][GATE_UP]
    if has_kernel(dh_RF):
        from moe_graphs.kernels import row_stack_triton

        return row_stack_triton.swiglu_backward(state, dh_RF, frame_5, part_CW)
    return row_stack_reference.swiglu_backward(state, dh_RF, frame_5, part_CW)
