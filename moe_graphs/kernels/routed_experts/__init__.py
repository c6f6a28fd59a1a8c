"""The experts of a layer, from its tokens to its tokens; keeps the tokens and one product.

    X = rows of tokens
    H = X @ w1
    A = swiglu(H)
    Y = A @ w2
    out[t] = sum of s * Y over the rows of token t

The forward rounds where these five ops round. For its backward it keeps the tokens, H, the routing
weights s and the order of rows; X, A and Y are freed. The whole backward is

    dY = rows of dout                      without s, so that no product is rounded
    dA = dY @ w2.T
    dH, ds, s * A                          one pass over the rows: `weighted_swiglu_backward`
    dw2 = (s * A).T @ dY
    dw1 = X.T @ dH                         with X gathered once more
    dtokens[t] = sum of dH @ w1.T over the rows of token t

It is the backward of out[t] = sum of (s * A) @ w2, where s stands before the product and meets
fewer columns, and where ds = <dA, A> needs no Y. Autograd sees two nodes, from the tokens to H
(`gather_gemm`) and from H to out (`down_projection`). It hands dH from one node to the other, also
where a backward is split: the weights' part of each node repeats no product. A third one computes
out behind the second, so that checkpointing does not compute it again (`sums`).

With `recompute` H is freed as well. The second node makes it again from the tokens, with one more
gather and one more product.

Shapes: T tokens, K top-k, R routed rows, D model, F ffn, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.gemm import (
    check_operands,
    gradient_of_weights,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_forward,
    is_transposed,
)
from moe_graphs.kernels.gemm.gather import gather_gemm
from moe_graphs.kernels.ops import is_made_again, wants_gradient
from moe_graphs.kernels.permute import spread_rows
from moe_graphs.kernels.precision import to_autocast
from moe_graphs.kernels.routed_experts import reference
from moe_graphs.kernels.routed_experts.sums import place_of_sums, sums_of_tokens
from moe_graphs.kernels.row_order import RowOrder
from moe_graphs.kernels.swiglu import NO_CLAMP, ClampedGate


def routed_experts(
    tokens_TD: Tensor,
    order: RowOrder,
    weights_TK: Tensor,
    w1_ED2F: Tensor,
    w2_EFD: Tensor,
    *,
    is_sorted: bool = False,
    recompute: bool = False,
) -> Tensor:
    """Each token's sum of its experts' outputs, times the routing weights; never syncs.

    The values are those of ``permute``, two ``grouped_gemm`` around ``swiglu``, and ``unpermute``
    with the weights. Saves the tokens, one ``[R, 2F]``, weights and order for backward. Under
    autocast the operands of the products are cast, visibly to autograd.

    Args:
        tokens_TD: tokens, or with ``is_sorted`` their rows ``[R, D]`` in the order of ``order``.
        weights_TK: routing weights, of any precision.
        w1_ED2F: gate and up side by side. Both weights may be transposed views, as for
            ``grouped_gemm``.
        recompute: do not save the ``[R, 2F]``, and compute it again in the backward, to the same
            bits.

    Raises:
        ValueError: shapes or dtypes do not fit, or the GPU path does not take them.
    """
    if w2_EFD.dim() != 3 or w1_ED2F.dim() != 3 or w1_ED2F.shape[2] != 2 * w2_EFD.shape[1]:
        raise ValueError(
            f"routed_experts wants w1 [E, D, 2F] and w2 [E, F, D], got {tuple(w1_ED2F.shape)} and "
            f"{tuple(w2_EFD.shape)}"
        )
    tokens_TD, w1_ED2F = to_autocast(tokens_TD, w1_ED2F)
    tokens_TD, w2_EFD = to_autocast(tokens_TD, w2_EFD)
    check_operands(tokens_TD, w2_EFD.transpose(1, 2), order.offsets_E)
    gate_up_R2F = up_projection(tokens_TD, order, w1_ED2F, is_sorted=is_sorted)
    again = FirstProduct(tokens_TD.detach(), w1_ED2F.detach(), is_sorted) if recompute else None
    return down_projection(gate_up_R2F, order, weights_TK, w2_EFD, again=again)


def up_projection(
    tokens_TD: Tensor, order: RowOrder, w1_ED2F: Tensor, *, is_sorted: bool = False
) -> Tensor:
    """The first half of ``routed_experts``, gate and up of the rows."""
    if is_sorted:
        return grouped_gemm(tokens_TD, w1_ED2F, order.offsets_E, zero_tail=False)
    return gather_gemm(tokens_TD, order, w1_ED2F, zero_tail=False)


class FirstProduct(NamedTuple):
    """Operands of the first product, without a gradient of their own, and where rows come from."""

    tokens_XD: Tensor
    w1_ED2F: Tensor
    is_sorted: bool


def down_projection(
    gate_up_R2F: Tensor,
    order: RowOrder,
    weights_TK: Tensor,
    w2_EFD: Tensor,
    *,
    gate: ClampedGate = NO_CLAMP,
    again: FirstProduct | None = None,
) -> Tensor:
    """The second half of ``routed_experts``, from gate and up of the rows; keeps nothing else.

    Under torch's checkpoint the backward overwrites gate and up, so nobody else may save them.

    Args:
        gate: an activation in place of SwiGLU.
        again: where the backward computes gate and up anew, so that they are not kept.
    """
    gate_up_R2F, w2_EFD = to_autocast(gate_up_R2F, w2_EFD)
    indices = order.inverse_R.view_as(weights_TK), order.offsets_E
    given = *indices, order.has_gaps, gate
    first = (None, None, False) if again is None else again
    place_TD = _DownProjection.apply(gate_up_R2F, w2_EFD, weights_TK, order.order_R, *given, *first)
    return sums_of_tokens(place_TD, gate_up_R2F, weights_TK, None, None, w2_EFD, *given)


class _DownProjection(torch.autograd.Function):
    """The node of the sums of tokens, which are computed behind it (``sums``).

    Gate and up are all that it keeps of the rows.
    """

    @staticmethod
    def forward(
        ctx, gate_up_R2F, w2_EFD, weights_TK, order_R, inverse_TK, offsets_E, has_gaps, gate,
        tokens_XD, w1_ED2F, is_sorted,
    ):  # fmt: skip
        needs_rows = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        ctx.has_gaps, ctx.gate, ctx.is_transposed = has_gaps, gate, is_transposed(w2_EFD)
        ctx.is_sorted, kept_EFD = is_sorted, w2_EFD if needs_rows else None
        kept_R2F = gate_up_R2F if tokens_XD is None else None
        indices = order_R, inverse_TK, offsets_E
        ctx.save_for_backward(kept_R2F, tokens_XD, w1_ED2F, kept_EFD, weights_TK, *indices)
        ctx.is_lost = is_made_again() or kept_R2F is None
        return place_of_sums(gate_up_R2F, weights_TK, w2_EFD)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        gate_up_R2F, tokens_XD, w1_ED2F, w2_EFD, weights_TK, *indices = ctx.saved_tensors
        order_R, inverse_TK, offsets_E = indices
        wants_rows, wants_w2, wants_weights = (wants_gradient(ctx, i) for i in range(3))
        routing = weights_TK, order_R, inverse_TK, ctx.has_gaps
        if gate_up_R2F is None:
            rows_RD = tokens_XD
            if not ctx.is_sorted:
                rows_RD = spread_rows(tokens_XD, order_R, inverse_TK, None, ctx.has_gaps)
            gate_up_R2F = grouped_gemm_forward(rows_RD, w1_ED2F, offsets_E, False)
            del rows_RD
        grad_gate_up = grad_w2 = grad_weights = None
        grad_RD = spread_rows(grad_TD, order_R, inverse_TK, None, ctx.has_gaps)
        if wants_rows or wants_weights:
            grad_RF = grouped_gemm_dgrad(grad_RD, w2_EFD, offsets_E, False)
            if not wants_w2:
                del grad_RD
            grad_gate_up, grad_weights, weighted_RF = weighted_swiglu_backward(
                gate_up_R2F, grad_RF, *routing, ctx.gate, with_result=wants_w2, is_lost=ctx.is_lost
            )
            del grad_RF, gate_up_R2F
        elif wants_w2:
            weighted_RF = weighted_swiglu(gate_up_R2F, weights_TK, order_R, ctx.gate)
        if wants_w2:
            grad_w2 = gradient_of_weights(weighted_RF, grad_RD, offsets_E, ctx.is_transposed)
        if not wants_weights:
            grad_weights = None
        return grad_gate_up, grad_w2, grad_weights, *[None] * 8


def weighted_swiglu(
    x_R2F: Tensor, weights_TK: Tensor, order_R: Tensor, gate: ClampedGate
) -> Tensor:
    """``swiglu_forward`` times each row's routing weight, rounded once; not differentiable."""
    if has_kernel(x_R2F):
        from moe_graphs.kernels.routed_experts import triton_kernels as routed_experts_triton

        return routed_experts_triton.weighted_swiglu(x_R2F, weights_TK, order_R, *gate)
    return reference.weighted_swiglu(x_R2F, weights_TK, order_R, *gate)


def weighted_swiglu_backward(
    x_R2F: Tensor,
    grad_RF: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    inverse_TK: Tensor,
    has_gaps: bool,
    gate: ClampedGate,
    *,
    with_result: bool,
    is_lost: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x_R2F`` and ``weights_TK``, and the result of ``weighted_swiglu`` again.

    With a result ``grad_RF`` is lost: the result may be in its memory. Gradients of pairs without a
    row are zero, and so are those of rows without a pair.

    Args:
        is_lost: the gradient of ``x_R2F`` may be in its memory.
    """
    if has_kernel(x_R2F):
        from moe_graphs.kernels.routed_experts import triton_kernels as routed_experts_triton

        grad_RF = grad_RF.contiguous()
        grad_R2F = x_R2F if is_lost and x_R2F.is_contiguous() else x_R2F.new_empty(x_R2F.shape)
        given = x_R2F, grad_RF, weights_TK, order_R, grad_R2F, has_gaps, with_result, *gate
        return grad_R2F, routed_experts_triton.weighted_swiglu_backward(*given), grad_RF
    return reference.weighted_swiglu_backward(
        x_R2F, grad_RF, weights_TK, order_R, inverse_TK, has_gaps, *gate
    )
