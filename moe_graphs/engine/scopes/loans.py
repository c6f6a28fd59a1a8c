"""Static memory that callers hold: it is called in before a graph writes there again."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_graphs.engine.snapshot import no_garbage_collection


class Loan:
    """One storage of static memory, and the tensors on it that were handed out.

    References to the storage are counted. What a graph and its recording hold themselves is known
    (``of_our_own``); one more is somebody else's.

    Attributes:
        handed: the tensors.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage, self._nbytes = storage, storage.nbytes()
        self._known = all_references(storage)
        self.handed: list[weakref.ref[Tensor]] = []

    def nothing_is_out(self) -> None:
        """Whoever holds the storage just now belongs to the engine."""
        self._known = all_references(self._storage)

    def nothing_more_is_out(self) -> None:
        """Likewise, of what was known to be the engine's some has gone."""
        self._known = min(self._known, all_references(self._storage))

    def hand(self, handed: Sequence[weakref.ref[Tensor]]) -> None:
        """What was handed out on this storage just now."""
        self.handed = list(handed)

    @property
    def is_out(self) -> bool:
        return self._others() > 0

    def _others(self) -> int:
        """References that are not the engine's."""
        return all_references(self._storage) - self._known

    @property
    def is_free(self) -> bool:
        """Whether it can be written."""
        found = all_references(self._storage)
        if found > self._known or self._storage.nbytes() != self._nbytes:
            return False
        self._known = found  # what is less was garbage of the engine's
        return True

    def has(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and (
            tensor.untyped_storage()._cdata == self._storage._cdata
        )

    def call_in(self) -> bool:
        """Gives the tensors that were handed out memory of their own, if somebody holds them.

        False if something else than those (a view) holds the memory, or somebody has freed it:
        then it cannot be written.
        """
        if self._storage.nbytes() != self._nbytes:
            return False
        if not self.is_out:
            return True
        found = {id(tensor): tensor for ref in self.handed if (tensor := ref()) is not None}
        alive = list(filter(self.has, found.values()))  # the others have moved by themselves
        del found
        if not self._may_move(len(alive)):
            return False
        if alive:
            moved = self._storage.clone()
            for tensor in alive:
                where = (tensor.storage_offset(), tensor.shape, tensor.stride())
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = empty.set_(moved, *where)
        self.handed.clear()
        return not self.is_out

    def _may_move(self, alive: int) -> bool:
        """Whether as many tensors get memory of their own, or all stay where they are."""
        return True

    @staticmethod
    @contextlib.contextmanager
    def of_our_own(loans: Sequence[Loan]) -> Iterator[None]:
        """References that come and go within this context are not a caller's: so none of the
        caller's may go by being collected."""
        with no_garbage_collection():
            before = [all_references(loan._storage) for loan in loans]
            try:
                yield
            finally:
                for loan, count in zip(loans, before, strict=True):
                    loan._known += all_references(loan._storage) - count


def references(storage: torch.UntypedStorage) -> int:
    """Those of tensors."""
    return torch._C._storage_Use_Count(storage._cdata)


def all_references(storage: torch.UntypedStorage) -> int:
    """Of tensors, and of Python to the storage: its object is one, whoever asks a tensor for it."""
    return references(storage) + sys.getrefcount(storage)
