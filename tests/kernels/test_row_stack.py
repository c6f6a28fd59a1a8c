"""A stack of rows: places, what is read back, and the kernels against plain torch.

Shapes: R rows that a call has room for, C rows of the stack, W width, F ffn.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_graphs.kernels import row_stack, row_stack_reference, swiglu_reference

R, F = 24, 20


def _ends(rows: int) -> Tensor:
    return torch.tensor([min(rows, 1), rows], dtype=torch.int32)


def _push(state: Tensor, rows: int, room: int = 10) -> Tensor:
    return row_stack.push_frame(state, _ends(rows), room)


def test_what_is_popped_in_reverse_is_reused_at_once():
    state = row_stack.new_state(None)
    first, second = _push(state, 4), _push(state, 5)
    assert [first[:2].tolist(), second[:2].tolist()] == [[0, 4], [4, 5]]
    assert _push(state, 2)[[0, 1, 4]].tolist() == [0, 0, 2]  # no room: it keeps nothing
    row_stack.pop_frame(state, second, 10)
    assert _push(state, 6)[:2].tolist() == [4, 6]
    assert row_stack.most_rows(state) == 4 + 6 + 2  # with what is asked for and not there


def test_what_is_popped_first_is_reused_behind_the_others():
    state = row_stack.new_state(None)
    first, second = _push(state, 4), _push(state, 5)
    row_stack.pop_frame(state, first, 10)
    lost = _push(state, 5)
    assert lost[1] == 0  # one row at the end and four at the front are not five
    third = _push(state, 4)
    assert third[:2].tolist() == [0, 4]
    for frame in (second, third):
        row_stack.pop_frame(state, frame, 10)
    assert not state[:4].any()
    assert state[row_stack_reference.WANTED] == 5  # the lost one holds none, and asked for them
    row_stack.pop_frame(state, lost, 10)
    assert state[row_stack_reference.WANTED] == 0


def test_frames_between_others_wait_for_one_of_them():
    state = row_stack.new_state(None)
    frames = [_push(state, rows) for rows in (2, 3, 5)]
    row_stack.pop_frame(state, frames[1], 10)
    row_stack.pop_frame(state, frames[1], 10)  # again: nothing happens
    assert _push(state, 1)[1] == 0
    row_stack.pop_frame(state, frames[2], 10)
    assert state[row_stack_reference.HEAD] == 2
    row_stack.pop_frame(state, frames[0], 10)
    assert not state[:4].any()


def test_what_is_read_after_its_room_was_given_back_is_nan():
    parts = tuple(torch.full((10, width), 7.0) for width in (2 * F, 4, 4))
    owner = torch.nn.Module()
    number, state = row_stack.number_of(parts, owner), row_stack.new_state(None)
    kept = row_stack.KeptRows(state, _push(state, 3), number)
    kept.store(row_stack.RECEIVED, torch.arange(12.0).view(3, 4))
    assert torch.equal(kept.load(row_stack.RECEIVED, 5)[:3], torch.arange(12.0).view(3, 4))
    row_stack.empty_(state)
    assert kept.load(row_stack.RECEIVED, 5)[:3].isnan().all()
    lost = row_stack.KeptRows(state, _push(state, 11), number)
    lost.store(row_stack.RECEIVED, torch.ones(11, 4))
    assert lost.lost() == 11
    assert not lost.load(row_stack.RECEIVED, 11).any()
    assert parts[row_stack.RECEIVED][3:].eq(7).all()
    del owner
    assert number not in row_stack._parts


@pytest.mark.parametrize("seed", range(3))
def test_no_two_open_frames_share_rows(seed):
    """Pushed and popped in any order; what is written stays until it is popped."""
    draw, state, room = random.Random(seed), row_stack.new_state(None), 40
    part_CW, held = torch.zeros(room, 1), {}
    for step in range(400):
        if held and draw.random() < 0.5:
            own, frame = held.popitem() if draw.random() < 0.5 else _oldest(held)
            rows = row_stack_reference.load_rows(state, frame, part_CW, int(frame[1]))
            assert rows.eq(own).all()
            row_stack.pop_frame(state, frame, room)
        else:
            frame = _push(state, draw.randrange(12), room)
            row_stack_reference.store_rows(torch.full((12, 1), float(step)), frame, part_CW)
            held[step] = frame
    wanted = sum(int(frame[4]) for frame in held.values())
    assert state[row_stack_reference.WANTED] == wanted


def _oldest(held: dict[int, Tensor]) -> tuple[int, Tensor]:
    own = min(held)
    return own, held.pop(own)


@pytest.mark.usefixtures("interpreted", "poisoned_memory")
class TestKernels:
    def test_places(self):
        triton_ops = pytest.importorskip("moe_graphs.kernels.row_stack_triton")
        draw, room, held = random.Random(1), 30, []
        ours, plain = row_stack.new_state(None), row_stack.new_state(None)
        for _ in range(60):
            if held and draw.random() < 0.5:
                frame = held.pop(draw.choice((0, -1, len(held) // 2)))
                triton_ops.pop_frame(ours, frame)
                row_stack_reference.pop_frame(plain, frame)
            else:
                ends = _ends(draw.randrange(14))
                held.append(triton_ops.push_frame(ours, ends, room))
                assert torch.equal(held[-1], row_stack_reference.push_frame(plain, ends, room))
            assert torch.equal(ours, plain)

    @pytest.mark.parametrize("how", ["kept", "lost", "given back"])
    def test_rows(self, how):
        triton_ops = pytest.importorskip("moe_graphs.kernels.row_stack_triton")
        torch.manual_seed(0)
        room = 12 if how == "lost" else 40
        state, part_CW = row_stack.new_state(None), torch.full((room, 2 * F), 7.0)
        _push(state, 5, room)
        frame = _push(state, 17, room)
        gate_up_R2F, dh_RF = torch.randn(R, 2 * F), torch.randn(R, F)
        expected_RF = swiglu_reference.swiglu_forward(gate_up_R2F)
        h_RF = triton_ops.swiglu(gate_up_R2F, frame, part_CW)
        torch.testing.assert_close(h_RF[:17], expected_RF[:17])
        plain_CW = torch.full((room, 2 * F), 7.0)
        row_stack_reference.store_rows(gate_up_R2F, frame, plain_CW)
        assert torch.equal(part_CW, plain_CW)
        part_CW.fill_(7.0)
        triton_ops.store_rows(gate_up_R2F, frame, part_CW)
        assert torch.equal(part_CW, plain_CW)
        if how == "given back":
            row_stack.empty_(state)
        for name, given in (("load_rows", ()), ("swiglu_again", ()), ("swiglu_backward", (dh_RF,))):
            args = (state, *given, frame, part_CW, *([] if given else [R]))
            found, plain = (getattr(m, name)(*args) for m in (triton_ops, row_stack_reference))
            torch.testing.assert_close(found[:17], plain[:17], equal_nan=True)
            assert plain[:17].isnan().all() == (how == "given back")
