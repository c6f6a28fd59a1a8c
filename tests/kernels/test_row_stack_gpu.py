"""A stack of rows on a GPU: places and rows as in plain torch, captured, in poisoned memory.

Shapes: R rows that a call has room for, C rows of the stack, D model, F ffn, e experts.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_graphs.kernels import row_stack, row_stack_reference, swiglu, swiglu_gemms
from moe_graphs.kernels.availability import has_triton
from moe_graphs.layers.activation_stack import ActivationStack, push_rows
from moe_graphs.layers.kept_experts import Kept, swiglu_experts_kept
from replays import check_replays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not has_triton(), reason="waits for Triton"),
]
R, D, F, E = 4096, 512, 320, 8


def _ends(share: float = 1.0) -> Tensor:
    """Of the rows of all experts, one of them without any."""
    sizes_E = torch.rand(E).softmax(0)
    sizes_E[2] = 0
    return (sizes_E.cumsum(0) * R * share).int().cuda()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def test_places():
    draw, room, held = random.Random(1), 3000, []
    ours, plain = row_stack.new_state("cuda"), row_stack.new_state("cpu")
    for _ in range(300):
        if held and draw.random() < 0.5:
            frame = held.pop(draw.choice((0, -1, len(held) // 2)))
            row_stack.pop_frame(ours, frame, room)
            row_stack.pop_frame(plain, frame.cpu(), room)
        else:
            ends = torch.tensor([0, draw.randrange(1200)], dtype=torch.int32)
            held.append(row_stack.push_frame(ours, ends.cuda(), room))
            expected = row_stack_reference.push_frame(plain, ends, room)
            assert torch.equal(held[-1].cpu(), expected)
        assert torch.equal(ours.cpu(), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_without_a_stack(dtype):
    """Bit for bit, also where a frame begins in the middle."""
    stack = ActivationStack(2 * R, D, F, dtype=dtype, device="cuda")
    torch.manual_seed(0)
    first = _random(R, D).to(dtype).requires_grad_()
    push_rows(stack, first, _ends(0.3))
    ends_e = _ends()
    rows = int(ends_e[-1])
    kept = push_rows(stack, first, ends_e)
    received_RD, gate_up_R2F = first.detach(), _random(R, 2 * F).to(dtype).requires_grad_()
    dh_RF = _random(R, F).to(dtype)
    kept.store(row_stack.RECEIVED, received_RD)
    h_RF = swiglu(gate_up_R2F)
    (dx_R2F,) = torch.autograd.grad(h_RF, gate_up_R2F, dh_RF)
    for found, expected in (
        (kept.swiglu(gate_up_R2F.detach()), h_RF),
        (kept.load(row_stack.RECEIVED, R), received_RD),
        (kept.load(row_stack.GATE_UP, R), gate_up_R2F),
        (kept.swiglu_again(R), h_RF),
        (kept.swiglu_backward(dh_RF), dx_R2F),
    ):
        assert torch.equal(found[:rows], expected[:rows])


def test_experts_captured():
    """Push, what experts keep, and pop in one graph, that has room, or not, by the routing."""
    stack = ActivationStack(R // 2, D, F, dtype=torch.bfloat16, device="cuda")
    torch.manual_seed(0)
    rows_RD, grad_RD = _random(R, D), _random(R, D)
    w1, w2 = _random(E, D, 2 * F).mul_(0.05), _random(E, F, D).mul_(0.05)
    ends_e = _ends(0.4)

    def gradients(with_stack: bool) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in (rows_RD, w1, w2)]
        if with_stack:
            frame = push_rows(stack, leaves[0], ends_e)
            out_RD = swiglu_experts_kept(*leaves, ends_e, Kept(frame))
            lost = [frame.lost()]
        else:
            out_RD, lost = swiglu_gemms(*leaves, ends_e), []
        grad_rows, *others = torch.autograd.grad(out_RD, leaves, grad_RD)
        is_row_R1 = (torch.arange(R, device="cuda") < ends_e[-1]).unsqueeze(1)
        tails = [torch.where(is_row_R1, each.detach(), 0) for each in (out_RD, grad_rows)]
        return [*tails, *others, *lost]

    def change() -> None:
        ends_e.copy_(_ends(0.2 + 0.15 * float(torch.rand(()))))

    check_replays(lambda: gradients(True), change)
    for share, fits in ((0.3, True), (0.5, True), (0.9, False)):
        ends_e.copy_(_ends(share))
        *found, lost = gradients(True)
        expected = gradients(False)
        assert torch.equal(found[0], expected[0])  # whether there is room or not
        assert all(map(torch.equal, found, expected)) == fits
        assert int(lost) == (0 if fits else int(ends_e[-1]))
        assert all(each.isfinite().all() for each in found)
        assert not stack.state[:4].any()
