"""The interface of a backend: it records what a block of code does, and does it again."""

from __future__ import annotations

import abc
import contextlib
from typing import Any, Generic, Protocol, TypeVar

import torch


class Graph(abc.ABC):
    """One recorded block. Replaying reads and writes the very tensors it was recorded with."""

    @property
    @abc.abstractmethod
    def kernels(self) -> int | None:
        """Kernels of a CUDA graph (None where they cannot be counted), recorded ops on the CPU."""

    @abc.abstractmethod
    def replay(self) -> None: ...

    @abc.abstractmethod
    def release(self) -> None:
        """Gives the memory back. Idempotent."""


class MemoryMeter(contextlib.AbstractContextManager):
    """A context: bytes allocated since it was entered."""

    @abc.abstractmethod
    def peak(self) -> int:
        """The most there was at once since the last ``restart``."""

    @abc.abstractmethod
    def alive(self) -> int:
        """Bytes that are still allocated."""

    @abc.abstractmethod
    def restart(self) -> None:
        """Counts bytes and the peak anew from now on."""


class Backend(abc.ABC):
    """Records graphs on one device."""

    name: str
    device: torch.device
    generators: tuple[torch.Generator, ...]
    """Random number generators that recorded blocks draw from, besides the device's default."""

    @abc.abstractmethod
    def make_room(self) -> None:
        """Waits for the device and gives cached memory back, before captures."""

    @abc.abstractmethod
    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Around eager work on the stream of the captures, ordered with the caller's stream."""

    @abc.abstractmethod
    def new_pool(self, nbytes: int = 0) -> Any:
        """Memory that graphs captured and replayed in one order may share. ``nbytes``: it begins
        with so much in one piece."""

    @abc.abstractmethod
    def record(self, pool: Any) -> contextlib.AbstractContextManager[list[Graph]]:
        """Records the block, on the stream of the captures, on whatever thread this is; the list
        holds its graph afterwards. On an exception nothing stays."""

    @abc.abstractmethod
    def random_position(self) -> Any:
        """Positions of the random number generators, as a value that is cheap to take."""

    @abc.abstractmethod
    def return_to(self, position: Any) -> None:
        """Sets the generators back to a ``random_position``."""

    @abc.abstractmethod
    def current_stream(self) -> Any:
        """The stream of the caller's work, as a value to compare."""

    @abc.abstractmethod
    def wait_for(self, stream: Any) -> None:
        """Orders the caller's work behind that of ``stream``, which it used before."""

    @abc.abstractmethod
    def meter(self) -> MemoryMeter:
        """Measures what blocks of code allocate on the device."""

    @abc.abstractmethod
    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not keep it: later captures may use the memory,
        too.

        Its values are good from the replay of its graph to the next replay in the pool.
        """

    @abc.abstractmethod
    def pool_bytes(self, pool: Any) -> int:
        """Bytes that the pool holds on the device (0 where there is no pool)."""

    def memory_note(self, error: Exception) -> str:
        """A note on the device's memory for messages, if ``error`` is about it."""
        if not isinstance(error, torch.OutOfMemoryError) or self.device.type != "cuda":
            return ""
        free, total = torch.cuda.mem_get_info(self.device)
        return f" ({free / 2**20:.0f} of {total / 2**20:.0f} MiB free)"

    @abc.abstractmethod
    def release(self) -> None:
        """Gives back what the backend itself holds, after its graphs."""


# ---- what was captured on a backend, apart from its users: a finalizer can hold it


class Releasable(Protocol):
    def release(self) -> None: ...


T = TypeVar("T", bound=Releasable)


class Resources(Generic[T]):
    """Owner of what was captured on a backend, and of the backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.captured: T | None = None

    def release(self) -> None:
        """Idempotent."""
        if self.captured is not None:
            self.captured.release()
            self.captured = None
            self.backend.release()
