"""Root mean square normalisation (arXiv 1910.07467), one pass over memory each way.

Shapes: leading dims of any number, N size of the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.rms_norm_reference import plain_rms_norm

LONGEST = 8192  # a longer row and the sums for its weights do not fit into a program's registers


def rms_norm(x_RN: Tensor, weight_N: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension of ``[..., N]``, as x's dtype.

    A kernel computes in fp32 and rounds once. Weights of another dtype are read as they are, and
    their gradient has their dtype. Nothing but ``x_RN`` and ``weight_N`` is kept for backward.

    Args:
        zero_centred: scale by ``1 + weight`` (Gemma, Qwen3-Next).

    Raises:
        ValueError: not one weight for each number of a row.
    """
    if weight_N.dim() != 1 or weight_N.shape != x_RN.shape[-1:]:
        raise ValueError(
            f"rms_norm wants [..., N] and weights [N], got {tuple(x_RN.shape)} and "
            f"{tuple(weight_N.shape)}"
        )
    fits = has_kernel(x_RN) and len(weight_N) <= LONGEST
    norm = _RMSNorm.apply if fits else plain_rms_norm
    return norm(x_RN, weight_N, eps, zero_centred)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RN, weight_N, eps, zero_centred):
        from moe_graphs.kernels import rms_norm_triton

        ctx.save_for_backward(x_RN, weight_N)
        ctx.constants = eps, zero_centred
        return rms_norm_triton.rms_norm_forward(x_RN, weight_N, eps, zero_centred)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RN):
        from moe_graphs.kernels import rms_norm_triton

        # If only the weights' is asked for (by a zero-bubble schedule), x's gradient is written
        # once more for nothing.
        grad_x, *grad_weight = rms_norm_triton.rms_norm_backward(
            grad_RN, *ctx.saved_tensors, *ctx.constants, wants_gradient(ctx, 1)
        )
        return grad_x, *(grad_weight or (None,)), None, None
