"""Storages whose memory comes and goes by ``resize_``, as that of parameters that FSDP2 gathers.

No operation does it, so no dispatch mode sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Calls ``note(storage, nbytes)`` after each ``storage.resize_(nbytes)`` of Python's."""
    kind = torch.UntypedStorage
    before, own = kind.resize_, vars(kind).get("resize_")

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = before(storage, nbytes)
        note(storage, nbytes)
        return result

    kind.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del kind.resize_
        else:
            kind.resize_ = own  # type: ignore[method-assign]
