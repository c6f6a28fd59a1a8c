"""SwiGLU that keeps only its input for backward.

Shapes: leading dims of any number, F ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.swiglu import reference as swiglu_reference


def swiglu(x_R2F: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``[..., 2F]`` rows of gate and up side by side.

    Computed in fp32 and rounded once to the input's dtype. Written plainly, autograd would keep
    three fp32 copies; this saves the input and computes them again.

    Raises:
        ValueError: the last dimension is odd.
    """
    if x_R2F.shape[-1] % 2:
        raise ValueError(
            f"swiglu wants gate and up side by side, an even last dimension, got "
            f"{tuple(x_R2F.shape)}"
        )
    return _SwiGLU.apply(x_R2F)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R2F):
        ctx.save_for_backward(x_R2F)
        return swiglu_forward(x_R2F)

    @staticmethod
    def backward(ctx, grad_RF):
        (x_R2F,) = ctx.saved_tensors
        if has_kernel(x_R2F):
            from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton

            return swiglu_triton.swiglu_backward(x_R2F, grad_RF)
        return swiglu_reference.swiglu_backward(x_R2F, grad_RF)


def swiglu_forward(x_R2F: Tensor) -> Tensor:
    """``swiglu`` without a backward."""
    if has_kernel(x_R2F):
        from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton

        return swiglu_triton.swiglu_forward(x_R2F)
    return swiglu_reference.swiglu_forward(x_R2F)
