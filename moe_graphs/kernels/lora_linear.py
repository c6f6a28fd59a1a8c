"""A frozen linear layer with LoRA beside it: ``x @ W.T + bias + s (x @ A.T) @ B.T`` as one op.

PEFT keeps its factors in fp32. Beside a bf16 weight it casts the rows to fp32 for each adapter,
multiplies them in fp32, and adds in fp32: on an H100 these passes take a fifth of a step of
Qwen3-30B-A3B. Here the factors are rounded to the dtype of the weight instead. Products are summed
in fp32, and results are rounded: ``x @ W``, ``x @ A``, and their sum. Gradients of the factors are
fp32, where the factors are.

The backward of ``y = x @ W.T + s (z @ A.T) @ B.T``, where ``z`` is ``x``, or ``x`` after a dropout:

    dlow = dy @ (s B)
    dx   = dy @ W      (+ dlow @ A, if z is x)
    dz   = dlow @ A
    dA   = dlow.T @ z
    dB   = s dy.T @ (z @ A.T)

Kept for it: ``x`` or ``z``, and ``z @ A.T``, whose rows are as short as the rank.

Shapes: T rows (any number of dimensions), K inputs, N outputs, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.precision import product_in, to_autocast


def lora_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    a_rK: Tensor,
    b_Nr: Tensor,
    scale: float,
    dropped_TK: Tensor | None = None,
) -> Tensor:
    """A frozen linear layer with LoRA; never syncs.

    Args:
        x_TK: rows ``[..., K]`` in the dtype of the weight (autocast casts both).
        weight_NK, bias_N: frozen.
        a_rK, b_Nr: the factors, of any float dtype.
        dropped_TK: rows that the factors multiply in place of ``x_TK``.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: dtypes differ, shapes do not fit, or the weight requires a gradient.
    """
    x_TK, weight_NK = to_autocast(x_TK, weight_NK)
    given = (weight_NK,) if bias_N is None else (weight_NK, bias_N)
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        raise ValueError("lora_linear takes a frozen weight and bias: set requires_grad to False")
    if x_TK.dtype != weight_NK.dtype:
        raise ValueError(f"rows are {x_TK.dtype}, the weight is {weight_NK.dtype}")
    outputs, inputs, rank = *weight_NK.shape, len(a_rK)
    if x_TK.shape[-1] != inputs or a_rK.shape != (rank, inputs) or b_Nr.shape != (outputs, rank):
        shapes = (tuple(each.shape) for each in (x_TK, weight_NK, a_rK, b_Nr))
        raise ValueError("rows {}, weight {}, A {} and B {} do not fit".format(*shapes))
    bias_N = None if bias_N is None else bias_N.to(x_TK.dtype)
    rows = x_TK.reshape(-1, inputs)
    dropped = None if dropped_TK is None else dropped_TK.to(x_TK.dtype).reshape(-1, inputs)
    y_TN = _LoRALinear.apply(rows, a_rK, b_Nr, weight_NK, dropped, bias_N, scale)
    return y_TN.view(*x_TK.shape[:-1], outputs)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        a_rK: Tensor,
        b_Nr: Tensor,
        weight_NK: Tensor,
        dropped_TK: Tensor | None,
        bias_N: Tensor | None,
        scale: float,
    ) -> Tensor:
        z_TK = x_TK if dropped_TK is None else dropped_TK
        low_Tr = z_TK @ a_rK.to(z_TK.dtype).t()
        y_TN = functional.linear(x_TK, weight_NK, bias_N)
        y_TN.addmm_(low_Tr, _scaled(b_Nr, scale, x_TK.dtype).t())
        ctx.save_for_backward(z_TK, low_Tr, weight_NK, a_rK, b_Nr)
        ctx.scale, ctx.is_dropped = scale, dropped_TK is not None
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        z_TK, low_Tr, weight_NK, a_rK, b_Nr = ctx.saved_tensors
        dx_TK = dz_TK = da_rK = db_Nr = None
        wants_x, wants_z = wants_gradient(ctx, 0), ctx.is_dropped and wants_gradient(ctx, 4)
        wants_a = wants_gradient(ctx, 1)
        if wants_x or wants_z or wants_a:
            dlow_Tr = dy_TN @ _scaled(b_Nr, ctx.scale, dy_TN.dtype)
        if wants_x:
            dx_TK = dy_TN @ weight_NK
            if not ctx.is_dropped:
                dx_TK.addmm_(dlow_Tr, a_rK.to(dlow_Tr.dtype))
        if wants_z:
            dz_TK = dlow_Tr @ a_rK.to(dlow_Tr.dtype)
        if wants_a:
            da_rK = product_in(a_rK.dtype, dlow_Tr.t(), z_TK)
        if wants_gradient(ctx, 2):
            db_Nr = product_in(b_Nr.dtype, dy_TN.t(), low_Tr) * ctx.scale
        return dx_TK, da_rK, db_Nr, None, dz_TK, None, None


def _scaled(b_Nr: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (b_Nr * scale).to(dtype)
