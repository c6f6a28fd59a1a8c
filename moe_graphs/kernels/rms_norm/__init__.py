"""Root mean square normalisation (arXiv 1910.07467), one pass over memory each way.

Shapes: leading dims of any number, N size of the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.rms_norm.reference import plain_add_rms_norm, plain_rms_norm

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
    _check(x_RN, weight_N)
    norm = _RMSNorm.apply if _fits(x_RN, weight_N) else plain_rms_norm
    return norm(x_RN, weight_N, eps, zero_centred)


def add_rms_norm(
    residual_RN: Tensor,
    update_RN: Tensor | None,
    weight_N: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """``residual + update`` and its ``rms_norm``: what leads from one block of a model to the next.

    One pass forward, and one backward for what arrives at both; sums are rounded as torch's ``+``
    does, so numbers are those of the two ops one after the other (fp32: to rounding). Nothing but
    the sum and the weight is kept for backward.

    Args:
        update_RN: None adds nothing: the residual itself and its norm, whose gradients are added
            up in one pass.

    Raises:
        ValueError: not one weight for each number of a row, or other shapes than the residual's.
    """
    _check(residual_RN, weight_N)
    if update_RN is not None and update_RN.shape != residual_RN.shape:
        raise ValueError(
            f"add_rms_norm wants an update of the residual's shape {tuple(residual_RN.shape)}, got "
            f"{tuple(update_RN.shape)}"
        )
    fits = _fits(residual_RN, weight_N) and (update_RN is None or has_kernel(update_RN))
    norm = _AddRMSNorm.apply if fits else plain_add_rms_norm
    return norm(residual_RN, weight_N, update_RN, eps, zero_centred)


def _check(x_RN: Tensor, weight_N: Tensor) -> None:
    if weight_N.dim() != 1 or weight_N.shape != x_RN.shape[-1:]:
        raise ValueError(
            f"rms_norm wants [..., N] and weights [N], got {tuple(x_RN.shape)} and "
            f"{tuple(weight_N.shape)}"
        )


def _fits(x_RN: Tensor, weight_N: Tensor) -> bool:
    return has_kernel(x_RN) and len(weight_N) <= LONGEST


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RN, weight_N, eps, zero_centred):
        from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton

        ctx.save_for_backward(x_RN, weight_N)
        ctx.constants = eps, zero_centred
        return rms_norm_triton.rms_norm_forward(x_RN, weight_N, eps, zero_centred)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RN):
        from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton

        # If only the weights' gradient is asked for (by a zero-bubble schedule), x's gradient is
        # written once more for nothing.
        grad_x, *grad_weight = rms_norm_triton.rms_norm_backward(
            grad_RN, *ctx.saved_tensors, *ctx.constants, wants_gradient(ctx, 1)
        )
        return grad_x, *(grad_weight or (None,)), None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual_RN, weight_N, update_RN, eps, zero_centred):
        from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton

        ctx.set_materialize_grads(False)
        ctx.constants = eps, zero_centred
        ctx.update_dtype, ctx.dtype = None, residual_RN.dtype
        if update_RN is None:
            # With an alias instead of the input itself, gradients of both outputs arrive here.
            sum_RN = residual_RN.view_as(residual_RN)
            y_RN = rms_norm_triton.rms_norm_forward(residual_RN, weight_N, eps, zero_centred)
        else:
            ctx.update_dtype = update_RN.dtype
            sum_RN, y_RN = rms_norm_triton.add_rms_norm_forward(
                residual_RN, update_RN, weight_N, eps, zero_centred
            )
        ctx.save_for_backward(sum_RN, weight_N)
        return sum_RN, y_RN

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_sum_RN, grad_RN):
        from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton

        grad, grad_weight = grad_sum_RN, []
        if grad_RN is not None:
            grad, *grad_weight = rms_norm_triton.rms_norm_backward(
                grad_RN, *ctx.saved_tensors, *ctx.constants, wants_gradient(ctx, 1), grad_sum_RN
            )
        elif grad is None:
            return None, None, None, None, None
        grad_update = None if ctx.update_dtype is None else grad.to(ctx.update_dtype)
        return grad.to(ctx.dtype), *(grad_weight or (None,)), grad_update, None, None
