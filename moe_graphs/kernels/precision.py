"""The precision of operands and sums, and the rounding of results."""

from __future__ import annotations

from typing import Any, Protocol, Self, TypeVar

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


def product_in(
    dtype: torch.dtype, left: Tensor, right: Tensor, added_to: Tensor | None = None
) -> Tensor:
    """The product in a dtype, from bf16 to fp32 without rounding to bf16 between.

    Args:
        added_to: a sum in that dtype, to which the product is added in place.
    """
    is_mixed = left.is_cuda and left.dtype != dtype
    mixed: dict[str, Any] = {"out_dtype": dtype} if is_mixed else {}
    if not is_mixed:  # the CPU has no product with two dtypes
        left, right = left.to(dtype), right.to(dtype)
    if added_to is not None:  # cuBLAS adds in its epilogue
        return torch.addmm(added_to, left, right, **mixed, out=added_to)
    found = torch.empty(len(left), right.shape[1], dtype=dtype, device=left.device)
    return torch.mm(left, right, **mixed, out=found)  # with `out`: autocast would round it


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, the result of a ``forward`` that was computed in place.

    Under torch.compile always a copy: where an output of an autograd function was written in
    place, dynamo of torch 2.11 gives its gradient to an alias, and the inputs get zeros.
    """
    return x.to(dtype, copy=torch.compiler.is_compiling())
