"""Codes of weights in FP8 that serve all microbatches of a step.

A weight is quantized in every forward, so that no codes are ever older than their weight. That
costs a layer of many small experts as much as FP8 gains. Between two updates weights stay as they
are, and a caller who says so pays it once. An optimizer that writes codes with each update
(``AdamW(fp8_codes=True)``) keeps them as new as the weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Kept:
    """Codes, the version of their weight, and the weight, so that no other takes its memory."""

    codes: dict[Any, tuple[Any, int, Tensor]] = field(default_factory=dict)


# The block around; _Apart where no codes from outside are used, those of optimizers neither.
_open: ContextVar[_Kept | type[_Apart] | None] = ContextVar("moe_graphs_weight_codes", default=None)


class _Apart:
    """The place of a block where none counts."""


@contextlib.contextmanager
def unchanged_weights() -> Iterator[None]:
    """A block in which no weight changes: codes of experts' weights are made once.

    Put it around the forwards and backwards of one update. Codes take two bytes for each number
    of the experts' weights until the block ends. In a whole step (``FullIteration``) the block
    belongs into the step. Codes are made each time, as without the block, by graphs of scopes, by
    code of ``torch.compile``, and by experts whose weights FSDP2 frees.

    Example::

        with unchanged_weights():
            for batch in microbatches:
                model(batch).loss.backward()
        optimizer.step()

    Raises:
        RuntimeError: a forward in the block found a weight that was changed in place since the
            first one. Changes through ``weight.data`` are not seen.
    """
    token = _open.set(_Kept())
    try:
        yield
    finally:
        _open.reset(token)


def is_open() -> bool:
    """Whether codes are kept here, by a block of ``unchanged_weights`` or by an optimizer."""
    if torch.compiler.is_compiling() or _open.get() is _Apart:
        return False
    return _open.get() is not None or bool(_written)


@contextlib.contextmanager
def made_apart(*, but_for_optimizers: bool = False) -> Iterator[None]:
    """A context without the codes of a block around it; a block within it has its own.

    Args:
        but_for_optimizers: codes that optimizers keep are used.
    """
    token = _open.set(None if but_for_optimizers else _Apart)
    try:
        yield
    finally:
        _open.reset(token)


def once(weight: Tensor, made: Callable[..., Any], *options: Any) -> Any:
    """Returns ``made(weight, *options)``, which is kept if a block is open or an optimizer asks.

    Args:
        made: returns tuples of tensors, for the same weight the same ones.
    """
    block = _Apart if torch.compiler.is_compiling() else _open.get()
    for each in _written if block is not _Apart else ():
        codes = each.find(weight, made, options)
        if codes is not None:
            return codes.ready()
    if not isinstance(block, _Kept):
        return made(weight, *options)
    key = (*_place(weight), *options)
    if key not in block.codes:
        block.codes[key] = made(weight, *options), weight._version, weight.detach()
    codes, version, _ = block.codes[key]
    if version != weight._version:
        raise RuntimeError(
            "a weight was changed within unchanged_weights(): end the block before the update"
        )
    return codes


def _place(weight: Tensor) -> tuple[Any, ...]:
    place = weight.untyped_storage()._cdata, weight.storage_offset()
    return *place, weight.dtype, weight.shape, weight.stride()


# ---- codes that an optimizer writes with each update


class WrittenCodes:
    """Codes of one weight, which have its version as long as they are as new as the weight.

    Whoever changes both counts a new version of both, and a snapshot that puts both back sets both
    versions. Changes through ``weight.data`` count no version, and are not seen.

    Attributes:
        options: what ``made`` takes beside the weight.
        codes: what ``made`` returns. The tensors stay, so a graph may read them.
        unused: updates since a forward.
    """

    def __init__(self, weight: Tensor, made: Callable[..., Any], options: tuple[Any, ...]) -> None:
        self.weight, self.options, self._made = weight.detach(), options, made
        self.codes = made(self.weight, *options)
        self.unused = 0
        self.written()

    def tensors(self) -> list[Tensor]:
        return [tensor for each in self.codes for tensor in each]

    def written(self) -> None:
        """Notes that the codes are those of the weight as it is now."""
        tensors = tuple(self.tensors())
        versions = (self.weight._version,) * len(tensors)
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)
        self.doubtful = False

    @torch.no_grad()
    def ready(self) -> Any:
        """The codes of the weight as it is now, for a forward."""
        self.unused = 0
        if self.doubtful or self.codes[0][0]._version != self.weight._version:
            made = self._made(self.weight, *self.options)
            for old, new in zip(self.tensors(), (t for each in made for t in each), strict=True):
                old.copy_(new)
            self.written()
        return self.codes


class CodesOfWeights:
    """The codes that one optimizer writes. A forward that wants codes of a weight finds them here.

    The first forward makes them. Codes that no forward has used for two updates are dropped.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[Any, ...], WrittenCodes] = {}
        self._asked_for: set[tuple[Any, ...]] = set()
        _written.add(self)

    def ask_for(self, weight: Tensor) -> None:
        """Lets forwards make codes that stay, if they want codes of this weight."""
        if weight.dim() == 3 and weight.is_contiguous():
            self._asked_for.add(_place(weight))

    def find(
        self, weight: Tensor, made: Callable[..., Any], options: tuple[Any, ...]
    ) -> WrittenCodes | None:
        """The codes of a weight, as a forward wants them."""
        found = self._codes.get(place := _place(weight))
        if found is None and place in self._asked_for:
            found = self._codes[place] = WrittenCodes(weight, made, options)
        return found if found is not None and found.options == options else None

    def of_update(self, weight: Tensor) -> WrittenCodes | None:
        """The codes that an update of this weight has to write, or None."""
        if weight.dim() != 3:
            return None
        found = self._codes.get(place := _place(weight))
        if found is None:
            self.ask_for(weight)  # it may lie elsewhere than when the optimizer was made
            return None
        found.unused += 1
        if found.unused > 2:
            del self._codes[place]
            return None
        return found

    def all(self) -> Iterable[WrittenCodes]:
        return self._codes.values()


_written: weakref.WeakSet[CodesOfWeights] = weakref.WeakSet()


def written_codes(weights: Iterable[Tensor]) -> list[WrittenCodes]:
    """All codes of these weights that optimizers write."""
    if not _written:
        return []
    memory = {weight.untyped_storage()._cdata for weight in weights}
    found = [codes for each in _written for codes in each.all()]
    return [codes for codes in found if codes.weight.untyped_storage()._cdata in memory]


def put_back(tensors: Iterable[Tensor]) -> None:
    """Doubts codes whose weight is among these tensors, which have earlier versions, but not they."""
    if not _written:
        return
    tensors = list(tensors)
    restored = set(map(id, tensors))
    for codes in written_codes(each for each in tensors if each.layout is torch.strided):
        codes.doubtful |= id(codes.tensors()[0]) not in restored
