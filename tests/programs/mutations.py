"""Mutations of an object by its type, each with what undoes it."""

from __future__ import annotations

import abc
import array
import collections
import copy
import ctypes
import enum
import functools
import io
import itertools
import mmap
import queue
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from programs.reachable_objects import (
    OF_MODULES,
    PLAIN,
    Path,
    World,
    _Named,
    attributes,
    cell_of,
    is_the_same_in_every_run,
    members,
    shown,
)

Undo = Callable[[], None]
Change = Callable[[Any, World], None]


@dataclass(frozen=True)
class Mutation:
    """A change of the object at a path. ``kind`` is its name in tables."""

    kind: str
    path: Path
    place: str
    change: Change = field(compare=False, repr=False)

    def apply(self, world: World) -> Undo:
        target = world.at(self.path)
        undo = snapshot(target)
        try:
            self.change(target, world)
        except Exception:
            undo()
            raise
        return undo

    def __str__(self) -> str:
        return f"{self.kind} at {shown(self.path)}{self.place}"


# ---- putting back


def snapshot(value: Any) -> Undo:
    """Note the contents of a value; the function that is returned puts them back."""
    parts = list(_snapshots(value))

    def undo() -> None:
        for part in parts:
            part()

    return undo


def _snapshots(value: Any) -> Iterator[Undo]:
    if isinstance(value, _Named):
        before = {name: value.space[name] for name in value.names()}
        yield lambda: [value.space.pop(name) for name in value.names()] and None
        yield lambda: value.space.update(before)
    elif isinstance(value, type):
        yield _snapshot_of_class(value)
    elif isinstance(value, types.FunctionType):
        yield _snapshot_of_function(value)
    elif isinstance(value, torch.Tensor):
        data, needs = value.detach().clone(), value.requires_grad
        yield lambda: (value.requires_grad_(needs), value.detach().copy_(data))[0]
        yield _of_dictionary(vars(value))
    elif type(value) in _CONTENTS:
        yield _CONTENTS[type(value)](value)
    elif isinstance(value, Mapping):
        yield _of_dictionary(value)
    elif isinstance(value, (list, collections.deque, set, bytearray, array.array, np.ndarray)):
        yield _of_sequence(value)
    elif isinstance(value, (memoryview, ctypes.Structure, ctypes._SimpleCData)):
        before_bytes = bytes(value)
        yield lambda: memoryview(value).cast("B").__setitem__(slice(None), before_bytes)
    kind = type(value)
    if isinstance(value, nn.Module):
        for name in OF_MODULES:
            yield _of_dictionary(getattr(value, name))
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        yield _of_dictionary(vars(value))
        if kind.__flags__ & (1 << 9):
            yield (
                lambda: (
                    None if type(value) is kind else object.__setattr__(value, "__class__", kind)
                )
            )
    slots = [(k, v) for k, v in attributes(value) if k not in getattr(value, "__dict__", {})]
    yield lambda: [object.__setattr__(value, k, v) for k, v in slots] and None


def _of_dictionary(place: Any) -> Undo:
    before = list(place.items())

    def undo() -> None:
        now = list(place.items())
        if len(now) == len(before) and all(
            a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True)
        ):
            return
        if isinstance(place, Mapping) and hasattr(place, "clear"):
            place.clear()
            for key, child in before:
                place[key] = child

    return undo


def _of_sequence(value: Any) -> Undo:
    before = copy.copy(value)

    def undo() -> None:
        if isinstance(value, (set, collections.deque)):
            value.clear()
            getattr(value, "update" if isinstance(value, set) else "extend")(before)
        else:
            value[:] = before

    return undo


def _snapshot_of_class(kind: type) -> Undo:
    before = dict(vars(kind))

    def undo() -> None:
        for name in set(vars(kind)) - set(before):
            type.__delattr__(kind, name)
        for name, child in before.items():
            if vars(kind).get(name, undo) is not child:
                type.__setattr__(kind, name, child)

    return undo


def _snapshot_of_function(function: types.FunctionType) -> Undo:
    code, defaults = function.__code__, function.__defaults__
    keywords = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
    cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if _is_full(cell)]
    of_attributes = _of_dictionary(vars(function))

    def undo() -> None:
        function.__code__, function.__defaults__ = code, defaults
        function.__kwdefaults__ = keywords
        for cell, contents in cells:
            cell.cell_contents = contents
        of_attributes()

    return undo


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _is_full
    except ValueError:
        return False


def _partial(value: functools.partial) -> Undo:
    before = value.__reduce__()[2]
    return lambda: value.__setstate__(before)


def _queue(value: queue.SimpleQueue) -> Undo:
    size = value.qsize()
    return lambda: [value.get_nowait() for _ in range(value.qsize() - size)] and None


def _variable(value: ContextVar) -> Undo:
    before = value.get()
    return lambda: value.set(before) and None


def _stream(value: io.StringIO) -> Undo:
    before = value.__getstate__()
    return lambda: value.__setstate__(before)


def _count(value: itertools.count) -> Undo:
    before = repr(value)

    def undo() -> None:
        if repr(value) != before:
            raise CannotBeUndone

    return undo


class CannotBeUndone(Exception):
    """Signal that a program has to be built anew."""


_CONTENTS: dict[type, Callable[[Any], Undo]] = {
    functools.partial: _partial,
    queue.SimpleQueue: _queue,
    ContextVar: _variable,
    io.StringIO: _stream,
    itertools.count: _count,
}


# ---- other values in the place of a value


def other(value: Any) -> Any:
    """Another value of the same plain type; raises ``TypeError`` if there is none."""
    if isinstance(value, enum.Enum):
        kinds = list(type(value))
        return kinds[(kinds.index(value) + 1) % len(kinds)]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, np.number)):
        return type(value)(value * 2 + 1)
    if isinstance(value, str):
        try:
            return str(float(value) * 2 + 1)
        except ValueError:
            return f"{value}x"
    if isinstance(value, tuple) and value:
        return (
            type(value)._make((other(value[0]), *value[1:]))
            if hasattr(value, "_make")
            else ((other(value[0]), *value[1:]))
        )
    if isinstance(value, frozenset):
        return frozenset(members(value)[1:])
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        with torch.no_grad():
            changed = value.detach() * 2 + 1
        return nn.Parameter(changed) if isinstance(value, nn.Parameter) else changed
    if isinstance(value, (list, collections.deque)) and len(value):
        return type(value)([other(value[0]), *list(value)[1:]])
    if isinstance(value, dict) and value:
        changed = copy.copy(value)
        key = next(iter(changed))
        changed[key] = other(changed[key])
        return changed
    raise TypeError(type(value))


def equal(value: Any) -> Any:
    """An equal object that is another one; raises ``TypeError`` if there is none."""
    if isinstance(value, torch.Tensor):
        made = value.detach().clone().requires_grad_(value.requires_grad)
        return nn.Parameter(made) if isinstance(value, nn.Parameter) else made
    if isinstance(value, (*PLAIN, type, types.ModuleType, types.FunctionType, enum.Enum)):
        raise TypeError(type(value))
    made = copy.deepcopy(value) if isinstance(value, nn.Module) else copy.copy(value)
    if made is value:
        raise TypeError(type(value))
    return made


# ---- mutations of a place that holds a value


@dataclass(frozen=True)
class Place:
    """A place in an object that holds a value."""

    word: str
    shown: str
    value: Any
    put: Callable[[Any, Any], None]
    remove: Callable[[Any], None] | None = None


def places(value: Any) -> Iterator[Place]:
    if isinstance(value, _Named):
        for name in value.names():
            yield Place("name", f".{name}", value.space[name], _put_name(name), _drop_name(name))
    elif isinstance(value, type):
        for name, child in list(vars(value).items()):
            if not name.startswith("__") or name in ("__init__", "__call__", "__getattr__"):
                yield _attribute("class attribute", name, child)
    elif isinstance(value, types.FunctionType):
        yield from _places_of_function(value)
    elif isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        # Weak dictionaries print errors if their own attributes are missing.
        is_weak = isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary))
        is_globals = "__builtins__" in value
        for number, (key, child) in enumerate(list(value.items())[:40]):
            if not (is_globals and (str(key).startswith("__") or not _is_interesting(child))):
                by_key = is_the_same_in_every_run(key, value)
                yield _entry("global" if is_globals else "entry", number, key, child, by_key)
        yield from () if is_weak else _attributes(value)
    elif isinstance(value, (list, collections.deque)):
        for number, child in enumerate(list(value)[:4]):
            yield Place("element", f"[{number}]", child, _put_item(number), _drop_item(number))
        yield from _attributes(value)
    else:
        yield from _attributes(value)


def _is_interesting(value: Any) -> bool:
    return not isinstance(value, types.ModuleType) or value.__spec__ is None


def _attributes(value: Any) -> Iterator[Place]:
    for name, child in attributes(value):
        # The hash of an enum's member is that of its name, which differs from process to process.
        if name not in OF_MODULES and not (isinstance(value, enum.Enum) and name == "_name_"):
            yield _attribute("attribute", name, child)
    if isinstance(value, nn.Module):
        for part in ("_parameters", "_buffers", "_modules"):
            for name, child in getattr(value, part).items():
                yield _attribute(part[1:-1].replace("ie", "y"), name, child)


def _attribute(word: str, name: str, child: Any) -> Place:
    def put(target: Any, new: Any) -> None:
        try:
            setattr(target, name, new)
        except (AttributeError, TypeError):
            object.__setattr__(target, name, new)

    return Place(word, f".{name}", child, put, lambda target: delattr(target, name))


def _entry(word: str, number: int, key: Any, child: Any, by_key: bool) -> Place:
    def found(target: Any) -> Any:
        return key if by_key else list(target)[number]

    return Place(
        word,
        f"[{key!r}]" if by_key else f"[key {number}]",
        child,
        lambda target, new: target.__setitem__(found(target), new),
        lambda target: target.__delitem__(found(target)),
    )


def _put_name(name: str) -> Callable[[Any, Any], None]:
    return lambda target, new: target.space.__setitem__(name, new)


def _drop_name(name: str) -> Callable[[Any], None]:
    return lambda target: target.space.__delitem__(name)


def _put_item(number: int) -> Callable[[Any, Any], None]:
    return lambda target, new: target.__setitem__(number, new)


def _drop_item(number: int) -> Callable[[Any], None]:
    return lambda target: target.__delitem__(number)


def _places_of_function(function: types.FunctionType) -> Iterator[Place]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if _is_full(cell):
            yield Place("closure cell", f".<closure>.{name}", cell.cell_contents, _put_cell(name))
    first = function.__code__.co_argcount - len(function.__defaults__ or ())
    for number, child in enumerate(function.__defaults__ or ()):
        name = function.__code__.co_varnames[first + number]
        yield Place("default", f".<default>.{name}", child, _put_default(number))
    for name, child in (function.__kwdefaults__ or {}).items():
        yield Place("keyword default", f".__kwdefaults__[{name!r}]", child, _put_keyword(name))
    for name, child in vars(function).items():
        yield _attribute("function attribute", name, child)


def _put_cell(name: str) -> Callable[[Any, Any], None]:
    return lambda target, new: setattr(cell_of(target, name), "cell_contents", new)


def _put_default(number: int) -> Callable[[Any, Any], None]:
    def put(target: Any, new: Any) -> None:
        found = list(target.__defaults__)
        found[number] = new
        target.__defaults__ = tuple(found)

    return put


def _put_keyword(name: str) -> Callable[[Any, Any], None]:
    return lambda target, new: target.__kwdefaults__.__setitem__(name, new)


Known = list[tuple[Path, Any]]


def mutations(path: Path, value: Any, known: Known) -> Iterator[Mutation]:
    """Yield all mutations of an object. ``known`` has the objects to exchange values for."""
    for place in places(value):
        yield from _of_place(path, place, known)
    for kind, change in _of_whole(value):
        # A module's dictionaries have modules, tensors or functions alone.
        if kind != "entry added" or path[-1][1] not in OF_MODULES:
            yield Mutation(kind, path, "", change)


def _of_place(path: Path, place: Place, known: Known) -> Iterator[Mutation]:
    def made(what: str, change: Change) -> Mutation:
        return Mutation(f"{place.word} {what}", path, place.shown, change)

    put, remove, value = place.put, place.remove, place.value
    for what, make in (("set", other), ("exchanged for an equal object", equal)):
        try:
            make(value)
        except Exception:
            continue
        # The value is read anew, since another run of the program has other objects.
        yield made(what, lambda target, world, m=make: put(target, m(_now(place, target))))
    if not isinstance(value, PLAIN):
        yield made("set to None", lambda target, world: put(target, None))
        for there in _exchanges(value, known):
            what = "exchanged for a known object"
            yield made(what, lambda target, world, t=there: put(target, world.at(t)))
    if remove is not None:
        yield made("deleted", lambda target, world: remove(target))
        if place.word != "element":
            yield made("renamed", lambda target, world: _rename(place, target))


def _now(place: Place, target: Any) -> Any:
    return next(each.value for each in places(target) if each.shown == place.shown)


def _rename(place: Place, target: Any) -> None:
    value = _now(place, target)
    assert place.remove is not None
    if place.shown.startswith("."):
        place.remove(target)
        if isinstance(target, _Named):
            target.space[place.shown[1:] + "x"] = value
        else:
            setattr(target, place.shown[1:] + "x", value)
        return
    key = next(k for n, k in enumerate(target) if place.shown in (f"[{k!r}]", f"[key {n}]"))
    place.remove(target)
    target[other(key)] = value


def _exchanges(value: Any, known: Known) -> Iterator[Path]:
    """Paths of other known objects that can stand for a value, first those of the pieces."""
    # A step within a step would never end.
    known = [(path, each) for path, each in known if len(path) > 1]
    found = [path for path, each in known if each is not value and _alike(each, value)]
    found.sort(key=lambda path: not re.search(r"_\d+\b", shown(path)))
    yield from found[:3]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, types.FunctionType) or isinstance(b, types.FunctionType):
        return type(a) is type(b) and a.__code__.co_argcount == b.__code__.co_argcount
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and isinstance(a, nn.Parameter) == isinstance(b, nn.Parameter)
    return type(a) is type(b) and not isinstance(a, type)


# ---- mutations of an object as a whole


def _of_whole(value: Any) -> Iterator[tuple[str, Change]]:
    if isinstance(value, _Named):
        return
    if isinstance(value, nn.Module):
        yield from _of_module(value)
    elif isinstance(value, torch.Tensor):
        yield "tensor filled", lambda t, w: t.detach().fill_(0.75)
        yield "requires_grad flipped", lambda t, w: t.requires_grad_(not t.requires_grad)
        yield "tensor has an attribute", lambda t, w: setattr(t, "gain", 2.5)
    elif isinstance(value, types.FunctionType):
        yield "code exchanged", _exchange_code
    elif isinstance(value, (collections.abc.MutableMapping)) and "__builtins__" not in value:
        yield from _of_mapping(value)
    elif isinstance(value, (list, collections.deque)):
        yield from _of_sequence_as_whole(value)
    elif isinstance(value, set):
        yield "member added", lambda t, w: t.add(other(members(t)[0]) if t else 1)
        yield "member removed", lambda t, w: t.remove(members(t)[0])
        yield "member exchanged", _exchange_member
    else:
        for kinds, kind, change in _STATE_IN_C:
            if isinstance(value, kinds):
                yield kind, change
    if type(value).__flags__ & (1 << 9) and not isinstance(value, (type, enum.Enum)):
        yield "class exchanged", _exchange_class


def _of_module(value: nn.Module) -> Iterator[tuple[str, Change]]:
    yield "eval()", lambda t, w: t.eval()
    yield "forward hook added", lambda t, w: _add_hook(t)
    yield "forward patched", _patch_forward
    for name in ("_modules", "_buffers", "_parameters"):
        if len(getattr(value, name)) > 1:
            kind = f"{name[1:]} reordered"
            yield kind, lambda t, w, n=name: _reorder(getattr(t, n))
            kind = f"{name[1:]} swapped"
            yield kind, lambda t, w, n=name: _swap(getattr(t, n))


def _add_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, y: y * 2)


def _patch_forward(module: nn.Module, world: World) -> None:
    forward = type(module).forward
    module.forward = lambda *args: forward(module, *args) * 2  # type: ignore[method-assign]


def _of_mapping(value: Any) -> Iterator[tuple[str, Change]]:
    yield "entry added", lambda t, w: t.__setitem__("added", 2.5)
    if len(value) > 1:
        yield "entries reordered", lambda t, w: _reorder(t)
        yield "entries swapped", lambda t, w: _swap(t)
    if isinstance(value, collections.ChainMap):
        yield "maps reversed", lambda t, w: t.maps.reverse()


def _reorder(place: Any) -> None:
    entries = list(place.items())[::-1]
    place.clear()
    for key, value in entries:
        place[key] = value


def _swap(place: Any) -> None:
    first, second = list(place)[:2]
    place[first], place[second] = place[second], place[first]


def _of_sequence_as_whole(value: Any) -> Iterator[tuple[str, Change]]:
    yield "element appended", lambda t, w: t.append(t[0] if t else 1)
    if len(value) > 1:
        yield "elements reversed", lambda t, w: t.reverse()
        yield "first element twice", lambda t, w: t.__setitem__(1, t[0])
    if len(value) > 50:
        yield "elements all set", _set_all
    if isinstance(value, collections.deque):
        yield "deque rotated", lambda t, w: t.rotate()


def _set_all(target: list, world: World) -> None:
    target[:] = [other(each) for each in target]


def _exchange_member(target: set, world: World) -> None:
    first = members(target)[0]
    target.remove(first)
    target.add(other(first))


def _exchange_code(target: types.FunctionType, world: World) -> None:
    """A function gets the code of another one with as many arguments and free variables."""
    code = target.__code__
    for name, each in list(world.globals.items()):
        if isinstance(each, types.FunctionType) and each is not target and name[:2] != "__":
            new = each.__code__
            if (new.co_argcount, new.co_freevars) == (code.co_argcount, code.co_freevars):
                target.__code__ = new
                return
    constants = tuple(c * 2 + 1 if isinstance(c, float) else c for c in code.co_consts)
    target.__code__ = code.replace(co_consts=constants)


def _exchange_class(target: Any, world: World) -> None:
    """An object gets another class of the program, or a subclass made for it."""
    kind = type(target)
    if world.is_own(kind):
        for each in list(world.globals.values()):
            if isinstance(each, type) and each is not kind and each.__mro__[1:] == kind.__mro__[1:]:
                target.__class__ = each
                return
    target.__class__ = type(kind.__name__, (kind,), {"__slots__": ()})


def _set_first(target: Any, world: World) -> None:
    target[0] = other(target[0])


def _fill(target: Any, world: World) -> None:
    target[:] = [other(each) for each in target.tolist()]


def _set_value(target: Any, world: World) -> None:
    if isinstance(target, ctypes.Structure):
        target.gain = 3.5
    else:
        target.value = other(target.value)


def _rebind(target: functools.partial, world: World) -> None:
    function, args, keywords, attributes_ = target.__reduce__()[2]
    changed = {key: other(child) for key, child in keywords.items()}
    target.__setstate__((function, args, changed, attributes_))


_STATE_IN_C: list[tuple[Any, str, Change]] = [
    ((array.array, bytearray, memoryview, np.ndarray), "element set", _set_first),
    ((array.array, np.ndarray), "elements all set", _fill),
    ((ctypes.Structure, ctypes._SimpleCData), "value set", _set_value),
    (functools.partial, "bound again", _rebind),
    (itertools.count, "advanced", lambda t, w: next(t) and None),
    (queue.SimpleQueue, "put", lambda t, w: t.put(1)),
    (ContextVar, "set", lambda t, w: t.set(other(t.get())) and None),
    (mmap.mmap, "byte set", lambda t, w: t.__setitem__(0, t[0] * 2 + 1)),
    (abc.ABCMeta, "class registered", lambda t, w: t.register(type(t.__name__, (), {})) and None),
    (io.StringIO, "written", lambda t, w: t.write("abcd") and None),
    (functools._lru_cache_wrapper, "cache cleared", lambda t, w: t.cache_clear()),
]
