"""Permutation and grouped GEMM in one node, which keeps the tokens and not their rows.

The backward makes the rows once more for the weights' gradient. Products whose loads gather the
rows are no faster than copy and product (``docs/development/log.md``).

Shapes: T tokens, K top-k, R = T*K routed rows, D and N the two sides of the product, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.gemm import (
    check_operands,
    gradient_of_weights,
    grouped_gemm_dgrad,
    grouped_gemm_forward,
    is_transposed,
)
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.permute import collect_rows, spread_rows
from moe_graphs.kernels.precision import to_autocast
from moe_graphs.kernels.row_order import RowOrder, pairs_per_token


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
