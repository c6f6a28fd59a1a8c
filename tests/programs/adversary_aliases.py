"""Adversaries: tensors that a forward writes through other objects on their memory."""

from __future__ import annotations

import array
import operator
import types

import numpy as np
import torch

from programs.cases import WIDTH, Scope, Table

case = Table()
ALONE = {"audit_every": None}  # guards have to see it
KEPT = torch.zeros(WIDTH)
ARRAY = np.zeros(WIDTH, dtype=np.float32)
OF_ARRAY = torch.from_numpy(ARRAY)
BUFFER = bytearray(4 * WIDTH)
OF_BUFFER = torch.frombuffer(BUFFER, dtype=torch.float32)
NUMBERS = array.array("f", [0.0] * WIDTH)
STORAGE = KEPT.untyped_storage()


def _init(s):
    s.kept = torch.zeros(WIDTH)
    s.storage = s.kept.untyped_storage()
    s.array = np.zeros(WIDTH, dtype=np.float32)
    s.of_array = torch.from_numpy(s.array)


def _of_storage(storage):
    return torch.empty(0).set_(storage, 0, (WIDTH,))


# Each writes ones, twos, ... at its calls.
WRITES = {
    "the storage of an attribute": lambda s: _of_storage(s.kept.untyped_storage()).add_(1),
    "the storage of a global": lambda s: _of_storage(KEPT.untyped_storage()).add_(1),
    "a storage that is an attribute": lambda s: _of_storage(s.storage).add_(1),
    "a storage that is a global": lambda s: _of_storage(STORAGE).add_(1),
    "a typed storage": lambda s: torch.empty(0).set_(s.kept.storage()).add_(1),
    "a part of a storage": lambda s: torch.empty(0).set_(s.storage, 2, (2,), (1,)).add_(1),
    "two tensors on a storage": lambda s: (
        _of_storage(s.storage).add_(1), _of_storage(s.storage).mul_(2)),
    "a view of a tensor on a storage": lambda s: _of_storage(s.storage)[1:].add_(1),
    "fill_ of a storage": lambda s: s.kept.untyped_storage().fill_(s.storage[0] + 1),
    "an element of a storage": lambda s: s.storage.__setitem__(0, s.storage[0] + 1),
    "an element of a storage by brackets": lambda s: _sets(s.kept.untyped_storage()),
    "an element of a typed storage": lambda s: _sets(s.kept.storage()),
    "copy_ of a storage": lambda s: s.storage.copy_((s.kept + 1).untyped_storage()),
    "from_numpy of an attribute": lambda s: torch.from_numpy(s.array).add_(1),
    "from_numpy of a global": lambda s: torch.from_numpy(ARRAY).add_(1),
    "as_tensor": lambda s: torch.as_tensor(s.array).add_(1),
    "frombuffer": lambda s: torch.frombuffer(BUFFER, dtype=torch.float32).add_(1),
    "an array in place": lambda s: s.array.__iadd__(1),
    "an array of another module": lambda s: torch.frombuffer(NUMBERS, dtype=torch.float32).add_(1),
    "a tensor's data": lambda s: s.kept.data.add_(1),
    "set_ of a tensor": lambda s: torch.empty(0).set_(s.kept).add_(1),
}  # fmt: skip


def _sets(storage):
    storage[0] = storage[0] + 1


def _zeroed(m, e):
    for each in (KEPT, OF_ARRAY, OF_BUFFER):
        each.zero_()
    NUMBERS[:] = array.array("f", [0.0] * WIDTH)


def _seen(m, e, i):
    found = [m.sc.kept, m.sc.of_array, KEPT, OF_ARRAY, OF_BUFFER]
    e.log.append([each.tolist() for each in found] + [list(NUMBERS)])
    m.zero_grad()


def _writing(write, reads):
    def forward(s, x):
        write(s)
        return s.l(x) + (s.kept if reads else 0.0)

    return forward


for _name, _write in WRITES.items():
    for _reads in (False, True):
        _what = f"a write by {_name}" + (", and a read" if _reads else "")
        case(_what, _writing(_write, _reads), _init, start=_zeroed, update=_seen, options=ALONE)


def _overwrites(write):
    """Forward that writes what is zero at the beginning of every step."""
    return lambda s, x: (write(s), s.l(x))[1]


OVERWRITES = {
    "fill_ of a storage": lambda s: s.kept.untyped_storage().fill_(64),
    "an element of a storage": lambda s: s.storage.__setitem__(3, 64),
    "an element of a typed storage": lambda s: s.kept.storage().__setitem__(0, 64),
    "a function of storages": lambda s: torch.UntypedStorage.fill_(s.storage, 64),
}
for _name, _write in OVERWRITES.items():
    case(f"a constant that is written by {_name}", _overwrites(_write), _init, options=ALONE,
         between=lambda m, e, i: m.sc.kept.zero_(), update=_seen)  # fmt: skip


# ---- properties of a class of their own


class Scales(property):
    """A property that computes something with what it holds."""

    scale = 1.0

    def __get__(self, owner, kind=None):
        return self if owner is None else super().__get__(owner, kind) * self.scale


class Slotted(property):
    __slots__ = ("__doc__", "scale")

    def __get__(self, owner, kind=None):
        return self if owner is None else super().__get__(owner, kind) * self.scale


class Deep(Scales):
    """A property that holds an object."""

    def __get__(self, owner, kind=None):
        return self if owner is None else owner.base * self.options["scale"]


class Owner:
    base = 1.0
    scales = Scales(lambda o: o.base)
    by_class = Scales(lambda o: o.base)
    slotted = Slotted(lambda o: o.base)
    deep = Deep(lambda o: o.base)
    getter = Scales(operator.attrgetter("base"))


class Owning(Scope):
    gain = Scales(lambda s: s.base)

    def forward(self, x):
        return self.l(x) * self.gain


class Settings(types.ModuleType):
    """A module of a class of its own."""

    gain = 1.0


SETTINGS = Settings("settings_of_aliases")


def _reset(m, e):
    Owner.base = Scales.scale = Settings.gain = 1.0
    of_owner = [vars(Owner)[name] for name in ("scales", "slotted", "getter")]
    for each in (*of_owner, vars(Owning)["gain"]):
        each.scale = 1.0
    vars(Owner)["deep"].options = {"scale": 1.0}
    m.sc.owner, m.sc.base = Owner(), 1.0


def of_property(name, forward, change, **options):
    case(f"a property of a class of its own: {name}", forward, start=_reset,
         change=lambda m, e: change(m), options=ALONE, **options)  # fmt: skip


of_property("its attribute", lambda s, x: s.l(x) * s.owner.scales,
            lambda m: setattr(vars(Owner)["scales"], "scale", 3.0))  # fmt: skip
of_property("its class", lambda s, x: s.l(x) * s.owner.by_class,
            lambda m: setattr(Scales, "scale", 3.0))  # fmt: skip
of_property("its slot", lambda s, x: s.l(x) * s.owner.slotted,
            lambda m: setattr(vars(Owner)["slotted"], "scale", 3.0))  # fmt: skip
of_property("what it holds", lambda s, x: s.l(x) * s.owner.deep,
            lambda m: vars(Owner)["deep"].options.update(scale=3.0))  # fmt: skip
of_property("its getter in C", lambda s, x: s.l(x) * s.owner.getter,
            lambda m: setattr(Owner, "base", 3.0))  # fmt: skip
of_property("of a module of Python", lambda s, x: s.l(x) * SETTINGS.gain,
            lambda m: setattr(Settings, "gain", 3.0))  # fmt: skip
of_property("of the module", None, lambda m: setattr(vars(Owning)["gain"], "scale", 3.0),
            scope=Owning)  # fmt: skip
