"""Adversaries: ways to reach Python state that no name in the forward's code shows."""

from __future__ import annotations

import array
import collections
import decimal
import gc
import inspect
import logging
import operator
import os
import pathlib
import random
import sys
import tempfile
import threading
import types
import warnings
import weakref

import numpy as np
import torch

from programs.cases import Scope, Table
from programs.scripts import Gain

case = Table()
TABLE: dict[str, float] = {}
GAIN = 1.0
FILE = pathlib.Path(tempfile.gettempdir()) / f"programs-{os.getpid()}"


def set_gain(value):
    global GAIN
    GAIN = value


def set_table(value):
    TABLE["gain"] = value


def attribute(name, forward):
    """Case whose forward reads ``s.gain`` in some way; before step 4 the gain becomes 3."""
    case(name, forward, lambda s: setattr(s, "gain", 1.0),
         change=lambda m, e: setattr(m.sc, "gain", 3.0))  # fmt: skip


def of_table(name, forward, init=None):
    case(name, forward, init, start=lambda m, e: set_table(1.0), change=lambda m, e: set_table(3.0))


def of_global(name, forward):
    case(name, forward, start=lambda m, e: set_gain(1.0), change=lambda m, e: set_gain(3.0))


def of_setter(name, forward, setter, before, after):
    """Case that changes a setting of the process; ``setter`` puts it back at the last step."""
    case(name, forward, start=lambda m, e: setter(before), change=lambda m, e: setter(after),
         between=lambda m, e, i: i == 6 and setter(before))  # fmt: skip


# ---- attributes by other names


def _gain_of(o):
    return o.gain


attribute("getattr with a name that is put together", lambda s, x: s.l(x) * getattr(s, "ga" + "in"))
attribute("vars() of the module", lambda s, x: s.l(x) * vars(s)["gain"])
attribute("operator.attrgetter", lambda s, x: s.l(x) * operator.attrgetter("gain")(s))
attribute("format_map", lambda s, x: s.l(x) * float("{s.gain}".format_map({"s": s})))
attribute("eval", lambda s, x: s.l(x) * eval("s.gain"))
attribute("map over attributes", lambda s, x: s.l(x) * next(map(_gain_of, [s])))
attribute("sorted by a key function", lambda s, x: s.l(x) * sorted(
    [s, s], key=lambda o: o.gain)[0].gain)  # fmt: skip
attribute("a comprehension", lambda s, x: s.l(x) * sum([o.gain for o in (s,)]))
attribute("a match statement", lambda s, x: s.l(x) * _matches(s))
attribute("a string of the attribute's value", lambda s, x: s.l(x) * len(repr(s.gain * 100)))
attribute("an f-string", lambda s, x: s.l(x) * float(f"{s.gain}"))


def _matches(s):
    match s:
        case Scope(gain=3.0):
            return 3.0
        case _:
            return 1.0


class Gets(Scope):
    """A module whose ``__getattribute__`` is written in Python."""

    def __getattribute__(self, name):
        if name == "gain":
            return object.__getattribute__(self, "__dict__")["hidden"]
        return super().__getattribute__(name)

    def forward(self, x):
        return self.l(x) * self.gain


case("__getattribute__", scope=Gets, start=lambda m, e: setattr(m.sc, "hidden", 1.0),
     change=lambda m, e: setattr(m.sc, "hidden", 3.0))  # fmt: skip


class Compares:
    """An object that is equal to everything."""

    def __init__(self, gain):
        self.gain = gain

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


case("an object that equals every other is replaced", lambda s, x: s.l(x) * s.o.gain,
     lambda s: setattr(s, "o", Compares(1.0)),
     change=lambda m, e: setattr(m.sc, "o", Compares(3.0)))  # fmt: skip


class RaisesOnCompare:
    def __init__(self, gain):
        self.gain = gain

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = object.__hash__


case("an object that cannot be compared is replaced", lambda s, x: s.l(x) * s.o.gain,
     lambda s: setattr(s, "o", RaisesOnCompare(1.0)),
     change=lambda m, e: setattr(m.sc, "o", RaisesOnCompare(3.0)))  # fmt: skip


class IsCallable:
    """An object whose class decides what a call does."""

    def __call__(self, x):
        return x


def _other_class(m, e):
    m.sc.o.__class__ = Triples


class Triples(IsCallable):
    def __call__(self, x):
        return x * 3.0


case("the class of an object is assigned", lambda s, x: s.o(s.l(x)),
     lambda s: setattr(s, "o", IsCallable()), change=_other_class)  # fmt: skip
case("the code of a function is replaced", lambda s, x: s.f(s.l(x)),
     lambda s: setattr(s, "f", types.FunctionType((lambda x: x * 1.0).__code__, {})),
     change=lambda m, e: setattr(m.sc.f, "__code__", (lambda x: x * 3.0).__code__))  # fmt: skip
case("a module of the list is iterated in reverse by a flag",
     lambda s, x: [x := layer(x).tanh() for layer in s.order(s.layers)][-1],
     lambda s: (setattr(s, "order", list),
                setattr(s, "layers", torch.nn.ModuleList([s.l, torch.nn.Linear(4, 4)]))),
     change=lambda m, e: setattr(m.sc, "order", reversed))  # fmt: skip

# ---- globals by other names

of_global("globals()", lambda s, x: s.l(x) * globals()["GAIN"])
of_global("the Python module of a function", lambda s, x: s.l(x) * sys.modules[__name__].GAIN)
of_global("eval of a global", lambda s, x: s.l(x) * eval("GAIN"))
of_global("the frame of the caller", lambda s, x: s.l(x) * inspect.currentframe().f_globals["GAIN"])
of_global("__globals__ of a function", lambda s, x: s.l(x) * set_gain.__globals__["GAIN"])
of_global("a nested function", lambda s, x: (lambda: (lambda: s.l(x) * GAIN)())())


def _generator_expression(s, x):
    return s.l(x) * next(g for g in (GAIN for _ in range(1)))


of_global("a generator expression", _generator_expression)


async def _awaits():
    return GAIN


def _runs_coroutine(s, x):
    coroutine = _awaits()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return s.l(x) * stop.value


of_global("a coroutine", _runs_coroutine)


class Contextual:
    def __enter__(self):
        return GAIN

    def __exit__(self, *exception): ...


def _with(s, x):
    with Contextual() as gain:
        return s.l(x) * gain


of_global("__enter__ of a context manager", _with)


class Indexed:
    def __getitem__(self, key):
        return GAIN

    def __len__(self):
        return int(GAIN)

    def __bool__(self):
        return GAIN > 2.0

    def __rmul__(self, x):
        return x * GAIN


of_global("__getitem__ of an object", lambda s, x: s.l(x) * Indexed()[0])
of_global("__len__ of an object", lambda s, x: s.l(x) * len(Indexed()))
of_global("__bool__ of an object", lambda s, x: s.l(x) * (3.0 if Indexed() else 1.0))
of_global("__rmul__ of an object", lambda s, x: 1.0 * Indexed() * s.l(x))

# ---- objects of C that hold state

of_table("a bound method of a dictionary", lambda s, x: s.l(x) * s.get("gain"),
         lambda s: setattr(s, "get", TABLE.get))  # fmt: skip
of_table("operator.itemgetter", lambda s, x: s.l(x) * operator.itemgetter("gain")(TABLE))
of_table("a mapping proxy", lambda s, x: s.l(x) * s.proxy["gain"],
         lambda s: setattr(s, "proxy", types.MappingProxyType(TABLE)))  # fmt: skip
of_table("a ChainMap", lambda s, x: s.l(x) * s.chain["gain"],
         lambda s: setattr(s, "chain", collections.ChainMap({}, TABLE)))  # fmt: skip
of_table("a view of a dictionary's values", lambda s, x: s.l(x) * sum(s.values),
         lambda s: setattr(s, "values", TABLE.values()))  # fmt: skip
case("array.array", lambda s, x: s.l(x) * s.a[0],
     lambda s: setattr(s, "a", array.array("d", [1.0])),
     change=lambda m, e: m.sc.a.__setitem__(0, 3.0))  # fmt: skip
case("a memoryview", lambda s, x: s.l(x) * s.v[0],
     lambda s: (setattr(s, "b", bytearray(b"\x01")), setattr(s, "v", memoryview(s.b))),
     change=lambda m, e: m.sc.b.__setitem__(0, 3))  # fmt: skip
case("a structured array of numpy", lambda s, x: s.l(x) * float(s.a["gain"][0]),
     lambda s: setattr(s, "a", np.array([(1.0,)], dtype=[("gain", "f8")])),
     change=lambda m, e: m.sc.a["gain"].__setitem__(0, 3.0))  # fmt: skip
case("a view of numpy's into another array", lambda s, x: s.l(x) * float(s.view[0]),
     lambda s: (setattr(s, "base", (np.ones(4),)), setattr(s, "view", s.base[0][2:])),
     change=lambda m, e: m.sc.base[0].__setitem__(2, 3.0))  # fmt: skip
case("a weak proxy", lambda s, x: s.l(x) * s.proxy.gain,
     lambda s: (setattr(s, "owner", (o := Gain(),)), setattr(s, "proxy", weakref.proxy(o))),
     change=lambda m, e: setattr(m.sc.owner[0], "gain", 3.0))  # fmt: skip
case("a tensor on the host is read as a number before the call", lambda s, x, g: s.l(x) * g,
     lambda s: setattr(s, "t", [torch.ones(())]), use=lambda m, x: m.sc(m.pre(x), m.sc.t[0].item()),
     change=lambda m, e: m.sc.t[0].fill_(3.0))  # fmt: skip

# ---- the process and its surroundings


def _by(reads):
    return lambda s, x: s.l(x) * reads()


of_setter("decimal's context", _by(lambda: float(decimal.Decimal(1) / decimal.Decimal(3))),
          lambda n: setattr(decimal.getcontext(), "prec", n), 28, 2)  # fmt: skip
of_setter("numpy's error state", _by(lambda: 3.0 if np.geterr()["divide"] == "ignore" else 1.0),
          lambda how: np.seterr(divide=how), "warn", "ignore")  # fmt: skip
of_setter("the level of a logger", _by(
    lambda: 3.0 if logging.getLogger("programs").isEnabledFor(logging.DEBUG) else 1.0),
          logging.getLogger("programs").setLevel, logging.WARNING, logging.DEBUG)  # fmt: skip
of_setter("the recursion limit", _by(lambda: sys.getrecursionlimit() / 1000.0),
          sys.setrecursionlimit, sys.getrecursionlimit(), 3000)  # fmt: skip
of_setter("the name of the thread", _by(lambda: float(threading.current_thread().name == "other")
                                        + 1.0),
          lambda name: setattr(threading.current_thread(), "name", name),
          "MainThread", "other")  # fmt: skip
of_setter("whether garbage is collected", _by(lambda: 1.0 if gc.isenabled() else 3.0),
          lambda is_on: gc.enable() if is_on else gc.disable(), True, False)  # fmt: skip
of_setter("the working directory", _by(lambda: float(len(os.getcwd()) == 1) + 1.0),
          os.chdir, os.getcwd(), "/")  # fmt: skip
of_setter("the arguments of the process", _by(lambda: 1.0 + float("--more" in sys.argv)),
          lambda argv: sys.argv.__setitem__(slice(None), argv), list(sys.argv),
          [*sys.argv, "--more"])  # fmt: skip
of_setter("a file", _by(lambda: float(FILE.read_text())), FILE.write_text, "1.0", "3.0")
of_setter("whether a file exists", _by(lambda: 3.0 if FILE.exists() else 1.0),
          lambda is_there: FILE.touch() if is_there else FILE.unlink(missing_ok=True),
          False, True)  # fmt: skip
of_setter("the filters of warnings", _by(lambda: len(warnings.filters) / 10),
          lambda more: [warnings.filterwarnings("ignore", f"x{n}") for n in range(more)],
          0, 2)  # fmt: skip
case("the state of Python's random numbers is only looked at",
     lambda s, x: s.l(x) * (random.getstate()[1][-1] % 7),
     between=lambda m, e, i: random.random())  # fmt: skip
