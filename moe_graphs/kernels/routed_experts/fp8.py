"""``routed_experts`` with products in FP8, as DeepSeek-V3 trains: blocks of 128, sums in fp32.

    X = rows of tokens, in FP8          H = X @ w1                  bf16
    A = swiglu(H), in FP8               Y = A @ w2                  bf16
    dY = rows of dout, in FP8, too      dA = dY @ w2.T              bf16
    dH, ds, s * A                       dH in FP8, too
    dw2 = (s * A).T @ dY                in bf16
    dw1 = X.T @ dH                      in bf16
    dtokens[t] = sum of dH @ w1.T over the rows of token t

With `weight_gradients` both gradients of weights are products in FP8, too. Their operands are the
codes of rows, turned into columns; a block of 128x128 has one scale, so codes of most of its rows
become smaller by powers of two, as scales of rows are then. Weights are quantized where a product
needs them, each pass anew, so no codes are ever older than their weights, in a graph neither; a
weight's codes take one byte a number until the product is done, or with `keep_codes` until the
backward. The forward keeps what ``routed_experts`` keeps. It is one node of autograd; a backward
that is split computes one product a second time.

Shapes: T tokens, K top-k, R routed rows, D model, F ffn, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.fp8 import (
    Columns,
    Rows,
    Weights,
    check_sizes,
    columns_of,
    gradient_of_weights,
    product,
    quantized,
    quantized_twice,
    quantized_weights,
    rows_for_products,
    spread_columns,
    spread_quantized,
    swiglu_quantized,
    weighted_swiglu_backward_all_quantized,
    weighted_swiglu_backward_quantized,
)
from moe_graphs.kernels.gemm import gradient_of_weights as gradient_without_fp8
from moe_graphs.kernels.gemm import is_transposed
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.permute import collect_rows, spread_rows
from moe_graphs.kernels.row_order import RowOrder


def routed_experts_fp8(
    tokens_XD: Tensor,
    order: RowOrder,
    weights_TK: Tensor,
    w1_ED2F: Tensor,
    w2_EFD: Tensor,
    *,
    is_sorted: bool = False,
    recompute: bool = False,
    keep_codes: bool = False,
    weight_gradients: bool = False,
    powers: bool = False,
) -> Tensor:
    """Each token's sum of its experts' outputs, as ``routed_experts`` has it, with products in FP8.

    Under autocast the tokens are cast; weights are quantized from the dtype that they have, and
    their gradients are computed in that of the tokens.

    Args:
        keep_codes: quantize weights once for forward and backward, and keep their codes between,
            one byte a number. FSDP2 does not free them with the weights.
        weight_gradients: gradients of weights are products in FP8, too. Scales of rows are powers
            of two then.
        powers: all scales are powers of two. By default they are any numbers of fp32.

    Raises:
        ValueError: 128 does not divide D and F, or a GPU is not a Hopper GPU, or its tokens are in
            another dtype than bf16 and fp16.
    """
    if w2_EFD.dim() != 3 or tuple(w1_ED2F.shape) != (
        w2_EFD.shape[0], tokens_XD.shape[1], 2 * w2_EFD.shape[1],
    ):  # fmt: skip
        raise ValueError(
            f"routed_experts_fp8 wants w1 [E, D, 2F] and w2 [E, F, D], got {tuple(w1_ED2F.shape)} "
            f"and {tuple(w2_EFD.shape)} for tokens {tuple(tokens_XD.shape)}"
        )
    check_sizes(hidden_size=tokens_XD.shape[1], ffn_hidden_size=w2_EFD.shape[1])
    tokens_XD = rows_for_products(tokens_XD, order.order_R.numel(), w1_ED2F.shape[0])
    inverse_TK = order.inverse_R.view_as(weights_TK)
    indices = order.order_R, inverse_TK, order.offsets_E
    keep_codes = keep_codes and torch.is_grad_enabled()
    options = order.has_gaps, is_sorted, recompute, keep_codes, weight_gradients, powers
    return _ExpertsInFP8.apply(tokens_XD, weights_TK, w1_ED2F, w2_EFD, *indices, *options)


class _ExpertsInFP8(torch.autograd.Function):
    """The sums of tokens from the tokens; keeps them and gate and up of the rows."""

    @staticmethod
    def forward(
        ctx, tokens_XD, weights_TK, w1_ED2F, w2_EFD, order_R, inverse_TK, offsets_E,
        has_gaps, is_sorted, recompute, keep_codes, weight_gradients, powers,
    ):  # fmt: skip
        ctx.options, ctx.powers = (has_gaps, is_sorted, powers or weight_gradients), powers
        ctx.in_fp8 = weight_gradients and any(ctx.needs_input_grad[2:4])
        indices = order_R, inverse_TK, offsets_E
        keep_codes = keep_codes and any(ctx.needs_input_grad[:4])
        quantized_for: Callable[..., tuple[Weights, Sequence[Tensor | None]]]
        quantized_for = quantized_twice if keep_codes else _once
        w1, again1 = quantized_for(w1_ED2F, powers)
        gate_up_R2F = _gate_and_up(tokens_XD, w1, *indices, *ctx.options)
        del w1
        rows = swiglu_quantized(gate_up_R2F, ctx.options[-1])
        w2, again2 = quantized_for(w2_EFD, powers)
        kept = None if recompute else gate_up_R2F
        given = tokens_XD, weights_TK, w1_ED2F, w2_EFD
        ctx.save_for_backward(*given, kept, *again1, *again2, *indices)
        del gate_up_R2F
        rows_RD = product(rows, w2, offsets_E, tokens_XD.dtype)
        return collect_rows(rows_RD, inverse_TK, weights_TK, has_gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        tokens_XD, weights_TK, w1_ED2F, w2_EFD, gate_up_R2F, *others = ctx.saved_tensors
        codes1, codes2 = others[:2], others[2:4]
        indices = order_R, inverse_TK, offsets_E = tuple(others[4:])
        (has_gaps, is_sorted, of_rows), powers = ctx.options, ctx.powers
        wants_tokens, wants_weights, wants_w1, wants_w2 = (wants_gradient(ctx, i) for i in range(4))
        dtype = tokens_XD.dtype
        if gate_up_R2F is None:
            w1 = quantized_weights(w1_ED2F, powers)
            gate_up_R2F = _gate_and_up(tokens_XD, w1, *indices, *ctx.options)
            del w1
        rows, grad_RD = _spread(grad_TD, indices, has_gaps, ctx.in_fp8, wants_w2, of_rows)
        grad_RF = product(rows, _transposed(w2_EFD, codes2, powers), offsets_E, dtype)
        grad_weights, rows, grad_R2F, weighted_RF = _swiglu_backward(
            gate_up_R2F, grad_RF, weights_TK, indices, has_gaps, ctx.in_fp8,
            wants_w1 or wants_w2, of_rows,
        )  # fmt: skip
        del gate_up_R2F, grad_RF
        grad_w2 = grad_w1 = grad_tokens = None
        if wants_w2:
            grad_w2 = _of_weights(weighted_RF, grad_RD, w2_EFD, offsets_E, order_R, dtype)
        del weighted_RF, grad_RD
        if wants_w1:
            rows_RD = _tokens(tokens_XD, indices, has_gaps, ctx.in_fp8, is_sorted)
            grad_w1 = _of_weights(rows_RD, grad_R2F, w1_ED2F, offsets_E, order_R, dtype)
            del rows_RD
        del grad_R2F
        if wants_tokens:
            w1 = _transposed(w1_ED2F, codes1, powers)
            grad_tokens = product(rows, w1, offsets_E, dtype)
            if not is_sorted:
                grad_tokens = collect_rows(grad_tokens, inverse_TK, None, has_gaps)
        return grad_tokens, grad_weights if wants_weights else None, grad_w1, grad_w2, *[None] * 9


Indices = tuple[Tensor, Tensor, Tensor]  # pairs of rows, rows of pairs [T, K], ends of experts
# Operands of a product that adds up rows: in FP8 their columns, else the rows themselves.
Operand = Tensor | Columns


def _spread(
    grad_TD: Tensor, indices: Indices, has_gaps: bool, in_fp8: bool, wanted: bool, powers: bool
) -> tuple[Rows, Operand]:
    """Rows of dY in FP8, and the operand, if it is wanted."""
    if in_fp8 and wanted:
        columns, rows = spread_columns(quantized(grad_TD, powers), *indices, with_rows=True)
        return rows, columns
    spread = *indices[:2], has_gaps
    return spread_quantized(grad_TD, *spread, with_rows=wanted, powers=powers)


def _swiglu_backward(
    gate_up_R2F: Tensor,
    grad_RF: Tensor,
    weights_TK: Tensor,
    indices: Indices,
    has_gaps: bool,
    in_fp8: bool,
    wanted: bool,
    powers: bool,
) -> tuple[Tensor, Rows, Operand, Operand]:
    """The routing weights' gradient, rows of dH in FP8, and the operands dH and s * A."""
    given = gate_up_R2F, grad_RF, weights_TK, *indices[:2], has_gaps
    if in_fp8 and wanted:
        grad_TK, rows, of_result = weighted_swiglu_backward_all_quantized(*given, powers=powers)
        return grad_TK, rows, columns_of(rows, indices[2]), columns_of(of_result, indices[2])
    grad_R2F, grad_TK, weighted_RF, rows = weighted_swiglu_backward_quantized(
        *given, with_result=wanted, powers=powers
    )
    return grad_TK, rows, grad_R2F, weighted_RF


def _tokens(
    tokens_XD: Tensor, indices: Indices, has_gaps: bool, in_fp8: bool, is_sorted: bool
) -> Operand:
    """The operand X."""
    order_R, inverse_TK, offsets_E = indices
    if in_fp8:
        tokens = quantized(tokens_XD, True)
        if is_sorted:
            return columns_of(tokens, offsets_E)
        return spread_columns(tokens, *indices, with_rows=False)[0]
    return tokens_XD if is_sorted else spread_rows(tokens_XD, order_R, inverse_TK, None, has_gaps)


def _of_weights(
    x: Operand,
    grad: Operand,
    w_EKN: Tensor,
    offsets_E: Tensor,
    order_R: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a weight, laid out like it."""
    if isinstance(x, Columns) and isinstance(grad, Columns):
        given = x, grad, offsets_E, order_R.numel(), dtype
        return gradient_of_weights(*given, is_transposed(w_EKN)).to(w_EKN.dtype)
    assert isinstance(x, Tensor)
    assert isinstance(grad, Tensor)
    return gradient_without_fp8(x, grad, offsets_E, is_transposed(w_EKN)).to(w_EKN.dtype)


def _once(w_EKN: Tensor, powers: bool) -> tuple[Weights, tuple[None, None]]:
    return quantized_weights(w_EKN, powers), (None, None)


def _transposed(w_EKN: Tensor, kept: Sequence[Tensor | None], powers: bool) -> Weights:
    """The transpose in FP8, which may have been kept."""
    codes, scales = kept
    if codes is None or scales is None:
        return quantized_weights(w_EKN.mT, powers)
    return Weights(codes, scales)


def _gate_and_up(
    tokens_XD: Tensor,
    w1: Weights,
    order_R: Tensor,
    inverse_TK: Tensor,
    offsets_E: Tensor,
    has_gaps: bool,
    is_sorted: bool,
    powers: bool,
) -> Tensor:
    rows: Rows
    if is_sorted:
        rows = quantized(tokens_XD, powers)
    else:
        spread = order_R, inverse_TK, has_gaps
        rows, _ = spread_quantized(tokens_XD, *spread, with_rows=False, powers=powers)
    return product(rows, w1, offsets_E, tokens_XD.dtype)
