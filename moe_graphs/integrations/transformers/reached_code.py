"""The code of transformers' models that a forward can reach, read without running it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

_KNOWN = {"torch", "moe_graphs", "library"}
_HOST_READS = {"tolist", "item", "nonzero", "numpy", "cpu"}


def host_read(layer: Any) -> str | None:
    """Says where the forward of a layer reads values on the host, which no graph can hold."""
    modules = [m for m in layer.modules() if not _has_other_experts(m)]
    for function in reached(modules):
        names = {name for code in codes(function.__code__) for name in code.co_names}
        if names & _HOST_READS:
            reads = ", ".join(sorted(names & _HOST_READS))
            return f"{function.__qualname__} reads values on the host ({reads})"
    return None


def _has_other_experts(module: Any) -> bool:
    """Experts of transformers' interface run their own forward as "eager" alone."""
    if not hasattr(type(module), "_apply_gate"):
        return False
    return getattr(module.config, "_experts_implementation", None) != "eager"


def reached(modules: Iterable[Any]) -> Iterator[types.FunctionType]:
    """The forwards of ``modules``, and the functions of their own packages that they name."""
    kinds = list(dict.fromkeys(type(module) for module in modules))
    waiting = [kind.forward for kind in kinds]
    seen: set[Any] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(function)
        package = _package_of(function)
        if package not in _KNOWN:
            yield function
            named = named_functions(function, kinds)
            waiting += (each for each in named if _package_of(each) == package)


def _package_of(function: Any) -> str:
    """The first name of its module; "library" for what transformers' models share."""
    first, _, rest = (function.__module__ or "").partition(".")
    return "library" if first == "transformers" and not rest.startswith("models.") else first


def named_functions(function: types.FunctionType, kinds: list[type]) -> Iterator[Any]:
    """The functions that ``function`` names: globals, and methods of ``kinds``."""
    names = (name for code in codes(function.__code__) for name in code.co_names)
    for name in dict.fromkeys(names):
        found = [function.__globals__.get(name), *(getattr(kind, name, None) for kind in kinds)]
        yield from (value for value in found if isinstance(value, types.FunctionType))


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def strings(value: Any) -> Iterator[str]:
    """The names and constants of code, keywords of its calls among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, types.CodeType):
        yield from value.co_names
        for constant in value.co_consts:
            yield from strings(constant)
    elif isinstance(value, tuple):
        for each in value:
            yield from strings(each)
