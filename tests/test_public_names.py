"""What a public signature names can be imported from ``moe_graphs``, and says what it is."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import moe_graphs

# What the engine, tests and benchmarks look into, and users have no need of.
INTERNAL = {"Graphs.captured", "Graphs.examine", "Graphs.mismatched"}
PUBLIC = [getattr(moe_graphs, name) for name in moe_graphs.__all__]


def callables_of(exported: Any) -> Iterator[Any]:
    """Functions with the annotations that a user of it meets: of a class, its own public ones."""
    if not inspect.isclass(exported):
        yield exported
        return
    yield exported  # fields of dataclasses and attributes
    for kind in exported.__mro__:
        if not kind.__module__.startswith("moe_graphs"):
            continue
        for name, value in vars(kind).items():
            if name in ("__init__", "__call__", "__iter__") or not name.startswith("_"):
                value = value.fget if isinstance(value, property) else value
                value = getattr(value, "__func__", value)  # of class methods
                if inspect.isfunction(value):
                    yield inspect.unwrap(value)


def classes_in(annotation: Any) -> Iterator[type]:
    for argument in typing.get_args(annotation):
        yield from classes_in(argument)
    if inspect.isclass(annotation):
        yield annotation


@pytest.mark.parametrize("exported", PUBLIC, ids=moe_graphs.__all__)
def test_what_a_public_signature_names_is_exported(exported):
    for function in callables_of(exported):
        if function.__qualname__ in INTERNAL:
            continue
        hints = typing.get_type_hints(function)
        if inspect.isclass(function):
            hints = {name: hint for name, hint in hints.items() if not name.startswith("_")}
        for name, hint in hints.items():
            for kind in classes_in(hint):
                if kind.__module__.startswith("moe_graphs"):
                    found = getattr(moe_graphs, kind.__name__, None)
                    assert found is kind, f"{function.__qualname__}, {name}: {kind}"


@pytest.mark.parametrize("exported", PUBLIC, ids=moe_graphs.__all__)
def test_what_is_exported_is_documented(exported):
    own = vars(exported).get("__doc__") if inspect.isclass(exported) else exported.__doc__
    assert own, exported
    assert not own.startswith(f"{exported.__name__}("), "made by dataclass: say what it is"
