"""SwiGLU, alone or with the projection behind it, that keeps only its input for backward.

Shapes: leading dims of any number, F ffn, D outputs of the projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.precision import to_autocast
from moe_graphs.kernels.swiglu import reference as swiglu_reference


class ClampedGate(NamedTuple):
    """An activation with limits in place of SwiGLU; by default that of gpt-oss.

    With ``gate`` at most ``limit`` and ``up`` between ``-limit`` and ``limit`` it is
    ``gate * sigmoid(alpha * gate) * (up + offset)``.

    Attributes:
        by_turns: whether gate and up stand by turns, ``[..., gate, up, gate, up, ...]``, and not
            side by side.
    """

    alpha: float
    limit: float
    offset: float = 1.0
    by_turns: bool = True


NO_CLAMP = ClampedGate(0.0, 0.0, 0.0, by_turns=False)
"""Stands for SwiGLU where an op wants numbers."""


def swiglu(x_R2F: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``[..., 2F]`` rows of gate and up side by side.

    Computed in fp32 and rounded once to the input's dtype. Written plainly, autograd would keep
    three fp32 copies; this saves the input and computes them again.

    Raises:
        ValueError: the last dimension is odd.
    """
    _check_even(x_R2F)
    return _SwiGLU.apply(x_R2F)


def swiglu_linear(x_R2F: Tensor, w_DF: Tensor) -> Tensor:
    """``functional.linear(swiglu(x), w)``, with the same bits.

    Saves ``x`` and the weight for backward. The result of ``swiglu``, which the weight's gradient
    needs, is computed again in the pass that computes the gradient of ``x``. Under autocast both
    operands are cast, visibly to autograd.

    Raises:
        ValueError: the last dimension of ``x`` is odd.
    """
    _check_even(x_R2F)
    return _SwiGLULinear.apply(*to_autocast(x_R2F, w_DF))


def _check_even(x_R2F: Tensor) -> None:
    if x_R2F.shape[-1] % 2:
        raise ValueError(
            f"swiglu wants gate and up side by side, an even last dimension, got "
            f"{tuple(x_R2F.shape)}"
        )


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R2F):
        ctx.save_for_backward(x_R2F)
        return swiglu_forward(x_R2F)

    @staticmethod
    def backward(ctx, grad_RF):
        (x_R2F,) = ctx.saved_tensors
        return swiglu_backward(x_R2F, grad_RF, with_result=False)[0]


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R2F, w_DF):
        ctx.save_for_backward(x_R2F, w_DF if ctx.needs_input_grad[0] else None)
        return functional.linear(swiglu_forward(x_R2F), w_DF)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):
        x_R2F, w_DF = ctx.saved_tensors
        wants_x, wants_w = wants_gradient(ctx, 0), wants_gradient(ctx, 1)
        grad_x = grad_w = None
        if wants_x:
            grad_x, h_RF = swiglu_backward(x_R2F, grad_RD @ w_DF, with_result=wants_w)
        elif wants_w:
            h_RF = swiglu_forward(x_R2F)
        if wants_w:
            grad_w = _as_matrix(grad_RD).t() @ _as_matrix(h_RF)
        return grad_x, grad_w


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def swiglu_forward(x_R2F: Tensor, gate: ClampedGate = NO_CLAMP) -> Tensor:
    """``swiglu`` or a clamped gate, without a backward."""
    if has_kernel(x_R2F):
        from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton

        return swiglu_triton.swiglu_forward(x_R2F, *gate)
    if gate.limit:
        return swiglu_reference.clamped_gate(x_R2F, *gate)
    return swiglu_reference.swiglu_forward(x_R2F)


def swiglu_backward(x_R2F: Tensor, grad_RF: Tensor, *, with_result: bool) -> tuple[Tensor, Tensor]:
    """The gradient of ``x_R2F``, and the result of ``swiglu_forward`` again if it is wanted."""
    if has_kernel(x_R2F):
        from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton

        return swiglu_triton.swiglu_backward(x_R2F, grad_RF, with_result)
    return swiglu_reference.swiglu_backward(x_R2F, grad_RF, with_result)
