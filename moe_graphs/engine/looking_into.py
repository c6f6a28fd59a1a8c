"""How to look into single kinds of Python values."""

from __future__ import annotations

import decimal
import functools
import itertools
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_graphs.engine.containers import GONE, Container
from moe_graphs.engine.values import is_plain
from moe_graphs.errors import CaptureError


def could_be_read(
    place: Mapping[str, Any], names: set[str], called: set[str]
) -> frozenset[str] | set[str]:
    """Names without those of plain values that the code only mentions as methods it calls."""
    return names - {key for key in called & place.keys() if is_plain(place[key])}


def contents_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


@functools.cache
def with_inner_code(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """Of a function, and of all functions and lambdas that stand in it."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return (code, *itertools.chain.from_iterable(map(with_inner_code, inner)))


def scripted(name: str) -> str:
    """The text of the refusal of a module of ``torch.jit``."""
    return (
        f"module {name or 'model'!r} is a ScriptModule (torch.jit.script or torch.jit.trace), "
        f"whose code nobody can look into: put the module in its place that it was made from, or "
        f"choose scopes without it"
    )


def check_not_scripted(values: Mapping[str, Any]) -> None:
    """A check for modules of ``torch.jit``.

    Raises:
        CaptureError: if a value is a module that ``torch.jit`` has compiled.
    """
    for name, value in values.items():
        if isinstance(value, torch.jit.ScriptModule):
            raise CaptureError(scripted(name))


def check_not_keyed_by_weights(containers: Iterable[Container]) -> None:
    """A check for dictionaries that a capture would read in vain.

    Raises:
        CaptureError: if the keys of a dictionary are parameters, in whose place a capture puts
            others.
    """
    for each in containers:
        keys = each.holder if isinstance(each.holder, dict) else ()
        if any(isinstance(key, Tensor) and key.requires_grad for key in keys):
            raise CaptureError(
                f"dictionary {each.name!r} is keyed by a parameter, and a capture runs forwards on "
                f"other parameters, which lie in the same memory: key it by the parameter's name"
            )


def attribute_of(value: Any, name: str) -> Any:
    """The attribute; None without it, and where the class of the value raises what it likes."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def has_dictionary(value: Any) -> bool:
    """Whether it has attributes; some classes raise what they like when they are asked."""
    try:
        return isinstance(value.__dict__, dict)
    except Exception:
        return False


def bytes_of(values: Any) -> tuple:
    """Of an array of whatever library."""
    kind = getattr(values, "dtype", None) or getattr(values, "typecode", None)
    return str(kind), getattr(values, "shape", None), bytes(values)


def decimal_context() -> tuple:
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp


def special_methods(kind: type) -> frozenset[str]:
    """Methods that run without being named."""
    return frozenset(
        name
        for name, value in vars(kind).items()
        if name[:2] == "__" and isinstance(value, types.FunctionType)
    )


def shown_key(index: int, key: Any, tensor_names: Mapping[int, str]) -> str:
    """Of a dictionary, within a path; ``tensor_names`` by ids."""
    if isinstance(key, Tensor):
        return tensor_names.get(id(key), f"tensor {index}")
    return repr(key) if is_plain(key) else f"key {index}"


def refill(target: set, values: frozenset) -> None:
    set.clear(target)
    set.update(target, values)


def slots_of(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [key for key in found if key not in ("__dict__", "__weakref__")]


def is_generator(value: Any) -> bool:
    """Whether it is one of random numbers, of Python's or numpy's."""
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__}
    numpy = {"numpy.random._generator.Generator", "numpy.random.mtrand.RandomState"}
    return bool(names & (numpy | {"random.Random"}))
