"""Bytes that autograd keeps for a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def kept_bytes(run: Callable[[], Any], besides: Iterable[Tensor] = ()) -> int:
    """Bytes of all storages that the call saves, once each, without those of ``besides``."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = run()  # while they live, no memory is given away twice
    for tensor in besides:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    del results
    return sum(kept.values())
