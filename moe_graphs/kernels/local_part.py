"""The part of a tensor that this rank holds, which is what kernels compute on."""

from __future__ import annotations

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor, with its gradient; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)  # importing DTensor would take a second
    return tensor if to_local is None else to_local()
