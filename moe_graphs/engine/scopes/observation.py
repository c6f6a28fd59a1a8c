"""What the scopes of a model did in one eager step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.scopes.plan import Event
from moe_graphs.engine.scopes.select import Call, Scope
from moe_graphs.engine.signature import Signature


@dataclass(frozen=True)
class Link:
    """An input that was the untouched output ``output`` of observed call ``call``."""

    call: int
    output: int


@dataclass(frozen=True)
class ObservedCall:
    """What an eager call of a scope looked like. ``alike``: the first call with its signature."""

    scope: Scope
    signature: Signature
    links: dict[int, Link]
    arguments: Call
    alike: int


class Observation:
    """The calls of a step, and the order of forwards and backwards.

    Of the inputs of calls that are alike it keeps the latest, by reference until ``clear``: a
    capture starts from them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        self.calls: list[ObservedCall] = []
        self.events: list[Event] = []
        self._leaves: dict[int, tuple[Any, ...]] = {}
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], Link]] = {}
        self._delays = self._weights = 0

    def inputs_of(self, call: ObservedCall) -> tuple[Any, ...]:
        """Input leaves, detached, that some call alike was made with."""
        return self._leaves[call.alike]

    def forward(self, scope: Scope, inputs: Any, call: Call) -> int:
        """Notes a call; returns its number in this step."""
        number = len(self.calls)
        leaves, structure = pytree.tree_flatten(inputs)
        alike, signature = self._signature(scope, inputs, leaves, structure)
        links = {i: link for i, leaf in enumerate(leaves) if (link := self._link(leaf)) is not None}
        self._leaves[alike] = tuple(
            x.detach() if isinstance(x, torch.Tensor) else x for x in leaves
        )
        self.calls.append(ObservedCall(scope, signature, links, call.without_tensors(), alike))
        self.events.append(Event("F", scope.name, number, alike=alike))
        return number

    def produced(self, number: int, outputs: Any) -> None:
        """Notes the outputs of a call, and listens for its backward."""
        listener = _Listener(self.events, self.calls[number].scope.name, number)
        tensors = [(i, leaf) for i, leaf in enumerate(pytree.tree_leaves(outputs))]
        for index, leaf in tensors:
            if not isinstance(leaf, torch.Tensor):
                continue
            self._outputs[id(leaf)] = (weakref.ref(leaf), Link(number, index))
            if leaf.grad_fn is not None:
                leaf.register_hook(listener.backward)
        node = _node_before_a_parameter([leaf for _, leaf in tensors if _has_history(leaf)])
        if node is not None:
            node.register_hook(listener.weights)

    @contextlib.contextmanager
    def delaying(self) -> Iterator[None]:
        """The backwards within this context leave their weight gradients for ``weights``."""
        start = len(self.events)
        yield
        ran = self.events[start:]
        self.events[start:] = [replace(event, delayed=self._delays) for event in ran]
        self._delays += 1

    def weights(self) -> None:
        """Notes a ``backward_weight()``: it makes up for the oldest ``delaying`` left."""
        self.events.append(Event("W", "", -1, delayed=self._weights))
        self._weights += 1

    def _signature(
        self, scope: Scope, inputs: Any, leaves: list[Any], structure: pytree.TreeSpec
    ) -> tuple[int, Signature]:
        for number, known in enumerate(self.calls):
            is_candidate = known.alike == number and known.scope is scope
            if is_candidate and not known.signature.mismatch(structure, leaves, self._device.type):
                return number, known.signature
        return len(self.calls), Signature.of(inputs, self._device.type, scope.name_input)

    def _link(self, leaf: Any) -> Link | None:
        reference, link = self._outputs.get(id(leaf), (None, None))
        return link if reference is not None and reference() is leaf else None


class _Listener:
    """Hooks on one call: when do its gradients arrive, and when are its weights' computed?"""

    def __init__(self, events: list[Event], scope: str, number: int) -> None:
        self._events, self._scope, self._number = events, scope, number
        self._task: int | None = None
        self._weights_task: int | None = None

    def backward(self, gradient: torch.Tensor) -> None:
        """A hook on the outputs. Zero-bubble schedules run a node again for its weights."""
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            self._events.append(Event("B", self._scope, self._number, self._task))

    def weights(self, *gradients: Any) -> None:
        """A hook on a node that computes a weight's gradient, in a backward of its own or not."""
        task = torch._C._current_graph_task_id()
        if self._task not in (None, task) and self._weights_task is None:
            self._weights_task = task
            self._events.append(Event("W", self._scope, self._number))


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def _node_before_a_parameter(outputs: list[torch.Tensor]) -> Any:
    """A node of the autograd graph that feeds a leaf; None if there is none."""
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            if isinstance(getattr(following, "variable", None), torch.nn.Parameter):
                return node
            stack.append(following)
    return None
