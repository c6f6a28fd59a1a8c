"""Where values are kept that Python can read: looked at anew, compared, put back."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

GONE = object()
"""In the place of a value that is not there."""


_KINDS = (OrderedDict, dict, list, tuple, deque, set, frozenset)


class Elements:
    """What a container keeps, in its order, as it is now: methods of a class of its own may say
    something else. transformers' ``ACT2FN`` keeps classes, and hands out instances."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        kind: Any = type(holder)
        if kind not in _KINDS:
            kind = next(kind for kind in _KINDS if isinstance(holder, kind))
        self._kind = kind

    def __len__(self) -> int:
        return self._kind.__len__(self._holder)

    def __iter__(self) -> Iterator[Any]:
        """Values of a dictionary."""
        if isinstance(self._holder, dict):
            if self._kind is dict:
                return iter(dict.values(self._holder))
            return (dict.__getitem__(self._holder, key) for key in self.keys())
        return self._kind.__iter__(self._holder)

    def keys(self) -> Iterator[Any]:
        return self._kind.__iter__(self._holder)


def elements(holder: Any) -> Any:
    """``Elements``, or what is as good and faster: live, with a length."""
    if type(holder) in (list, deque):
        return holder
    if type(holder) is OrderedDict:  # whose order the view of a plain dictionary does not have
        return holder.values()
    if isinstance(holder, dict) and not isinstance(holder, OrderedDict):
        return dict.values(holder)
    return Elements(holder)


def stored(holder: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dictionary, or of a proxy of one."""
    if isinstance(holder, dict) and type(holder) is not dict:
        kept = Elements(holder)
        return list(zip(kept.keys(), kept, strict=True))
    return list(holder.items())


@dataclass
class Container:
    """A dictionary or list that was looked into.

    keys: of a dictionary of which only some entries matter, the names that do (whether they are
        there or not); None if all of it does.
    owner: the class whose dictionary it is, if so.
    """

    holder: Any
    name: str
    keys: frozenset[str] | None = None
    owner: type | None = None

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.holder, (dict, types.MappingProxyType))

    def contents(self) -> dict[Any, Any]:
        """The entries that matter, as they are now."""
        if not self.is_mapping:
            return dict(enumerate(Elements(self.holder)))
        if self.keys is None:
            return dict(stored(self.holder))
        # In its own order: what differs is told by the first name, the same in every process.
        # Of a module's thousands of names a few matter: without a step of Python for the others.
        if type(self.holder) in (dict, types.MappingProxyType):
            mattering = filter(self.keys.__contains__, self.holder)
            return {key: self.holder[key] for key in mattering}
        return {key: value for key, value in stored(self.holder) if key in self.keys}

    def absent(self, contents: dict[Any, Any]) -> frozenset[str]:
        """Names that would matter, and are not there."""
        return (self.keys or frozenset()) - contents.keys()

    def put_back(self, contents: dict[Any, Any]) -> None:
        if self.owner is not None:
            for key in self.keys or ():
                if self.holder.get(key, GONE) is not contents.get(key, GONE) and key in contents:
                    setattr(self.owner, key, contents[key])
        elif isinstance(self.holder, dict):
            # Not by methods of a class of its own: a Counter's update() adds.
            kind = OrderedDict if isinstance(self.holder, OrderedDict) else dict
            now = self.contents()
            if self.keys is None and list(now) != list(contents):
                kind.clear(self.holder)  # what was put in later would come later
                now = {}
            for key in now.keys() - contents.keys():
                kind.__delitem__(self.holder, key)
            for key, value in contents.items():
                kind.__setitem__(self.holder, key, value)
        elif not isinstance(self.holder, types.MappingProxyType):
            kind = list if isinstance(self.holder, list) else deque
            kind.clear(self.holder)
            kind.extend(self.holder, contents.values())


@dataclass(frozen=True)
class Cell:
    """A value that is read by a function of its own: a closure's cell, a slot, a context.

    is_copy: ``read`` makes a new value every time, which is compared by value.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None] | None
    name: str
    is_copy: bool = False

    def is_still(self, value: Any) -> bool:
        now = self.read()
        return now is value or (self.is_copy and now == value)
