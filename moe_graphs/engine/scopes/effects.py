"""What a backward does beside its results: numbers it draws, tensors it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.preserve import RandomState, Values
from moe_graphs.engine.proof import Difference, first_difference
from moe_graphs.engine.tracing import Trace


class Effects:
    """Seen in a first run; all others start from where it started, and happen only once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._before = self._random()
        self._trace = Trace(backend.device, strict=False, refuse=False)
        self._after: RandomState | None = None
        self._values = Values([])

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Around the first run."""
        with self._trace:
            yield
        self._after = self._random()
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
        return first_difference(names, self._values.values, tensors)

    def _random(self) -> RandomState:
        return RandomState(self._backend.device, self._backend.generators)
