"""SwiGLU times routing weights in plain torch: what the kernels are held against.

Shapes: T tokens, K top-k, R routed rows, F ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_graphs.kernels.precision import accumulation_dtype
from moe_graphs.kernels.swiglu.reference import halves, limited


def weighted_swiglu(
    x_R2F: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    alpha: float,
    limit: float,
    offset: float,
    by_turns: bool,
) -> Tensor:
    """``weight * silu(gate) * up``, in fp32 and rounded once; zero in rows without a pair.

    With a ``limit`` it is a clamped gate.
    """
    gate_RF, up_RF = (_of_pairs(half, order_R) for half in halves(x_R2F, by_turns))
    if limit:
        gate_RF, up_RF = limited(gate_RF, up_RF, limit, offset)
        h_RF = torch.sigmoid(alpha * gate_RF).mul_(gate_RF).mul_(up_RF)
    else:
        h_RF = functional.silu(gate_RF).mul_(up_RF)
    return _weighted(h_RF, weights_TK, order_R).to(x_R2F.dtype)


def weighted_swiglu_backward(
    x_R2F: Tensor,
    grad_RF: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    inverse_TK: Tensor,
    has_gaps: bool,
    alpha: float,
    limit: float,
    offset: float,
    by_turns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x_R2F`` and of the weights, and the result of ``weighted_swiglu``."""
    gate_RF, up_RF = (_of_pairs(half, order_R) for half in halves(x_R2F, by_turns))
    grad_RF = _of_pairs(grad_RF, order_R)
    if limit:
        is_over_RF, is_cut_RF = gate_RF > limit, up_RF.abs() > limit
        gate_RF, up_RF = limited(gate_RF, up_RF, limit, offset)
        sigmoid_RF = torch.sigmoid(alpha * gate_RF)
        silu_RF = gate_RF * sigmoid_RF
        slope_RF = sigmoid_RF * (1 + alpha * gate_RF * (1 - sigmoid_RF))
    else:
        silu_RF = functional.silu(gate_RF)
    h_RF = silu_RF * up_RF
    dweights_TK = _dots(h_RF, grad_RF, inverse_TK, has_gaps)
    grad_RF = _weighted(grad_RF, weights_TK, order_R)
    dx_R2F = torch.empty_like(x_R2F)
    dgate_RF, dup_RF = halves(dx_R2F, by_turns)
    if limit:
        dup_RF.copy_((silu_RF * grad_RF).masked_fill_(is_cut_RF, 0))
        dgate_RF.copy_((up_RF * grad_RF * slope_RF).masked_fill_(is_over_RF, 0))
    else:
        dup_RF.copy_(silu_RF.mul_(grad_RF))
        dgate_RF.copy_(torch.ops.aten.silu_backward(up_RF * grad_RF, gate_RF))
    h_RF = _weighted(h_RF, weights_TK, order_R)
    return dx_R2F, dweights_TK.to(weights_TK.dtype), h_RF.to(x_R2F.dtype)


def _of_pairs(rows: Tensor, order_R: Tensor) -> Tensor:
    """Rows in fp32, zero where there is no pair, whatever was there.

    The copy is contiguous, since torch's silu has other bits for other strides.
    """
    rows = rows.to(accumulation_dtype(rows), copy=True)
    return rows.masked_fill_((order_R < 0).unsqueeze(1), 0)


def _weighted(rows_RF: Tensor, weights_TK: Tensor, order_R: Tensor) -> Tensor:
    """Rows times the weights of their pairs."""
    return rows_RF * weights_TK.reshape(-1, 1).index_select(0, order_R.clamp(min=0))


def _dots(h_RF: Tensor, grad_RF: Tensor, inverse_TK: Tensor, has_gaps: bool) -> Tensor:
    dots_R = (h_RF * grad_RF).sum(1)
    dots_TK = dots_R.index_select(0, inverse_TK.clamp(min=0).view(-1)).view_as(inverse_TK)
    return dots_TK.masked_fill(inverse_TK < 0, 0) if has_gaps else dots_TK
