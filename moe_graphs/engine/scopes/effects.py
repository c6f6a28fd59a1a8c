"""What a backward does beside its results: numbers it draws, tensors it writes, FP8 scales."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from moe_graphs.engine import fp8
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.preserve import HiddenState, Values
from moe_graphs.engine.proof import Difference, first_difference
from moe_graphs.engine.tracing import Trace


class Effects:
    """Seen in a first run; all others start from where it started, and happen only once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._before = self._hidden()
        self._trace = Trace(backend.device, strict=False, refuse=False)
        self._after: HiddenState | None = None
        self._values = Values([])

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Around the first run."""
        with self._trace:
            yield
        self._after = self._hidden()
        self._values = Values(self._trace.written())

    def again(self) -> None:
        """Before another run."""
        self._before.put_back()
        self._trace.rewind()

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Around all other runs."""
        try:
            yield
        finally:
            self._after.put_back()
            self._values.put_back()

    def difference(self) -> Difference | None:
        """How what another run has written differs."""
        tensors = self._values.tensors
        names = [f"the tensor {tuple(tensor.shape)} that it writes" for tensor in tensors]
        expected, found = self._after.scales(), fp8.named_tensors()
        return first_difference(
            [*names, *expected],
            [*self._values.values, *expected.values()],
            [*tensors, *map(found.get, expected)],
        )

    def _hidden(self) -> HiddenState:
        return HiddenState(self._backend.device, self._backend.generators)
