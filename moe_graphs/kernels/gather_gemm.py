"""Permutation and grouped GEMM in one: the expert-sorted rows are never written.

Saves the copy of R rows in the forward, and its memory until the backward, which makes the rows
once more for the weights' gradient (a gathered weight gradient is slower than copy and product).

Shapes: T tokens, K top-k, R = T*K routed rows, D and N the two sides of the product, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_graphs.kernels import reference
from moe_graphs.kernels.availability import has_triton
from moe_graphs.kernels.grouped_gemm import (
    check_operands,
    dgrad,
    grouped_gemm,
    matmul_rows,
    to_autocast,
    wgrad,
)
from moe_graphs.kernels.permute import gather_rows, permute, sum_rows
from moe_graphs.kernels.routing import RowOrder


def gather_gemm(hidden_TD: Tensor, order: RowOrder, w_EDN: Tensor) -> Tensor:
    """``grouped_gemm(permute(hidden_TD, order), w_EDN, order.offsets_E)`` as one op.

    Without gaps; an order with gaps takes the two ops. Never syncs, deterministic. Saves
    ``hidden_TD`` and the order for backward, not the rows.
    """
    hidden_TD, w_EDN = to_autocast(hidden_TD, w_EDN)
    if order.has_gaps:
        return grouped_gemm(permute(hidden_TD, order), w_EDN, order.offsets_E)
    check_operands(hidden_TD, w_EDN, order.offsets_E)
    rows, tokens = order.order_R.numel(), hidden_TD.shape[0]
    if order.inverse_R.numel() != rows or (rows % tokens if tokens else rows):
        raise ValueError(
            f"gather_gemm wants an order of whole multiples of {tokens} tokens, got {rows} rows "
            f"for {order.inverse_R.numel()} pairs"
        )
    return _forward(hidden_TD, order.order_R, order.inverse_R, w_EDN, order.offsets_E)


@torch.library.custom_op("moe_graphs::gather_gemm", mutates_args=(), device_types="cpu")
def _forward(
    hidden_TD: Tensor, order_R: Tensor, inverse_R: Tensor, w_EDN: Tensor, offsets_E: Tensor
) -> Tensor:
    rows_RD = hidden_TD.index_select(0, _token_of(order_R, hidden_TD))
    return reference.grouped_gemm(rows_RD, w_EDN, offsets_E)


@_forward.register_kernel("cuda")
def _(hidden_TD, order_R, inverse_R, w_EDN, offsets_E):
    if has_triton():
        from moe_graphs.kernels.gemm_launch import can_gather, matmul_gathered

        if can_gather(hidden_TD):
            hidden_TD, top_k = hidden_TD.contiguous(), _top_k(order_R, hidden_TD)
            return matmul_gathered(hidden_TD, order_R, top_k, w_EDN.contiguous(), offsets_E)
    rows_RD = hidden_TD.index_select(0, _token_of(order_R, hidden_TD))
    return matmul_rows(rows_RD, w_EDN, offsets_E, False)


@_forward.register_fake
def _(hidden_TD, order_R, inverse_R, w_EDN, offsets_E):
    return hidden_TD.new_empty(order_R.shape[0], w_EDN.shape[2])


def _save_operands(ctx, inputs, output) -> None:
    hidden_TD, order_R, inverse_R, w_EDN, offsets_E = inputs
    needs_hidden, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    ctx.num_tokens = hidden_TD.shape[0]
    ctx.save_for_backward(
        hidden_TD if needs_w else None, order_R, inverse_R, w_EDN if needs_hidden else None,
        offsets_E,
    )  # fmt: skip


def _backward(ctx, grad_RN: Tensor):
    hidden_TD, order_R, inverse_R, w_EDN, offsets_E = ctx.saved_tensors
    inverse_TK = inverse_R.view(ctx.num_tokens, -1) if ctx.num_tokens else inverse_R.view(0, 1)
    grad_hidden = grad_w = None
    if ctx.needs_input_grad[0]:
        grad_hidden = sum_rows(dgrad(grad_RN, w_EDN, offsets_E, False), inverse_TK)
    if ctx.needs_input_grad[3]:
        grad_w = wgrad(gather_rows(hidden_TD, inverse_TK, order_R), grad_RN, offsets_E)
    return grad_hidden, None, None, grad_w, None


torch.library.register_autograd("moe_graphs::gather_gemm", _backward, setup_context=_save_operands)


def _top_k(order_R: Tensor, hidden_TD: Tensor) -> int:
    return order_R.numel() // hidden_TD.shape[0] if hidden_TD.shape[0] else 1


def _token_of(order_R: Tensor, hidden_TD: Tensor) -> Tensor:
    return torch.div(order_R, _top_k(order_R, hidden_TD), rounding_mode="floor")
