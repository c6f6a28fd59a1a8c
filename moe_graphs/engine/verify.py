"""One verifier: whether a replay leaves behind what eager leaves behind, bit for bit.

A strategy says what is kept of a run, and with that how it is compared:

| strategy | what it keeps | who uses it | replays |
|---|---|---|---|
| `ByValue.replayed` | tensors | forwards of scopes and callables | several |
| `ByValue.replayed_once` | tensors | backwards, which use up what their forward has left | one |
| `ByFingerprint` | fingerprints, for a lack of memory for tensors | whole steps | several |

Each is given what two runs have left behind by name (`Left`), or functions that run once more, and
answers with a `Verdict`. What runs, from which state, and what is compared is the business of
`partial/verify.py` and `whole_step/capture_step.py`. Every strategy is asked the same on
all ranks that run together: a further run holds collectives.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_graphs.engine.tensors import owned_leaves, unwrap
from moe_graphs.errors import GraphWarning

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUNS = 64  # to see whether they vary; only where a difference looks like it
_CHUNK = 1 << 24  # elements whose bits are widened at once
_NOISE = 16  # times what eager runs differ by, of which two are a small sample
_ROUNDINGS = 2  # of the dtype, by which a whole tensor may be off
_PROJECTIONS, _SIDE = 8, 4096  # _SIDE squared is _CHUNK
_ROUNDS = 4  # of both, where fingerprints differ

Left = Sequence[tuple[str, Tensor | None]]
"""What a run leaves behind, by the names that messages use."""
Looks = dict[str, Any]
"""What is kept of everything that a run leaves behind: fingerprints, or plain values."""
Run = Callable[[], Mapping[str, Any]]
"""Runs once, and tells what it has left behind."""
Anywhere = Callable[[bool], bool]
"""Whether something is so on any of the ranks that run together: the answer for all of them."""


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


@dataclass(frozen=True)
class Verdict:
    """The first difference that eager runs do not explain, and whether eager runs differ from one
    another."""

    difference: Difference | None = None
    not_reproducible: bool = False


class ByValue:
    """Compares tensors."""

    def __init__(self, anywhere: Anywhere) -> None:
        self._anywhere = anywhere

    def replayed(
        self,
        eager: Left,
        replayed: Left,
        again: Callable[[], Left],
        another_replay: Callable[[], Difference | None],
        *,
        outputs: int,
    ) -> Verdict:
        """For what can be replayed again.

        Args:
            again: runs eagerly once more.
            another_replay: how another replay differs from the first one.
            outputs: how many of the first entries are outputs, which are looked at again where
                eager runs differ.
        """
        found = difference(eager, replayed)
        if not self._anywhere(found is not None):
            return Verdict()
        repeated, wrong = again(), None
        eager_varies = difference(eager, repeated) is not None
        may_vary = _may_vary(found, eager_varies)
        if self._anywhere(may_vary):
            eager_varies |= varies(another_replay, self._anywhere)
        elif eager_varies:
            wrong = unexplained(eager[:outputs], repeated[:outputs], replayed[:outputs])
        if found is not None and not eager_varies:
            wrong = found
        if self._anywhere(wrong is not None):
            return Verdict(wrong or ELSEWHERE)
        return Verdict(not_reproducible=True)

    def replayed_once(
        self,
        eager: Left,
        again: Left,
        replayed: Left,
        beside: Callable[[], Difference | None],
        another_run: Callable[[], Difference | None],
    ) -> Verdict:
        """For what can be replayed only once.

        Args:
            again: what a second eager run has left.
            beside: how what the replay has left besides its results differs.
            another_run: how another eager run differs from the first one.
        """
        eager_varies = difference(eager, again) is not None
        found = unexplained(eager, again, replayed)
        if found is None and not eager_varies:
            found = beside()
        may_vary = _may_vary(found, eager_varies)
        if self._anywhere(may_vary):
            eager_varies |= varies(another_run, self._anywhere)
        # Where runs vary somewhere, sums in another order are no more than that.
        is_worse = found is not None and not (eager_varies and found.only_order_of_sums)
        if self._anywhere(is_worse):
            return Verdict(found or ELSEWHERE, eager_varies)
        return Verdict(None, eager_varies)


def _may_vary(found: Difference | None, eager_varies: bool) -> bool:
    return found is not None and found.only_order_of_sums and not eager_varies


class ByFingerprint:
    """Compares fingerprints. Eager runs come before the capture, as far as that goes: beside a
    graph's pool they take the memory of a second step. What differs is computed once more.

    ``eager`` and ``replay`` run once, from the same state. Each tells everything that it leaves
    behind. What is no tensor is compared as it is.
    """

    def __init__(self, anywhere: Anywhere) -> None:
        self._anywhere = anywhere
        self._not_reproducible = False

    def expect(self, eager: Run) -> None:
        """Runs eagerly twice, or more often where the two differ."""
        self._expected = _looks_of(eager)
        self._again = [_looks_of(eager)]
        self._not_reproducible = self._anywhere(self._again[0] != self._expected)
        if self._not_reproducible:  # how much, is to be known before there is a pool
            self._again += [_looks_of(eager) for _ in range(_ROUNDS)]

    def check(self, eager: Run, replay: Run, make_room: Callable[[], None]) -> Verdict:
        """Replays, and compares. Leaves what the replay has left.

        make_room: called after more runs, which leave memory in the allocator's cache.
        """
        replayed = _looks_of(replay)
        wrong = [name for name in self._expected if not self._is_right(name, self._again, replayed)]
        if self._anywhere(bool(wrong)):
            wrong = self._still_wrong(wrong, replayed, eager, replay)
            make_room()
            if self._anywhere(bool(wrong)):  # what a rank runs, all have to: it holds collectives
                name = (wrong or list(self._expected))[0]
                found = _difference(name, eager, replay) if wrong else _elsewhere(eager, replay)
                # Where runs vary somewhere, sums in another order are no more than that.
                is_worse = not (self._not_reproducible and found.only_order_of_sums)
                if self._anywhere(bool(wrong) and is_worse):
                    return Verdict(found, self._not_reproducible)
        return Verdict(None, self._not_reproducible)

    def _still_wrong(self, wrong: list[str], replayed: Looks, eager: Run, replay: Run) -> list[str]:
        """The names that more runs of both do not explain by what they differ from one another."""
        for _ in range(_ROUNDS):
            again, once_more = _looks_of(eager), _looks_of(replay)
            varies = again != self._expected or once_more != replayed
            self._not_reproducible |= self._anywhere(varies)
            wrong = [
                name
                for name in wrong
                if not self._is_right(name, [again], replayed)
                and (
                    once_more.get(name) == replayed.get(name)
                    or not _is_noise(replayed.get(name), once_more.get(name), self._expected[name])
                )
            ]
            if not self._anywhere(bool(wrong)):
                break
        return wrong

    def _is_right(self, name: str, others: list[Looks], replayed: Looks) -> bool:
        """The same bits or, where eager runs vary, about as near to them as another of these."""
        expected, found = self._expected[name], replayed.get(name)
        if found == expected:
            return True
        near = any(_is_noise(expected, other[name], found) for other in others)
        return self._not_reproducible and near


def _looks_of(run: Run) -> Looks:
    left = run()
    tensors = {name: each for name, each in left.items() if isinstance(each, Tensor)}
    return {**left, **dict(zip(tensors, fingerprints(list(tensors.values())), strict=True))}


def _difference(name: str, eager: Run, replay: Run) -> Difference:
    """The values themselves, from one more run of both."""
    one, other = (_value_of(run(), name) for run in (eager, replay))
    found = first_difference([name], [one], [other])
    return found or Difference(name, None, "one value", "another", 1)


def _elsewhere(eager: Run, replay: Run) -> Difference:
    """This rank runs along with one that looks for its difference."""
    eager()
    replay()
    return ELSEWHERE


def _is_noise(first: Any, second: Any, other: Any) -> bool:
    prints = all(isinstance(each, Fingerprint) for each in (first, second, other))
    return prints and first.is_noise(second, other)


def _value_of(left: Mapping[str, Any], name: str) -> Tensor | None:
    value = left.get(name)
    return owned_leaves([value.detach()])[0] if isinstance(value, Tensor) else None


def difference(eager: Left, replayed: Left) -> Difference | None:
    """The first one, bit for bit."""
    names = [name for name, _ in eager]
    return first_difference(names, *([tensor for _, tensor in each] for each in (eager, replayed)))


def unexplained(eager: Left, again: Left, replayed: Left) -> Difference | None:
    """The first difference that is more than what two eager runs differ by."""
    for one, other, last in zip(eager, again, replayed, strict=True):
        found = difference([one], [last])
        if found is not None and not is_noise(one[1], other[1], last[1]):
            return found
    return None


def first_difference(
    names: Sequence[str], eager: Sequence[Tensor | None], replayed: Sequence[Tensor | None]
) -> Difference | None:
    """Bit for bit: None is not zero, 0.0 is not -0.0, a NaN is the very same NaN. Synchronises."""
    for name, a, b in zip(names, eager, replayed, strict=True):
        if a is b:
            continue
        if a is None or b is None:
            return Difference(name, None, _shown(a), _shown(b), 1)
        a, b = unwrap(a), unwrap(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return Difference(name, None, (a.dtype, a.shape), (b.dtype, b.shape), 1)
        if not same_bits(a, b):
            return _describe(name, a.detach(), b.detach())
    return None


def varies(another_run: Callable[[], Difference | None], anywhere: Anywhere = bool) -> bool:
    """Whether runs of the same thing differ from one another: a kernel in there adds in any order
    it likes (atomics, as in the backward of flash attention), in some runs in ten or a hundred.

    another_run: runs it again; how the result differs from that of the first run.
    """
    for _ in range(_RUNS):
        found = another_run()
        if anywhere(found is not None):
            return not anywhere(found is not None and not found.only_order_of_sums)
    return False


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    tensor = unwrap(tensor).detach()
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
    eager, again, replayed = unwrap(eager), unwrap(again), unwrap(replayed)
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
    tensors = list(map(unwrap, tensors))
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
