"""What the scopes of a model did in one eager step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.autograd import nodes_behind
from moe_graphs.engine.scopes.plan import Event
from moe_graphs.engine.scopes.select import Scope
from moe_graphs.engine.signature import Signature, flatten


@dataclass(frozen=True)
class ObservedCall:
    """What an eager call of a scope looked like."""

    scope: Scope
    signature: Signature


class Observation:
    """The calls of the warm-up steps, and the order of forwards and backwards in each.

    Attributes:
        alike: one call for each scope and signature; events refer to them by number.
        steps: the events of each step.
        with_double_backward: names of scopes whose gradients were differentiated again.
    """

    def __init__(self) -> None:
        self.alike: list[ObservedCall] = []
        self.steps: list[list[Event]] = []
        self.with_double_backward: set[str] = set()
        self.begin_step()

    def begin_step(self) -> None:
        self.events: list[Event] = []
        self._calls = self._delays = self._weights = 0
        self._outputs: dict[int, weakref.ref[torch.Tensor]] = {}

    def end_step(self) -> None:
        if self.events:
            self.steps.append(self.events)
        self.begin_step()

    def forward(self, scope: Scope, inputs: Any) -> tuple[int, int, bool]:
        """Notes a call; returns its number in this step, that of those alike, and whether it is
        the first one of these."""
        alike, is_new = self._alike(scope, inputs)
        number = self._calls
        self._calls += 1
        self.events.append(Event("F", scope.name, number, alike=alike))
        return number, alike, is_new

    def linked(self, inputs: Any) -> list[int]:
        """The numbers of the leaves that are untouched outputs of calls before."""
        leaves = pytree.tree_leaves(inputs)
        return [i for i, leaf in enumerate(leaves) if self._is_output(leaf)]

    def produced(self, number: int, scope: Scope, outputs: Any) -> None:
        """Notes the outputs of a call, and listens for its backward."""
        listener = _Listener(self, scope.name, number)
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for leaf in tensors:
            self._outputs[id(leaf)] = weakref.ref(leaf)
            if leaf.grad_fn is not None:
                leaf.register_hook(listener.backward)
        node = _node_before_a_parameter([leaf for leaf in tensors if leaf.grad_fn is not None])
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

    def _alike(self, scope: Scope, inputs: Any) -> tuple[int, bool]:
        leaves, structure = flatten(inputs)
        for number, known in enumerate(self.alike):
            if known.scope is scope and not known.signature.mismatch(structure, leaves):
                return number, False
        self.alike.append(ObservedCall(scope, Signature.of(inputs, scope.name_input)))
        return len(self.alike) - 1, True

    def _is_output(self, leaf: Any) -> bool:
        reference = self._outputs.get(id(leaf))
        return reference is not None and reference() is leaf


class _Listener:
    """Hooks on one call: when do its gradients arrive, and when are its weights' computed?"""

    def __init__(self, observation: Observation, scope: str, number: int) -> None:
        self._observation, self._events = observation, observation.events
        self._scope, self._number = scope, number
        self._task: int | None = None
        self._weights_task: int | None = None

    def backward(self, gradient: torch.Tensor) -> None:
        """A hook on the outputs. Zero-bubble schedules run a node again for its weights."""
        if torch.is_grad_enabled():  # create_graph=True
            self._observation.with_double_backward.add(self._scope)
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            self._events.append(Event("B", self._scope, self._number, self._task))

    def weights(self, *gradients: Any) -> None:
        """A hook on a node that computes a weight's gradient, in a backward of its own or not."""
        task = torch._C._current_graph_task_id()
        if self._task not in (None, task) and self._weights_task is None:
            self._weights_task = task
            self._events.append(Event("W", self._scope, self._number))


def _node_before_a_parameter(outputs: list[torch.Tensor]) -> Any:
    """A node of the autograd graph that feeds a leaf; None if there is none."""
    for node in nodes_behind(outputs):
        for following, _ in node.next_functions:
            if isinstance(getattr(following, "variable", None), torch.nn.Parameter):
                return node
    return None
