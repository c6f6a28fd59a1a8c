"""Whether a replay is what eager computes: compared bit for bit, and named where it is not."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_graphs.engine.stand_for import local
from moe_graphs.errors import GraphWarning

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUNS = 64  # to see whether they vary; only where a difference looks like it
_CHUNK = 1 << 24  # elements whose bits are widened at once
_NOISE = 16  # times what eager runs differ by, of which two are a small sample
_ROUNDINGS = 2  # of the dtype, by which a whole tensor may be off
_PROJECTIONS, _SIDE = 8, 4096  # _SIDE squared is _CHUNK


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


ELSEWHERE = Difference("what another rank computes", None, "one value", "another", 1)
"""Where this rank has none, and another one has."""


def first_difference(
    names: Sequence[str], eager: Sequence[Tensor | None], replayed: Sequence[Tensor | None]
) -> Difference | None:
    """Bit for bit: None is not zero, 0.0 is not -0.0, a NaN is the very same NaN. Synchronises."""
    for name, a, b in zip(names, eager, replayed, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None:
            return Difference(name, None, _shown(a), _shown(b), 1)
        a, b = local(a), local(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return Difference(name, None, (a.dtype, a.shape), (b.dtype, b.shape), 1)
        if not same_bits(a, b):
            return _describe(name, a.detach(), b.detach())
    return None


def varies(
    another_run: Callable[[], Difference | None], anywhere: Callable[[bool], bool] = bool
) -> bool:
    """Whether runs of the same thing differ from one another: a kernel in there adds in any order
    it likes (atomics, as in the backward of flash attention), in some runs in ten or a hundred.

    another_run: runs it again; how the result differs from that of the first run. anywhere:
    whether something is so on any of the ranks that run it together, the answer for all of them.
    """
    for _ in range(_RUNS):
        found = another_run()
        if anywhere(found is not None):
            return not anywhere(found is not None and not found.only_order_of_sums)
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
    flat = int(differing.view(torch.uint8).argmax())  # the first; not a list of all of them
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    values = a[index].item(), b[index].item()
    return Difference(name, index, *values, int(differing.sum()), _is_rounding(a, b))


def is_noise(eager: Tensor | None, again: Tensor | None, replayed: Tensor | None) -> bool:
    """Whether two eager runs differ, and a replay is about as near to one of them as the other one
    is. Of whole numbers that vary nothing is known. Synchronises."""
    if eager is None or again is None or replayed is None or same_bits(eager, again):
        return False
    eager, again, replayed = local(eager), local(again), local(replayed)
    if not eager.is_floating_point() or _is_rounding(eager, replayed):
        return True
    if not _largest(eager).isfinite():
        return not bool(_largest(replayed).isfinite())
    return bool(_distance(eager, replayed) <= _NOISE * _distance(eager, again))


def _is_rounding(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return False
    # False of what is not finite.
    return bool(_distance(a, b) <= 16 * torch.finfo(a.dtype).eps * _largest(a))


def _largest(tensor: Tensor) -> Tensor:
    parts = tensor.detach().reshape(-1).split(_CHUNK)
    return torch.stack([part.double().abs().max() for part in parts]).max()


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Part by part: as doubles a model's largest tensor takes several times its memory."""
    pairs = zip(a.detach().reshape(-1).split(_CHUNK), b.detach().reshape(-1).split(_CHUNK),
                strict=True)  # fmt: skip
    return torch.stack([(x.double() - y.double()).abs().max() for x, y in pairs]).max()


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of a tensor. Equal ones have the same bits.

    Attributes:
        bits: two sums over them, one weighted by position, and the shape.
        sketch: sums with random signs, which are as far apart as the tensors are, for their size;
            empty where they are no floating point numbers.
        rounding: what sums in another order may differ by, of the size.
    """

    bits: tuple[int, ...]
    sketch: tuple[float, ...] = field(compare=False)
    rounding: float = field(compare=False)

    def is_noise(self, again: Fingerprint, replayed: Fingerprint) -> bool:
        """Where runs vary: whether a replay is about as near to this one as another run, or as
        sums in another order. Of whole numbers that vary nothing is known."""
        if not self.sketch:
            return again != self
        if not all(map(math.isfinite, self.sketch)):
            return not all(map(math.isfinite, replayed.sketch))
        noise, distance = (math.dist(self.sketch, each.sketch) for each in (again, replayed))
        return distance <= max(_NOISE * noise, self.rounding * math.hypot(*self.sketch))


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[Fingerprint]:
    """Made on the device, without a copy of the tensor. Synchronises."""
    tensors = list(map(local, tensors))
    sums = torch.stack([_sums_over_bits(t) for t in tensors]).tolist() if tensors else []
    sketches = torch.stack([_sketch(t) for t in tensors]).tolist() if tensors else []
    found = []
    for tensor, pair, sketch in zip(tensors, sums, sketches, strict=True):
        bits = (*pair, *tensor.shape)
        if tensor.is_floating_point():
            rounding = _ROUNDINGS * torch.finfo(tensor.dtype).eps
            found.append(Fingerprint(bits, tuple(sketch), rounding))
        else:
            found.append(Fingerprint(bits, (), 0.0))
    return found


def _sketch(tensor: Tensor) -> Tensor:
    sums = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=tensor.device)
    if not tensor.is_floating_point():
        return sums
    signs = _signs(tensor.device)
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        whole = part.numel() // _SIDE
        rows = part[: whole * _SIDE].view(whole, _SIDE) @ signs
        sums += (rows * signs[:whole]).sum(0)
        rest = part[whole * _SIDE :]
        sums -= rest @ signs[: rest.numel()]
    return sums


@functools.cache
def _signs(device: torch.device) -> Tensor:
    made = torch.randint(2, (_SIDE, _PROJECTIONS), generator=torch.Generator().manual_seed(0))
    return (made * 2 - 1).double().to(device)


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
