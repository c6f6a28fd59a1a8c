"""A matrix transposed, scaled and rounded by one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import define_op


@define_op()
def transpose(x_MN: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``x.T * scale``, computed in the wider of both dtypes, contiguous ``[N, M]`` of ``dtype``."""
    return _plain(x_MN, scale, x_MN.new_empty(x_MN.shape[::-1], dtype=dtype))


def _plain(x_MN: Tensor, scale: float, out_NM: Tensor) -> Tensor:
    # A tensor of one number: a number would leave the product in the dtype of x.
    factor = x_MN.new_full((1,), scale, dtype=torch.promote_types(x_MN.dtype, out_NM.dtype))
    return torch.mul(x_MN.mT, factor, out=out_NM)


@torch.library.impl("moe_graphs::transpose", "cuda")
def _(x_MN, scale, dtype):
    out_NM = x_MN.new_empty(x_MN.shape[::-1], dtype=dtype)
    if not (has_kernel(x_MN) and has_kernel(out_NM)):
        return _plain(x_MN, scale, out_NM)
    from moe_graphs.kernels.transpose import triton_kernels as transpose_triton

    transpose_triton.transpose(x_MN.contiguous(), scale, out_NM)
    return out_NM


@torch.library.register_fake("moe_graphs::transpose")
def _(x_MN, scale, dtype):
    return x_MN.new_empty(x_MN.shape[::-1], dtype=dtype)
