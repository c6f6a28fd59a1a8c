"""Every way to change a container is seen, and a container that is put back is the same again."""

from __future__ import annotations

import types
from collections import OrderedDict, deque

import pytest
from torch import nn

from moe_graphs.engine.guards.guards import FastPath
from moe_graphs.engine.guards.introspection import Container

CHANGES = {
    "set": (lambda d: d.__setitem__("a", 2), lambda d: d.__setitem__("a", 1)),
    "new": (lambda d: d.setdefault("b", 2), lambda d: d.pop("b")),
    "delete": (lambda d: d.__delitem__("a"), lambda d: d.__setitem__("a", 1)),
    "update": (lambda d: d.update(a=2), lambda d: d.update(a=1)),
    "or": (lambda d: d.__ior__({"a": 2}), lambda d: d.__ior__({"a": 1})),
    "clear": (lambda d: d.clear(), lambda d: d.update(a=1)),
    "popitem": (lambda d: d.popitem(), lambda d: d.update(a=1)),
}


def untouched_by(containers, noisy=(), matter=()):
    return FastPath([(each, each.contents()) for each in containers], (), (), (), noisy, matter)


def check(container, change, back):
    untouched = untouched_by([container])
    assert untouched.is_true()
    change()
    assert not untouched.is_true()
    assert not untouched.is_true()  # however often it is asked
    back()
    assert untouched.is_true()


@pytest.mark.parametrize("keys", [None, frozenset({"a", "b"})], ids=["all of it", "by name"])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", CHANGES)
def test_dictionaries(name, kind, keys):
    held = kind(a=1)
    change, back = CHANGES[name]
    check(Container(held, "held", keys), lambda: change(held), lambda: back(held))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_key_with_the_same_value_is_renamed(kind):
    held, value = kind(a=1), object()
    held["a"] = value
    check(
        Container(held, "held"),
        lambda: held.update(b=held.pop("a")),
        lambda: held.update(a=held.pop("b")),
    )


def test_sets():
    held = {("a", 1)}
    check(Container(held, "held"), lambda: held.add(2), lambda: held.discard(2))


class HandsOutOthers(OrderedDict):
    """A dictionary like transformers' ``ACT2FN``, which keeps classes and makes instances."""

    def __getitem__(self, key):
        return [super().__getitem__(key)]

    def __iter__(self):
        return iter(["another"])


def test_what_is_kept_and_not_what_is_handed_out():
    held = HandsOutOthers(a=1)
    container = Container(held, "held")
    contents = container.contents()
    assert contents == {"a": 1}
    assert Container(held, "held", frozenset({"a"})).contents() == {"a": 1}
    check(container, lambda: held.update(a=2), lambda: held.update(a=1))
    held["a"], held["b"] = 2, 3
    container.put_back(contents)
    assert dict(dict.items(held)) == {"a": 1}


class WithAttributes:
    def __init__(self) -> None:
        self.a = 1


def set_in_a_loop(owner, value):
    for _ in range(50):  # until the interpreter has specialised it
        owner.a = value


@pytest.mark.parametrize("make", [WithAttributes, nn.Module])
@pytest.mark.parametrize("way", ["assign", "setattr", "__dict__", "delattr", "new"])
def test_attributes(make, way):
    owner = make()
    owner.a = 1
    ways = {
        "assign": lambda: set_in_a_loop(owner, 2),
        "setattr": lambda: object.__setattr__(owner, "a", 2),
        "__dict__": lambda: owner.__dict__.update(a=2),
        "delattr": lambda: delattr(owner, "a"),
        "new": lambda: setattr(owner, "b", 2),
    }
    back = (lambda: delattr(owner, "b")) if way == "new" else (lambda: set_in_a_loop(owner, 1))
    check(Container(vars(owner), "owner", frozenset({"a", "b"})), ways[way], back)


def test_what_changes_without_mattering_is_compared_by_name():
    owner = WithAttributes()
    container = Container(vars(owner), "owner", frozenset({"a"}))
    whole = untouched_by([container])
    owner.calls = 1
    assert not whole.is_true()
    assert whole.changed() == [vars(owner)]
    by_name = untouched_by([container], {id(vars(owner))})
    owner.calls = 2
    assert by_name.is_true()
    owner.a = 2
    assert not by_name.is_true()


@pytest.mark.parametrize("kind", [list, deque])
def test_sequences(kind):
    held = kind([1, 2])
    check(Container(held, "held"), lambda: held.append(3), held.pop)
    check(Container(held, "held"), held.reverse, held.reverse)


def test_classes():
    made = type("Made", (), {"a": 1})
    container = Container(vars(made), "Made", frozenset({"a"}), owner=made)
    assert isinstance(container.holder, types.MappingProxyType)
    check(container, lambda: setattr(made, "a", 2), lambda: setattr(made, "a", 1))


@pytest.mark.parametrize("times", [0, 1, 2])
def test_what_changes_beside_a_dictionary_that_always_does(times):
    made = type("Made", (), {"a": 1})
    busy, quiet = {"a": 1}, {"a": 1}
    names = frozenset({"a"})
    containers = [
        Container(busy | {"__builtins__": {}}, "busy", names),
        Container(quiet, "quiet", names),
        Container(vars(made), "Made", names, owner=made),
    ]
    busy = containers[0].holder
    for change, back in (
        (lambda: setattr(made, "a", 2), lambda: setattr(made, "a", 1)),
        (lambda: quiet.update(a=2), lambda: quiet.update(a=1)),
        (lambda: busy.update(a=2), lambda: busy.update(a=1)),
    ):
        untouched = untouched_by(containers)
        for number in range(times):
            busy["counter"] = number
            assert untouched.is_true()
        busy["counter"] = -1
        change()
        assert not untouched.is_true()
        back()
        assert untouched.is_true()
