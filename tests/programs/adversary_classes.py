"""Adversaries: classes, metaclasses, descriptors, properties."""

from __future__ import annotations

import enum
import functools
import weakref
from dataclasses import dataclass
from typing import Any

from programs.cases import Scope, Table
from programs.scripts import having, setting

case = Table()
SETTINGS: dict[str, Any] = {}


# ---- classes


class OfClass(Scope):
    gain = 1.0

    def helper(self, x):
        return x

    def forward(self, x):
        return self.helper(self.l(x)) * self.gain


class OfSubclass(OfClass):
    pass


def _fresh(kind):
    """A new class for this case, so that a change of it ends with the case."""

    def make(case):
        OfClass.gain = 1.0
        return type(kind.__name__, (kind,), {})(case)

    return make


def set_class(name, value, base=0):
    return lambda m, e: setattr(type(m.sc).__mro__[base], name, value)


case("an attribute of the class", scope=_fresh(OfClass), change=set_class("gain", 3.0))
case(
    "an attribute of a base class",
    scope=_fresh(OfSubclass),
    start=set_class("gain", 1.0, base=2),
    change=set_class("gain", 3.0, base=2),
)
case("a method of the class is patched", scope=_fresh(OfClass),
     change=set_class("helper", lambda self, x: 3.0 * x))  # fmt: skip
case("forward of the class is patched", scope=_fresh(OfClass),
     change=set_class("forward", lambda self, x: 3.0 * self.l(x)))  # fmt: skip
case("an attribute hides that of the class", scope=_fresh(OfClass), change=setting("gain", 3.0))


def _delete_gain(m, e):
    del m.sc.gain


case(
    "an attribute goes and the class's comes through",
    scope=_fresh(OfClass),
    start=setting("gain", 2.0),
    change=_delete_gain,
)


class Meta(type):
    @property
    def gain(cls):
        return SETTINGS["gain"]


class WithMeta(metaclass=Meta):
    pass


case(
    "a property of a metaclass",
    lambda s, x: s.l(x) * WithMeta.gain,
    start=lambda m, e: SETTINGS.update(gain=1.0),
    change=lambda m, e: SETTINGS.update(gain=3.0),
)


class Falls(Scope):
    def __init__(self, case):
        super().__init__(case)
        self.__dict__["options"] = {"gain": 1.0}

    def __getattr__(self, name):
        options = self.__dict__.get("options", {})
        return options[name] if name in options else super().__getattr__(name)

    def forward(self, x):
        return self.l(x) * self.gain


case("__getattr__ falls back to a dictionary", scope=Falls,
     change=lambda m, e: m.sc.options.update(gain=3.0))  # fmt: skip


class Descriptor:
    def __init__(self) -> None:
        self.values: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def __get__(self, owner, kind=None):
        return self if owner is None else self.values.get(owner, 1.0)

    def __set__(self, owner, value):
        self.values[owner] = value


class Described(Scope):
    gain = Descriptor()

    def forward(self, x):
        return self.l(x) * self.gain


case("a descriptor keeps the value elsewhere", scope=Described, change=setting("gain", 3.0))


class Cached(Scope):
    def __init__(self, case):
        super().__init__(case)
        self.base = [1.0]

    @functools.cached_property
    def gain(self):
        return self.base[0]

    def forward(self, x):
        return self.l(x) * self.gain


def _invalidate(m, e):
    m.sc.base[0] = 3.0
    m.sc.__dict__.pop("gain", None)


case("a cached_property is invalidated", scope=Cached, change=_invalidate)


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


case("an object with slots", lambda s, x: s.l(x) * s.o.gain, lambda s: setattr(s, "o", Slotted()),
     change=lambda m, e: setattr(m.sc.o, "gain", 3.0))  # fmt: skip


class Mode(enum.Enum):
    A = "a"
    B = "b"


case("an enum", lambda s, x: s.l(x) * (1.0 if s.mode is Mode.A else 3.0), having(mode=Mode.A),
     change=setting("mode", Mode.B))  # fmt: skip


@dataclass(frozen=True)
class Frozen:
    gain: float = 1.0
    inner: Any = None


case("a frozen dataclass holds one that is replaced by force", lambda s, x: s.l(x) * s.c.inner.gain,
     lambda s: setattr(s, "c", Frozen(inner=Frozen())),
     change=lambda m, e: object.__setattr__(m.sc.c.inner, "gain", 3.0))  # fmt: skip
