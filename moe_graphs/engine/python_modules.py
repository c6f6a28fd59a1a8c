"""What the code of functions names in Python's modules."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from moe_graphs.engine.containers import GONE, Container
from moe_graphs.engine.origins import origin_of
from moe_graphs.engine.reads import attributes_of_globals, global_names_of
from moe_graphs.engine.values import BY_IDENTITY, is_plain

Code = Mapping[types.CodeType, dict[str, Any]]


def containers_of_globals(code: Code) -> Iterator[tuple[Container, str]]:
    """The modules that the functions stand in, and those that they name as ``module.name``, each
    with what separates its name from that of an entry. ``code``: with the globals of each."""
    mentioned: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
    for each, globals_ in code.items():
        origin = origin_of(each.co_filename)
        if origin != "internal":
            names = mentioned.setdefault(id(globals_), (globals_, origin, set()))[2]
            names.update(global_names_of(each))
    for globals_, origin, names in mentioned.values():
        if origin == "library":  # its functions and classes are taken for granted
            names = {name for name in names if _is_data(globals_.get(name, GONE))}
        yield Container(globals_, globals_.get("__name__", "?"), frozenset(names)), ":"
    for module, names in _of_other_modules(code).values():
        yield Container(vars(module), module.__name__, frozenset(names)), "."


def _of_other_modules(code: Code) -> dict[int, tuple[types.ModuleType, set[str]]]:
    """Of libraries: the user's own code may have functions of theirs patched; other code's are
    taken for granted, and its data alone is compared."""
    found: dict[int, tuple[types.ModuleType, set[str]]] = {}
    for each, globals_ in code.items():
        origin = origin_of(each.co_filename)
        if origin == "internal":
            continue
        for *path, key in attributes_of_globals(each):
            module = _module_at(globals_, path)
            value = GONE if module is None else vars(module).get(key, GONE)
            if value is not GONE and (origin == "own" or is_plain(value)):
                found.setdefault(id(module), (module, set()))[1].add(key)
    return found


def _module_at(globals_: dict[str, Any], path: list[str]) -> types.ModuleType | None:
    found: Any = globals_.get(path[0], GONE)
    for name in path[1:]:
        if not isinstance(found, types.ModuleType):
            return None
        found = vars(found).get(name, GONE)
    return found if isinstance(found, types.ModuleType) else None


def _is_data(value: Any) -> bool:
    return not (isinstance(value, BY_IDENTITY) or callable(value))


def is_own(module: types.ModuleType) -> bool:
    """Whether it is the user's. One that was made by hand has neither file nor loader."""
    file = getattr(module, "__file__", None)
    if file is not None:
        return origin_of(file) == "own"
    package = sys.modules.get(module.__name__.partition(".")[0], module)
    return module.__spec__ is None and (package is module or is_own(package))
