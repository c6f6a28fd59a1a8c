"""Frozen weights in few bits, dequantised where a product needs them into memory that all share.

A ``PackedWeight`` stands in for the weight of a grouped GEMM. ``dense()`` writes the whole weight
into the model's ``Scratch`` and returns it there. The next ``dense()`` with the same scratch, of
another layer or of the other product, overwrites it: a product reads it at once, and a backward
asks again. No layer keeps a weight in bf16.

The scratch has one address for the life of the model, so graphs may bake it in. Layers run one
after the other: each needs the output of the one before, and so does each backward. Batches that
run on several streams at once wait for each other here.

Shapes: E experts, M and N the two sides of a stored weight, X and Y those that a product reads.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.packed_weights.reference import (
    FORMATS,
    PackedFormat,
    format_named,
)

__all__ = ["FORMATS", "PackedFormat", "PackedWeight", "Scratch", "format_named", "unpack_weight"]

_numbers = itertools.count()
# An op can take a number but no object. Modules of the model hold the object.
_numbered: weakref.WeakValueDictionary[int, Scratch] = weakref.WeakValueDictionary()


class Scratch:
    """Memory that all layers of one model dequantise into, one weight at a time.

    It is made in the first call on a device, as large as the largest weight that was announced.
    Memory that is outgrown is kept, because graphs may hold its address.

    Attributes:
        number: what ops know it by.
        nbytes: the size of the largest weight that was announced.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.number, self.nbytes = next(_numbers), nbytes
        self._memory: dict[torch.device, list[Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}
        _numbered[self.number] = self

    def announce(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Makes room for weights of a shape."""
        self.nbytes = max(self.nbytes, math.prod(shape) * dtype.itemsize)

    def at(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor at the beginning of the memory; it has the values of the last call.

        Raises:
            ValueError: the memory has to be made, in a capture.
        """
        self.announce(shape, dtype)
        made = self._memory.setdefault(device, [])
        if not made or made[-1].nbytes < self.nbytes:
            made.append(_allocated(self.nbytes, device))
        self._wait_for_other_streams(device)
        count = math.prod(shape) * dtype.itemsize
        return made[-1][:count].view(dtype).view(*shape)

    def _wait_for_other_streams(self, device: torch.device) -> None:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        now = torch.cuda.current_stream(device)
        before = self._streams.setdefault(device, now)
        if before != now:
            now.wait_stream(before)
            self._streams[device] = now

    def __deepcopy__(self, memo: dict[int, Any]) -> Scratch:
        memo[id(self)] = made = Scratch(self.nbytes)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Scratch, (self.nbytes,)


def _allocated(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"the {nbytes:,} bytes that experts in few bits are dequantised into are made in the "
            f"first call on a device, which cannot be in a capture: run a step eagerly first"
        )
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@define_op(device="default")
def unpack_weight(
    codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype, scratch: int
) -> Tensor:
    """Dequantise a weight into the scratch of this number, and return it there.

    It is there until the next call with the same scratch.

    Returns:
        ``[E, M, N]`` of ``dtype``, bitwise ``FORMATS[format].dequantize(...)``.
    """
    kind = FORMATS[format]
    out_EMN = _numbered[scratch].at(kind.shape_of(codes), dtype, codes.device)
    if has_kernel(out_EMN):
        from moe_graphs.kernels.packed_weights import triton_kernels as packed_weights_triton

        packed_weights_triton.unpack(kind, codes, scales, out_EMN)
        return out_EMN
    return out_EMN.copy_(kind.dequantize(codes, scales, dtype))


@torch.library.register_fake("moe_graphs::unpack_weight")
def _(codes, scales, format, dtype, scratch):
    return codes.new_empty(FORMATS[format].shape_of(codes), dtype=dtype)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A frozen weight ``[E, X, Y]`` of a grouped product, in few bits.

    It has the attributes by which operands are checked and cast.

    Attributes:
        codes, scales: what ``FORMATS[format]`` stores.
        dtype: that of ``dense()``.
        transposed: whether the product reads the transpose of what is stored.
        scratch: where ``dense()`` writes.
    """

    codes: Tensor
    scales: Tensor
    format: str
    dtype: torch.dtype
    transposed: bool
    scratch: Scratch

    requires_grad = False

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = FORMATS[self.format].shape_of(self.codes)
        return (experts, columns, rows) if self.transposed else (experts, rows, columns)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def mT(self) -> PackedWeight:
        """The transposed weight ``[E, Y, X]``, which stores the same."""
        return replace(self, transposed=not self.transposed)

    def dim(self) -> int:
        return 3

    def to(self, dtype: torch.dtype) -> PackedWeight:
        """A packed weight of the same numbers, whose ``dense()`` has another dtype."""
        return replace(self, dtype=dtype)

    def dense(self) -> Tensor:
        """``[E, X, Y]`` in the scratch, until the next call; never saved."""
        FORMATS[self.format].check(self.codes, self.scales)
        given = self.codes, self.scales, self.format, self.dtype, self.scratch.number
        found_EMN: Tensor = unpack_weight(*given)
        return found_EMN.transpose(1, 2) if self.transposed else found_EMN
