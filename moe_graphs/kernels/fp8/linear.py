"""``functional.linear`` with its products in FP8: the grouped products with one group of rows.

    Y = X @ w.T          dX = dY @ w          dw = dY.T @ X

Operands are quantized as those of `routed_experts.fp8`: rows in blocks of 128 numbers, weights in
128x128, columns of rows for the gradient of the weight. The codes of X are kept for the backward in
place of X; the weight is quantized anew there, so no codes are ever older than their weight.

Shapes: T rows, K in features, N out features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.fp8 import (
    Rows,
    check_sizes,
    columns_of,
    gradient_of_weights,
    product,
    quantized,
    quantized_weights,
    rows_for_products,
)
from moe_graphs.kernels.ops import wants_gradient


def linear_fp8(
    x: Tensor, weight_NK: Tensor, *, weight_gradients: bool = True, powers: bool = False
) -> Tensor:
    """``x @ weight.T`` for any number of rows, with products in FP8.

    Under autocast ``x`` is cast; the weight is quantized from the dtype that it has.

    Args:
        weight_gradients: the weight's gradient is a product in FP8, too. Scales of rows are powers
            of two then. Otherwise ``x`` is kept in its dtype, which the gradient is computed in.
        powers: all scales are powers of two. By default they are any numbers of fp32.

    Raises:
        ValueError: 128 does not divide K and N, or a GPU is not a Hopper GPU, or ``x`` is there in
            another dtype than bf16 and fp16.
    """
    if weight_NK.dim() != 2 or x.shape[-1] != weight_NK.shape[1]:
        raise ValueError(
            f"linear_fp8 wants a weight [N, K] and rows of K numbers, got {tuple(weight_NK.shape)} "
            f"and {tuple(x.shape)}"
        )
    check_sizes(in_features=weight_NK.shape[1], out_features=weight_NK.shape[0])
    x_TK = x.reshape(-1, x.shape[-1])
    x_TK = rows_for_products(x_TK, rows=x_TK.shape[0], experts=1)
    y_TN = _LinearInFP8.apply(x_TK, weight_NK, weight_gradients, powers)
    return y_TN.view(*x.shape[:-1], weight_NK.shape[0])


class _LinearInFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, weight_NK, weight_gradients, powers):
        ctx.in_fp8, ctx.powers = weight_gradients, powers
        x_TK = x_TK.contiguous()  # products of rows that lie otherwise may have other bits
        # Ends of the rows of one group, as products of experts have them.
        end_1 = torch.full((1,), x_TK.shape[0], dtype=torch.int32, device=x_TK.device)
        rows = quantized(x_TK, weight_gradients or powers)
        kept: tuple[Tensor | None, ...] = (None, None, None)
        if ctx.needs_input_grad[1]:
            kept = (*rows, None) if weight_gradients else (None, None, x_TK)
        ctx.save_for_backward(weight_NK, *kept, end_1)
        weights = quantized_weights(weight_NK.mT.unsqueeze(0), powers)
        return product(rows, weights, end_1, x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TN):
        weight_NK, codes, scales, x_TK, end_1 = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        dtype, grad_x, grad_weight = grad_TN.dtype, None, None
        wants_x, wants_weight = (wants_gradient(ctx, i) for i in range(2))
        rows = quantized(grad_TN, ctx.in_fp8 or ctx.powers)
        if wants_x:
            weights = quantized_weights(weight_NK.unsqueeze(0), ctx.powers)
            grad_x = product(rows, weights, end_1, dtype)
        if wants_weight and ctx.in_fp8:
            columns = columns_of(rows, end_1), columns_of(Rows(codes, scales), end_1)
            given = *columns, end_1, grad_TN.shape[0], dtype
            grad_weight = gradient_of_weights(*given, transposed=False)[0].to(weight_NK.dtype)
        elif wants_weight:
            grad_weight = (grad_TN.t() @ x_TK).to(weight_NK.dtype)
        return grad_x, grad_weight, None, None
