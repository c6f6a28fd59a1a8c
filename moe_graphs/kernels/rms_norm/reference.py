"""RMS norm in plain torch: what the kernels are held against, and what runs where there are none.

Shapes: leading dims of any number, N size of the norm.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from moe_graphs.kernels.precision import accumulation_dtype


def plain_rms_norm(
    x_RN: Tensor, weight_N: Tensor, eps: float, zero_centred: bool = False
) -> Tensor:
    """``rms_norm`` in torch's op, which has a fused kernel; the scale is rounded to x's dtype."""
    scale_N = 1 + weight_N.to(accumulation_dtype(weight_N)) if zero_centred else weight_N
    # One dtype for both, or torch leaves its fused kernel (and warns): under autocast the queries
    # are bf16 and the weights fp32. Autocast makes the result fp32 on a GPU.
    scale_N = scale_N.to(x_RN.dtype)
    return functional.rms_norm(x_RN, scale_N.shape, scale_N, eps).to(x_RN.dtype)


def plain_add_rms_norm(
    residual_RN: Tensor,
    weight_N: Tensor,
    update_RN: Tensor | None,
    eps: float,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` in torch's ops."""
    sum_RN = residual_RN if update_RN is None else residual_RN + update_RN
    return sum_RN, plain_rms_norm(sum_RN, weight_N, eps, zero_centred)
