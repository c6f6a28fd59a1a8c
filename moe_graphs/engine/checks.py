"""Checks of values in a forward, such as ``assert not x.isnan().any()``: made on the device, later.

A graph cannot branch on a value. But if one branch only raises, a forward that goes on has taken
the other one. So a trial run, a capture and an audit go on, and the value is a further output of
the call. It is read without waiting for the device, when a later step begins or at the latest when
somebody asks. If it says that eager would have raised, ``CheckError`` names scope and line.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import linecache
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_graphs.engine.guards.bytecode_names import unwatched
from moe_graphs.errors import CheckError

_MOST = 64  # steps whose checks may wait to be read
# Instructions after which an error is not certain any more.
_ENDS = ("RETURN", "YIELD", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE", "JUMP",
         "POP_JUMP", "FOR_ITER", "SEND")  # fmt: skip
_noting: contextvars.ContextVar[bool] = contextvars.ContextVar("moe_graphs_noting", default=False)

Key = tuple[str, bool, int]
"""The line of a check, the truth value with which a forward goes on, and the check's number."""


class Checks(TorchFunctionMode):
    """A context in which checks of values do not read them; ``found`` gets the values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Key, Tensor] = {}

    def __enter__(self) -> Self:
        self._token = _noting.set(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _noting.reset(self._token)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__:
            with unwatched():
                goes_on = self.note(args[0], sys._getframe(1))
            if goes_on is not None:
                return goes_on
        return func(*args, **(kwargs or {}))

    def note(self, value: Tensor, frame: types.FrameType) -> bool | None:
        """Notes a value that Python asks for, if it is that of a check, and how the code goes on.

        Otherwise None.
        """
        goes_on = _goes_on(frame.f_code, frame.f_lasti)
        if goes_on is not None:
            name, number = frame.f_code.co_filename, frame.f_lineno
            line = f"{name}:{number}: {linecache.getline(name, number).strip()}"
            self.found[line, goes_on, len(self.found)] = value.detach()
        return goes_on


def are_noted() -> bool:
    """Whether a trial run or a capture notes the checks of the code that runs now."""
    return _noting.get()


class Deferred:
    """Outcomes of checks that were not read yet.

    Args:
        error: the error of a failed check, by its place and key. Default: that of a replay.

    Attributes:
        now: checks of replays, with the name of the scope.
        waiting: outcomes on their way to the host, oldest first.
    """

    def __init__(self, error: Callable[[str, Key], CheckError] | None = None) -> None:
        self._error = _of_a_replay if error is None else error
        self.now: list[tuple[str, Key, Tensor]] = []
        self.waiting: deque[tuple[Any, Tensor, list[tuple[str, Key]]]] = deque()

    def add(self, where: str, checks: Mapping[Key, Tensor]) -> None:
        """Adds the checks of one replay."""
        self.now += [(where, key, value) for key, value in checks.items()]

    def poll(self, *, waiting: bool = False) -> None:
        """Reads the outcomes that have arrived, and sends for those that were added since.

        Args:
            waiting: whether to wait for all of them.

        Raises:
            CheckError: for the first check that has failed.
        """
        if self.now:
            self.waiting.append(_sent(self.now))
            self.now = []
        while self.waiting:
            event, failed, checks = self.waiting[0]
            if event is not None and not (waiting or len(self.waiting) > _MOST or event.query()):
                return
            if event is not None:
                event.synchronize()
            self.waiting.popleft()
            if failed.any():
                self.waiting.clear()
                raise self._error(*checks[int(failed.int().argmax())])


@torch.no_grad()
def _sent(checks: Iterable[tuple[str, Key, Tensor]]) -> tuple[Any, Tensor, list[tuple[str, Key]]]:
    """The outcomes on their way to the host, and the event at which they have arrived."""
    checks = list(checks)
    failed = torch.stack([value.reshape(()).bool() != key[1] for _, key, value in checks])
    named = [(where, key) for where, key, _ in checks]
    if not failed.is_cuda:
        return None, failed, named
    on_host = torch.empty(failed.shape, dtype=torch.bool, pin_memory=True)
    on_host.copy_(failed, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event, on_host, named


def _of_a_replay(where: str, key: Key) -> CheckError:
    line, *_ = key
    return CheckError(
        f"{where}: a check has failed in a replay, at {line}: eager would have raised there. It is "
        f"read one step late, so the parameters may have been updated since: look at an earlier "
        f"checkpoint, and run the step within graphs.paused() for the error itself"
    )


# ---- which truth values are checks, by the code behind them


@functools.cache
def _goes_on(code: types.CodeType, at: int) -> bool | None:
    """The truth value of a tensor, asked for at ``at``, with which the code does not raise.

    None if both or none of the branches raise.
    """
    instructions = list(dis.get_instructions(code))
    places = {each.offset: number for number, each in enumerate(instructions)}
    if at not in places:
        return None
    number, is_true = places[at], True
    while instructions[number].opname in ("UNARY_NOT", "TO_BOOL"):
        is_true ^= instructions[number].opname == "UNARY_NOT"
        number += 1
    jump = instructions[number]
    if not (jump.opname.startswith("POP_JUMP") and jump.opname.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    jumps_if = jump.opname.endswith("IF_TRUE") == is_true
    there = _raises(instructions, places[jump.argval])
    here = _raises(instructions, number + 1)
    return None if there == here else (jumps_if if here else not jumps_if)


def _raises(instructions: list[dis.Instruction], number: int) -> bool:
    """Whether the code from an instruction on does nothing but to raise."""
    for each in instructions[number:]:
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opname.startswith(_ENDS):
            return False
    return False
