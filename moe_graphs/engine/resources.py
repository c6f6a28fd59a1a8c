"""What has to be released, apart from what uses it: so that a finalizer can hold it."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from moe_graphs.engine.backends.backend import Backend


class Releasable(Protocol):
    def release(self) -> None: ...


T = TypeVar("T", bound=Releasable)


class Resources(Generic[T]):
    """What was captured on a backend, and the backend, which gives back what it holds itself."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.captured: T | None = None

    def release(self) -> None:
        """Idempotent."""
        if self.captured is not None:
            self.captured.release()
            self.captured = None
            self.backend.release()
