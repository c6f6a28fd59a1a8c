"""The quick answer of ``Guards``: every place holds the very object that it held."""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice, repeat
from operator import contains, is_
from typing import Any

from torch import Tensor
from torch._C._dynamo import guards as of_dynamo

from moe_graphs.engine.containers import GONE, Container, elements


def _notices_attributes(version_of: Callable[[dict], int]) -> bool:
    """Whether attributes that are set go through the dictionary of their object, once somebody has
    it: in Python 3.13 some do not."""

    class Owner:
        def __init__(self) -> None:
            self.a = 0

    owner = Owner()
    held = vars(owner)
    for value in range(50):  # and when the interpreter has specialised it
        before = version_of(held)
        owner.a = value + 1
        if version_of(held) == before:
            return False
    before = version_of(held)
    owner.b = 1
    between = version_of(held)
    del owner.b
    return len({before, between, version_of(held)}) == 3


Contents = tuple[Container, dict[Any, Any]]
# Of a dictionary a number that any change of it changes: Python's own, or that of a watcher.
_version_of: Callable[[dict], int] | None = getattr(of_dynamo, "dict_version", None)
if _version_of is not None and not _notices_attributes(_version_of):
    _version_of = None
_OFTEN = 3


class Untouched:
    """Compares containers with what they held when it was made, in a few loops in C.

    Args:
        contents: containers, each with what it holds now.
        noisy: ids of holders that change in ways that do not matter: they are compared by name.
        matter: ids of the tensors whose identity matters; others may be exchanged.
    """

    def __init__(
        self, contents: Sequence[Contents], noisy: Collection[int], matter: Collection[int]
    ) -> None:
        self._contents, self._noisy, self._matter = contents, noisy, matter
        # By the ids of dictionaries: how often they changed in ways that do not matter.
        self._changes: Counter[int] = Counter()
        self._begin()

    def _begin(self) -> None:
        matter = [pair for pair in self._contents if pair[0].keys is None or pair[0].keys]
        filled = [pair for pair in matter if not self._is_empty(pair[0].holder)]
        self._empty = [c.holder for c, _ in matter if self._is_empty(c.holder)]
        of_dicts = [pair for pair in filled if self._has_version(pair[0].holder)]
        others = [pair for pair in filled if not self._has_version(pair[0].holder)]
        self._dicts = [container.holder for container, _ in of_dicts]
        self._versions = list(map(_version_of, self._dicts))
        self._of_dicts = _Columns(of_dicts, self._noisy, self._matter)
        self._others = _Columns(others, self._noisy, self._matter)

    def _is_empty(self, holder: Any) -> bool:
        return type(holder) is dict and not holder and id(holder) not in self._noisy

    def _has_version(self, holder: Any) -> bool:
        # Not if it changes all the time, like the globals of a script.
        restless = self._changes[id(holder)] >= _OFTEN
        return _version_of is not None and type(holder) is dict and not restless

    def is_true(self) -> bool:
        if any(self._empty):
            return False
        versions = list(map(_version_of, self._dicts))
        if versions == self._versions:
            return self._others.are_same()
        if not (self._of_dicts.are_same() and self._others.are_same()):
            return False
        rows = zip(self._dicts, versions, self._versions, strict=True)
        self._changes.update(id(held) for held, now, before in rows if now != before)
        self._begin()
        return True

    def changed(self) -> list[Any]:
        """The holders, of those that are compared whole, that hold something else now."""
        filled = [holder for holder in self._empty if holder]
        return filled + self._of_dicts.changed() + self._others.changed()


class _Columns:
    """Holders, keys and values side by side. Containers of which all matters are compared whole,
    and dictionaries of objects, until they change in a way that does not matter. Modules of Python
    have many names, of which few matter: those are compared one by one."""

    def __init__(
        self, contents: Sequence[Contents], noisy: Collection[int], matter: Collection[int]
    ) -> None:
        keyed = [pair for pair in contents if not _is_compared_whole(pair[0], noisy)]
        self._holders = [c.holder for c, _ in contents if _is_compared_whole(c, noisy)]
        # The views of dictionaries are live: they show the values of the time they are read.
        self._now = list(map(elements, self._holders))
        self._sizes = list(map(len, self._now))
        self._values = list(chain.from_iterable(self._now))
        rows = [
            (c.holder, key, value)
            for c, held in keyed
            for key, value in held.items()
            if not isinstance(value, Tensor) or id(value) in matter
        ]
        self._of_dicts = _columns(rows, dict)
        self._of_classes = _columns(rows, types.MappingProxyType)
        # Names that may come: each by itself, or whether the holder's names are the same.
        absent = [(c.holder, c.absent(held)) for c, held in keyed]
        few = [(holder, keys) for holder, keys in absent if len(keys) <= len(holder)]
        self._absent = [[h for h, keys in few for _ in keys], [k for _, keys in few for k in keys]]
        many = [holder for holder, keys in absent if len(keys) > len(holder)]
        self._names_of_many = [holder.keys() for holder in many]
        self._names_known = list(map(frozenset, many))

    def are_same(self) -> bool:
        return (
            self._hold_the_same()
            and _have(dict, *self._of_dicts)
            and _have(types.MappingProxyType, *self._of_classes)
            and not any(map(contains, *self._absent))
            and self._names_of_many == self._names_known
        )

    def _hold_the_same(self) -> bool:
        if not self._holders:
            return True
        same_sizes = list(map(len, self._now)) == self._sizes
        return same_sizes and all(map(is_, chain.from_iterable(self._now), self._values))

    def changed(self) -> list[Any]:
        before, found = iter(self._values), []
        for holder, view, size in zip(self._holders, self._now, self._sizes, strict=True):
            values = list(islice(before, size))
            if size != len(view) or not all(map(is_, view, values)):
                found.append(holder)
        return found


def _is_compared_whole(container: Container, noisy: Collection[int]) -> bool:
    holder = container.holder
    if container.keys is None:
        return isinstance(holder, (dict, list, deque))
    return isinstance(holder, dict) and not (id(holder) in noisy or "__builtins__" in holder)


def _columns(rows: Sequence[tuple], kind: type) -> tuple[list, list, list]:
    chosen = [row for row in rows if isinstance(row[0], kind)]
    return tuple([row[i] for row in chosen] for i in range(3))  # type: ignore[return-value]


def _have(kind: type, holders: list, keys: list, values: list) -> bool:
    return not values or all(map(is_, map(kind.get, holders, keys, repeat(GONE)), values))
