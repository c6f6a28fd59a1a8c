"""What a step may change or depends on besides its model: optimizer, scaler, averages, ...

Objects are followed through their attributes, dictionaries and lists down to tensors and plain
numbers. A graph has the addresses of the former and the values of the latter baked in.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moe_graphs.engine.module_state import Addresses
from moe_graphs.engine.signature import Mismatch
from moe_graphs.errors import CaptureError

_PLAIN = (bool, int, float, str, type(None))
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
_GONE = object()


@dataclass(frozen=True)
class Edge:
    """``holder[key]`` is ``value``; ``name`` is what messages call it."""

    holder: Any
    key: Any
    value: Any
    name: str

    def now(self) -> Any:
        try:
            return self.holder[self.key]
        except LookupError:
            return _GONE

    @property
    def is_plain(self) -> bool:
        return type(self.value) in _PLAIN

    @property
    def is_leaf(self) -> bool:
        return self.is_plain or isinstance(self.value, torch.Tensor)


class Watched:
    """The tensors and plain values that were reachable from ``roots`` at some time.

    Args:
        roots: name -> object.
        tensor_names: how to call tensors that are keys of a dictionary, by id.
    """

    def __init__(
        self, roots: Mapping[str, Any], tensor_names: Mapping[int, str] | None = None
    ) -> None:
        self._roots = dict(roots)
        self._tensor_names = tensor_names or {}
        self._remember(list(_walk(self._roots, self._tensor_names)))

    def mismatch(self) -> Mismatch | None:
        """The first tensor or plain value that is another one now. Reads no tensor values."""
        if self._is_untouched():
            return None
        # Other containers may hold the same leaves: a state that was loaded in place.
        edges = list(_walk(self._roots, self._tensor_names))
        now = {edge.name: edge.value for edge in edges if edge.is_leaf}
        for edge in self.leaves:
            value = now.pop(edge.name, _GONE)
            if not _same(value, edge.value):
                return _difference(edge, value)
        for name in now:
            return Mismatch("state_replaced", f"{name} was not there at the capture")
        if not self._addresses.are_same():
            message = "a tensor of the optimizer or of state= lies at another address now"
            return Mismatch("state_replaced", message)
        self._remember(edges)
        return None

    def check_unchanged(self) -> None:
        """After the step has run once more.

        Raises:
            CaptureError: it changes a number in Python, which a replay would not do again.
        """
        for edge in self.leaves:
            if edge.is_plain and not _same(edge.now(), edge.value):
                raise CaptureError(
                    f"{edge.name} changes within the step ({edge.value!r} -> {edge.now()!r}): a "
                    f"replay runs no Python: keep it in a tensor, or change it outside the step "
                    f"(a scheduler's step() belongs there)"
                )

    def put_back(self) -> None:
        """Plain values as they were. Tensors keep theirs."""
        for edge in self.leaves:
            if edge.is_plain and not _same(edge.now(), edge.value):
                edge.holder[edge.key] = edge.value

    def _remember(self, edges: list[Edge]) -> None:
        self.leaves = [edge for edge in edges if edge.is_leaf]
        self.tensors = [edge.value for edge in self.leaves if not edge.is_plain]
        self._addresses = Addresses(self.tensors)
        children: dict[int, tuple[Any, list[Edge]]] = {}
        for edge in edges:
            children.setdefault(id(edge.holder), (edge.holder, []))[1].append(edge)
            if isinstance(edge.value, (dict, list)):
                children.setdefault(id(edge.value), (edge.value, []))  # it may be empty
        # Whole containers are compared by one loop in C; of others only some entries are watched.
        whole = [each for each in children.values() if len(each[0]) == len(each[1])]
        self._holders = [holder for holder, _ in whole]
        # The views of dictionaries are live: they show the values of the time they are read.
        self._now = [h.values() if isinstance(h, dict) else h for h in self._holders]
        self._values = [edge.value for _, siblings in whole for edge in siblings]
        self._entries = [
            (holder, edge.key, edge.value)
            for holder, siblings in children.values()
            if len(holder) != len(siblings)
            for edge in siblings
        ]

    def _is_untouched(self) -> bool:
        """The quick answer: every holder has the very same values."""
        if sum(map(len, self._holders)) != len(self._values):
            return False
        if not all(map(is_, chain.from_iterable(self._now), self._values)):
            return False
        entries = all(holder.get(key) is value for holder, key, value in self._entries)
        return entries and self._addresses.are_same()


def _walk(roots: dict[str, Any], tensor_names: Mapping[int, str]) -> Iterator[Edge]:
    seen: set[int] = set()
    stack = [Edge(roots, name, value, name) for name, value in reversed(roots.items())]
    while stack:
        edge = stack.pop()
        yield edge
        if not edge.is_leaf and id(edge.value) not in seen:
            seen.add(id(edge.value))
            stack.extend(reversed(list(_children(edge.value, edge.name, tensor_names))))


def _children(value: Any, name: str, tensor_names: Mapping[int, str]) -> Iterator[Edge]:
    if isinstance(value, Optimizer):
        # Its other attributes are bookkeeping of torch and of schedulers.
        yield Edge(vars(value), "state", value.state, f"{name}.state")
        yield Edge(vars(value), "param_groups", value.param_groups, f"{name}.param_groups")
    elif isinstance(value, nn.Module):
        for prefix, module in value.named_modules():
            for place in (module._parameters, module._buffers):
                for key, tensor in place.items():
                    yield Edge(place, key, tensor, ".".join(filter(None, (name, prefix, key))))
    elif isinstance(value, Mapping):
        for index, (key, child) in enumerate(value.items()):
            is_tensor = isinstance(key, torch.Tensor)
            shown = tensor_names.get(id(key), f"tensor {index}") if is_tensor else repr(key)
            yield Edge(value, key, child, f"{name}[{shown}]")
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield Edge(value, index, child, f"{name}[{index}]")
    elif hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        for key, child in vars(value).items():
            # Of a scheduler only the counters: they tell whether it has been stepped.
            if not isinstance(value, LRScheduler) or type(child) in _PLAIN:
                yield Edge(vars(value), key, child, f"{name}.{key}")


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(before) not in _PLAIN or type(now) is not type(before):
        return False
    return now == before or (now != now and before != before)


def _difference(edge: Edge, now: Any) -> Mismatch:
    if edge.is_plain:
        shown = "gone" if now is _GONE else repr(now)
        message = f"{edge.name} was {edge.value!r} at the capture and is {shown} now"
        if edge.key == "lr":
            message += (
                f", and the graph would go on with {edge.value!r}: make it a tensor, which "
                f"schedulers change in place (lr=torch.tensor({edge.value!r}, device=...))"
            )
        return Mismatch("hyperparameter", f"{message}; set it back, or capture again")
    message = (
        f"{edge.name} was replaced since the capture (load_state_dict does that, and an lr that "
        f"is assigned instead of filled), and the graph would use the old one: change it in "
        f"place, or capture again"
    )
    return Mismatch("state_replaced", message)
