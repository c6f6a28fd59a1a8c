"""The experts of a layer with LoRA beside them: ``w + a @ b`` per expert, which nobody makes.

    H = X @ w1 + (X @ a1) @ b1
    A = swiglu(H)
    Y = A @ w2 + (A @ a2) @ b2
    out[t] = sum of s * Y over the rows of token t

The weights ``w1`` and ``w2`` are frozen: no gradient of them is computed. They may be in few bits
(``PackedWeight``), with factors or without; then each product of forward and backward dequantises
them anew, and nothing is kept in bf16. For the backward two nodes keep the tokens, H, the routing
weights s, the order of rows and X @ a1, whose rows are as short as the rank. Everything else is
computed again as in ``routed_experts``, and the backward of a product ``P = x @ w + (x @ a) @ b``
is

    dlow = dP @ b.T
    dx   = dP @ w.T + dlow @ a.T
    da   = x.T @ dlow
    db   = (x @ a).T @ dP

Shapes: T tokens, K top-k, R routed rows, D model, F ffn, E experts, r rank, M and N the two sides
of a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moe_graphs.kernels.gemm import (
    check_operands,
    gradient_of_weights,
    grouped_gemm_dgrad,
    grouped_gemm_forward,
    is_transposed,
)
from moe_graphs.kernels.gemm.gather import gather_gemm_wgrad
from moe_graphs.kernels.ops import is_made_again, wants_gradient
from moe_graphs.kernels.packed_weights import PackedWeight
from moe_graphs.kernels.permute import collect_rows, spread_rows
from moe_graphs.kernels.precision import to_autocast
from moe_graphs.kernels.routed_experts import (
    down_projection,
    up_projection,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from moe_graphs.kernels.routed_experts.sums import (
    multiplied,
    multiplied_with_lora,
    place_of_sums,
    product,
    sums_of_tokens,
)
from moe_graphs.kernels.row_order import RowOrder
from moe_graphs.kernels.swiglu import NO_CLAMP, ClampedGate
from moe_graphs.kernels.transpose import transpose


class LoRA(NamedTuple):
    """Two factors per expert, whose product is added to the expert's weight ``[M, N]``.

    Attributes:
        a_EMr: ``[E, M, r]``, contiguous or the transpose of what is; any float dtype.
        b_ErN: ``[E, r, N]``, likewise.
        scale: multiplies the product. It is multiplied into the second factor, which is rounded
            afterwards.
    """

    a_EMr: Tensor
    b_ErN: Tensor
    scale: float = 1.0

    def transposed(self) -> LoRA:
        """The factors beside the transposed weights."""
        return LoRA(self.b_ErN.mT, self.a_EMr.mT, self.scale)


def routed_experts_with_lora(
    tokens_TD: Tensor,
    order: RowOrder,
    weights_TK: Tensor,
    w1_ED2F: Tensor | PackedWeight,
    w2_EFD: Tensor | PackedWeight,
    lora1: LoRA | None,
    lora2: LoRA | None,
    *,
    is_sorted: bool = False,
) -> Tensor:
    """``routed_experts`` of ``w1 + a1 @ b1`` and ``w2 + a2 @ b2``; never syncs.

    Factors are rounded to the dtype of the tokens. Products are summed in fp32, and results are
    rounded: ``x @ a``, and ``x @ w + (x @ a) @ b``, which is one sum. Saves the tokens, one ``[R,
    2F]`` and one ``[R, r]``.

    Args:
        tokens_TD: tokens, or with ``is_sorted`` their rows ``[R, D]`` in the order of ``order``.
        weights_TK: routing weights, of any precision.
        w1_ED2F, w2_EFD: frozen, as in ``routed_experts``, or in few bits.
        lora1, lora2: the factors beside each weight; None if there are none.

    Raises:
        ValueError: shapes or dtypes do not fit, the GPU path does not take them, or a weight beside
            factors requires a gradient.
    """
    tokens_TD, w1_ED2F = to_autocast(tokens_TD, w1_ED2F)
    tokens_TD, w2_EFD = to_autocast(tokens_TD, w2_EFD)
    experts, width, hidden = w2_EFD.shape
    if tuple(w1_ED2F.shape) != (experts, hidden, 2 * width):
        raise ValueError(
            f"routed_experts_with_lora wants w1 [E, D, 2F] and w2 [E, F, D], got "
            f"{tuple(w1_ED2F.shape)} and {tuple(w2_EFD.shape)}"
        )
    check_operands(tokens_TD, w2_EFD.mT, order.offsets_E)
    top_k = weights_TK.shape[1]
    gate_up_R2F = up_projection_with_lora(
        tokens_TD, order, top_k, w1_ED2F, lora1, is_sorted=is_sorted
    )
    return down_projection_with_lora(gate_up_R2F, order, weights_TK, w2_EFD, lora2)


def up_projection_with_lora(
    tokens_TD: Tensor,
    order: RowOrder,
    top_k: int,
    w1_ED2F: Tensor | PackedWeight,
    lora1: LoRA | None,
    *,
    is_sorted: bool = False,
    bias_E2F: Tensor | None = None,
) -> Tensor:
    """Gate and up of the rows: the first half of ``routed_experts_with_lora``.

    Args:
        bias_E2F: added to the rows of each expert, within the sum of their product.

    Raises:
        ValueError: as ``routed_experts_with_lora``, or a bias or a weight beside it requires a
            gradient.
    """
    if lora1 is None and bias_E2F is None and isinstance(w1_ED2F, Tensor):
        return up_projection(tokens_TD, order, w1_ED2F, is_sorted=is_sorted)
    tokens_TD, w1_ED2F = to_autocast(tokens_TD, w1_ED2F)
    check_operands(tokens_TD, w1_ED2F, order.offsets_E)
    factors = _checked_factors("w1", w1_ED2F, lora1, tokens_TD.dtype)
    if bias_E2F is not None:
        for each in (bias_E2F, w1_ED2F):
            if each.requires_grad and torch.is_grad_enabled():
                raise ValueError("a bias within the sum, and its weight, are frozen")
        bias_E2F = bias_E2F.to(tokens_TD.dtype)
    indices = order.order_R, order.inverse_R.view(-1, top_k), order.offsets_E
    given = *indices, order.has_gaps, is_sorted, bias_E2F
    return _UpProjection.apply(tokens_TD, *factors, w1_ED2F, *given)


def down_projection_with_lora(
    gate_up_R2F: Tensor,
    order: RowOrder,
    weights_TK: Tensor,
    w2_EFD: Tensor | PackedWeight,
    lora2: LoRA | None,
    *,
    gate: ClampedGate = NO_CLAMP,
) -> Tensor:
    """The sums of tokens from gate and up: the second half of ``routed_experts_with_lora``.

    Under torch's checkpoint the backward overwrites gate and up, so nobody else may save them.

    Args:
        gate: an activation in place of SwiGLU.
    """
    if lora2 is None and isinstance(w2_EFD, Tensor):
        return down_projection(gate_up_R2F, order, weights_TK, w2_EFD, gate=gate)
    gate_up_R2F, w2_EFD = to_autocast(gate_up_R2F, w2_EFD)
    a_EFr, b_ErD = _checked_factors("w2", w2_EFD, lora2, gate_up_R2F.dtype)
    operands = gate_up_R2F, weights_TK, a_EFr, b_ErD, w2_EFD
    indices = order.inverse_R.view_as(weights_TK), order.offsets_E
    place_TD = _DownProjection.apply(*operands, order.order_R, *indices, order.has_gaps, gate)
    return sums_of_tokens(place_TD, *operands, *indices, order.has_gaps, gate)


def _checked_factors(
    name: str, w_EMN: Tensor | PackedWeight, lora: LoRA | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    if lora is None:
        return None, None
    _check_factors(name, w_EMN, lora)
    return _in_dtype(dtype, lora, _lies_transposed(w_EMN))


def _check_factors(name: str, w_EMN: Tensor | PackedWeight, lora: LoRA) -> None:
    experts, inner, outer = w_EMN.shape
    rank = lora.a_EMr.shape[-1]
    shapes = tuple(lora.a_EMr.shape), tuple(lora.b_ErN.shape)
    if shapes != ((experts, inner, rank), (experts, rank, outer)):
        raise ValueError(
            f"LoRA beside {name} {tuple(w_EMN.shape)} wants factors [{experts}, {inner}, r] and "
            f"[{experts}, r, {outer}], got {shapes[0]} and {shapes[1]}"
        )
    if w_EMN.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} has LoRA beside it and requires a gradient, which is not computed: freeze it"
        )


def _lies_transposed(w_EMN: Tensor | PackedWeight) -> bool:
    return w_EMN.transposed if isinstance(w_EMN, PackedWeight) else is_transposed(w_EMN)


def _in_dtype(dtype: torch.dtype, lora: LoRA, transposed: bool) -> tuple[Tensor, Tensor]:
    """Both factors as the kernels take them: dtype of the rows, rank, layout of the weight."""
    a_EMr, b_ErN, scale = lora
    missing = -a_EMr.shape[2] % 8  # rows of 16 bytes
    if missing:
        a_EMr = functional.pad(a_EMr, (0, missing))
        b_ErN = functional.pad(b_ErN, (0, 0, 0, missing))
    if transposed:
        return _rounded(a_EMr.mT, 1.0, dtype).mT, _rounded(b_ErN.mT, scale, dtype).mT
    return _rounded(a_EMr, 1.0, dtype), _rounded(b_ErN, scale, dtype)


def _rounded(factor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if factor.dtype == dtype and scale == 1.0 and factor.is_contiguous():
        return factor
    return _Rounded.apply(factor, scale, dtype)


class _Rounded(torch.autograd.Function):
    """A factor times a number, contiguous and in another dtype, by one pass.

    Its gradient lies as the factor does: autograd takes it for ``.grad`` without a copy. Experts
    are the last dimension in the memory of PEFT's second factor, so that one is transposed.
    """

    @staticmethod
    def forward(ctx, factor_EXY, scale, dtype):
        factor_XYE = factor_EXY.permute(1, 2, 0)
        ctx.scale, ctx.is_turned = scale, factor_XYE.is_contiguous()
        if ctx.is_turned:
            ctx.dtype = factor_EXY.dtype
            return transpose(factor_XYE.flatten(0, 1), scale, dtype).view(factor_EXY.shape)
        like = torch.empty_like(factor_EXY, device="meta")  # dense, where the factor is not
        ctx.like = like.shape, like.stride(), like.dtype
        out = torch.empty(factor_EXY.shape, dtype=dtype, device=factor_EXY.device)
        return torch.mul(factor_EXY, scale, out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_EXY):
        if ctx.is_turned:
            grad_XYE = transpose(grad_EXY.flatten(1), ctx.scale, ctx.dtype)
            return grad_XYE.view(*grad_EXY.shape[1:], -1).permute(2, 0, 1), None, None
        shape, strides, dtype = ctx.like
        out = grad_EXY.new_empty_strided(shape, strides, dtype=dtype)
        if ctx.scale == 1.0:
            return out.copy_(grad_EXY), None, None
        # A tensor of one number in the factor's dtype: the product is not rounded to that of grad.
        scale = grad_EXY.new_full((1,), ctx.scale, dtype=dtype)
        return torch.mul(grad_EXY, scale, out=out), None, None


def _kept(ctx: Any, w_EMN: Tensor | PackedWeight, is_needed: bool) -> Tensor | None:
    """The tensor that autograd saves of a frozen weight; a packed weight is kept beside it."""
    ctx.packed = w_EMN if is_needed and isinstance(w_EMN, PackedWeight) else None
    return w_EMN if is_needed and isinstance(w_EMN, Tensor) else None


def _gradient_of_rows(
    grad_RN: Tensor,
    w_EMN: Tensor | PackedWeight,
    a_EMr: Tensor | None,
    b_ErN: Tensor | None,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """``grad @ w.T + low @ a.T``, and ``low``, which is ``grad @ b.T``."""
    if a_EMr is not None and b_ErN is not None:
        return multiplied_with_lora(grad_RN, w_EMN.mT, b_ErN.mT, a_EMr.mT, offsets_E)
    if isinstance(w_EMN, Tensor):
        return grouped_gemm_dgrad(grad_RN, w_EMN, offsets_E, False), None
    return multiplied(grad_RN, w_EMN.mT, offsets_E), None


class _UpProjection(torch.autograd.Function):
    """Gate and up of the rows, from tokens or sorted rows; keeps them and ``rows @ a``."""

    @staticmethod
    def forward(
        ctx, tokens_XD, a_EDr, b_Er2F, w1_ED2F, order_R, inverse_TK, offsets_E, has_gaps, is_sorted,
        bias_E2F,
    ):  # fmt: skip
        wants_tokens, wants_a, wants_b = ctx.needs_input_grad[:3]
        ctx.has_gaps, ctx.is_sorted = has_gaps, is_sorted
        rows_RD = _rows(tokens_XD, order_R, inverse_TK, has_gaps, is_sorted)
        gate_up_R2F, low_Rr = product(rows_RD, w1_ED2F, a_EDr, b_Er2F, offsets_E, bias_E2F)
        kept = tokens_XD if wants_a else None, low_Rr if wants_b else None
        frozen = _kept(ctx, w1_ED2F, wants_tokens)
        ctx.save_for_backward(*kept, a_EDr, b_Er2F, frozen, order_R, inverse_TK, offsets_E)
        return gate_up_R2F

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_R2F):
        tokens_XD, low_Rr, a_EDr, b_Er2F, frozen, *indices = ctx.saved_tensors
        order_R, inverse_TK, offsets_E = indices
        wants_tokens, wants_a, wants_b = (wants_gradient(ctx, i) for i in range(3))
        grad_tokens = grad_a = grad_b = None
        grad_low_Rr: Any = None
        if wants_b:
            grad_b = gradient_of_weights(low_Rr, grad_R2F, offsets_E, is_transposed(b_Er2F))
        if wants_tokens:
            w1_ED2F = frozen if ctx.packed is None else ctx.packed
            factors = a_EDr, b_Er2F
            grad_tokens, grad_low_Rr = _gradient_of_rows(grad_R2F, w1_ED2F, *factors, offsets_E)
            if not ctx.is_sorted:  # the rows are as large as those of the next gradient
                grad_tokens = collect_rows(grad_tokens, inverse_TK, None, ctx.has_gaps)
        elif wants_a:
            grad_low_Rr = grouped_gemm_dgrad(grad_R2F, b_Er2F, offsets_E, False)
        if wants_a:
            tokens, order = (tokens_XD, grad_low_Rr, a_EDr), (order_R, inverse_TK, offsets_E)
            grad_a = _gradient_of_factor(*tokens, *order, ctx.has_gaps, is_sorted=ctx.is_sorted)
        return grad_tokens, grad_a, grad_b, *[None] * 7


def _rows(
    tokens_XD: Tensor, order_R: Tensor, inverse_TK: Tensor, has_gaps: bool, is_sorted: bool
) -> Tensor:
    return tokens_XD if is_sorted else spread_rows(tokens_XD, order_R, inverse_TK, None, has_gaps)


def _gradient_of_factor(
    tokens_XD: Tensor,
    low_Rr: Tensor,
    factor_EDr: Tensor,
    order_R: Tensor,
    inverse_TK: Tensor,
    offsets_E: Tensor,
    has_gaps: bool,
    *,
    is_sorted: bool = False,
) -> Tensor:
    """``rows.T @ low``, laid out like the factor; tokens are read by the order of their rows."""
    transposed = is_transposed(factor_EDr)
    if is_sorted or has_gaps:
        rows_RD = _rows(tokens_XD, order_R, inverse_TK, has_gaps, is_sorted)
        return gradient_of_weights(rows_RD, low_Rr, offsets_E, transposed)
    grad = gather_gemm_wgrad(tokens_XD, order_R, low_Rr, offsets_E, transposed)
    return grad.mT if transposed else grad


class _DownProjection(torch.autograd.Function):
    """The node of the sums of tokens, which are computed behind it (``sums``).

    Gate and up are all that it keeps of the rows.
    """

    # `wants_gradient` counts tensors only, so what may be None or packed stands behind them.
    @staticmethod
    def forward(
        ctx, gate_up_R2F, weights_TK, a_EFr, b_ErD, w2_EFD, order_R, inverse_TK, offsets_E,
        has_gaps, gate,
    ):  # fmt: skip
        ctx.has_gaps, ctx.gate = has_gaps, gate
        kept = gate_up_R2F, weights_TK, a_EFr, b_ErD, _kept(ctx, w2_EFD, True)
        ctx.save_for_backward(*kept, order_R, inverse_TK, offsets_E)
        ctx.is_lost = is_made_again()
        return place_of_sums(gate_up_R2F, weights_TK, w2_EFD)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        gate_up_R2F, weights_TK, a_EFr, b_ErD, frozen, *indices = ctx.saved_tensors
        order_R, inverse_TK, offsets_E = indices
        wants_rows, wants_weights, wants_a, wants_b = (wants_gradient(ctx, i) for i in range(4))
        routing = weights_TK, order_R, inverse_TK, ctx.has_gaps
        grad_gate_up = grad_a = grad_b = grad_weights = None
        grad_low_Rr: Any = None
        grad_RD = spread_rows(grad_TD, order_R, inverse_TK, None, ctx.has_gaps)
        wants_factors = wants_a or wants_b
        if wants_rows or wants_weights:
            w2_EFD = frozen if ctx.packed is None else ctx.packed
            grad_RF, grad_low_Rr = _gradient_of_rows(grad_RD, w2_EFD, a_EFr, b_ErD, offsets_E)
            del grad_RD
            options = dict(with_result=wants_factors, is_lost=ctx.is_lost)
            grad_gate_up, grad_weights, weighted_RF = weighted_swiglu_backward(
                gate_up_R2F, grad_RF, *routing, ctx.gate, **options
            )
            del grad_RF, gate_up_R2F
        elif wants_factors:
            weighted_RF = weighted_swiglu(gate_up_R2F, weights_TK, order_R, ctx.gate)
            grad_low_Rr = grouped_gemm_dgrad(grad_RD, b_ErD, offsets_E, False)
        if wants_a:
            grad_a = gradient_of_weights(weighted_RF, grad_low_Rr, offsets_E, is_transposed(a_EFr))
        if wants_b:
            low_Rr = grouped_gemm_forward(weighted_RF, a_EFr, offsets_E, False)
            tokens, order = (grad_TD, low_Rr, b_ErD.mT), (order_R, inverse_TK, offsets_E)
            grad_b = _gradient_of_factor(*tokens, *order, ctx.has_gaps).mT
        if not wants_weights:
            grad_weights = None
        return grad_gate_up, grad_weights, grad_a, grad_b, *[None] * 6
