"""Copies of a device's tensors in host memory, at the speed of the bus."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64


@torch.no_grad()
def copies_on_host(tensors: Sequence[Tensor], owner: object) -> list[Tensor]:
    """Their values. Those of CUDA tensors lie in one block that is pinned as long as ``owner``
    lives: to and from pageable memory the same bytes take seven times as long.

    torch's own pinned memory would be kept for good, in blocks of powers of two.
    """
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.to("cpu", copy=True) for tensor in tensors]
    sizes = [-tensor.nbytes // _ALIGNMENT * -_ALIGNMENT for tensor in tensors]
    # Written by all threads: fresh pages are slow.
    block = torch.empty(sum(sizes), dtype=torch.uint8).fill_(0)
    _pin(block, owner)
    starts = itertools.accumulate(sizes, initial=0)
    copies = [_within(block, *pair) for pair in zip(starts, tensors, strict=False)]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    return copies


def _within(block: Tensor, start: int, tensor: Tensor) -> Tensor:
    like = torch.empty_like(tensor, device="meta")  # dense, in the order of the tensor's memory
    flat = block[start : start + tensor.nbytes].view(tensor.dtype)
    return flat.as_strided(like.shape, like.stride())


def _pin(block: Tensor, owner: object) -> None:
    runtime = torch.cuda.cudart()
    if block.numel() and int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == 0:
        # Holds the block until it is unpinned.
        done = weakref.finalize(owner, lambda: runtime.cudaHostUnregister(block.data_ptr()))
        done.atexit = False
