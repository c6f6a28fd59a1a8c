"""The precision of operands and sums, and the rounding of results."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


class _Castable(Protocol):
    def to(self, dtype: torch.dtype, /) -> Self: ...


W = TypeVar("W", bound=_Castable)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp32, or fp64 where the values are fp64 already (gradient checks)."""
    return torch.promote_types(x.dtype, torch.float32)


def to_autocast(x: Tensor, w: W) -> tuple[Tensor, W]:
    """Rows and weights, in the autocast dtype if autocast is on for their device."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        return x.to(dtype), w.to(dtype)
    return x, w


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, the result of a ``forward`` that was computed in place.

    Under torch.compile always a copy: where an output of an autograd function was written in
    place, dynamo of torch 2.11 gives its gradient to an alias, and the inputs get zeros.
    """
    return x.to(dtype, copy=torch.compiler.is_compiling())
