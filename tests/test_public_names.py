"""Public names have docstrings and types; so do the names in the signatures of ``moe_graphs``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import moe_graphs

# What the engine, tests and benchmarks look into, and users have no need of.
INTERNAL = {"Graphs.captured", "Graphs.try_out", "Graphs.mismatched"}
PUBLIC = [getattr(moe_graphs, name) for name in moe_graphs.__all__]
# Packages whose names are imported from them, and packages of modules that are.
WITH_NAMES = (
    *("moe_graphs", "moe_graphs.dispatch", "moe_graphs.kernels", "moe_graphs.layers"),
    *("moe_graphs.integrations.lightning", "moe_graphs.integrations.transformers"),
    *("moe_graphs.integrations.megablocks", "moe_graphs.parallel"),
    "moe_graphs.planning",
)
OF_MODULES = ("moe_graphs.pipelines", "moe_graphs.training")


def public_modules() -> list[str]:
    folders = {name: importlib.import_module(name).__path__ for name in OF_MODULES}
    return [*WITH_NAMES, *(f"{name}.{module.name}" for name, folder in folders.items()
                           for module in pkgutil.iter_modules(folder))]  # fmt: skip


def documented_names(module: str) -> dict[str, Any]:
    """Functions and classes: those of ``__all__``, or that it defines."""
    if module.startswith("moe_graphs.integrations."):
        pytest.importorskip(module.rpartition(".")[2])
    values = importlib.import_module(module)
    names = getattr(values, "__all__", None) or [
        name
        for name, value in vars(values).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    found = {name: getattr(values, name) for name in names}
    return {k: v for k, v in found.items() if inspect.isclass(v) or inspect.isfunction(v)}


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


def test_the_face_is_small():
    """A user needs these names; a further one has to take the place of another."""
    assert len(moe_graphs.__all__) == 11
    assert len(importlib.import_module("moe_graphs.parallel").__all__) == 8
    for module, names in moe_graphs._MOVED.items():
        for name in names:
            assert hasattr(importlib.import_module(f"moe_graphs.{module}"), name)
            with pytest.raises(AttributeError, match=f"{name} is in moe_graphs.{module}: import"):
                getattr(moe_graphs, name)


@pytest.mark.parametrize("exported", PUBLIC, ids=moe_graphs.__all__)
def test_what_a_public_signature_names_can_be_imported_by_its_module(exported):
    for function in callables_of(exported):
        if function.__qualname__ in INTERNAL:
            continue
        hints = typing.get_type_hints(function)
        if inspect.isclass(function):
            hints = {name: hint for name, hint in hints.items() if not name.startswith("_")}
        for name, hint in hints.items():
            for kind in classes_in(hint):
                if kind.__module__.startswith("moe_graphs"):
                    found = getattr(importlib.import_module(kind.__module__), kind.__name__, None)
                    assert found is kind, f"{function.__qualname__}, {name}: {kind}"
                    assert vars(kind).get("__doc__"), kind


@pytest.mark.parametrize("module", public_modules())
def test_what_is_public_is_documented(module):
    found = documented_names(module)
    assert found
    for name, value in found.items():
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own, name
        assert not own.startswith(f"{name}("), f"{name}: made by dataclass: say what it is"


@pytest.mark.parametrize("module", public_modules())
def test_what_is_public_has_types(module):
    for value in documented_names(module).values():
        for function in filter(inspect.isfunction, callables_of(value)):
            signature = inspect.signature(function)
            given = [signature.return_annotation]
            given += [
                p.annotation for n, p in signature.parameters.items() if n not in ("self", "cls")
            ]
            assert inspect.Signature.empty not in given, function.__qualname__
