"""Audits: now and then a captured call runs eagerly in place of its replay, and is compared.

A replay runs no Python, so guards compare what the Python could read. No list of what Python can
read is complete. An audit needs no such list: it runs the call for real and compares the operations
that the call does with those that were captured (`Stream`). Nothing runs twice, nothing is put
back, and the audited call itself is right.

| what is compared | how it is noted |
|---|---|
| operations in their order | by name, with constants |
| tensors that they work on | shape, dtype, strides, and where the memory comes from (`Origins`) |
| results | which tensors they are; other values as they are |

`partial/audited_call.py` audits calls of scopes, `whole_step/audited_step.py` whole steps. An audit
does not find changes that come and go between two audits, kernels that pass torch's dispatcher by,
and Python that does no operations.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import random
import re
import sys
import time
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_graphs.config import check_audits
from moe_graphs.engine.checkpointing import Checkpoints
from moe_graphs.engine.ranks import ALONE, Ranks
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import address, is_plain, unwrap
from moe_graphs.engine.tracing import (
    Operations,
    Origins,
    shown,
    source_line,
    written_arguments,
)
from moe_graphs.errors import GraphError

_SHARE = 0.01  # of the time
_AT_ONCE, _APART = 8, 256  # so many occasions are audited at once, later ones in so many calls
MEETING = 32  # calls or steps from one meeting of ranks that communicate to the next
NEVER = sys.maxsize
_MOST_KEPT = 64 << 20  # bytes of what an audited call writes are copied, to put them back
_ALLOCATION = re.compile(
    r"Tried to allocate ([\d.]+) (\w+).*? of which ([\d.]+) (\w+) is free", re.DOTALL
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

# ---- what is compared


@dataclass(frozen=True)
class Stream:
    """The operations of a captured call, compressed.

    Attributes:
        packed: a line for each operation, then one for the results.
        size: the number of operations.
    """

    packed: bytes
    size: int

    @classmethod
    def of(cls, operations: Operations, results: Sequence[Any]) -> Stream:
        pairs = zip(operations.ops, operations.memory, strict=True)
        lines = [_line(op, memory) for op, memory in pairs]
        lines.append(_line_of_results(operations.origins, results))
        return cls(zlib.compress("\n".join(lines).encode(), level=1), len(operations.ops))

    def lines(self) -> list[str]:
        return zlib.decompress(self.packed).decode().split("\n")


class Comparison(Operations):
    """A context that compares the operations inside with a captured stream, as they run.

    The source line is looked up where the first difference is, and nowhere else.

    Args:
        named: gives tensors of the capture by the names that messages use.
        before: the state before the run. Values that the run writes are added to it, up to 64 MiB.
            None if nothing is ever put back.
        checkpoint: what looks after torch's checkpoint inside.

    Attributes:
        difference: the first difference, for messages, or None.
    """

    def __init__(
        self,
        stream: Stream,
        origins: Origins,
        named: Callable[[], Mapping[str, Tensor]] = dict,
        before: Snapshot | None = None,
        checkpoint: Checkpoints | None = None,
    ) -> None:
        super().__init__(origins, checkpoint)
        self._lines, self._size, self._number = stream.lines(), stream.size, 0
        self._named, self._before = named, before
        self._kept: set[tuple[Any, ...]] = set()
        self._kept_bytes = 0
        self.difference: str | None = None

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._before is not None:
            self._keep_what_is_written(func, args, kwargs)
        return super().see(func, args, kwargs)

    @contextlib.contextmanager
    def undone_without_memory(self) -> Iterator[None]:
        """Context around the whole call, with this context inside.

        Raises:
            UndoneError: if memory ran out, and everything is as before the call.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._before is None or self.difference is not None:
                error.add_note(
                    "memory ran out in an audit, a call that runs eagerly in place of a replay, "
                    "and what it has done cannot be put back: it communicates with other ranks, "
                    "has written much, or has differed from its capture. audit_every=None turns "
                    "audits off"
                )
                raise
            self._before.put_back()
            raise UndoneError(_missing_bytes(error)) from None
        finally:
            # The thread of a backward may hold this context after the call. It must not hold the
            # gradients that the call has found, which a graph is going to write.
            self._before = None

    def _keep_what_is_written(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        assert self.origins is not None
        for tensor in written_arguments(func, args, kwargs):
            if self._before is None or self.origins.is_made(tensor):
                continue
            key = (address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
            if key in self._kept:
                continue
            self._kept.add(key)
            self._kept_bytes += tensor.nbytes
            if self._kept_bytes > _MOST_KEPT:
                self._before = None
            else:
                self._before.keep(tensor)

    def _add(self, op: tuple[Any, ...], memory: tuple[Any, ...]) -> None:
        number, self._number = self._number, self._number + 1
        if self.difference is not None:
            return
        line = _line(op, memory)
        captured = self._lines[number] if number < self._size else "no further one\t"
        if line != captured:
            where = source_line(traceback.extract_stack())
            self.differs(f"operation {number} is {self._told(line, captured)}, at {where}")

    def finish(self, results: Sequence[Any]) -> None:
        """Compares the end of the call, after the context."""
        if self.difference is None and self._number < self._size:
            operation, _ = self._lines[self._number].split("\t")
            self.differs(f"it ends before operation {self._number}, {operation} at the capture")
        if self.difference is None and _line_of_results(self.origins, results) != self._lines[-1]:
            self.differs("it returns something else than at the capture")

    def differs(self, difference: str) -> None:
        """Notes a difference, if none is known yet."""
        self.difference = self.difference or difference

    def _told(self, line: str, captured: str) -> str:
        now, memory = line.split("\t")
        before, memory_before = captured.split("\t")
        if now != before:
            return f"{now} and was {before} at the capture"
        pairs = zip(*map(ast.literal_eval, (memory, memory_before)), strict=True)
        number, (a, b) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        return (
            f"{now} as at the capture, but on other memory: its tensor {number} is "
            f"{self._origin(a)} and was {self._origin(b)}"
        )

    def _origin(self, origin: tuple[Any, ...]) -> str:
        """An origin for messages."""
        if len(origin) == 1:
            return str(origin[0])
        name, where, strides = origin
        if name == "at":
            for known, tensor in self._named().items():
                storage = unwrap(tensor).untyped_storage()
                if 0 <= where - storage.data_ptr() < storage.nbytes():
                    return f"{known} with strides {strides}"
            return f"memory at {where:#x} with strides {strides}"
        if isinstance(name, tuple):
            name = f"output {name[1]} of operation {name[0]}"
        return f"{name}, from element {where} on, with strides {strides}"


def named_tensors(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a capture, by the names that messages use."""
    named = {f"input {name!r}": each for name, each in inputs.items()}
    named |= {f"parameter {name!r}": each for name, each in model.named_parameters()}
    return named | {f"buffer {name!r}": each for name, each in model.named_buffers()}


class UndoneError(Exception):
    """Memory ran out in an audited call, and everything has been put back.

    Attributes:
        missing: the bytes that were missing, or None if torch's error does not say it.
    """

    def __init__(self, missing: int | None) -> None:
        super().__init__("memory ran out in an audit")
        self.missing = missing


def _missing_bytes(error: torch.OutOfMemoryError) -> int | None:
    """The bytes that an allocation missed, by torch's message of it.

    None if the message does not tell, or if free memory was in pieces or not allowed to be taken.
    """
    found = _ALLOCATION.search(str(error))
    if found is None:
        return None
    wanted, free = (float(found[i]) * _UNITS.get(found[i + 1], 0) for i in (1, 3))
    return int(wanted - free) if wanted > free else None


def _line(op: tuple[Any, ...], memory: tuple[Any, ...]) -> str:
    return f"{shown(op)}\t{memory!r}".replace("\n", " ")


def _line_of_results(origins: Origins | None, results: Sequence[Any]) -> str:
    assert origins is not None
    told = [
        (tuple(each.shape), each.dtype, each.requires_grad, origins.of(each))
        if isinstance(each, Tensor)
        else (type(each).__name__, each if is_plain(each) else None)
        for each in results
    ]
    return repr(told).replace("\n", " ")


# ---- when


class Schedule:
    """The calls of one captured call site that are audited.

    Calls are divided into windows, and one call in each window is audited. With "auto" the windows
    of a single call site have 1, 2, 4, 8, ... calls until the audits take at most their share of
    the time. N call sites take turns: the first window has N calls, so that a step has one audit on
    average, and a next window may be N times as long. A window where audits take less than their
    share is as long as the one before, or has half its length. With a number all windows have this
    length. The place within a window is drawn from a generator of the schedule's own, which ranks
    have in common. Ranks that communicate do not ask their own clocks: their windows have 1, 2, 4,
    ... calls up to ``MEETING``, and then a length that the ranks agree on (``wanted``).

    Attributes:
        due: the count of calls at which the next audit is due.
        wanted: the length of the next window by this rank's clock.
    """

    def __init__(self, audits: Audits, name: str) -> None:
        self._audits = audits
        self._random = random.Random(name)
        self._length = self.wanted = 1 if audits.every == "auto" else int(audits.every or 1)
        self.due = NEVER
        self._end = self._asked_for = 0
        audits.schedules += 1

    def begin(self, count: int) -> None:
        """Begins the first window behind the call of number ``count``."""
        if self._audits.every == "auto" and self._audits.ranks.group is None:
            self._length = self.wanted = self._audits.schedules
        self._end = count
        self._began, self._count, self._cost = time.perf_counter(), count, 0.0
        self._next_window()

    def took(self, seconds: float) -> None:
        """Notes the time of a part of an audit."""
        self._cost += seconds

    def audited(self, count: int) -> None:
        """Notes that an audit has run before the call of number ``count``; chooses the next one."""
        self._measure(count)
        self._next_window()

    def put_off(self, count: int) -> None:
        """Tries again in the next window, because the audit could not be made now."""
        self._end = max(self._end, count)
        if self._audits.every == "auto" and self._length < MEETING:
            self._length = self.wanted = 2 * self._length
        self._next_window()

    def affords(self, seconds: float) -> bool:
        """Whether an audit that takes so long now stays within the share of the time."""
        share = _SHARE / self._audits.schedules
        return seconds <= share * (time.perf_counter() - self._began)

    def soon(self, count: int) -> bool:
        """Lets the next call be audited, unless this has been asked for too often."""
        if self.due == NEVER:
            return False
        if count < _APART * (self._asked_for + 1 - _AT_ONCE):
            self._audits.skipped["often"] += 1
            return False
        self._asked_for += 1
        self.due = 0
        return True

    def agreed(self, length: int) -> None:
        """Lets the next windows have a length that all ranks have agreed on."""
        if self._audits.every == "auto" and self._length >= MEETING:
            self._length = length

    def _measure(self, count: int) -> None:
        now = time.perf_counter()
        of_a_call = (now - self._began) / max(1, count - self._count)
        share = _SHARE / self._audits.schedules
        calls = self._cost / (share * max(of_a_call, 1e-9))
        self._began, self._count, self._cost = now, count, 0.0
        if calls > self._length:
            by_turns = min(int(calls), self._audits.schedules * self._length)
            self.wanted = max(2 * self._length, by_turns)
        else:
            self.wanted = max(1, self._length // 2) if 4 * calls < self._length else self._length
        if self._audits.every != "auto":
            return
        if self._audits.ranks.group is None:
            self._length = self.wanted
        elif self._length < MEETING:
            self._length *= 2

    def _next_window(self) -> None:
        self.due = self._end + 1 + self._random.randrange(self._length)
        self._end += self._length


class Occasions:
    """Counts what lets the next call be audited: ``train()``, ``load_state_dict()`` and their kin.

    torch has no hooks for all of these methods, so they are replaced in torch's classes, once per
    process. A call that leaves a module in the mode that it has is no occasion, because many
    loops call ``train()`` in every step.

    Attributes:
        number: the number of occasions so far.
        last: object -> the number of its last occasion.
    """

    def __init__(self) -> None:
        self.number = 0
        self.last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_watching = False

    def watch(self) -> None:
        """Begins to count. Idempotent."""
        if self._is_watching:
            return
        self._is_watching = True
        self._before(nn.Module, "train", self._mode)
        self._before(nn.Module, "load_state_dict", self._load)
        self._before(Optimizer, "load_state_dict", self._change)
        self._before(Optimizer, "add_param_group", self._change)

    def since(self, number: int, objects: Iterable[Any]) -> bool:
        """Whether one of the objects has had an occasion after that of a number."""
        return any(self.last.get(each, 0) > number for each in objects)

    def _before(self, kind: type, name: str, note: Callable[..., None]) -> None:
        method = getattr(kind, name)

        @functools.wraps(method)
        def noting(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                note(owner, *args, **kwargs)
            return method(owner, *args, **kwargs)

        setattr(kind, name, noting)

    def _change(self, owner: Any, *_: Any, **__: Any) -> None:
        self.number += 1
        self.last[owner] = self.number

    def _mode(self, module: nn.Module, mode: bool = True) -> None:
        if module.training is not mode:
            self._change(module)

    def _load(self, module: nn.Module, *_: Any, **__: Any) -> None:
        for each in module.modules():
            self._change(each)


OCCASIONS = Occasions()


@dataclass
class CallAudit:
    """The audits of one captured call: their times, and the streams that they compare with.

    Attributes:
        last: the step of the last comparison with eager that passed.
        origins: names of the memory that the captured forward has made, until its backward is
            captured.
    """

    forward: Stream
    schedule: Schedule
    last: int
    origins: Origins | None = None
    backward: Stream | None = None


# ---- the audits of one model's graphs or of one whole step


@dataclass
class Audits:
    """The audits of one model's graphs or of one whole step, with their results and their cost.

    Attributes:
        every: "auto", or the number of calls in a window, or None for no audits.
        on_audit: what happens after a difference: "eager" or "error".
        ranks: the ranks that audit the same calls.
        step: the number of the step that is running.
        schedules: the number of call sites that are audited.
        passed: the number of audits without a difference.
        seconds: the time of all audited calls, on the host.
        skipped: reason -> number of audits that could not be made.
        missing: the most bytes that were missing for an audit.
        last_step: the last step in which an audit passed.
    """

    every: int | str | None
    on_audit: str
    ranks: Ranks = ALONE
    step: int = 0
    schedules: int = 0
    passed: int = 0
    seconds: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    last_step: int | None = None
    _seen: int = 0  # occasions
    _is_asked_for: bool = False
    _has_run_out: bool = False

    def __post_init__(self) -> None:
        check_audits(self.every, self.on_audit)
        if self.are_on:
            OCCASIONS.watch()
        self._seen = OCCASIONS.number

    @property
    def are_on(self) -> bool:
        return self.every is not None

    def origins(self, *, by_address: bool) -> Origins | None:
        """Names for the memory of a capture, or None if nothing is going to be audited."""
        return Origins(by_address=by_address) if self.are_on else None

    def of_call(self, operations: Operations, results: Sequence[Any], name: str) -> CallAudit:
        """The audits of a call that has just been captured."""
        forward, schedule = Stream.of(operations, results), Schedule(self, name)
        return CallAudit(forward, schedule, self.step, operations.origins)

    def are_asked_for(
        self,
        count: int,
        objects: Callable[[], Iterable[Any]],
        schedules: Callable[[], list[Schedule]],
    ) -> bool:
        """Whether calls are to be audited soon, because something has happened to the objects.

        Ranks that communicate decide this together, and agree on the length of the windows, where
        ``count`` is a multiple of ``MEETING``.
        """
        if self._seen != OCCASIONS.number:
            before, self._seen = self._seen, OCCASIONS.number
            self._is_asked_for |= OCCASIONS.since(before, objects())
        if self.ranks.group is not None:
            if count % MEETING:
                return False
            wanted = max((each.wanted for each in schedules()), default=1)
            asked, length = self.ranks.highest([int(self._is_asked_for), wanted])
            for each in schedules():
                each.agreed(length)
            self._is_asked_for = bool(asked)
        asked_for, self._is_asked_for = self._is_asked_for, False
        return asked_for

    def reported(self) -> dict[str, Any]:
        """The fields of a report."""
        return {
            "audits_passed": self.passed,
            "audit_seconds": self.seconds,
            "audits_skipped": dict(self.skipped),
            "audits_missed_bytes": self.missing,
            "last_audited_step": self.last_step,
        }

    def without_memory(self, missing: int | None) -> None:
        """Counts an audit that could not be made because bytes of memory were missing."""
        self.skipped["memory"] += 1
        self.missing = max(self.missing, missing or 0)

    def ran_out(self, what: str, missing: int | None, warn: Callable[[str], None]) -> None:
        """Counts an audit in which memory ran out, and tells the user of the first one."""
        self.without_memory(missing)
        if not self._has_run_out:
            self._has_run_out = True
            how_much = "" if missing is None else f" ({missing / 2**30:.2f} GiB were missing)"
            warn(
                f"{what}: memory ran out in an audit{how_much}. Training goes on as without it, "
                f"and further audits are counted in report().audits_skipped['memory'] if they do "
                f"not fit: audit_every=None turns audits off"
            )

    def note_passed(self) -> None:
        self.passed, self.last_step = self.passed + 1, self.step

    def message(self, difference: str, last: int) -> str:
        """A difference for users. ``last`` is the step of the last comparison that passed."""
        return (
            f"an audit in step {self.step} found that it does something else than at the capture: "
            f"{difference}. The audited call was right, and it runs eagerly from now on. Its last "
            f"comparison with eager was in step {last}, so replays in the steps after {last} may "
            f"have been wrong"
        )

    def found(self, what: str, message: str, warn: Callable[[str], None]) -> None:
        """Tells the user of a difference.

        Raises:
            GraphError: with ``on_audit="error"``.
        """
        if self.on_audit == "error":
            raise GraphError(f"{what}: {message}")
        warn(f"{what} stays eager: {message}")
