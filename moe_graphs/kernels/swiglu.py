"""SwiGLU that keeps only its input for backward.

Shapes: leading dims of any number, F ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.reference import accumulation_dtype


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
        if has_kernel(x_R2F):
            from moe_graphs.kernels import swiglu_triton

            return swiglu_triton.swiglu_forward(x_R2F)
        # ``reference.swiglu`` in place: one fp32 temporary instead of four.
        gate_RF, up_RF = x_R2F.chunk(2, dim=-1)
        gate_RF = gate_RF.to(accumulation_dtype(x_R2F), copy=True)
        return functional.silu(gate_RF, inplace=True).mul_(up_RF).to(x_R2F.dtype)

    @staticmethod
    def backward(ctx, grad_RF):
        (x_R2F,) = ctx.saved_tensors
        if has_kernel(x_R2F):
            from moe_graphs.kernels import swiglu_triton

            return swiglu_triton.swiglu_backward(x_R2F, grad_RF)
        dtype = accumulation_dtype(x_R2F)
        gate_RF, up_RF = x_R2F.chunk(2, dim=-1)
        gate_RF = gate_RF.to(dtype)
        grad_x = torch.empty_like(x_R2F)
        grad_gate_RF, grad_up_RF = grad_x.chunk(2, dim=-1)
        grad_up_RF.copy_(functional.silu(gate_RF).mul_(grad_RF))
        grad_silu_RF = up_RF.to(dtype, copy=True).mul_(grad_RF)
        grad_gate_RF.copy_(torch.ops.aten.silu_backward(grad_silu_RF, gate_RF))
        return grad_x
