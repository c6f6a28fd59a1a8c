"""What a backward does beside its results: numbers it draws, tensors it writes, FP8 scales."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from moe_graphs.engine import fp8
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.proof import Difference, first_difference
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tracing import Trace


class Effects:
    """Seen in a first run; all others start from where it started, and happen only once."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._before = backend, Snapshot(backend)
        self._after = Snapshot()

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Around the first run."""
        with Trace(self._backend.device, strict=False, refuse=False, before=self._before):
            yield
        self._after = Snapshot(self._backend, values=self._before.tensors)

    def again(self) -> None:
        """Before another run."""
        self._before.put_back()

    def once(self) -> Snapshot:
        """A context around all other runs."""
        return self._after

    def difference(self) -> Difference | None:
        """How what another run has written differs."""
        tensors = self._after.tensors
        names = [f"the tensor {tuple(tensor.shape)} that it writes" for tensor in tensors]
        expected, found = self._after.scales(), fp8.named_tensors()
        return first_difference(
            [*names, *expected],
            [*self._after.values, *expected.values()],
            [*tensors, *map(found.get, expected)],
        )
