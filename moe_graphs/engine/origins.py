"""Whose a piece of code is: torch's and Python's own, a library's, or the user's."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
import sysconfig

_PACKAGE = str(pathlib.Path(__file__).parent.parent)
_ENGINE = str(pathlib.Path(__file__).parent)
_OTHERS = ("staged.py", "kernels", "optim")
_NOT_READ = (_ENGINE, *(f"{_PACKAGE}/{name}" for name in _OTHERS))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = {"site-packages", "dist-packages"}
_INTERNAL = ("torch", "triton", "numpy")


@functools.cache
def origin_of(filename: str) -> str:
    """Of code: "internal" (torch, the standard library, the engine), "library" or "own"."""
    if filename in ("<string>", "?") or "<frozen" in filename:
        return "internal"
    if filename.startswith(_NOT_READ + _internal_places()):
        return "internal"
    if filename.startswith(_PACKAGE) or not _INSTALLED.isdisjoint(pathlib.PurePath(filename).parts):
        return "library"
    if filename.startswith(_STANDARD_LIBRARY):
        return "internal"
    return "library" if any(map(filename.startswith, _other_places_of_packages())) else "own"


@functools.cache
def _internal_places() -> tuple[str, ...]:
    """Also of a torch that was built where its sources are."""
    found = filter(None, map(importlib.util.find_spec, _INTERNAL))
    return tuple(f"{place}/" for spec in found for place in spec.submodule_search_locations or ())


@functools.cache
def _other_places_of_packages() -> tuple[str, ...]:
    """Where ``pip install --target`` has put packages: they have their metadata beside them."""
    places = (pathlib.Path(entry) for entry in sys.path if entry)
    return tuple(f"{p}/" for p in places if p.is_dir() and any(p.glob("*.dist-info")))


def origin_of_class(kind: type) -> str:
    """As ``origin_of``, of the code that defines it."""
    module = sys.modules.get(kind.__module__)
    if module is None:
        return "internal"
    if module.__name__ == "__main__":
        return "own"
    return origin_of(getattr(module, "__file__", None) or "?")


def is_of_engine(kind: type) -> bool:
    """Whether it is a class of graphs, not of what they hold."""
    return kind.__module__.startswith(f"{__package__}.")
