"""Whether a replay is what eager computes: compared bit for bit, and named where it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_graphs.engine.stand_for import local
from moe_graphs.errors import GraphWarning

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUNS = 64  # to see whether they vary; only where a difference looks like it
_CHUNK = 1 << 24  # elements whose bits are widened at once


@dataclass(frozen=True)
class Difference:
    """The first place where two results differ. ``count``: of how many elements they do."""

    tensor: str
    index: tuple[int, ...] | None
    eager: object
    replayed: object
    count: int
    only_order_of_sums: bool = False

    def __str__(self) -> str:
        where = f"{self.tensor}{list(self.index)}" if self.index else self.tensor
        text = f"{where} is {self.eager!r} eagerly and {self.replayed!r} replayed"
        if self.count > 1:
            text += f" ({self.count:,} elements differ)"
        if self.only_order_of_sums:
            text += ", which looks like sums in another order, nothing worse"
        return text


def first_difference(
    names: Sequence[str], eager: Sequence[Tensor | None], replayed: Sequence[Tensor | None]
) -> Difference | None:
    """Bit for bit: None is not zero, 0.0 is not -0.0, a NaN is the very same NaN. Synchronises."""
    for name, a, b in zip(names, eager, replayed, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None:
            return Difference(name, None, _shown(a), _shown(b), 1)
        if a.shape != b.shape or a.dtype != b.dtype:
            return Difference(name, None, (a.dtype, a.shape), (b.dtype, b.shape), 1)
        if not same_bits(a, b):
            return _describe(name, local(a).detach(), local(b).detach())
    return None


def varies(another_run: Callable[[], Difference | None]) -> bool:
    """Whether runs of the same thing differ from one another: a kernel in there adds in any order
    it likes (atomics, as in the backward of flash attention), in some runs in ten or a hundred.

    another_run: runs it again; how the result differs from that of the first run.
    """
    for _ in range(_RUNS):
        found = another_run()
        if found is not None:
            return found.only_order_of_sums
    return False


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    tensor = local(tensor).detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.view(_BITS[tensor.element_size()])


def _shown(tensor: Tensor | None) -> object:
    return None if tensor is None else f"a tensor {tuple(tensor.shape)}"


def _describe(name: str, a: Tensor, b: Tensor) -> Difference:
    differing = (_bits(a) != _bits(b)).reshape(-1)
    if a.is_complex():
        differing = differing.view(-1, 2).any(1)
    flat = int(differing.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    values = a[index].item(), b[index].item()
    return Difference(name, index, *values, int(differing.sum()), _is_rounding(a, b))


def _is_rounding(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or not (a.isfinite().all() and b.isfinite().all()):
        return False
    largest = a.abs().max().double()
    distance = (a.double() - b.double()).abs().max()
    return bool(distance <= 16 * torch.finfo(a.dtype).eps * largest)


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Two sums over the bits of each tensor, one of them weighted by position, and its layout.

    Made on the device, without a copy of the tensor. Synchronises.
    """
    sums = [_sums_over_bits(tensor) for tensor in tensors]
    numbers = torch.stack(sums).tolist() if sums else []
    return [(*pair, *tensor.shape) for pair, tensor in zip(numbers, tensors, strict=True)]


def _sums_over_bits(tensor: Tensor) -> Tensor:
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    flat = _bits(tensor).reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].to(torch.int64)
        # An odd multiplier, modulo 2^64: sums that wrap around are sums all the same.
        weights = torch.arange(start, start + bits.numel(), device=bits.device) * 2 + 1
        total += torch.stack([bits.sum(), (bits * weights).sum()])
    return total


def warn(message: str) -> None:
    """Prints what runs eagerly from now on, once; the report counts it."""
    warnings.warn(message, GraphWarning, stacklevel=2)
