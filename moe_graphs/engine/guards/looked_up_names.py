"""Names of attributes that code gives to ``getattr`` and its kin, however it puts them together.

No instruction has such a name. ``sys.setprofile`` shows the call, but not its arguments. So the
instructions that make the name are followed once more at the call (``names_looked_up``), as far as
they only combine texts with what lies in variables, attributes and containers. Nothing of the
user's runs here. A name that a function makes in the argument is not known.

Functions in C look up names unseen (``map(getattr, ...)``, ``attrgetter``). If code that has such a
function may make texts, its names are not known, either (``looks_up_unseen``). A template of
``str.format`` has names that the event shows.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import re
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

_LOOKUPS = (getattr, hasattr, setattr, delattr)
_NAMES_OF_LOOKUPS = {function.__name__ for function in _LOOKUPS}
_UNSEEN = {"attrgetter", "methodcaller", "__getattribute__", "__setattr__", "__delattr__"}
_TEMPLATES = {"format", "format_map"}
_FORMATS = {"FORMAT_VALUE", "FORMAT_SIMPLE"}
_MAKE_TEXTS = _FORMATS | {"FORMAT_WITH_SPEC", "BUILD_SLICE", "BINARY_SLICE"}
_LEFT_OUT = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME"}
_PLAIN = (str, int, bool, float, type(None))
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "%": operator.mod}
ANY = "__dict__"  # stands for the names of all attributes


class _Unknown(Exception):
    """The value of an argument is not known without running code."""


class _Part(NamedTuple):
    """An instruction, or one of the two that an instruction stands for."""

    opname: str
    value: Any
    shown: str
    effect: int | None  # on the number of values at hand; None if it may jump


def names_looked_up(function: Any, frame: types.FrameType) -> Collection[str]:
    """The names that a call of a function in C looks up, by the instruction that makes the call."""
    if any(function is each for each in _LOOKUPS):
        return [_name_given(frame) or ANY]
    if function.__name__ in _TEMPLATES and isinstance(getattr(function, "__self__", None), str):
        return re.findall(r"\w+", function.__self__)
    return ()


def _name_given(frame: types.FrameType) -> str | None:
    """The second argument of the call that the frame has come to, or None if it is not known."""
    try:
        found = _value(_second_argument(frame.f_code, frame.f_lasti), frame)
    except Exception:
        return None
    return found if isinstance(found, str) else None


@functools.cache
def looks_up_unseen(code: types.CodeType) -> bool:
    """Whether the code may make names and let functions in C look them up."""
    instructions = list(dis.get_instructions(code))
    hands_on = not _UNSEEN.isdisjoint(code.co_names) or any(
        each.argval in _NAMES_OF_LOOKUPS and not (each.arg or 0) & 1
        for each in instructions
        if each.opname == "LOAD_GLOBAL"
    )
    return hands_on and any(map(_makes_a_text, instructions))


def _makes_a_text(instruction: dis.Instruction) -> bool:
    is_sum = instruction.opname == "BINARY_OP" and instruction.argrepr.rstrip("=") in _OPERATIONS
    return is_sum or instruction.opname in _MAKE_TEXTS


@functools.cache
def _second_argument(code: types.CodeType, offset: int) -> tuple[_Part, ...]:
    """The instructions that make the second argument of the call at an offset."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _LEFT_OUT]
    before = [part for i in instructions if i.offset < offset for part in _parts(i)]
    call = next(i for i in instructions if i.offset == offset)
    if call.opname != "CALL" or call.arg is None:
        raise _Unknown
    if before[-1].opname == "PRECALL":  # a part of the call, in Python 3.11
        before.pop()
    found: list[_Part] = []
    for _ in range(call.arg - 1):  # from the last argument to the second
        found, missing = [], 1
        while missing:
            part = before.pop()
            if part.effect is None or part.effect > missing:
                raise _Unknown
            missing -= part.effect
            found.insert(0, part)
    return tuple(found)


def _parts(instruction: dis.Instruction) -> list[_Part]:
    opname, value = instruction.opname, instruction.argval
    if isinstance(value, tuple) and opname.startswith("LOAD_FAST"):  # it stands for two
        return [_Part("LOAD_FAST", each, str(each), 1) for each in value]
    jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
    arg = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
    effect = None if jumps else dis.stack_effect(instruction.opcode, arg)
    return [_Part(opname, value, instruction.argrepr, effect)]


def _value(parts: tuple[_Part, ...], frame: types.FrameType) -> Any:
    """The value that instructions make.

    Raises:
        _Unknown: if they do something else than to load and to combine plain values.
    """
    at_hand: list[Any] = []
    for part in parts:
        opname, value = part.opname, part.value
        if opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            at_hand.append(value)
        elif opname.startswith("LOAD_FAST") or opname in ("LOAD_DEREF", "LOAD_NAME"):
            at_hand.append(frame.f_locals[value])
        elif opname == "LOAD_GLOBAL":
            at_hand.append(frame.f_globals.get(value, vars(builtins).get(value)))
        elif opname == "LOAD_ATTR":
            at_hand.append(_attribute(at_hand.pop(), value))
        elif opname == "BUILD_STRING":
            taken = [at_hand.pop() for _ in range(value)]
            at_hand.append("".join(reversed(taken)))
        elif opname in _FORMATS and not part.shown:
            at_hand.append(format(_plain(at_hand.pop())))
        else:
            second, first = at_hand.pop(), at_hand.pop()
            at_hand.append(_combined(opname, part.shown, first, second))
    return at_hand.pop()


def _attribute(owner: Any, name: str) -> Any:
    """The value under a name in the object itself, if its class has no say in that."""
    kind: Any = type(owner)
    if kind.__getattribute__ is not object.__getattribute__:
        raise _Unknown
    if any(name in vars(base) for base in kind.__mro__):
        raise _Unknown
    return vars(owner)[name]


def _combined(opname: str, shown: str, first: Any, second: Any) -> Any:
    if opname == "BINARY_SUBSCR" or shown == "[]":
        if type(first) not in (str, list, tuple, dict):
            raise _Unknown
        return first[_plain(second)]
    if opname != "BINARY_OP" or shown not in _OPERATIONS:
        raise _Unknown
    return _OPERATIONS[shown](_plain(first), _plain(second))


def _plain(value: Any) -> Any:
    """The value, if no code of the user's can run where it is combined with another one."""
    if type(value) not in _PLAIN:
        raise _Unknown
    return value
