"""Permutation and grouped GEMM in one node, which keeps the tokens and not their rows.

The backward makes the rows once more for the weights' gradient. Products whose loads gather the
rows are no faster than copy and product (``docs/development/log.md``).

Shapes: T tokens, K top-k, R = T*K routed rows, D and N the two sides of the product, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_triton
from moe_graphs.kernels.gemm import (
    check_operands,
    gradient_of_weights,
    grouped_gemm_dgrad,
    grouped_gemm_forward,
    grouped_gemm_wgrad,
    is_transposed,
    reference,
)
from moe_graphs.kernels.ops import define_op, wants_gradient
from moe_graphs.kernels.permute import collect_rows, spread_rows
from moe_graphs.kernels.precision import to_autocast
from moe_graphs.kernels.row_order import RowOrder, pairs_per_token, token_of


def gather_gemm(
    hidden_TD: Tensor,
    order: RowOrder,
    w_EDN: Tensor,
    *,
    zero_tail: bool = True,
) -> Tensor:
    """``grouped_gemm(permute(hidden_TD, order), w_EDN, order.offsets_E)`` as one op.

    Never syncs, deterministic. Saves ``hidden_TD`` and the order for backward, not the rows.

    Args:
        zero_tail: as in ``grouped_gemm``. An order without gaps leaves no tail.
    """
    hidden_TD, w_EDN = to_autocast(hidden_TD, w_EDN)
    check_operands(hidden_TD, w_EDN, order.offsets_E)
    rows, pairs, tokens = order.order_R.numel(), order.inverse_R.numel(), hidden_TD.shape[0]
    if (pairs != rows and not order.has_gaps) or (pairs % tokens if tokens else pairs):
        raise ValueError(
            f"gather_gemm wants an order of whole multiples of {tokens} tokens, got {rows} rows "
            f"for {pairs} pairs"
        )
    inverse_TK = order.inverse_R.view(tokens, pairs_per_token(pairs, tokens))
    indices = order.order_R, inverse_TK, order.offsets_E
    gaps = order.has_gaps
    return _GatherGemm.apply(hidden_TD, w_EDN, *indices, gaps, zero_tail and gaps)


class _GatherGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, w_EDN, order_R, inverse_TK, offsets_E, has_gaps, zero_tail):
        needs_hidden, needs_w = ctx.needs_input_grad[:2]
        ctx.has_gaps, ctx.is_transposed = has_gaps, is_transposed(w_EDN)
        kept_TD, kept_EDN = hidden_TD if needs_w else None, w_EDN if needs_hidden else None
        ctx.save_for_backward(kept_TD, kept_EDN, order_R, inverse_TK, offsets_E)
        rows_RD = spread_rows(hidden_TD, order_R, inverse_TK, None, has_gaps)
        return grouped_gemm_forward(rows_RD, w_EDN, offsets_E, zero_tail)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RN):
        hidden_TD, w_EDN, order_R, inverse_TK, offsets_E = ctx.saved_tensors
        grad_hidden = grad_w = None
        if wants_gradient(ctx, 1):
            rows_RD = spread_rows(hidden_TD, order_R, inverse_TK, None, ctx.has_gaps)
            grad_w = gradient_of_weights(rows_RD, grad_RN, offsets_E, ctx.is_transposed)
            del rows_RD  # as large as the rows of the next gradient
        if wants_gradient(ctx, 0):
            rows_RD = grouped_gemm_dgrad(grad_RN, w_EDN, offsets_E, False)
            grad_hidden = collect_rows(rows_RD, inverse_TK, None, ctx.has_gaps)
        return grad_hidden, grad_w, None, None, None, None, None


@define_op()
def gather_gemm_wgrad(
    hidden_TD: Tensor, order_R: Tensor, grad_RN: Tensor, offsets_E: Tensor, transposed: bool
) -> Tensor:
    rows_RD = _rows(hidden_TD, order_R)
    pair = (grad_RN, rows_RD) if transposed else (rows_RD, grad_RN)
    return reference.grouped_gemm_wgrad(*pair, offsets_E)


@torch.library.impl("moe_graphs::gather_gemm_wgrad", "cuda")
def _(hidden_TD, order_R, grad_RN, offsets_E, transposed):
    if has_triton():
        from moe_graphs.kernels.gemm.launch import can_gather_weights, matmul_weights_gathered

        if can_gather_weights(hidden_TD, grad_RN.shape[1]):
            top_k = pairs_per_token(order_R.numel(), hidden_TD.shape[0])
            operands = hidden_TD.contiguous(), order_R, top_k, grad_RN.contiguous(), offsets_E
            return matmul_weights_gathered(*operands, transposed=transposed)
    rows_RD = _rows(hidden_TD, order_R)
    pair = (grad_RN, rows_RD) if transposed else (rows_RD, grad_RN)
    return grouped_gemm_wgrad(*pair, offsets_E)


@torch.library.register_fake("moe_graphs::gather_gemm_wgrad")
def _(hidden_TD, order_R, grad_RN, offsets_E, transposed):
    sides = (grad_RN.shape[1], hidden_TD.shape[1])
    return hidden_TD.new_empty(len(offsets_E), *(sides if transposed else sides[::-1]))


def _rows(hidden_TD: Tensor, order_R: Tensor) -> Tensor:
    top_k = pairs_per_token(order_R.numel(), hidden_TD.shape[0])
    return hidden_TD.index_select(0, token_of(order_R, top_k))
