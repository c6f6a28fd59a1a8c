"""Static memory that callers hold: it is called in before a graph writes there again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_graphs.engine.preserve import no_garbage_collection


class Loan:
    """One storage of static memory, and the tensors on it that were handed out.

    References to the storage are counted. What a graph and its recording hold themselves is known
    (``of_our_own``); one more is somebody else's.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage, self._nbytes = storage, storage.nbytes()
        self._known = references(storage)
        self._handed: list[weakref.ref[Tensor]] = []

    def nothing_is_out(self) -> None:
        """Whoever holds the storage just now belongs to the engine."""
        self._known = references(self._storage)

    def hand(self, handed: Sequence[weakref.ref[Tensor]]) -> None:
        """What was handed out on this storage just now."""
        self._handed = list(handed)

    @property
    def is_out(self) -> bool:
        return references(self._storage) > self._known

    def call_in(self) -> bool:
        """Gives the tensors that were handed out memory of their own, if somebody holds them.

        False if something else than those (a view) holds the memory, or somebody has freed it:
        then it cannot be written.
        """
        if self._storage.nbytes() != self._nbytes:
            return False
        if not self.is_out:
            return True
        alive = [tensor for ref in self._handed if (tensor := ref()) is not None]
        if alive:
            moved = self._storage.clone()
            for tensor in alive:
                where = (tensor.storage_offset(), tensor.shape, tensor.stride())
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = empty.set_(moved, *where)
        self._handed.clear()
        return not self.is_out

    @staticmethod
    @contextlib.contextmanager
    def of_our_own(loans: Sequence[Loan]) -> Iterator[None]:
        """References that come and go within this context are not a caller's: so none of the
        caller's may go by being collected."""
        with no_garbage_collection():
            before = [references(loan._storage) for loan in loans]
            try:
                yield
            finally:
                for loan, count in zip(loans, before, strict=True):
                    loan._known += references(loan._storage) - count


def references(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)
