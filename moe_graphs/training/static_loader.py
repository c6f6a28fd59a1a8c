"""Batches in fixed device memory, copied there while the step before still runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.signature import ConstantSpec, Signature
from moe_graphs.engine.whole_step.static_inputs import input_name, structure_mismatch
from moe_graphs.errors import GraphError


class StaticLoader:
    """Iterates over ``loader`` and hands out its batches in memory of its own on ``device``.

    The loader is one batch ahead: while a step runs, the next batch travels through pinned memory
    on a stream of its own. A batch is good until ``held`` more have been taken; by then the
    work that was enqueued with it before counts as the last to read it.

    Tensors of a batch may change their values only; other leaves must stay equal. Two loaders share
    nothing. A new ``iter()`` ends the one before.

    Args:
        loader: any iterable of pytrees, such as a ``DataLoader``; pinning there is not needed.
        held: how many batches in a row stay good: the number of microbatches, if they are
            taken together.
        on_mismatch: for a batch that is built differently from the first (a smaller last one):
            "error" raises, "pass" hands it out in fresh memory, for an eager step. The next one is
            right again in both cases.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        *,
        held: int = 1,
        on_mismatch: str = "error",
    ) -> None:
        if held < 1:
            raise ValueError(f"held: got {held}, must be at least 1")
        if on_mismatch not in ("error", "pass"):
            raise ValueError(f"on_mismatch: got {on_mismatch!r}, accepted are 'error', 'pass'")
        self.loader, self.held, self.on_mismatch = loader, held, on_mismatch
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._signature: Signature | None = None
        self._slots: list[_Slot] = []
        self._passes = 0

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> StaticBatches:
        self._passes += 1
        return StaticBatches(self, iter(self.loader), self._passes)

    def _put(self, batch: Any, turn: int) -> _Slot:
        """Starts the copies of a batch.

        Raises:
            GraphError: if it does not fit.
        """
        leaves, structure = pytree.tree_flatten(batch)
        if self._signature is None:
            self._signature = Signature.of(batch, self.device.type, input_name)
            self._slots = [
                _Slot(leaves, structure, self.device, self._stream) for _ in range(self.held + 1)
            ]
        difference = _difference(self._signature, batch, leaves, structure)
        if difference is None:
            slot = self._slots[turn % len(self._slots)]
        elif self.on_mismatch == "pass":
            slot = _Slot(leaves, structure, self.device, self._stream)
        else:
            raise GraphError(
                f"static loader: {difference}; give batches that are built alike "
                f"(drop_last=True), or on_mismatch='pass' to run such a batch eagerly"
            )
        slot.fill(leaves)
        return slot


class StaticBatches(Iterator[Any]):
    """One pass over a ``StaticLoader``.

    An exception of the loader (or a batch that does not fit) is raised when its batch would have
    come; after that the pass may go on, if the loader can.
    """

    def __init__(self, owner: StaticLoader, source: Iterator[Any], number: int) -> None:
        self.held = owner.held
        self._owner, self._source, self._number = owner, source, number
        self._turn = 0
        self._next: _Slot | Exception | None = None

    def __next__(self) -> Any:
        if self._owner._passes != self._number:
            raise GraphError(
                "static loader: another iter() of it has begun, which uses the same memory: use "
                "one StaticLoader for each"
            )
        current = self._next if self._next is not None else self._fetch()
        if isinstance(current, StopIteration):
            raise StopIteration
        self._next = None if isinstance(current, Exception) else self._fetch()
        if isinstance(current, Exception):
            raise current
        return current.take()

    def _fetch(self) -> _Slot | Exception:
        # Whoever used the slot that is written next has enqueued all its work by now.
        owner, slots = self._owner, self._owner._slots
        if slots:
            slots[self._turn % len(slots)].give_back()
        try:
            batch = next(self._source)
            slot = owner._put(batch, self._turn)
        except Exception as error:  # raised when this batch's turn has come
            return error
        if slot in owner._slots:
            self._turn += 1
        return slot


class _Slot:
    """Memory of one batch, and the events that say when it may be read and written."""

    def __init__(
        self,
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._structure, self._device, self._stream = structure, device, stream
        self._leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if _is_tensor(leaf) else leaf
            for leaf in leaves
        ]
        self._pinned: list[Tensor | None] = [None] * len(leaves)
        if stream is not None:
            self._written, self._released = torch.cuda.Event(), torch.cuda.Event()
            for tensor in filter(_is_tensor, self._leaves):
                tensor.record_stream(stream)
            self.give_back()

    def give_back(self) -> None:
        """The next batch comes after all work that the caller has enqueued until now."""
        if self._stream is not None:
            self._released.record(torch.cuda.current_stream(self._device))

    def fill(self, leaves: Sequence[Any]) -> None:
        pairs = [(i, leaf) for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
        if self._stream is None:
            for index, leaf in pairs:
                self._leaves[index].copy_(leaf)
            return
        # The device has read what is in pinned memory now: it did so some steps ago.
        self._written.synchronize()
        sources = [(index, self._staged(index, leaf)) for index, leaf in pairs]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._released)
            for index, source in sources:
                self._leaves[index].copy_(source, non_blocking=True)
            self._written.record(self._stream)

    def take(self) -> Any:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
        return pytree.tree_unflatten(self._leaves, self._structure)

    def _staged(self, index: int, leaf: Tensor) -> Tensor:
        """What the copy stream may read later: pinned memory that nobody else writes."""
        leaf = leaf.detach()
        if leaf.device.type != "cpu":
            self._stream.wait_stream(torch.cuda.current_stream(leaf.device))
            leaf.record_stream(self._stream)
            return leaf
        if self._pinned[index] is None:
            self._pinned[index] = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
        return self._pinned[index].copy_(leaf)


def _difference(
    signature: Signature, batch: Any, leaves: Sequence[Any], structure: pytree.TreeSpec
) -> str | None:
    """How a batch differs from the first one, by the name of the leaf."""
    if structure != signature.structure:
        return structure_mismatch(signature, batch).message
    for spec, leaf in zip(signature.leaves, leaves, strict=True):
        if isinstance(spec, ConstantSpec):
            difference = spec.mismatch(leaf)
            if difference is not None:
                return difference.message
        elif not _is_tensor(leaf):
            return f"{spec.name} was a tensor in the first batch and is {leaf!r} now"
        elif leaf.shape != spec.shape or leaf.dtype is not spec.dtype:
            was, now = (f"{list(t.shape)} {t.dtype}" for t in (spec, leaf))
            return f"{spec.name} was {was} in the first batch and is {now} now"
    return None


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
