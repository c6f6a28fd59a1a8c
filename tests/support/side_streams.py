"""Two streams that are none: who launched what on which of them, and what may go wrong with that.

A checker over lifetimes. On the CPU operations run one after the other, whatever stream they are
said to be on; here it is noted which of them a GPU might run at the same time, and which memory its
allocator would hand out again meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe_graphs import side_stream

MAIN, SIDE = "main", "side"


@dataclass
class _Memory:
    """Of one storage: whose it is, and the times of its last uses by stream."""

    held: StorageWeakRef
    of: str
    used: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)


class TwoStreams(TorchDispatchMode):
    """Stands in for ``side_stream`` within its context.

    Attributes:
        events: "fork", "join" and the operations on the side stream, in order.
        hazards: what would be wrong on a GPU.
    """

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        self.events: list[str] = []
        self.hazards: list[str] = []
        self._stream, self._time = MAIN, 0
        self._forked = self._joined = -1
        self._memory: dict[int, _Memory] = {}
        self._last_reads: list[int] = []  # by main, of freed memory of the side stream
        monkeypatch.setattr(side_stream, "forked", self._fork)
        monkeypatch.setattr(side_stream, "join", self._join)

    @contextlib.contextmanager
    def _fork(self, device: torch.device) -> Iterator[None]:
        assert self._stream == MAIN, "forked within a fork"
        self._look_for_freed()
        self.events.append("fork")
        self._stream, self._forked = SIDE, self._tick()
        try:
            yield
        finally:
            self._look_for_freed()
            self._stream = MAIN

    def _join(self, device: torch.device) -> None:
        assert self._stream == MAIN, "joined within a fork"
        self._look_for_freed()
        self.events.append("join")
        self._joined = self._tick()

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def _look_for_freed(self) -> None:
        """The allocator gives memory to the next who asks on the stream that it was made on."""
        for key, memory in list(self._memory.items()):
            if not memory.held.expired():
                continue
            del self._memory[key]
            if memory.of == MAIN and memory.used.get(SIDE, -1) > self._joined:
                self.hazards.append("main's memory is freed while the side stream uses it")
            if memory.of == SIDE and MAIN in memory.used:
                self._last_reads.append(memory.used[MAIN])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_for_freed()
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        now, name = self._tick(), str(func)
        if self._stream == SIDE:
            self.events.append(name)
        if all(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
            return out  # a view launches nothing
        written = {
            id(value)
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        for tensor in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, now, name, id(tensor) in written)
        return out

    def _note(self, tensor: torch.Tensor, now: int, name: str, writes: bool) -> None:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = _Memory(StorageWeakRef(storage), self._stream)
            self._memory[storage._cdata], writes = memory, True
            if self._stream == SIDE:
                self._check_reuse(name)
        other, known = (SIDE, self._joined) if self._stream == MAIN else (MAIN, self._forked)
        if memory.written.get(other, -1) > known:
            self.hazards.append(f"{name} on {self._stream} reads what {other} writes meanwhile")
        if writes and memory.used.get(other, -1) > known:
            self.hazards.append(f"{name} on {self._stream} writes what {other} reads meanwhile")
        memory.used[self._stream] = now
        if writes:
            memory.written[self._stream] = now

    def _check_reuse(self, name: str) -> None:
        if any(used > self._forked for used in self._last_reads):
            self.hazards.append(f"{name} on side may be given memory that main still reads")
        self._last_reads.clear()
