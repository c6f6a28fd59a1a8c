"""Frozen weights in few bits, dequantised where a product needs them into memory that all share.

A ``PackedWeight`` stands in for the weight of a grouped GEMM. ``packed_gemm`` writes the weights of
a part of the experts into the model's ``Scratch``, multiplies the rows of these experts, and goes
on to the next part. The next product, of another layer or of the backward, overwrites them. No
layer keeps a weight in bf16, and no whole weight is there at any time.

The scratch has one address for the life of the model, so graphs may bake it in. Layers run one
after the other: each needs the output of the one before, and so does each backward. Batches that
run on several streams at once wait for each other here.

Shapes: R routed rows, E experts, M and N the two sides of a stored weight, X and Y those that a
product reads, r rank.
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

from moe_graphs.kernels.availability import has_kernel, has_triton
from moe_graphs.kernels.gemm import add_beside, rows_of_experts
from moe_graphs.kernels.launching import cdiv
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.packed_weights.reference import (
    FORMATS,
    PackedFormat,
    Stored,
    format_named,
)

__all__ = [
    "FORMATS",
    "PackedFormat",
    "PackedWeight",
    "Scratch",
    "Stored",
    "format_named",
    "packed_gemm",
]

MOST_BYTES = 1 << 28
"""Size that the weights of experts that are dequantised at once may have."""
_numbers = itertools.count()
# An op can take a number but no object. Modules of the model hold the object.
_numbered: weakref.WeakValueDictionary[int, Scratch] = weakref.WeakValueDictionary()


class Scratch:
    """Memory that all layers of one model dequantise into, a part of one weight at a time.

    It is made in the first call on a device, as large as the largest part of a weight that was
    announced. Memory that is outgrown is kept, because graphs may hold its address.

    Attributes:
        number: what ops know it by.
        nbytes: the size of the largest part of a weight that was announced.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.number, self.nbytes = next(_numbers), nbytes
        self._memory: dict[torch.device, list[Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}
        _numbered[self.number] = self

    def announce(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Makes room for a part of the weights ``[E, M, N]``."""
        at_once = experts_at_once(shape, dtype)
        self.nbytes = max(self.nbytes, math.prod((at_once, *shape[1:])) * dtype.itemsize)

    def at(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor at the beginning of the memory; it has the values of the last call.

        Raises:
            ValueError: the memory has to be made, in a capture.
        """
        self.nbytes = max(self.nbytes, math.prod(shape) * dtype.itemsize)
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


def experts_at_once(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The number of experts whose weights ``[E, M, N]`` are dequantised together."""
    parts = cdiv(math.prod(shape) * dtype.itemsize, MOST_BYTES)
    return max(1, cdiv(shape[0], max(1, parts)))


@define_op(device="default")
def packed_product(
    x_RX: Tensor,
    stored: Sequence[Tensor],
    format: str,
    transposed: bool,
    scratch: int,
    offsets_E: Tensor,
    low_Rr: Tensor | None,
    b_ErY: Tensor | None,
) -> Tensor:
    """``packed_gemm`` of a weight in the scratch of this number, in the dtype of the rows."""
    kind = FORMATS[format]
    shape = experts, _, _ = kind.shape_of(stored[0])
    # Without Triton a product on a GPU takes all experts.
    is_whole = x_RX.is_cuda and not has_triton()
    at_once = experts if is_whole else experts_at_once(shape, x_RX.dtype)
    out_RY = x_RX.new_empty(x_RX.shape[0], shape[1 if transposed else 2])
    beside = None if low_Rr is None or b_ErY is None else (low_Rr, b_ErY)
    for first in range(0, experts, at_once):
        part = slice(first, min(first + at_once, experts))
        w_eMN = _unpacked(kind, [each[part] for each in stored], x_RX, _numbered[scratch])
        w_eXY = w_eMN.transpose(1, 2) if transposed else w_eMN
        rows_of_experts(x_RX, w_eXY, offsets_E, first, out_RY, beside)
    return add_beside(out_RY, offsets_E, beside)


def _unpacked(kind: PackedFormat, stored: Stored, x: Tensor, scratch: Scratch) -> Tensor:
    """Weights ``[e, M, N]`` in the scratch; bitwise ``kind.dequantize(...)``."""
    out_eMN = scratch.at(kind.shape_of(stored[0]), x.dtype, x.device)
    if has_kernel(out_eMN):
        from moe_graphs.kernels.packed_weights import triton_kernels as packed_weights_triton

        packed_weights_triton.unpack(kind, stored, out_eMN)
        return out_eMN
    return out_eMN.copy_(kind.dequantize(stored, x.dtype))


@torch.library.register_fake("moe_graphs::packed_product")
def _(x_RX, stored, format, transposed, scratch, offsets_E, low_Rr, b_ErY):
    shape = FORMATS[format].shape_of(stored[0])
    return x_RX.new_empty(x_RX.shape[0], shape[1 if transposed else 2])


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A frozen weight ``[E, X, Y]`` of a grouped product, in few bits.

    It has the attributes by which operands are checked and cast.

    Attributes:
        stored: codes, scales and what else ``FORMATS[format]`` stores.
        dtype: that of products, and of weights when they are dequantised.
        transposed: whether the product reads the transpose of what is stored.
        scratch: where weights are dequantised to.
    """

    stored: Stored
    format: str
    dtype: torch.dtype
    transposed: bool
    scratch: Scratch

    requires_grad = False

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = FORMATS[self.format].shape_of(self.stored[0])
        return (experts, columns, rows) if self.transposed else (experts, rows, columns)

    @property
    def device(self) -> torch.device:
        return self.stored[0].device

    @property
    def mT(self) -> PackedWeight:
        """The transposed weight ``[E, Y, X]``, which stores the same."""
        return replace(self, transposed=not self.transposed)

    def dim(self) -> int:
        return 3

    def to(self, dtype: torch.dtype) -> PackedWeight:
        """A packed weight of the same numbers for products in another dtype."""
        return replace(self, dtype=dtype)


def packed_gemm(
    rows_RX: Tensor,
    weight: PackedWeight,
    offsets_E: Tensor,
    low_Rr: Tensor | None = None,
    b_ErY: Tensor | None = None,
) -> Tensor:
    """``rows @ weight[e]`` for the rows of expert e, plus ``low @ b[e]`` within the same sum.

    Rows past the last end hold anything. Not differentiable; nothing of the weight is kept.

    Returns:
        ``[R, Y]`` in the dtype of the rows, bitwise the product of a weight that was dequantised
        before. A sum of 4,096 and more may be added up in other parts on Hopper.

    Raises:
        ValueError: what is stored is not of the format.
    """
    FORMATS[weight.format].check(weight.stored)
    given = weight.stored, weight.format, weight.transposed, weight.scratch.number
    found_RY: Tensor = packed_product(rows_RX, *given, offsets_E, low_Rr, b_ErY)
    return found_RY
