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
from moe_graphs.kernels.reference import accumulation_dtype
from moe_graphs.kernels.routing import RowOrder, pairs_per_token, token_of


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
        ``hidden_TD`` in the dtype of ``rows_RD``. Saves rows, order and weights for backward.
    """
    return _Unpermute.apply(rows_RD, weights_TK, order.order_R, order.inverse_R, order.has_gaps)


def sum_rows(rows_RD: Tensor, inverse_TK: Tensor) -> Tensor:
    """The sum of each token's K rows, without gaps; not differentiable."""
    return _gather_sum(rows_RD, inverse_TK, None, False)


def gather_rows(hidden_TD: Tensor, inverse_TK: Tensor, order_R: Tensor) -> Tensor:
    """Each token in its K rows, without gaps; not differentiable."""
    if has_kernel(hidden_TD):
        return _spread(hidden_TD, inverse_TK, None, order_R, False)
    return _gather(hidden_TD, token_of(order_R, inverse_TK.shape[1]), order_R, False)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, order_R, inverse_R, has_gaps):
        ctx.save_for_backward(inverse_R)
        ctx.num_tokens, ctx.has_gaps = hidden_TD.shape[0], has_gaps
        top_k = pairs_per_token(inverse_R.numel(), hidden_TD.shape[0])
        if has_kernel(hidden_TD):
            return _spread(hidden_TD, inverse_R.view(-1, top_k), None, order_R, has_gaps)
        return _gather(hidden_TD, token_of(order_R, top_k), order_R, has_gaps)

    @staticmethod
    def backward(ctx, grad_RD):
        (inverse_R,) = ctx.saved_tensors
        top_k = pairs_per_token(inverse_R.numel(), ctx.num_tokens)
        inverse_TK = inverse_R.view(ctx.num_tokens, top_k)
        return _gather_sum(grad_RD, inverse_TK, None, ctx.has_gaps), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_TK, order_R, inverse_R, has_gaps):
        ctx.save_for_backward(rows_RD, weights_TK, order_R, inverse_R)
        ctx.has_gaps = has_gaps
        return _gather_sum(rows_RD, inverse_R.view_as(weights_TK), weights_TK, has_gaps)

    @staticmethod
    def backward(ctx, grad_TD):
        rows_RD, weights_TK, order_R, inverse_R = ctx.saved_tensors
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0] and has_kernel(grad_TD):
            inverse_TK = inverse_R.view_as(weights_TK)
            grad_rows = _spread(grad_TD, inverse_TK, weights_TK, order_R, ctx.has_gaps)
        elif ctx.needs_input_grad[0]:
            token_R = token_of(order_R, weights_TK.shape[1])
            grad_rows = _gather(grad_TD, token_R, order_R, ctx.has_gaps)
            # In place, the product is taken in fp32 and rounded once, without an fp32 [R, D].
            weights_R1 = _gather(weights_TK.reshape(-1, 1), order_R, order_R, ctx.has_gaps)
            grad_rows.mul_(weights_R1)
        if ctx.needs_input_grad[1]:
            inverse_TK = inverse_R.view_as(weights_TK)
            grad_weights = _gather_dot(rows_RD, grad_TD, inverse_TK, ctx.has_gaps)
            grad_weights = grad_weights.to(weights_TK.dtype)
        return grad_rows, grad_weights, None, None, None


def _spread(
    source_TD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, order_R: Tensor, gaps: bool
) -> Tensor:
    """Every token's vector, times its weights, in its K rows: one kernel."""
    from moe_graphs.kernels import permute_triton

    return permute_triton.spread_rows(source_TD, inverse_TK, weights_TK, order_R.numel(), gaps)


def _gather(source: Tensor, index_R: Tensor, mark_R: Tensor, has_gaps: bool) -> Tensor:
    """``source[index]``; with gaps, zero where ``mark`` is negative."""
    if not has_gaps:
        return source.index_select(0, index_R)
    rows = source.index_select(0, index_R.clamp(min=0))
    return rows.masked_fill_((mark_R < 0).unsqueeze(1), 0)


def _gather_sum(
    rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, has_gaps: bool
) -> Tensor:
    """``sum_k weights[t, k] * rows[inverse[t, k]]`` in fp32; one [T, D] temporary per k."""
    if has_kernel(rows_RD):
        from moe_graphs.kernels import permute_triton

        return permute_triton.collect_rows(rows_RD, inverse_TK, weights_TK)
    if weights_TK is None and inverse_TK.shape[1] == 1:
        return _gather(rows_RD, inverse_TK[:, 0], inverse_TK[:, 0], has_gaps)
    dtype = accumulation_dtype(rows_RD)
    total_TD = rows_RD.new_zeros(inverse_TK.shape[0], rows_RD.shape[1], dtype=dtype)
    for k, index_T in enumerate(inverse_TK.t().contiguous()):
        rows_TD = _gather(rows_RD, index_T, index_T, has_gaps)
        if weights_TK is None:
            total_TD.add_(rows_TD)
        else:
            total_TD.addcmul_(rows_TD, weights_TK[:, k : k + 1])
    return total_TD.to(rows_RD.dtype)


def _gather_dot(rows_RD: Tensor, grad_TD: Tensor, inverse_TK: Tensor, has_gaps: bool) -> Tensor:
    """``<rows[inverse[t, k]], grad[t]>`` in fp32, ``[T, K]``."""
    if has_kernel(rows_RD):
        from moe_graphs.kernels import permute_triton

        return permute_triton.dot_rows(rows_RD, inverse_TK, grad_TD, torch.float32)
    grad_TD = grad_TD.to(accumulation_dtype(grad_TD))
    dots = []
    for index_T in inverse_TK.t().contiguous():
        rows_TD = _gather(rows_RD, index_T, index_T, has_gaps)
        dots.append((grad_TD * rows_TD).sum(1))
    return torch.stack(dots, 1)
