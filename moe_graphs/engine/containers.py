"""Where values are kept that Python can read: looked at anew, compared, put back."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GONE = object()
"""In the place of a value that is not there."""


def stored(holder: Any) -> Any:
    """Keys and values of a dictionary as they are kept. Methods of a class of its own may make
    others of them: transformers' ``ACT2FN`` keeps classes, and hands out instances."""
    return dict.items(holder) if isinstance(holder, dict) else holder.items()


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
            each = list.__iter__ if isinstance(self.holder, list) else iter
            return dict(enumerate(each(self.holder)))
        if self.keys is None:
            return dict(stored(self.holder))
        # In its own order: what differs is told by the first name, the same in every process.
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
            for key in self.contents().keys() - contents.keys():
                kind.__delitem__(self.holder, key)
            for key, value in contents.items():
                kind.__setitem__(self.holder, key, value)
        elif not isinstance(self.holder, types.MappingProxyType):
            kind = list if isinstance(self.holder, list) else type(self.holder)
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
