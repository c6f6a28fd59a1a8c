"""Moves tokens into expert-sorted rows and back, by gathers in both directions.

The gradient of a gather is a scatter with atomics unless one knows the inverse. ``RowOrder`` has
it, so the backward of ``permute`` is a gather too (the K rows of a token, summed in k order in
fp32), and so is that of ``unpermute``: the same bits on every run.

Shapes: T tokens, D model, K top-k, R rows (T*K without gaps).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.permute import reference as permute_reference
from moe_graphs.kernels.row_order import RowOrder, pairs_per_token


def permute(hidden_TD: Tensor, order: RowOrder) -> Tensor:
    """Copies each token into the K rows that hold it; rows without a pair are zero.

    Example: hidden ``[[1], [2], [3]]``, routed as in ``route_rows``, gives rows
    ``[[1], [2], [2], [3], [1], [3]]``.

    Returns:
        ``rows_RD`` in the dtype of ``hidden_TD``. Saves only the order for backward.
    """
    return _Permute.apply(hidden_TD, order.order_R, order.inverse_R, order.has_gaps)


def unpermute(rows_RD: Tensor, order: RowOrder, weights_TK: Tensor) -> Tensor:
    """Sums each token's K rows by weight, in fp32 and in k order, rounded once at the end.

    Example: rows ``[[10], [20], [30], [40], [50], [60]]`` in the order of ``route_rows`` with
    weights ``[[.5, .5], [1, 0], [0, 1]]`` give ``[[30], [20], [40]]``.

    Returns:
        ``hidden_TD`` in the dtype of ``rows_RD``. Saves order and weights for backward, and rows
        if the weights need a gradient.
    """
    inverse_TK = order.inverse_R.view_as(weights_TK)
    return _Unpermute.apply(rows_RD, weights_TK, order.order_R, inverse_TK, order.has_gaps)


def sum_rows(rows_RD: Tensor, order: RowOrder, top_k: int) -> Tensor:
    """Sums each token's K rows, in fp32 and in k order, rounded once at the end.

    Returns:
        ``hidden_TD`` in the dtype of ``rows_RD``. Saves only the order for backward.
    """
    inverse_TK = order.inverse_R.view(order.inverse_R.numel() // top_k, top_k)
    return _Unpermute.apply(rows_RD, None, order.order_R, inverse_TK, order.has_gaps)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, order_R, inverse_R, has_gaps):
        ctx.save_for_backward(inverse_R)
        ctx.num_tokens, ctx.has_gaps = hidden_TD.shape[0], has_gaps
        top_k = pairs_per_token(inverse_R.numel(), hidden_TD.shape[0])
        return spread_rows(hidden_TD, order_R, inverse_R.view(-1, top_k), None, has_gaps)

    @staticmethod
    def backward(ctx, grad_RD):
        (inverse_R,) = ctx.saved_tensors
        top_k = pairs_per_token(inverse_R.numel(), ctx.num_tokens)
        inverse_TK = inverse_R.view(ctx.num_tokens, top_k)
        return collect_rows(grad_RD, inverse_TK, None, ctx.has_gaps), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_TK, order_R, inverse_TK, has_gaps):
        kept_RD = rows_RD if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept_RD, weights_TK, order_R, inverse_TK)
        ctx.has_gaps = has_gaps
        return collect_rows(rows_RD, inverse_TK, weights_TK, has_gaps)

    @staticmethod
    def backward(ctx, grad_TD):
        rows_RD, weights_TK, order_R, inverse_TK = ctx.saved_tensors
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = spread_rows(grad_TD, order_R, inverse_TK, weights_TK, ctx.has_gaps)
        if ctx.needs_input_grad[1]:
            grad_weights = dot_rows(rows_RD, inverse_TK, grad_TD, ctx.has_gaps)
            grad_weights = grad_weights.to(weights_TK.dtype)
        return grad_rows, grad_weights, None, None, None


def spread_rows(
    source_TD: Tensor,
    order_R: Tensor,
    inverse_TK: Tensor,
    weights_TK: Tensor | None,
    has_gaps: bool,
) -> Tensor:
    """Every token's vector, times its weights, in its K rows; not differentiable."""
    if has_kernel(source_TD):
        from moe_graphs.kernels.permute import triton_kernels as permute_triton

        rows = order_R.numel()
        return permute_triton.spread_rows(source_TD, inverse_TK, weights_TK, rows, has_gaps)
    top_k = inverse_TK.shape[1]
    return permute_reference.spread_rows(source_TD, order_R, top_k, weights_TK, has_gaps)


def collect_rows_into(
    out_TD: Tensor, rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None
) -> None:
    """The weighted sum of every token's K rows, with gaps, into memory that there is already."""
    if has_kernel(rows_RD):
        from moe_graphs.kernels.permute import triton_kernels as permute_triton

        permute_triton.collect_rows_into(out_TD, rows_RD, inverse_TK, weights_TK)
    else:
        out_TD.copy_(permute_reference.collect_rows(rows_RD, inverse_TK, weights_TK, True))


def collect_rows(
    rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, has_gaps: bool
) -> Tensor:
    """The weighted sum of every token's K rows; not differentiable."""
    if has_kernel(rows_RD):
        from moe_graphs.kernels.permute import triton_kernels as permute_triton

        return permute_triton.collect_rows(rows_RD, inverse_TK, weights_TK)
    return permute_reference.collect_rows(rows_RD, inverse_TK, weights_TK, has_gaps)


def dot_rows(rows_RD: Tensor, inverse_TK: Tensor, other_TD: Tensor, has_gaps: bool) -> Tensor:
    """The inner products of every token's K rows with its vector, in fp32; not differentiable."""
    if has_kernel(rows_RD):
        from moe_graphs.kernels.permute import triton_kernels as permute_triton

        return permute_triton.dot_rows(rows_RD, inverse_TK, other_TD)
    return permute_reference.dot_rows(rows_RD, inverse_TK, other_TD, has_gaps)
