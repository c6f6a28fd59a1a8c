"""Permutation and grouped GEMM in one: the expert-sorted rows are never written.

Saves the copy of R rows in the forward, and its memory until the backward, which makes the rows
once more for the weights' gradient (a gathered weight gradient is slower than copy and product).

Shapes: T tokens, K top-k, R = T*K routed rows, D and N the two sides of the product, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_triton
from moe_graphs.kernels.gemm import (
    check_operands,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
    reference,
    rows_on_gpu,
    to_autocast,
)
from moe_graphs.kernels.ops import define_op, wants_gradient
from moe_graphs.kernels.permute import gather_rows, permute, sum_rows
from moe_graphs.kernels.row_order import RowOrder, pairs_per_token, token_of


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
    return _GatherGemm.apply(hidden_TD, order.order_R, order.inverse_R, w_EDN, order.offsets_E)


class _GatherGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, order_R, inverse_R, w_EDN, offsets_E):
        needs_hidden, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        ctx.num_tokens = hidden_TD.shape[0]
        kept_TD, kept_EDN = hidden_TD if needs_w else None, w_EDN if needs_hidden else None
        ctx.save_for_backward(kept_TD, order_R, inverse_R, kept_EDN, offsets_E)
        return gather_gemm_forward(hidden_TD, order_R, w_EDN, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RN):
        hidden_TD, order_R, inverse_R, w_EDN, offsets_E = ctx.saved_tensors
        inverse_TK = inverse_R.view(-1, pairs_per_token(inverse_R.numel(), ctx.num_tokens))
        grad_hidden = grad_w = None
        if wants_gradient(ctx, 0):
            rows_RD = grouped_gemm_dgrad(grad_RN, w_EDN, offsets_E, False)
            grad_hidden = sum_rows(rows_RD, inverse_TK)
        if wants_gradient(ctx, 3):
            rows_RD = gather_rows(hidden_TD, order_R, inverse_TK)
            grad_w = grouped_gemm_wgrad(rows_RD, grad_RN, offsets_E)
        return grad_hidden, None, None, grad_w, None


@define_op()
def gather_gemm_forward(
    hidden_TD: Tensor, order_R: Tensor, w_EDN: Tensor, offsets_E: Tensor
) -> Tensor:
    return reference.grouped_gemm(_rows(hidden_TD, order_R), w_EDN, offsets_E)


@torch.library.impl("moe_graphs::gather_gemm_forward", "cuda")
def _(hidden_TD, order_R, w_EDN, offsets_E):
    if has_triton():
        from moe_graphs.kernels.gemm.launch import can_gather, matmul_gathered

        if can_gather(hidden_TD):
            top_k = pairs_per_token(order_R.numel(), hidden_TD.shape[0])
            w_EDN = w_EDN.contiguous()
            return matmul_gathered(hidden_TD.contiguous(), order_R, top_k, w_EDN, offsets_E)
    return rows_on_gpu(_rows(hidden_TD, order_R), w_EDN, offsets_E, False)


@torch.library.register_fake("moe_graphs::gather_gemm_forward")
def _(hidden_TD, order_R, w_EDN, offsets_E):
    return hidden_TD.new_empty(order_R.shape[0], w_EDN.shape[2])


def _rows(hidden_TD: Tensor, order_R: Tensor) -> Tensor:
    top_k = pairs_per_token(order_R.numel(), hidden_TD.shape[0])
    return hidden_TD.index_select(0, token_of(order_R, top_k))
