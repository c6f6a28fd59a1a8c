"""Root mean square normalisation (arXiv 1910.07467). torch has a fused kernel, so none of ours."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over as many last dimensions as the weight has; statistics in fp32, in the input's dtype."""
    # One dtype for both, or torch leaves its fused kernel (and warns): under autocast the
    # queries are bf16 and the weights fp32.
    return torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
