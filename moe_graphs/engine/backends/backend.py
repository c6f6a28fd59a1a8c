"""The interface of a backend: it records what a block of code does, and does it again."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from moe_graphs.errors import CaptureError


class Graph(abc.ABC):
    """One recorded block. A replay reads and writes the very tensors of the recording."""

    @property
    @abc.abstractmethod
    def kernels(self) -> int | None:
        """Kernels of a CUDA graph (None if not countable); recorded operations on the CPU."""

    @abc.abstractmethod
    def replay(self) -> None: ...

    @abc.abstractmethod
    def release(self) -> None:
        """Frees the memory. Idempotent."""


class RecordedDraws(abc.ABC):
    """Random numbers of a block that recomputations within it draw again, in every replay.

    Forwards under torch's checkpoint have numbers, in the order in which they run.
    """

    def __init__(self, begins: Sequence[int | None]) -> None:
        self.begins = begins

    def note(self, number: int) -> None:
        """Notes where a forward begins that is being recorded.

        Raises:
            CaptureError: the trial run had fewer of them.
        """
        if number >= len(self.begins):
            raise CaptureError("torch.utils.checkpoint is called more often than in a trial run")

    @abc.abstractmethod
    def again(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Context in which a recorded recomputation draws the numbers of its forward."""


class MemoryMeter(contextlib.AbstractContextManager["MemoryMeter"]):
    """A context that counts the bytes allocated since it was entered."""

    @abc.abstractmethod
    def peak(self) -> int:
        """The largest number of bytes at once since the last ``restart``."""

    @abc.abstractmethod
    def alive(self) -> int:
        """The bytes that are still allocated."""

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
        """Waits for the device and frees cached memory, before captures."""

    def memory_of_its_own(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which this thread allocates in segments that nothing else uses."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def cache_piece(self, nbytes: int) -> None:
        """Leaves one free piece in the allocator's cache of the current stream.

        Eager work that allocates no more than this then leaves fewer gaps. ``make_room`` frees it.
        """

    @abc.abstractmethod
    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Context for eager work on the captures' stream, ordered with the caller's stream."""

    @abc.abstractmethod
    def new_pool(self, nbytes: int = 0) -> Any:
        """A pool: memory that graphs may share which are captured and replayed in one order.

        ``nbytes`` is the size of the one piece that the pool begins with.
        """

    @abc.abstractmethod
    def new_draws(self, begins: Sequence[int | None]) -> RecordedDraws:
        """Prepares a capture whose recomputations draw again what their forwards have drawn.

        Args:
            begins: for each forward under checkpoint, how far the default generator was behind the
                begin of the block in a trial run, or None if it drew nothing.
        """

    @abc.abstractmethod
    def record(
        self, pool: Any, draws: RecordedDraws | None = None
    ) -> contextlib.AbstractContextManager[list[Graph]]:
        """Records the block, on the stream of the captures, on whatever thread this is.

        The list holds the block's graph afterwards. On an exception nothing is left.
        """

    @abc.abstractmethod
    def random_position(self) -> Any:
        """Positions of the random number generators, as a value that is cheap to take."""

    @abc.abstractmethod
    def return_to(self, position: Any) -> None:
        """Sets the generators back to a ``random_position``."""

    @contextlib.contextmanager
    def drawing_from(self, position: Any) -> Iterator[None]:
        """Context that draws from a ``random_position`` and leaves the generators as they were.

        None changes nothing.
        """
        if position is None:
            yield
            return
        now = self.random_position()
        self.return_to(position)
        try:
            yield
        finally:
            self.return_to(now)

    @abc.abstractmethod
    def current_stream(self) -> Any:
        """The stream of the caller's work, as a value to compare."""

    @abc.abstractmethod
    def wait_for(self, stream: Any) -> None:
        """Orders the caller's work behind that of ``stream``, which the caller used before."""

    @abc.abstractmethod
    def meter(self) -> MemoryMeter:
        """Measures what blocks of code allocate on the device."""

    @abc.abstractmethod
    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not keep the memory alive.

        Later captures may use the memory, too. Its values are good from the replay of its graph to
        the next replay in the pool.
        """

    @abc.abstractmethod
    def pool_bytes(self, pool: Any) -> int:
        """Bytes that the pool holds on the device (0 where there is no pool)."""

    def memory_note(self, error: Exception) -> str:
        """A note on the device's memory for messages, if ``error`` is about memory."""
        if not isinstance(error, torch.OutOfMemoryError) or self.device.type != "cuda":
            return ""
        free, total = torch.cuda.mem_get_info(self.device)
        return f" ({free / 2**20:.0f} of {total / 2**20:.0f} MiB free)"

    def free_bytes(self) -> int | None:
        """Bytes that this process may still take on the device, or None if nobody knows.

        ``torch.cuda.set_per_process_memory_fraction`` may allow fewer than are free.
        """
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return min(free, allowed - torch.cuda.memory_reserved(self.device))

    @abc.abstractmethod
    def release(self) -> None:
        """Frees what the backend itself holds, after its graphs."""


# ---- resources: what was captured on a backend, apart from its users, so a finalizer can hold it


class Releasable(Protocol):
    def release(self) -> None: ...


T = TypeVar("T", bound=Releasable)


class Resources(Generic[T]):
    """Owner of what was captured on a backend, and of the backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.captured: T | None = None

    def release(self) -> None:
        """Frees everything. Idempotent."""
        if self.captured is not None:
            self.captured.release()
            self.captured = None
            self.backend.release()
