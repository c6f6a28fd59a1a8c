"""Multiplication of gradients by a number on the device, as in clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_graphs.kernels.local_part import local_part


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, with few launches for each dtype.

    Args:
        gradients: plain tensors; for DTensors their local shards.
        factor: fp32, 0-dim. It is rounded to the gradients' dtype, because torch launches a kernel
            per gradient, at half the speed, if the dtypes differ.
    """
    for same in by_dtype(list(map(local_part, gradients))):
        torch._foreach_mul_(same, factor.to(same[0].device, same[0].dtype))


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists of tensors of one dtype each, as torch's multi-tensor kernels need."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
