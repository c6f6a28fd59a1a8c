"""Results of a call besides its outputs: tensors in attributes, counts, and checks of values.

**Attributes** that a call assigns tensors to, such as ``self.aux_loss = ...``, are outputs of its
graph. A trial run finds the places: entries of dictionaries, which hold attributes and buffers,
too. The run of a call hands what it leaves there on as a part of its outputs (``Left``), and puts
the old values back. Whoever runs the call for its caller sets the values (``Assigned.take``): a
replay the tensors that come out of it, with their gradients.

If the call reads an old value, as an average that is assigned does, this is an input of the call
(``Given``). Guards do not compare the places. Of an old value that is no input they compare what
Python can ask for, such as its shape; of one that code always assigns first, nothing. A number that
code only counts up (``self.calls += 1``) is a place, too: a replay counts.

**Checks** of values, such as ``assert not x.isnan().any()``: a graph cannot branch on a value. But
if one branch only raises, a forward that goes on has taken the other one. So a trial run, a capture
and an audit go on, and the value is a further output of the call. It is read without waiting for
the device, when a later step begins or at the latest when somebody asks. If it says that eager
would have raised, ``CheckError`` names scope and line.
"""

from __future__ import annotations

import contextlib
import contextvars
import dis
import functools
import linecache
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from moe_graphs.engine.guards.bytecode_names import AccessedNames, unwatched
from moe_graphs.engine.guards.introspection import GONE
from moe_graphs.engine.tensors import address, tensor_leaves
from moe_graphs.errors import CheckError

_MOST = 64  # steps whose checks may wait to be read
# Instructions after which an error is not certain any more.
_ENDS = ("RETURN", "YIELD", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE", "JUMP",
         "POP_JUMP", "FOR_ITER", "SEND")  # fmt: skip
_noting: contextvars.ContextVar[bool] = contextvars.ContextVar("moe_graphs_noting", default=False)

Key = tuple[str, bool, int]
"""The line of a check, the truth value with which a forward goes on, and the check's number."""


# ---- attributes


class Given(NamedTuple):
    """The inputs of a call, and the old values of attributes that it reads."""

    inputs: Any
    of_attributes: tuple[Any, ...]


class Left(NamedTuple):
    """The outputs of a call, and what it leaves besides them.

    Attributes:
        in_attributes: values by the number of the place; of a counter, how far it counts.
        checks: values that say whether checks have failed.
    """

    outputs: Any
    in_attributes: dict[int, Any]
    checks: dict[Key, Tensor]


@dataclass
class Place:
    """An entry of a dictionary.

    Attributes:
        is_input: whether operations read the old value, or it is handed out.
        is_counter: whether code only adds a number to the value.
        is_read: whether code may read the old value, and does not always assign first.
    """

    holder: dict[Any, Any]
    key: Any
    name: str
    is_input: bool
    is_read: bool
    is_counter: bool = False

    def read(self) -> Any:
        return self.holder.get(self.key, GONE)

    def write(self, value: Any) -> None:
        if value is GONE:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value

    def asked(self) -> Any:
        """Everything that Python can ask of the value, besides the values of tensors."""
        leaves, structure = pytree.tree_flatten(self.read())
        return structure, [
            (type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]


class Assigned:
    """The places that calls of one scope, or of one step, assign tensors to, and their checks.

    Attributes:
        name: the name of the scope.
        deferred: outcomes of checks that are to be read.
        may_check: whether values may be asked for in checks. Trial runs find out.
    """

    def __init__(self, name: str = "") -> None:
        self.name, self.places = name, list[Place]()
        self.deferred = Deferred()
        self.may_check = True
        self._has_checked = False

    def tried(self) -> None:
        """Ends the trial runs: later runs ask for values only if trial runs did."""
        self.may_check = self._has_checked

    @cached_property
    def inputs(self) -> list[Place]:
        """The places whose old values are inputs."""
        return [place for place in self.places if place.is_input]

    def compared(self) -> Mapping[int, Mapping[Any, Place]]:
        """The places by the id of their dictionary and by key, for guards."""
        found: dict[int, dict[Any, Place]] = {}
        for place in self.places:
            found.setdefault(id(place.holder), {})[place.key] = place
        return found

    def find(self, guards: Any, accessed: AccessedNames, read: Collection[int]) -> bool:
        """Notes what a run has assigned since ``guards`` were made, and puts the old values back.

        Args:
            accessed: the code that ran.
            read: addresses of the memory that operations have read, or that was handed out.

        Returns:
            Whether there is a new place.
        """
        known, loaded, counted = self.compared(), accessed.loaded, accessed.counted
        new: list[tuple[Place, Any]] = []
        for container, before in guards.contents:
            holder = container.holder
            if type(holder) is not dict or container.owner is not None:
                continue
            for key, value in container.contents().items():
                old = before.get(key, GONE)
                is_counter = key in counted and type(value) is type(old) is int
                if value is old or not (is_counter or _can_be_output(value, old)):
                    continue
                if key in known.get(id(holder), ()):
                    continue
                is_input = any(address(each) in read for each in tensor_leaves(old))
                is_read = not is_counter and (not isinstance(key, str) or key in loaded)
                name = f"{container.name}.{key}".lstrip(".")
                new.append((Place(holder, key, name, is_input, is_read, is_counter), old))
        for place, old in new:
            place.write(old)
        self.places += [place for place, _ in new]
        self.__dict__.pop("inputs", None)
        return bool(new)

    def put_back(self, kept: Mapping[int, Mapping[Any, Any]]) -> None:
        """Sets values that the places had earlier: ``kept`` has dictionaries' contents by id."""
        for place in self.places:
            if id(place.holder) in kept:
                place.write(kept[id(place.holder)].get(place.key, GONE))

    def given(self, inputs: Any) -> Any:
        """The inputs together with the old values that are inputs, if there are some."""
        if not self.inputs:
            return inputs
        return Given(inputs, tuple(place.read() for place in self.inputs))

    def run(self, inputs: Any, run: Callable[[Any], Any]) -> Any:
        """Runs the call. If it leaves something, outputs are ``Left``; old values are put back."""
        if not (self.places or self.may_check):
            return run(inputs)
        before = [place.read() for place in self.places]
        if isinstance(inputs, Given):
            for place, value in zip(self.inputs, inputs.of_attributes, strict=True):
                place.write(value)
            inputs = inputs.inputs
        started = [place.read() for place in self.places]
        checks = Checks()
        try:
            with checks if self.may_check else contextlib.nullcontext():
                outputs = run(inputs)
            after = [place.read() for place in self.places]
        finally:
            for place, value in zip(self.places, before, strict=True):
                place.write(value)
        pairs = enumerate(zip(started, after, strict=True))
        left = {
            number: now - old if self.places[number].is_counter else now
            for number, (old, now) in pairs
            if now is not old
        }
        self._has_checked |= bool(checks.found)
        return Left(outputs, left, checks.found) if left or checks.found else outputs

    def take(self, outputs: Any) -> Any:
        """Sets what a call has left; returns its other outputs."""
        if type(outputs) is not Left:
            return outputs
        for number, value in outputs.in_attributes.items():
            place = self.places[number]
            place.write(place.read() + value if place.is_counter else value)
        self.deferred.add(self.name, outputs.checks)
        return outputs.outputs

    def values(self) -> list[Any]:
        """The present values of the places."""
        return [place.read() for place in self.places]

    def name_of(self, path: Any) -> tuple[Any, str | None]:
        """The path of an input within the call's own inputs, or the name of the attribute."""
        if not (path and getattr(path[0], "name", None) in Given._fields and self.inputs):
            return path, None
        if path[0].name == "inputs":
            return path[1:], None
        return path, f"{self.inputs[path[1].idx].name}{pytree.keystr(path[2:])}"


def contents_of(model: nn.Module) -> dict[int, dict[Any, Any]]:
    """Contents of the dictionaries that modules have: attributes, buffers, and plain ones."""
    own = [place for module in model.modules() for place in (vars(module), module._buffers)]
    inner = [each for place in own for each in place.values() if type(each) is dict]
    return {id(place): dict(place) for place in (*own, *inner)}


def _can_be_output(value: Any, old: Any) -> bool:
    """Whether it has tensors of the call; DDP assigns a new list of the same buffers."""
    leaves, before = tensor_leaves(value), tensor_leaves(old)
    if len(leaves) == len(before) and all(map(operator.is_, leaves, before)):
        return False
    return bool(leaves) and not any(isinstance(leaf, nn.Parameter) for leaf in leaves)


# ---- checks


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
