"""What the engine asks of a backend: record what a block of code does, and do it again."""

from __future__ import annotations

import abc
import contextlib
from typing import Any

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
    """Bytes allocated since the block was entered. ``peak``: at most, within the block."""

    peak: int

    @abc.abstractmethod
    def alive(self) -> int:
        """Of those, what is still there. After the block, too."""


class Backend(abc.ABC):
    """Records graphs on one device."""

    name: str
    device: torch.device
    generators: tuple[torch.Generator, ...]
    """Random number generators that recorded blocks draw from, besides the device's default."""

    @abc.abstractmethod
    def session(self) -> contextlib.AbstractContextManager[None]:
        """Around all captures of a session: the stream they use, one synchronisation."""

    @abc.abstractmethod
    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Around eager work on the stream of the captures, ordered with the caller's stream."""

    @abc.abstractmethod
    def new_pool(self) -> Any:
        """Memory that graphs captured and replayed in one order may share."""

    @abc.abstractmethod
    def record(self, pool: Any) -> contextlib.AbstractContextManager[list[Graph]]:
        """Records the block; the list holds its graph afterwards. On an exception nothing stays."""

    @abc.abstractmethod
    def meter(self) -> MemoryMeter:
        """Measures what blocks of code allocate on the device."""

    @abc.abstractmethod
    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without keeping it: later captures into the pool may use it, too.

        Its values are good from the replay of its graph to the next replay in the pool.
        """

    @abc.abstractmethod
    def pool_bytes(self, pool: Any) -> int:
        """Bytes that the pool holds on the device (0 where there is no pool)."""

    @abc.abstractmethod
    def release(self) -> None:
        """After the graphs: gives back what the backend itself holds."""
