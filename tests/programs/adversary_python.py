"""Adversaries: Python state that a forward reaches in unusual ways and that changes later."""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import os
import sys
import threading
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import silu as imported

from programs.cases import Scope, Table
from programs.scripts import Gain

case = Table()
SETTINGS: dict[str, Any] = {}
OTHER_MODULE = types.ModuleType("programs_settings")
sys.modules["programs_settings"] = OTHER_MODULE
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)
THREAD = threading.local()


# ---- functions, partials, caches


def _set_keyword(m, e):
    m.sc.f.keywords["other"] = 3.0


case(
    "keywords of a partial are changed in place",
    lambda s, x: s.f(s.l(x)),
    lambda s: setattr(s, "f", functools.partial(torch.mul, other=2.0)),
    change=_set_keyword,
)


@functools.lru_cache
def _cached_gain():
    return SETTINGS["gain"]


def _clear_cache(m, e):
    SETTINGS["gain"] = 3.0
    _cached_gain.cache_clear()


def _start_cache(m, e):
    SETTINGS["gain"] = 1.0
    _cached_gain.cache_clear()


case(
    "a setting behind lru_cache, whose cache is cleared",
    lambda s, x: s.l(x) * _cached_gain(),
    start=_start_cache,
    change=_clear_cache,
)


def _with_default(x, factor=1.0, factors=[1.0]):  # noqa: B006
    return x * factor * factors[0]


def _reset_defaults(m, e):
    _with_default.__defaults__ = (1.0, [1.0])


case(
    "default arguments of a function are replaced",
    lambda s, x: _with_default(s.l(x)),
    start=_reset_defaults,
    change=lambda m, e: setattr(_with_default, "__defaults__", (3.0, [1.0])),
)
case(
    "a mutable default argument is changed",
    lambda s, x: _with_default(s.l(x)),
    start=_reset_defaults,
    change=lambda m, e: (
        _with_default.__defaults__[1].append(0) or _with_default.__defaults__[1].__setitem__(0, 3.0)
    ),
)


def _counting(function):
    calls = 0

    @functools.wraps(function)
    def wrapper(*args):
        nonlocal calls
        calls += 1
        return function(*args) / calls

    return wrapper


case(
    "a decorator counts calls in its closure",
    lambda s, x: s.f(s.l(x)),
    lambda s: setattr(s, "f", _counting(torch.tanh)),
)


def _attribute_of_function(x):
    return x * _attribute_of_function.gain


case(
    "an attribute of a function",
    lambda s, x: _attribute_of_function(s.l(x)),
    start=lambda m, e: setattr(_attribute_of_function, "gain", 1.0),
    change=lambda m, e: setattr(_attribute_of_function, "gain", 3.0),
)
REGISTRY: dict[str, Any] = {}
case(
    "a function in a registry is registered anew",
    lambda s, x: REGISTRY["act"](s.l(x)),
    start=lambda m, e: REGISTRY.update(act=torch.tanh),
    change=lambda m, e: REGISTRY.update(act=torch.sigmoid),
)


case(
    "a callable object changes",
    lambda s, x: s.f(s.l(x)),
    lambda s: setattr(s, "f", Gain()),
    change=lambda m, e: setattr(m.sc.f, "gain", 3.0),
)
case(
    "the owner of a bound method changes",
    lambda s, x: s.f(s.l(x)),
    lambda s: setattr(s, "f", Gain().apply),
    change=lambda m, e: setattr(m.sc.f.__self__, "gain", 3.0),
)


def _rebind(m, e):
    global imported
    imported = functional.relu


def _bind(m, e):
    global imported
    imported = functional.silu


case("a name from 'from x import y' is bound anew", lambda s, x: imported(s.l(x)), start=_bind,
     change=_rebind)  # fmt: skip


def _monkeypatch(m, e):
    original = functional.mish
    functional.mish = lambda x: original(x) * 3.0
    e.undo = lambda: setattr(functional, "mish", original)


case(
    "a function of torch is monkeypatched",
    lambda s, x: functional.mish(s.l(x)),
    change=_monkeypatch,
    between=lambda m, e, i: i == 6 and e.undo(),
)

# ---- things far away

case("a weak reference's object changes", lambda s, x: s.l(x) * s.ref().gain,
     lambda s: (setattr(s, "owner", (o := Gain(),)), setattr(s, "ref", weakref.ref(o))),
     change=lambda m, e: setattr(m.sc.ref(), "gain", 3.0))  # fmt: skip
case("a context variable", lambda s, x: s.l(x) * CONTEXT.get(), start=lambda m, e: CONTEXT.set(1.0),
     change=lambda m, e: CONTEXT.set(3.0))  # fmt: skip
case("a thread local", lambda s, x: s.l(x) * THREAD.gain,
     start=lambda m, e: setattr(THREAD, "gain", 1.0),
     change=lambda m, e: setattr(THREAD, "gain", 3.0))  # fmt: skip
case("an environment variable", lambda s, x: s.l(x) * float(os.environ["PROGRAMS"]),
     start=lambda m, e: os.environ.update(PROGRAMS="1"),
     change=lambda m, e: os.environ.update(PROGRAMS="3"))  # fmt: skip


def _import_inside(s, x):
    import programs_settings

    return s.l(x) * programs_settings.gain


case("an attribute of another Python module", _import_inside,
     start=lambda m, e: setattr(OTHER_MODULE, "gain", 1.0),
     change=lambda m, e: setattr(OTHER_MODULE, "gain", 3.0))  # fmt: skip
case("the model around the scope", lambda s, x: s.l(x) * s.up[0].factor,
     start=lambda m, e: (setattr(m.sc, "up", (m,)), setattr(m, "factor", 1.0)),
     change=lambda m, e: setattr(m, "factor", 3.0))  # fmt: skip
case("a plain object four attributes away", lambda s, x: s.l(x) * s.a.b.c.gain,
     lambda s: setattr(s, "a", types.SimpleNamespace(b=types.SimpleNamespace(c=Gain()))),
     change=lambda m, e: setattr(m.sc.a.b.c, "gain", 3.0))  # fmt: skip
case("the number of hooks of another module",
     lambda s, x: s.l(x) * (1 + len(s.up[0]._forward_hooks)),
     start=lambda m, e: setattr(m.sc, "up", (m.pre,)),
     change=lambda m, e: m.pre.register_forward_hook(lambda *a: None))  # fmt: skip

# ---- iterators, counters, logs


def _generator():
    for n in itertools.count(1):
        yield 1.0 / n


case("a generator is advanced", lambda s, x: s.l(x) * next(s.g),
     lambda s: setattr(s, "g", _generator()))  # fmt: skip
case("itertools.cycle is advanced", lambda s, x: s.l(x) * next(s.c),
     lambda s: setattr(s, "c", itertools.cycle([1.0, 2.0, 3.0])))  # fmt: skip
case("a deque remembers how many calls there were", lambda s, x: s.q.append(1) or s.l(x) / len(s.q),
     lambda s: setattr(s, "q", collections.deque(maxlen=5)))  # fmt: skip
case("a counter counts for the script", lambda s, x: s.c.update(["call"]) or s.l(x),
     lambda s: setattr(s, "c", collections.Counter()),
     between=lambda m, e, i: e.log.append(m.sc.c["call"]))  # fmt: skip
case("a class counts its calls", lambda s, x: setattr(type(s), "n", type(s).n + 1) or s.l(x),
     start=lambda m, e: setattr(Scope, "n", 0),
     between=lambda m, e, i: e.log.append(Scope.n))  # fmt: skip
case("a schedule is a function of a global step", lambda s, x: s.l(x) * (1.0 + SETTINGS["step"]),
     start=lambda m, e: SETTINGS.update(step=0),
     between=lambda m, e, i: SETTINGS.update(step=i))  # fmt: skip
case("a seed sequence of its own", lambda s, x: s.l(x) * float(s.r.random()),
     lambda s: setattr(s, "r", np.random.default_rng(0)))  # fmt: skip


def _raises_by_flag(s, x):
    if SETTINGS["stop"]:
        raise ZeroDivisionError("stop")
    return s.l(x)


case("a forward that raises by a flag", _raises_by_flag,
     start=lambda m, e: SETTINGS.update(stop=False),
     change=lambda m, e: SETTINGS.update(stop=True))  # fmt: skip
