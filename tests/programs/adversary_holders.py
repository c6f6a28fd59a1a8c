"""Adversaries that keep what the forward reads in other things than plain objects.

What has been put there: modules made by hand, functions, containers of a class of their own.
Audits would find most of these changes, so they are off: this is about guards.
"""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import functools
import sys
import types
import weakref
from typing import ClassVar

import torch

from programs.cases import WIDTH, Table

case = Table()
ALONE = {"audit_every": None}


def held(name, forward, holder, key="gain", before=1.0, after=3.0):
    """Case that changes an attribute of a holder of this process before step 4."""
    case(name, forward, start=lambda m, e: setattr(holder, key, before),
         change=lambda m, e: setattr(holder, key, after), options=ALONE)  # fmt: skip


# ---- modules that are made by hand, and modules and classes that have lost their names


def by_hand(name):
    """A module with a class and an object of it, which Python knows by the module's name."""
    module = types.ModuleType(name)
    code = "class Rate:\n    gain = 1.0\n    def of(self, y): return y * self.gain\nrate = Rate()"
    exec(code, vars(module))
    sys.modules[name] = module
    return module


INSTALLED, NAMELESS = by_hand("programs_by_hand"), by_hand("programs_nameless")
del NAMELESS.__name__
RENAMED = by_hand("programs_renamed")


class Singleton:
    """An object of this class stands in the place of its module."""

    gain = 1.0


Singleton.__module__ = "programs_singleton"
SINGLETON = sys.modules["programs_singleton"] = Singleton()


class Homeless:
    gain = 1.0


Homeless.__module__ = None
HOMELESS = Homeless()

for _what, _module in (("made by hand", INSTALLED), ("without a name", NAMELESS)):
    held(f"a class of a module {_what}", lambda s, x, m=_module: s.l(x) * m.Rate.gain, _module.Rate)
    held(f"a method of a module {_what}", lambda s, x, m=_module: m.rate.of(s.l(x)), _module.Rate)
    held(f"data of a module {_what}", lambda s, x, m=_module: s.l(x) * m.gain, _module)
held("a class whose module is an object", lambda s, x: s.l(x) * SINGLETON.gain, Singleton)
held("a class that says no module", lambda s, x: s.l(x) * HOMELESS.gain, Homeless)
case("a module loses its name", lambda s, x: s.l(x) * RENAMED.rate.gain,
     start=lambda m, e: setattr(RENAMED, "__name__", "programs_renamed"),
     change=lambda m, e: delattr(RENAMED, "__name__"), options=ALONE)  # fmt: skip
case("a module gets a name that is no text", lambda s, x: s.l(x) * RENAMED.rate.gain,
     start=lambda m, e: setattr(RENAMED, "__name__", "programs_renamed"),
     change=lambda m, e: setattr(RENAMED, "__name__", 7), options=ALONE)  # fmt: skip


# ---- tensors whose memory operations find by its storage


def _keeps_two(s):
    s.scales = [torch.full((WIDTH,), 1.5), torch.full((WIDTH,), 0.5)]
    s.register_buffer("seen", torch.ones(WIDTH))


def _viewed(s, x):
    return s.l(x) * torch.empty(0).set_(s.scales[0].untyped_storage(), 0, (WIDTH,))


def _counted(s, x):
    seen = torch.empty(0).set_(s.seen.untyped_storage(), 0, (WIDTH,))
    return s.l(x) * seen.add_(1.0)


def of_two(name, forward, change=lambda m, e: m.sc.scales.reverse()):
    case(name, forward, _keeps_two, change=change, options=ALONE)


of_two("a deepcopy of a list of tensors", lambda s, x: s.l(x) * copy.deepcopy(s.scales)[0])
of_two("a tensor that takes another one's storage", _viewed)
of_two("a buffer that is written by its storage", _counted, lambda m, e: m.sc.seen.zero_())


# ---- attributes of holders that are no plain objects, by their names and by any name


def _a_function(): ...


@functools.lru_cache
def _a_cached_function():
    return 1


class Mapping(dict):
    level = 1.0

    def of(self, y):
        return y * self.level


class Listed(list):
    __slots__ = ("gain",)


class Row(tuple):
    """A tuple with attributes."""


class Reference(weakref.ref):
    """A weak reference with attributes."""


class Phase(enum.Enum):
    first = 1


class Plain:
    levels: ClassVar[list[float]] = [1.0]


HOLDERS = {
    "a function": _a_function,
    "a cached function": _a_cached_function,
    "a partial": functools.partial(int),
    "a dict of a class of its own": Mapping(),
    "a list with slots": Listed(),
    "an OrderedDict": collections.OrderedDict(),
    "a tuple of a class of its own": Row((1, 2)),
    "a weak reference of a class of its own": Reference(Plain),
    "a member of an enum": Phase.first,
    "a tensor": torch.ones(WIDTH),
    "a module": types.ModuleType("programs_gains"),
    "a class": Plain,
    "arguments of a command": argparse.Namespace(),
    "a namespace": types.SimpleNamespace(),
}
LETTERS = ["ga", "in"]


def _picked(gain=1.0, **others):
    return gain


for _what, _of in HOLDERS.items():
    held(f"an attribute of {_what}", lambda s, x, o=_of: s.l(x) * o.gain, _of)
    held(f"getattr of {_what}", lambda s, x, o=_of: s.l(x) * getattr(o, "".join(LETTERS)), _of)
    if hasattr(_of, "__dict__"):
        held(f"vars of {_what}",
             lambda s, x, o=_of: s.l(x) * _picked(**vars(o)),
             _of)  # fmt: skip

LISTED = types.ModuleType("programs_lists")
LISTED.levels = [1.0]
END = "els"
MAPPING = Mapping()


def of_list(name, forward, levels):
    case(name, forward, start=lambda m, e: levels.__setitem__(0, 1.0),
         change=lambda m, e: levels.__setitem__(0, 3.0), options=ALONE)  # fmt: skip


of_list("a list in a module, by any name",
        lambda s, x: s.l(x) * getattr(LISTED, f"lev{END}")[0], LISTED.levels)  # fmt: skip
of_list("a list in a class, by any name",
        lambda s, x: s.l(x) * getattr(Plain, f"lev{END}")[0], Plain.levels)  # fmt: skip
held("a class of a dict", lambda s, x: MAPPING.of(s.l(x)), Mapping, "level")
