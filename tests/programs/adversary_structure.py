"""Adversaries of the structure of guards; each is named after its row in issue 32."""

from __future__ import annotations

import builtins
import copy
import ctypes
import dataclasses
import enum
import functools
import importlib
import operator
import os
import queue
import sys
import tempfile
import threading
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn

from programs.cases import WIDTH, Table

case = Table()


def attribute(name, forward, init, change, **options):
    """Case whose module is changed before step 4."""
    case(name, forward, init, change=lambda m, e: change(m.sc), **options)


def of_global(name, forward, holder, key, before, after):
    """Case that changes what lies in a namespace or class of this process before step 4."""
    case(name, forward, start=lambda m, e: setattr(holder, key, before),
         change=lambda m, e: setattr(holder, key, after))  # fmt: skip


# ---- 01: a reference is moved to an object that is known by another path


def _two_layers(s):
    s.a, s.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    s.use, s.order, s.fn = s.a, [s.a, s.b], s.a.forward


attribute("01 self.use = self.b", lambda s, x: s.use(x).tanh(), _two_layers,
          lambda s: setattr(s, "use", s.b))  # fmt: skip
attribute("01 a plain list of layers is reversed", lambda s, x: s.order[1](s.order[0](x).tanh()),
          _two_layers, lambda s: s.order.reverse())  # fmt: skip
attribute("01 self.fn = self.b.forward", lambda s, x: s.fn(x).tanh(), _two_layers,
          lambda s: setattr(s, "fn", s.b.forward))  # fmt: skip


def _phases(s):
    s.cfgs = {"a": {"gain": 1.0}, "b": {"gain": 3.0}}
    s.now = s.cfgs["a"]


attribute("01 self.now = self.cfgs['b']", lambda s, x: s.l(x) * s.now["gain"] * len(s.cfgs),
          _phases, lambda s: setattr(s, "now", s.cfgs["b"]))  # fmt: skip
attribute("01 a tensor that nobody reads is another known one",
          lambda s, x: s.l(x) * (1.0 if s.t is s.u else 3.0),
          lambda s: (setattr(s, "u", torch.ones(1)), setattr(s, "v", torch.ones(1)),
                     setattr(s, "t", s.u)),
          lambda s: setattr(s, "t", s.v))  # fmt: skip


# ---- 02, 05: keys are compared as values are, and so is their order


class Mode(enum.Enum):
    A = 1
    B = 2
    C = {"gain": 1.0}  # noqa: RUF012


def _rename(held, old, new):
    held[new] = held.pop(old)


attribute("02 a key is renamed", lambda s, x: s.l(x) * s.d.get("a", 3.0),
          lambda s: setattr(s, "d", {"a": 1.0}), lambda s: _rename(s.d, "a", "b"))  # fmt: skip
attribute("02 layers of a Sequential in another order", lambda s, x: s.layers(x).tanh(),
          lambda s: setattr(s, "layers", nn.Sequential(
              nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))),
          lambda s: _rename(s.layers._modules, "0", "0"))  # fmt: skip
attribute("05 a key that is an enum", lambda s, x: s.l(x) * s.d.get(Mode.A, 3.0),
          lambda s: setattr(s, "d", {Mode.A: 1.0}),
          lambda s: setattr(s, "d", {Mode.B: 1.0}))  # fmt: skip
attribute("05 a key that is a tuple", lambda s, x: s.l(x) * (3.0 if (0, 1) in s.d else 1.0),
          lambda s: setattr(s, "d", {(0, 0): 1.0}),
          lambda s: setattr(s, "d", {(0, 1): 1.0}))  # fmt: skip
attribute("05 a key that is a tensor",
          lambda s, x: s.l(x) * (3.0 if id(s.v) in map(id, s.d) else 1.0),
          lambda s: (setattr(s, "u", torch.ones(1)), setattr(s, "v", torch.ones(1)),
                     setattr(s, "d", {s.u: 1.0})),
          lambda s: setattr(s, "d", {s.v: 1.0}))  # fmt: skip
attribute("05 a set of enums", lambda s, x: s.l(x) * (3.0 if Mode.B in s.modes else 1.0),
          lambda s: setattr(s, "modes", {Mode.A}),
          lambda s: setattr(s, "modes", {Mode.B}))  # fmt: skip


# ---- 03: roots have names of their own

attribute("03 an attribute named step", lambda s, x: s.l(x), None, lambda s: None,
          engines=("step",), loss=lambda m, x, e: m.sc(m.pre(x)).square().mean() * m.step,
          start=lambda m, e: setattr(m, "step", 1.0),
          between=lambda m, e, i: setattr(m, "step", 1.0 + i // 4))  # fmt: skip


# ---- 26, 18: wherever a function is noted, it is visited

BOX = [1.0]


def _with_closure(box):
    def forward(s, x):
        return s.l(x) * box[0]

    return forward


class PatchedIn(nn.Module):
    """A module whose forward is a closure that was patched into the class."""

    def __init__(self, _):
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    forward = _with_closure(BOX)


case("26 the closure of a forward", scope=PatchedIn, start=lambda m, e: BOX.__setitem__(0, 1.0),
     change=lambda m, e: BOX.__setitem__(0, 3.0))  # fmt: skip


def _class_with_property(box):
    class Block(PatchedIn):
        gain = property(lambda s: box[0])

        def forward(self, x):
            return self.l(x) * self.gain

    return Block


case("18 the closure of a property", scope=_class_with_property(BOX),
     start=lambda m, e: BOX.__setitem__(0, 1.0),
     change=lambda m, e: BOX.__setitem__(0, 3.0))  # fmt: skip


class Meta(type):
    rate = 1.0

    @property
    def scale(cls):
        return cls.rate


class Space(metaclass=Meta):
    pass


builtins.GAIN_OF_STRUCTURE = 1.0
of_global("18 data of a metaclass", lambda s, x: s.l(x) * Space.scale, Meta, "rate", 1.0, 3.0)
of_global("18 a name in builtins", lambda s, x: s.l(x) * GAIN_OF_STRUCTURE,  # noqa: F821
          builtins, "GAIN_OF_STRUCTURE", 1.0, 3.0)  # fmt: skip
case("18 a dictionary in an enum", lambda s, x: s.l(x) * Mode.C.value["gain"],
     start=lambda m, e: Mode.C.value.update(gain=1.0),
     change=lambda m, e: Mode.C.value.update(gain=3.0))  # fmt: skip


def _marked():
    raise AssertionError


_marked.gain = 1.0
of_global("18 an attribute of a function that does not run",
          lambda s, x: s.l(x) * _marked.gain, _marked, "gain", 1.0, 3.0)  # fmt: skip
attribute("18 a partial that is bound again", lambda s, x: s.scaled(s.l(x)),
          lambda s: setattr(s, "scaled", functools.partial(torch.mul, other=1.0)),
          lambda s: s.scaled.__setstate__((torch.mul, (), {"other": 3.0}, None)))  # fmt: skip


# ---- 04: names that only the backward mentions


def _hooked(s, x):
    y = s.l(x)
    y.register_hook(lambda gradient: gradient * s.gradient_scale)
    return y.tanh()


attribute("04 a hook made in the forward", _hooked, lambda s: setattr(s, "gradient_scale", 1.0),
          lambda s: setattr(s, "gradient_scale", 3.0))  # fmt: skip


def _scaled(gradient, config):
    return gradient * config.scale_of_gradients


def _hooked_by_a_function(s, x):
    y, config = s.l(x), s.config
    y.register_hook(lambda gradient: _scaled(gradient, config))
    return y.tanh()


class Schedule:
    strength = 1.0
    scale_of_gradients = 1.0


def _reversed(x, schedule):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -schedule.strength * gradient

    return Reverse.apply(x)


attribute("04 a function that a hook calls", _hooked_by_a_function,
          lambda s: setattr(s, "config", Schedule()),
          lambda s: setattr(s.config, "scale_of_gradients", 3.0))  # fmt: skip
attribute("04 a local autograd function", lambda s, x: _reversed(s.l(x), s.schedule).tanh(),
          lambda s: setattr(s, "schedule", Schedule()),
          lambda s: setattr(s.schedule, "strength", 3.0))  # fmt: skip


def _double(gradient):
    return gradient * 2.0


def _triple(gradient):
    return gradient * 3.0


DOUBLE = _double.__code__


def _hooked_by_an_attribute(s, x):
    y = s.l(x)
    y.register_hook(lambda gradient: s.scaled(gradient))
    return y.tanh()


attribute("04 code of a function without names that a hook calls", _hooked_by_an_attribute,
          lambda s: (setattr(s, "scaled", _double), setattr(_double, "__code__", DOUBLE)),
          lambda s: setattr(_double, "__code__", _triple.__code__),
          options={"audit_every": None})  # fmt: skip


# ---- 06 to 08: what cannot be compared runs eagerly, and is counted

attribute("06 a list of 3,000 numbers", lambda s, x: s.l(x) * s.table[2500],
          lambda s: setattr(s, "table", [1.0] * 3000),
          lambda s: setattr(s, "table", [3.0] * 3000))  # fmt: skip
attribute("07 an array of 10,000 numbers", lambda s, x: s.l(x) * float(s.table[7]),
          lambda s: setattr(s, "table", np.ones(10_000)), lambda s: s.table.fill(3.0))  # fmt: skip
attribute("08 ctypes", lambda s, x: s.l(x) * s.v.value,
          lambda s: setattr(s, "v", ctypes.c_double(1.0)),
          lambda s: setattr(s.v, "value", 3.0))  # fmt: skip
attribute("08 an event", lambda s, x: s.l(x) * (3.0 if s.v.is_set() else 1.0),
          lambda s: setattr(s, "v", threading.Event()), lambda s: s.v.set())  # fmt: skip
attribute("08 a masked array", lambda s, x: s.l(x) * float(s.v[1]),
          lambda s: setattr(s, "v", np.ma.ones(4)), lambda s: s.v.__setitem__(1, 3.0))  # fmt: skip
attribute("08 a queue in C", lambda s, x: s.l(x) * (3.0 if s.v.qsize() else 1.0),
          lambda s: setattr(s, "v", queue.SimpleQueue()), lambda s: s.v.put(1))  # fmt: skip


# ---- 10, 11: names that are data, and objects that are read as a whole


@dataclasses.dataclass(unsafe_hash=True)
class Norm:
    eps: float = 1e-5


@dataclasses.dataclass
class Rate:
    gain: float = 1.0


PLAIN_NORM, OF_NORMS = Norm(), {Norm(): 1.0, Norm(1.0): 3.0}
GET_GAIN = operator.attrgetter("cfg.gain")


def set_gains(value):
    for holder in (CONSTANTS, Levels, Preset):
        holder.gain = value


def _rgetattr(value, path):
    return functools.reduce(getattr, path.split("."), value)


def of_config(name, forward, make=Norm, key="eps", after=1.0):
    attribute(name, forward, lambda s: setattr(s, "cfg", make()),
              lambda s: setattr(s.cfg, key, after))  # fmt: skip


def _norm(s, x, options):
    return nn.functional.layer_norm(s.l(x), (WIDTH,), **options)


of_config("10 an attrgetter made before", lambda s, x: s.l(x) * GET_GAIN(s), Rate, "gain", 3.0)
of_config("10 a dotted name", lambda s, x: s.l(x) * _rgetattr(s, "cfg.gain"), Rate, "gain", 3.0)
attribute("10 a name that is put together",
          lambda s, x: s.l(x) * getattr(s.cfg, "".join(s.letters)),
          lambda s: (setattr(s, "cfg", Rate()), setattr(s, "letters", ["ga", "in"])),
          lambda s: setattr(s.cfg, "gain", 3.0))  # fmt: skip
CONSTANTS = types.ModuleType("constants_of_a_project")
CONSTANTS.gain = 1.0


class Levels(type):
    gain = 1.0


class Level(metaclass=Levels):
    """A class whose metaclass has the data."""


class Preset:
    gain = 1.0


for _what, _holder in (("a class, by an object", Preset()), ("a metaclass", Level),
                       ("a module", CONSTANTS)):  # fmt: skip
    attribute(f"10 a name that is put together: {_what}",
              lambda s, x: s.l(x) * getattr(s.cfg, "".join(s.letters)),
              lambda s, holder=_holder: (set_gains(1.0), setattr(s, "cfg", holder),
                                         setattr(s, "letters", ["ga", "in"])),
              lambda s: set_gains(3.0))  # fmt: skip
attribute("10 names in a list", lambda s, x: s.l(x) * sum([getattr(s, n) for n in s.terms]),
          lambda s: (setattr(s, "terms", ["alpha", "beta"]), setattr(s, "alpha", 1.0),
                     setattr(s, "beta", 1.0)),
          lambda s: setattr(s, "beta", 3.0))  # fmt: skip
of_config("11 asdict", lambda s, x: _norm(s, x, dataclasses.asdict(s.cfg)))
of_config("11 vars", lambda s, x: _norm(s, x, vars(s.cfg)))
of_config("11 __dict__", lambda s, x: _norm(s, x, s.cfg.__dict__))
of_config("11 a copy", lambda s, x: _norm(s, x, vars(copy.copy(s.cfg))))
of_config("11 ==", lambda s, x: s.l(x) * (1.0 if s.cfg == PLAIN_NORM else 3.0))
of_config("11 a key of a dict", lambda s, x: s.l(x) * OF_NORMS[s.cfg])


# ---- 09, 12, 14: code in a package, in site-packages, and without a file

_PROJECT = """
import os
from torch import nn
class Config: scale = 1.0
class Registry: functions = {"act": lambda x: x.tanh()}
class Block(nn.Module):
    def __init__(self, _): super().__init__(); self.l = nn.Linear(4, 4)
class ByClass(Block):
    def forward(self, x): return self.l(x) * Config.scale
class ByRegistry(Block):
    def forward(self, x): return Registry.functions["act"](self.l(x))
class ByImport(Block):
    def forward(self, x):
        from . import settings
        return self.l(x) * settings.gain
class ByFile(Block):
    def forward(self, x): return self.l(x) * (3.0 if os.path.exists(os.environ["FLAG"]) else 1.0)
"""


def _installed():
    """A user's project in a folder site-packages."""
    where = Path(tempfile.mkdtemp()) / "site-packages"
    name = f"programs_project_{os.getpid()}"
    (where / name).mkdir(parents=True)
    (where / name / "__init__.py").write_text(_PROJECT)
    (where / name / "settings.py").write_text("gain = 1.0\n")
    sys.path.insert(0, str(where))
    try:
        return importlib.import_module(name), importlib.import_module(f"{name}.settings")
    finally:
        sys.path.pop(0)


PROJECT, SETTINGS = _installed()
FLAG = Path(PROJECT.__file__).parent / "flag"


def of_project(name, scope, start, change):
    case(name, scope=scope, start=lambda m, e: start(), change=lambda m, e: change())


of_project("12 an attribute of a class", PROJECT.ByClass,
           lambda: setattr(PROJECT.Config, "scale", 1.0),
           lambda: setattr(PROJECT.Config, "scale", 3.0))  # fmt: skip
of_project("12 a registry of a class", PROJECT.ByRegistry,
           lambda: PROJECT.Registry.functions.update(act=torch.tanh),
           lambda: PROJECT.Registry.functions.update(act=torch.sigmoid))  # fmt: skip
of_project("12 a file that appears", PROJECT.ByFile,
           lambda: (os.environ.__setitem__("FLAG", str(FLAG)), FLAG.unlink(missing_ok=True)),
           FLAG.touch)  # fmt: skip
of_project("09 from . import settings", PROJECT.ByImport,
           lambda: setattr(SETTINGS, "gain", 1.0),
           lambda: setattr(SETTINGS, "gain", 3.0))  # fmt: skip

EXECUTED = {"__name__": "__main__"}
exec(f"GAIN = 1.0\n{_PROJECT.replace('Config.scale', 'GAIN')}", EXECUTED)
of_project("14 a global of code without a file", EXECUTED["ByClass"],
           lambda: EXECUTED.update(GAIN=1.0), lambda: EXECUTED.update(GAIN=3.0))  # fmt: skip
