"""Objects that a program's step can reach, and the path of steps that leads to each.

The walk goes by ``gc.get_referents``. An object that can be named (an attribute, an entry, a cell)
is named, so that the same path leads to the same place in another run of the same program, in
which an engine may have added attributes.
"""

from __future__ import annotations

import builtins
import collections
import functools
import gc
import os
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Step = tuple[str, Any]
Path = tuple[Step, ...]
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
# Dictionaries of torch's modules whose entries are a program's; other attributes are bookkeeping.
OF_MODULES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {*OF_MODULES, "training"}
_LEAVES = (types.CodeType, types.MethodDescriptorType, torch.Generator)
_FEW = 12  # of a long sequence only the first elements are visited


@dataclass(frozen=True)
class World:
    """A running program: its globals, its step, and the names of its modules."""

    globals: dict[str, Any]
    model: nn.Module
    step: Any

    def roots(self) -> Iterator[tuple[Step, Any]]:
        yield ("root", "step"), self.step
        yield ("root", "builtins"), _Named(vars(builtins), "GAIN_OF_ALL_")
        yield ("root", "environ"), _Named(os.environ, "MUTABLE_GAIN_")
        yield ("root", "modules"), _Named(_OwnModules(self.globals["__name__"]), "settings")

    def at(self, path: Path) -> Any:
        found: Any = self
        for step in path:
            found = _follow(found, step)
        return found

    def is_own(self, value: Any) -> bool:
        """Whether a function, class or module is the program's."""
        name = self.globals["__name__"]
        names = (name, f"{name}_library")
        if isinstance(value, types.ModuleType):
            return value.__spec__ is None or value.__name__.partition(".")[0] in names
        if isinstance(value, types.FunctionType):
            return str(value.__globals__.get("__name__")).partition(".")[0] in names
        if isinstance(value, type):
            return value.__module__.partition(".")[0] in names
        return value is not os.environ and not isinstance(value, _LEAVES)


class _OwnModules(MutableMapping):
    """The modules of a program, by names that are the same in every run of the program."""

    def __init__(self, program: str) -> None:
        self._program = f"{program}."

    def __getitem__(self, name: str) -> types.ModuleType:
        return sys.modules[self._program + name]

    def __setitem__(self, name: str, module: types.ModuleType) -> None:
        sys.modules[self._program + name] = module

    def __delitem__(self, name: str) -> None:
        del sys.modules[self._program + name]

    def __iter__(self) -> Iterator[str]:
        found = [name for name in sys.modules if name.startswith(self._program)]
        return (name.removeprefix(self._program) for name in found)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Named:
    """The entries of a namespace of Python's that a program has made."""

    def __init__(self, space: Any, begin: str) -> None:
        self.space, self.begin = space, begin

    def names(self) -> list[str]:
        return sorted(name for name in self.space if name.startswith(self.begin))


def _follow(value: Any, step: Step) -> Any:
    word, key = step
    if word == "root":
        return dict(value.roots())[step]
    if word == "attribute":
        return getattr(value, key)
    if word == "of class":
        return vars(value)[key]
    if word == "cell":
        return cell_of(value, key).cell_contents
    if word == "key":
        return value.space[key] if isinstance(value, _Named) else value[key]
    if word == "value":
        return list(value.values())[key]
    if word == "key itself":
        return list(value)[key]
    if word == "element":
        return value[key]
    if word == "member":
        return members(value)[key]
    if word == "class":
        return type(value)
    if word == "called":
        return value()
    assert word == "referent", word
    return gc.get_referents(value)[key]


def cell_of(function: types.FunctionType, name: str) -> types.CellType:
    assert function.__closure__ is not None
    return function.__closure__[function.__code__.co_freevars.index(name)]


def members(values: Any) -> list[Any]:
    """The elements of a set in an order that is the same in every run."""
    return sorted(values, key=lambda each: (type(each).__name__, repr(each)))


def shown(path: Path) -> str:
    """A path as a text for people."""
    text = ""
    for word, key in path:
        text += {
            "root": str(key),
            "attribute": f".{key}",
            "of class": f".__dict__[{key!r}]",
            "cell": f".<closure>.{key}",
            "key": f"[{key!r}]",
            "value": f".<value {key}>",
            "key itself": f".<key {key}>",
            "element": f"[{key}]",
            "member": f".<member {key}>",
            "class": ".__class__",
            "called": "()",
            "referent": f".<referent {key}>",
        }[word]
    return text


# ---- the walk


def walk(world: World) -> Iterator[tuple[Path, Any]]:
    """Yield every object once, with the first path that leads to it; plain values are left out."""
    seen: set[int] = set()
    waiting: collections.deque[tuple[Path, Any]] = collections.deque(
        ((step,), root) for step, root in world.roots()
    )
    kept = []
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, PLAIN) or id(value) in seen or not world.is_own(value):
            continue
        seen.add(id(value))
        kept.append(value)
        yield path, value
        waiting.extend(((*path, step), child) for step, child in children(value))


def children(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield what a value refers to: by name where there is one, the rest by number."""
    named = list(_named(value))
    yield from named
    covered = {id(child) for _, child in named} | {id(getattr(value, "__dict__", None))}
    if isinstance(value, (nn.Module, type, torch.Tensor, _Named, types.FunctionType, *_PARTS)):
        return
    for number, child in enumerate(gc.get_referents(value)):
        if id(child) not in covered and number < _FEW and not isinstance(child, PLAIN):
            yield ("referent", number), child


def _named(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, _Named):
        for name in value.names():
            yield ("key", name), value.space[name]
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, type):
        for name, child in list(vars(value).items()):
            if name not in ("__dict__", "__weakref__", "__module__", "__doc__"):
                yield ("of class", name), child
        yield ("attribute", "__mro__"), value.__mro__
        yield ("class", None), type(value)
    elif isinstance(value, weakref.ref):
        yield ("called", None), value()
    elif isinstance(value, Mapping) and not isinstance(value, nn.Module):
        yield from _of_mapping(value)
        yield from _of_instance(value)
    elif isinstance(value, (list, tuple, collections.deque)):
        for number, child in enumerate(list(value)[:_FEW]):
            yield ("element", number), child
        yield from _of_instance(value)
    elif isinstance(value, (set, frozenset)):
        for number, child in enumerate(members(value)[:_FEW]):
            yield ("member", number), child
    else:
        yield from _of_instance(value)


def _of_function(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield ("cell", name), cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in ("__defaults__", "__kwdefaults__", "__globals__"):
        yield ("attribute", name), getattr(function, name)
    for name, child in vars(function).items():
        yield ("attribute", name), child


def is_the_same_in_every_run(key: Any, place: Any) -> bool:
    """Whether a key names the same entry in every run. Hooks are numbered in the whole process."""
    return isinstance(key, PLAIN) and not (
        type(key) is int and isinstance(place, collections.OrderedDict)
    )


def _of_mapping(value: Mapping) -> Iterator[tuple[Step, Any]]:
    is_globals = "__builtins__" in value
    for number, (key, child) in enumerate(list(value.items())):
        if is_globals and (not isinstance(key, str) or key.startswith("__")):
            continue
        if is_the_same_in_every_run(key, value):
            yield ("key", key), child
        elif number < _FEW:
            yield ("value", number), child
            yield ("key itself", number), key


_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools._lru_cache_wrapper: ("__wrapped__",),
}


def _of_instance(value: Any) -> Iterator[tuple[Step, Any]]:
    for kind, names in _PARTS.items():
        if isinstance(value, kind):
            for name in names:
                yield ("attribute", name), getattr(value, name)
            return
    for name, child in attributes(value):
        yield ("attribute", name), child
    if type(value).__flags__ & (1 << 9):  # a class made by a class statement
        yield ("class", None), type(value)


def attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes in an object's dictionary and in its slots."""
    found = list(getattr(value, "__dict__", {}).items())
    if isinstance(value, nn.Module):
        found = [(name, child) for name, child in found if name not in _OF_EVERY_MODULE]
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.append((name, getattr(value, name)))
    return found
