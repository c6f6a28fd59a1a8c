"""The routed experts, with what their backward needs in a frame of an ``ActivationStack``.

Kept are the rows that the experts received, unless they are received again, and pre-activations.
Activations are computed again, by a kernel that reads the latter once more: storing and loading
them would move more bytes.

Shapes: D model, F ffn, e experts of this rank, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.gemm.op import (
    check_operands,
    gradient_of_weights,
    grouped_gemm_dgrad,
    grouped_gemm_forward,
    is_transposed,
    to_autocast,
)
from moe_graphs.kernels.row_stack import RECEIVED, KeptRows
from moe_graphs.staged import is_repeated


@dataclass(frozen=True)
class Kept:
    """What the backward of a layer's experts has.

    Attributes:
        frame: on the stack.
        hidden_TD: the tokens, where rows are received again from them by ``receive``.
    """

    frame: KeptRows
    hidden_TD: Tensor | None = None
    receive: Callable[[Tensor], Tensor] | None = None


def swiglu_experts_kept(
    rows_RD: Tensor, w1_eD2F: Tensor, w2_eFD: Tensor, offsets_e: Tensor, kept: Kept
) -> Tensor:
    """``swiglu_gemms``, to the bit. Its backward gives the frame's room back, so it can run once.

    Raises:
        RuntimeError: in a second backward (``retain_graph``, or weights apart from inputs).
    """
    rows_RD, w1_eD2F = to_autocast(rows_RD, w1_eD2F)
    w2_eFD = to_autocast(rows_RD, w2_eFD)[1]
    check_operands(rows_RD, w1_eD2F, offsets_e)
    return _KeptExperts.apply(rows_RD, w1_eD2F, w2_eFD, offsets_e, kept)


class _KeptExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        w1_eD2F: Tensor,
        w2_eFD: Tensor,
        offsets_e: Tensor,
        kept: Kept,
    ) -> Tensor:
        frame = kept.frame
        ctx.save_for_backward(w1_eD2F, w2_eFD, offsets_e, kept.hidden_TD)
        ctx.frame, ctx.receive, ctx.is_popped = frame, kept.receive, False
        ctx.num_rows = rows_RD.shape[0]
        gate_up_R2F = grouped_gemm_forward(rows_RD, w1_eD2F, offsets_e, False)
        if ctx.needs_input_grad[1] and kept.receive is None:
            frame.store(RECEIVED, rows_RD)
        return grouped_gemm_forward(frame.swiglu(gate_up_R2F), w2_eFD, offsets_e, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        w1_eD2F, w2_eFD, offsets_e, hidden_TD = ctx.saved_tensors
        frame, rows = ctx.frame, ctx.num_rows
        _check_first(ctx)
        grad_w1 = grad_w2 = None
        if ctx.needs_input_grad[2]:
            h_RF = frame.swiglu_again(rows)
            grad_w2 = gradient_of_weights(h_RF, grad_RD, offsets_e, is_transposed(w2_eFD))
            del h_RF
        grad_RF = grouped_gemm_dgrad(grad_RD, w2_eFD, offsets_e, False)
        grad_R2F = frame.swiglu_backward(grad_RF)
        del grad_RF
        if ctx.receive is not None:  # all ranks together, whatever each needs of it
            received_RD = ctx.receive(hidden_TD)
        elif ctx.needs_input_grad[1]:
            received_RD = frame.load(RECEIVED, rows)
        if ctx.needs_input_grad[1]:
            grad_w1 = gradient_of_weights(received_RD, grad_R2F, offsets_e, is_transposed(w1_eD2F))
            del received_RD
        frame.pop()
        grad_RD = grouped_gemm_dgrad(grad_R2F, w1_eD2F, offsets_e, False)
        return grad_RD, grad_w1, grad_w2, None, None


def _check_first(ctx: Any) -> None:
    if ctx.is_popped and not is_repeated():
        raise RuntimeError(
            "activation stack: this backward has run before, and what it needs is not kept any "
            "more: call backward() once per forward, for inputs and weights together, or train "
            "without a stack"
        )
    ctx.is_popped = True
