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
import random
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_graphs.engine.tensors import is_plain, unwrap
from moe_graphs.engine.tracing import Operations, Origins, shown, source_line
from moe_graphs.errors import GraphError

_SHARE = 0.01  # of the time
_LONGEST = 512  # calls between two audits, on ranks that communicate
NEVER = sys.maxsize

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

    Attributes:
        difference: the first difference, for messages, or None.
    """

    def __init__(
        self,
        stream: Stream,
        origins: Origins,
        named: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        super().__init__(origins)
        self._lines, self._size, self._number = stream.lines(), stream.size, 0
        self._named = named
        self.difference: str | None = None

    def _add(self, op: tuple, memory: tuple) -> None:
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

    def _origin(self, origin: tuple) -> str:
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


def _line(op: tuple, memory: tuple) -> str:
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
    have 1, 2, 4, 8, ... calls until the audits take their share of the time. A window is never
    twice as long as the one before. With a number all windows have this length. The place within a
    window is drawn from a generator of the schedule's own, which ranks have in common.

    Attributes:
        due: the count of calls at which the next audit is due.
    """

    def __init__(self, audits: Audits, name: str, *, alone: bool) -> None:
        self._audits, self._alone = audits, alone
        self._random = random.Random(name)
        self._length = 1 if audits.every == "auto" else int(audits.every or 1)
        self.due = NEVER
        self._end = 0
        audits.schedules += 1

    def begin(self, count: int) -> None:
        """Begins the first window behind the call of number ``count``."""
        self._end = count
        self._began, self._count, self._cost = time.perf_counter(), count, 0.0
        self._next_window()

    def took(self, seconds: float) -> None:
        """Notes the time of a part of an audit."""
        self._cost += seconds

    def audited(self, count: int) -> None:
        """Notes that an audit has run before the call of number ``count``; chooses the next one."""
        if self._audits.every == "auto":
            longest = 2 * self._length
            if self._alone:
                now = time.perf_counter()
                of_a_call = (now - self._began) / max(1, count - self._count)
                share = _SHARE / self._audits.schedules
                wanted = int(self._cost / (share * max(of_a_call, 1e-9))) + 1
                self._length = max(min(wanted, longest), self._length // 2, 1)
                self._began, self._count, self._cost = now, count, 0.0
            else:
                self._length = min(longest, _LONGEST)
        self._next_window()

    def put_off(self, count: int) -> None:
        """Tries again in the next window, because the audit could not be made now."""
        self._end = max(self._end, count)
        self._next_window()

    def _next_window(self) -> None:
        self.due = self._end + 1 + self._random.randrange(self._length)
        self._end += self._length


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
        step: the number of the step that is running.
        schedules: the number of call sites that are audited.
        passed: the number of audits without a difference.
        seconds: the time of all audited calls, on the host.
        skipped: reason -> number of audits that could not be made.
        last_step: the last step in which an audit passed.
    """

    every: int | str | None
    on_audit: str
    step: int = 0
    schedules: int = 0
    passed: int = 0
    seconds: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    last_step: int | None = None

    @property
    def are_on(self) -> bool:
        return self.every is not None

    def origins(self, *, by_address: bool) -> Origins | None:
        """Names for the memory of a capture, or None if nothing is going to be audited."""
        return Origins(by_address=by_address) if self.are_on else None

    def of_call(
        self, operations: Operations, results: Sequence[Any], name: str, *, alone: bool
    ) -> CallAudit:
        """The audits of a call that has just been captured.

        Args:
            alone: whether no other rank takes part in the call.
        """
        forward, schedule = Stream.of(operations, results), Schedule(self, name, alone=alone)
        return CallAudit(forward, schedule, self.step, operations.origins)

    def reported(self) -> dict[str, Any]:
        """The fields of a report."""
        return {
            "audits_passed": self.passed,
            "audit_seconds": self.seconds,
            "audits_skipped": dict(self.skipped),
            "last_audited_step": self.last_step,
        }

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
