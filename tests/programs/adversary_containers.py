"""Adversaries: containers whose methods return something else than they hold.

A forward reads ``s.held`` by the methods of the container. Before step 4 its content changes.
Guards must see the change, and must not change the content themselves.
"""

from __future__ import annotations

import collections
import types

from programs.cases import Table

case = Table()


def kept(name, made, read, change, **options):
    """Case whose forward multiplies by ``read(s)``; ``change`` gives ``s.held`` another content."""
    case(
        name,
        lambda s, x: s.l(x) * read(s.held),
        lambda s: setattr(s, "held", made()),
        change=lambda m, e: change(m.sc.held),
        **options,
    )


class Made(collections.OrderedDict):
    """A dictionary that keeps classes and returns instances, as ``ACT2FN`` of transformers does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class One:
    value = 1.0


class Three:
    value = 3.0


def change_made(held):
    held["a"] = Three


def of_class(held):
    """1.0 if the dictionary still holds the class behind its methods."""
    return 1.0 if isinstance(dict.get(held, "a"), type) else 5.0


kept("an OrderedDict that makes what it hands out", lambda: Made(a=One),
     lambda h: h["a"].value, change_made)  # fmt: skip
kept("what it keeps stays what it is", lambda: Made(a=One),
     lambda h: of_class(h) * h["a"].value, change_made)  # fmt: skip
kept("its items()", lambda: Made(a=One), lambda h: sum(v.value for _, v in h.items()), change_made)
REGISTRY = Made(a=One)
case("a global one", lambda s, x: s.l(x) * of_class(REGISTRY) * REGISTRY["a"].value,
     start=lambda m, e: REGISTRY.update(a=One),
     change=lambda m, e: change_made(REGISTRY))  # fmt: skip


class Doubles(dict):
    def __getitem__(self, key):
        return 2 * dict.get(self, key)


class Shy(dict):
    """A list whose methods show nothing of its content."""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __bool__(self):
        return False

    def __contains__(self, key):
        return False

    def keys(self):
        return ()

    def values(self):
        return ()

    def items(self):
        return ()


class Agrees(dict):
    def __eq__(self, other):
        return True

    __hash__ = None


class Counting(dict):
    """A dictionary in which a lookup of a missing key makes an entry."""

    def __missing__(self, key):
        self[key] = 0.5
        return 0.5


for kind in (Doubles, Shy, Agrees, Counting):
    kept(f"a dictionary: {kind.__name__}", lambda kind=kind: kind(a=1.0),
         lambda h: h["a"], lambda h: dict.__setitem__(h, "a", 3.0))  # fmt: skip
    kept(f"a new entry: {kind.__name__}", lambda kind=kind: kind(a=1.0),
         lambda h: h["a"] * dict.get(h, "b", 1.0),
         lambda h: dict.__setitem__(h, "b", 3.0))  # fmt: skip
kept("an entry made by a miss", lambda: Counting(), lambda h: h["a"] * len(h),
     lambda h: dict.__setitem__(h, "a", 3.0))  # fmt: skip


class ShyList(list):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class Backwards(list):
    def __iter__(self):
        return iter([2 * v for v in reversed(list(self[:]))])


class ShyDeque(collections.deque):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class ShySet(set):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


def set_first(held):
    held[0] = 3.0


for kind in (ShyList, Backwards, ShyDeque):
    kept(f"a sequence: {kind.__name__}", lambda kind=kind: kind([1.0, 2.0]),
         lambda h: h[0], set_first)  # fmt: skip
kept("a list by its iterator", lambda: Backwards([1.0, 2.0]), lambda h: next(iter(h)), set_first)
kept("a set: ShySet", lambda: ShySet({"a"}), lambda h: 3.0 if set.__contains__(h, "b") else 1.0,
     lambda h: set.add(h, "b"))  # fmt: skip


class Hidden(tuple):
    """A tuple whose elements its iterator does not show."""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


kept("a list within a tuple that hides it", lambda: Hidden(([1.0],)), lambda h: h[0][0],
     lambda h: set_first(h[0]))  # fmt: skip
kept("a UserDict", lambda: collections.UserDict(a=1.0), lambda h: h["a"],
     lambda h: h.update(a=3.0))  # fmt: skip
kept("a UserList", lambda: collections.UserList([1.0]), lambda h: h[0], set_first)
kept("a ChainMap", lambda: collections.ChainMap({}, {"a": 1.0}), lambda h: h["a"],
     lambda h: h.maps[1].update(a=3.0))  # fmt: skip
kept("a ChainMap's first", lambda: collections.ChainMap({}, {"a": 1.0}), lambda h: h["a"],
     lambda h: h.maps[0].update(a=3.0))  # fmt: skip
kept("a proxy of a shy dictionary", lambda: (d := Shy(a=1.0), types.MappingProxyType(d)),
     lambda h: h[1]["a"], lambda h: dict.__setitem__(h[0], "a", 3.0))  # fmt: skip
kept("a Counter", lambda: collections.Counter(a=1), lambda h: float(h["a"]),
     lambda h: h.update(a=2))  # fmt: skip
kept("a Counter that misses", lambda: collections.Counter(a=1), lambda h: 1.0 + h["b"],
     lambda h: h.update(b=2))  # fmt: skip
kept("a defaultdict that misses", lambda: collections.defaultdict(lambda: 1.0), lambda h: h["a"],
     lambda h: h.update(a=3.0))  # fmt: skip
kept("an OrderedDict that is moved", lambda: collections.OrderedDict(a=1.0, b=3.0),
     lambda h: next(iter(h.values())), lambda h: h.move_to_end("a"))  # fmt: skip
kept("a dictionary in another order", lambda: {"a": 1.0, "b": 3.0},
     lambda h: next(iter(h.values())), lambda h: h.update(a=h.pop("a")))  # fmt: skip
