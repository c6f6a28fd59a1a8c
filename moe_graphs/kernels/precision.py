"""The precision of sums, and the rounding of their results."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp32, or fp64 where the values are fp64 already (gradient checks)."""
    return torch.promote_types(x.dtype, torch.float32)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, the result of a ``forward`` that was computed in place.

    Under torch.compile always a copy: where an output of an autograd function was written in
    place, dynamo of torch 2.11 gives its gradient to an alias, and the inputs get zeros.
    """
    return x.to(dtype, copy=torch.compiler.is_compiling())
