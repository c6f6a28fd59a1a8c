"""Codes of weights in FP8 that serve all microbatches of a step.

A weight is quantized in every forward, so that no codes are ever older than their weight. That
costs a layer of many small experts as much as FP8 gains. Between two updates weights stay as they
are, and a caller who says so pays it once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Kept:
    """Codes, the version of their weight, and the weight, so that no other takes its memory."""

    codes: dict[Any, tuple[Any, int, Tensor]] = field(default_factory=dict)


_open: ContextVar[_Kept | None] = ContextVar("moe_graphs_weight_codes", default=None)


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
    """Whether this is within a block of ``unchanged_weights``."""
    return not torch.compiler.is_compiling() and _open.get() is not None


@contextlib.contextmanager
def made_apart() -> Iterator[None]:
    """A context without the codes of a block around it; a block within it has its own."""
    token = _open.set(None)
    try:
        yield
    finally:
        _open.reset(token)


def once(weight: Tensor, made: Callable[[], Any], *options: Any) -> Any:
    """Returns the result of ``made`` for a weight, which is kept if a block is open.

    Args:
        options: what else decides about the codes.
    """
    kept = None if torch.compiler.is_compiling() else _open.get()
    if kept is None:
        return made()
    place = weight.untyped_storage()._cdata, weight.storage_offset()
    key = (*place, weight.dtype, weight.shape, weight.stride(), *options)
    if key not in kept.codes:
        kept.codes[key] = made(), weight._version, weight.detach()
    codes, version, _ = kept.codes[key]
    if version != weight._version:
        raise RuntimeError(
            "a weight was changed within unchanged_weights(): end the block before the update"
        )
    return codes
