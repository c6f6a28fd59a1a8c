"""The verifier: whether a replay leaves behind what eager leaves behind, bit for bit.

A strategy says what is kept of a run, and so how runs are compared:

| strategy | what it keeps | who uses it | replays |
|---|---|---|---|
| `ByValue.replayed` | tensors | forwards of scopes and callables | several |
| `ByValue.replayed_once` | tensors | backwards, which use up what their forward has left | one |
| `ByFingerprint` | fingerprints, which take no memory | whole steps | several |

A strategy gets the results of two runs by name (`Left`), or functions that run once more, and
answers with a `Verdict`. `partial/verify.py` and `whole_step/capture_step.py` say what runs, from
which state, and what is compared. All ranks that run together ask a strategy the same questions,
because a further run holds collectives.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_graphs.engine.tensors import owned_leaves, unwrap
from moe_graphs.engine.tracing import frame_of_the_user
from moe_graphs.errors import GraphWarning

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUNS = 64  # number of runs that show whether runs vary
_CHUNK = 1 << 22  # elements whose bits are widened at once
_NOISE = 16  # a factor for the difference of eager runs, because two runs are a small sample
_ROUNDINGS = 2  # number of roundings by which a tensor may be off
_PROJECTIONS, _SIDE = 8, 2048  # _SIDE squared is _CHUNK
_ROUNDS = 4  # number of further runs if something differs
_WARNED: dict[str, dict[Any, Any]] = {}  # what Python has to know of warnings, by file

Left = Sequence[tuple[str, Tensor | None]]
"""Results of a run, by the names that messages use."""
Looks = dict[str, Any]
"""Fingerprints of a run's tensors, and its other values as they are."""
Run = Callable[[], Mapping[str, Any]]
"""A function that runs once and returns the results."""
Anywhere = Callable[[bool], bool]
"""A function that tells whether something is true on any of the ranks that run together."""


@dataclass(frozen=True)
class Difference:
    """The first place where two results differ.

    Attributes:
        count: the number of elements that differ.
        only_order_of_sums: whether the largest difference is a few roundings of the dtype.
        relative: the largest difference of two elements, relative to the largest element.
    """

    tensor: str
    index: tuple[int, ...] | None
    eager: object
    replayed: object
    count: int
    only_order_of_sums: bool = False
    relative: float = math.inf

    def is_rounding(self, of_operands: float) -> bool:
        """Whether sums in another order explain it.

        Args:
            of_operands: the rounding of the sums that others were computed from, or 0. Gradients in
                fp32 that are computed from sums in bf16 vary as bf16 does.
        """
        return self.only_order_of_sums or self.relative <= _ROUNDINGS * of_operands

    def __str__(self) -> str:
        where = f"{self.tensor}{list(self.index)}" if self.index else self.tensor
        text = f"{where} is {self.eager!r} eagerly and {self.replayed!r} replayed"
        if self.count > 1:
            text += f" ({self.count:,} elements differ)"
        if self.only_order_of_sums:
            text += ", which looks like sums in another order, nothing worse"
        return text


ELSEWHERE = Difference("what another rank computes", None, "one value", "another", 1)
"""The difference that a rank without one reports, if another rank has one."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a strategy.

    Attributes:
        difference: the first difference that is more than eager runs differ by, or None.
        not_reproducible: whether eager runs differ from one another.
    """

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
        """Verdict on a recording that can be replayed again.

        Args:
            again: runs eagerly once more.
            another_replay: how another replay differs from the first one.
            outputs: how many of the first entries are outputs. If eager runs differ, outputs are
                compared once more.
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
        another_run: Callable[[], Left],
        *,
        any_order: float = 0.0,
    ) -> Verdict:
        """Verdict on a recording that can be replayed only once.

        Two eager runs may agree by chance in a tensor that varies. So a difference is compared with
        further eager runs, before it counts.

        Args:
            again: results of a second eager run.
            beside: how the side effects of the replay differ from those of eager.
            another_run: runs eagerly once more.
            any_order: the rounding of operations that add in any order, or 0
                (``Operations.rounding_of_any_order``). Then differences by such roundings are no
                error, even if all eager runs agree.
        """
        eager_varies, explained = difference(eager, again) is not None, set[str]()
        found = unexplained(eager, again, replayed, explained)
        of_effects = beside() if found is None and not eager_varies else None
        found = found or of_effects
        for number in range(_ROUNDS if any_order else _RUNS):
            if not self._anywhere(_is_open(found, eager_varies, number)):
                break
            again = another_run()
            eager_varies |= difference(eager, again) is not None
            found = unexplained(eager, again, replayed, explained) or of_effects
        eager_varies |= any_order > 0 and found is not None
        # If runs vary somewhere, sums in another order are no error.
        is_worse = found is not None and not (eager_varies and found.is_rounding(any_order))
        if self._anywhere(is_worse):
            return Verdict(found or ELSEWHERE, eager_varies)
        return Verdict(None, eager_varies)


def _is_open(found: Difference | None, eager_varies: bool, number: int) -> bool:
    """Whether another eager run may explain a difference, after a number of further runs."""
    if found is None:
        return False
    if found.only_order_of_sums:
        return not eager_varies
    return found.index is not None and number < _ROUNDS  # no index: None, or another shape


def _may_vary(found: Difference | None, eager_varies: bool) -> bool:
    return found is not None and found.only_order_of_sums and not eager_varies


class ByFingerprint:
    """Compares fingerprints of tensors.

    Eager runs come before the capture, as far as possible, because beside a graph's pool they need
    the memory of a second step. If a tensor differs, its values are computed once more.

    ``eager`` and ``replay`` are functions that run once, from the same state, and return everything
    that the run leaves behind. Values that are no tensors are compared as they are.
    """

    def __init__(self, anywhere: Anywhere) -> None:
        self._anywhere = anywhere
        self._not_reproducible = False

    def expect(self, eager: Run) -> None:
        """Runs eagerly twice, or more often if the two runs differ."""
        self._expected = _looks_of(eager)
        self._again = [_looks_of(eager)]
        self._not_reproducible = self._anywhere(self._again[0] != self._expected)
        # The size of the difference must be known before there is a pool.
        if self._not_reproducible:
            self._again += [_looks_of(eager) for _ in range(_ROUNDS)]

    def check(
        self, eager: Run, replay: Run, make_room: Callable[[], None], *, any_order: float = 0.0
    ) -> Verdict:
        """Replays and compares. The state afterwards is that after a replay.

        Args:
            make_room: called after further runs, which leave memory in the allocator's cache.
            any_order: as in ``ByValue.replayed_once``.
        """
        replayed = _looks_of(replay)
        wrong = [name for name in self._expected if not self._is_right(name, self._again, replayed)]
        if self._anywhere(bool(wrong)):
            wrong = self._still_wrong(wrong, replayed, eager, replay)
            make_room()
            if self._anywhere(bool(wrong)):  # all ranks run, because a run holds collectives
                name = (wrong or list(self._expected))[0]
                found = _difference(name, eager, replay) if wrong else _elsewhere(eager, replay)
                self._not_reproducible |= any_order > 0
                # If runs vary somewhere, sums in another order are no error.
                is_worse = not (self._not_reproducible and found.is_rounding(any_order))
                if self._anywhere(bool(wrong) and is_worse):
                    return Verdict(found, self._not_reproducible)
        return Verdict(None, self._not_reproducible)

    def _still_wrong(self, wrong: list[str], replayed: Looks, eager: Run, replay: Run) -> list[str]:
        """The names among ``wrong`` whose difference further runs of both do not explain."""
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
        """Whether a replayed value equals eager's bits or, if eager runs vary, is about as near."""
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
    """The difference of the values themselves, from one more run of both."""
    one, other = (_value_of(run(), name) for run in (eager, replay))
    found = first_difference([name], [one], [other])
    return found or Difference(name, None, "one value", "another", 1)


def _elsewhere(eager: Run, replay: Run) -> Difference:
    """Runs both along with a rank that looks for its difference."""
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
    """The first difference, bit for bit."""
    names = [name for name, _ in eager]
    return first_difference(names, *([tensor for _, tensor in each] for each in (eager, replayed)))


def unexplained(
    eager: Left, again: Left, replayed: Left, explained: set[str] | None = None
) -> Difference | None:
    """The first difference that is more than what two eager runs differ by.

    Args:
        explained: names of tensors that earlier runs have explained; those of this run are added.
    """
    explained = set() if explained is None else explained
    first = None
    for one, other, last in zip(eager, again, replayed, strict=True):
        found = None if one[0] in explained else difference([one], [last])
        if found is not None and is_noise(one[1], other[1], last[1]):
            explained.add(one[0])
        elif first is None:
            first = found
    return first


def first_difference(
    names: Sequence[str], eager: Sequence[Tensor | None], replayed: Sequence[Tensor | None]
) -> Difference | None:
    """The first difference, bit for bit. Waits for the device.

    None is not zero, 0.0 is not -0.0, and a NaN equals only a NaN of the same bits.
    """
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
    """Whether runs of the same thing differ from one another.

    They do if a kernel adds in any order (atomics, as in the backward of flash attention). Such a
    difference may show in one of ten or one of a hundred runs.

    Args:
        another_run: runs it again and returns how the result differs from that of the first run.
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
    flat = int(differing.view(torch.uint8).argmax())  # the first one, without a list of all
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    values = a[index].item(), b[index].item()
    relative = _relative_distance(a, b)
    is_rounding = relative <= _rounding_of(a)
    return Difference(name, index, *values, int(differing.sum()), is_rounding, relative)


def is_noise(eager: Tensor | None, again: Tensor | None, replayed: Tensor | None) -> bool:
    """Whether two eager runs differ, and a replay is about as near to one as the other one is.

    For varying whole numbers every replay counts as near. Waits for the device.
    """
    if eager is None or again is None or replayed is None or same_bits(eager, again):
        return False
    eager, again, replayed = unwrap(eager), unwrap(again), unwrap(replayed)
    if not eager.is_floating_point() or _relative_distance(eager, replayed) <= _rounding_of(eager):
        return True
    if not _largest(eager).isfinite():
        return not bool(_largest(replayed).isfinite())
    return bool(_distance(eager, replayed) <= _NOISE * _distance(eager, again))


def _relative_distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements, relative to the largest of ``a``.

    Infinite or NaN where values are not finite, or are no floating point numbers.
    """
    if not a.is_floating_point() or not _largest(a).isfinite():
        return math.inf
    return float(_distance(a, b) / _largest(a).clamp(min=sys.float_info.min))


def _rounding_of(tensor: Tensor) -> float:
    """The relative distance that sums in another order may have; 0 for whole numbers."""
    return 16 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _largest(tensor: Tensor) -> Tensor:
    parts = tensor.detach().reshape(-1).split(_CHUNK)
    return torch.stack([part.double().abs().max() for part in parts]).max()


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference of two elements.

    It is computed part by part: a model's largest tensor in doubles takes several times its memory.
    """
    pairs = zip(a.detach().reshape(-1).split(_CHUNK), b.detach().reshape(-1).split(_CHUNK),
                strict=True)  # fmt: skip
    return torch.stack([(x.double() - y.double()).abs().max() for x, y in pairs]).max()


@dataclass(frozen=True)
class Fingerprint:
    """A few numbers that stand for a tensor. Equal fingerprints mean the same bits.

    Attributes:
        bits: two sums over the bits, one of them weighted by position, and the shape.
        sketch: sums with random signs. Two sketches are as far apart as the tensors are, relative
            to their size. Empty for tensors that are not floating point.
        rounding: how much sums in another order may differ, relative to the size.
    """

    bits: tuple[int, ...]
    sketch: tuple[float, ...] = field(compare=False)
    rounding: float = field(compare=False)

    def is_noise(self, again: Fingerprint, replayed: Fingerprint) -> bool:
        """Whether a replay is about as near to this run as another run is, if runs vary.

        It also counts as near if the difference looks like sums in another order. For varying whole
        numbers every replay counts as near.
        """
        if not self.sketch:
            return again != self
        if not all(map(math.isfinite, self.sketch)):
            return not all(map(math.isfinite, replayed.sketch))
        noise, distance = (math.dist(self.sketch, each.sketch) for each in (again, replayed))
        return distance <= max(_NOISE * noise, self.rounding * math.hypot(*self.sketch))


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[Fingerprint]:
    """Fingerprints, made on the device without a copy of the tensor. Waits for the device."""
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
        # The multiplier is odd, modulo 2^64: sums that wrap around are still good sums.
        weights = torch.arange(start, start + bits.numel(), device=bits.device) * 2 + 1
        total += torch.stack([bits.sum(), (bits * weights).sum()])
    return total


def warn(message: str) -> None:
    """Warns once of what runs eagerly from now on; the report counts its calls.

    The warning has the line of the user's code that led here. `warnings.warn` would leave a
    `__warningregistry__` in the globals of that code, which may be what a model computes with.
    """
    frame = frame_of_the_user(sys._getframe(1))
    # A backward on a GPU has a thread of its own, without frames of the user. Python drops a
    # warning whose module is None, so these have the names that `warnings.warn` gives them.
    file, line, module = "sys", 1, "sys"
    if frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        module = frame.f_globals.get("__name__") or "<string>"
    registry = _WARNED.setdefault(file, {})
    warnings.warn_explicit(message, GraphWarning, file, line, module, registry)
