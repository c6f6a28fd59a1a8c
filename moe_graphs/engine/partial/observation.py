"""Notes on what the scopes of a model do in eager steps."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from moe_graphs.engine.autograd import is_wanted, nodes_behind
from moe_graphs.engine.partial.plan import ChunkMemory, Event
from moe_graphs.engine.partial.scope import Scope
from moe_graphs.engine.tensors import Mismatch, Signature, flatten, tensor_leaves
from moe_graphs.engine.verify import warn


@dataclass
class ObservedCall:
    """The scope and the signature of an eager call, and how it was checkpointed, if it was.

    Trial runs may find further inputs, which belong to the signature.
    """

    scope: Scope
    signature: Signature
    use_reentrant: bool | None = None


class Observation:
    """Calls of the warm-up steps, and the order of forwards and backwards in each step.

    Attributes:
        calls_by_signature: one call for each scope and signature; events refer to them by number.
        steps: the events of each step.
        with_double_backward: names of scopes whose gradients were differentiated again.
        with_shared_casts: names of scopes with weights whose casts, cached by autocast, other code
            uses, too.
        with_second_backward: names of scopes with a forward that had several backwards.
        with_separate_weight_backward: names of scopes whose weights had a backward of their own.
        with_gradients: names of scopes with a weight that had a ``.grad`` at the scope's first call
            in the last step.
        accumulating: the same for a later call in the step.
    """

    def __init__(self) -> None:
        self.calls_by_signature: list[ObservedCall] = []
        self.steps: list[list[Event]] = []
        self.with_double_backward: set[str] = set()
        self.with_second_backward: set[str] = set()
        self.with_shared_casts: set[str] = set()
        self.with_separate_weight_backward: set[str] = set()
        self.with_gradients: set[str] = set()
        self.accumulating: set[str] = set()
        self.begin_step()

    def begin_step(self) -> None:
        self.events: list[Event] = []
        self._calls = self._delays = self._weights = 0
        self._outputs: dict[int, weakref.ref[torch.Tensor]] = {}

    def end_step(self) -> None:
        if self.events:
            self.steps.append(self.events)
        self.begin_step()

    def forward(
        self, scope: Scope, inputs: Any, use_reentrant: bool | None = None
    ) -> tuple[int, int]:
        """Notes a call. Returns its number in this step, and the number of its signature."""
        signature_id = self._signature_id(scope, inputs, use_reentrant)
        number = self._calls
        self._calls += 1
        if not self.events:
            self.with_gradients, self.accumulating = set(), set()
        if any(parameter.grad is not None for parameter in scope.module.parameters()):
            is_later = any(event.scope == scope.name for event in self.events)
            (self.accumulating if is_later else self.with_gradients).add(scope.name)
        self.events.append(Event("F", scope.name, number, signature_id=signature_id))
        return number, signature_id

    def linked(self, inputs: Any) -> list[int]:
        """The numbers of the leaves that are unchanged outputs of earlier calls."""
        leaves = pytree.tree_leaves(inputs)
        return [i for i, leaf in enumerate(leaves) if self._is_output(leaf)]

    def produced(self, number: int, scope: Scope, outputs: Any, inputs: Any = ()) -> None:
        """Notes the outputs of a call, and listens for its backward."""
        listener = _Listener(self, scope.name, number)
        tensors = tensor_leaves(outputs)
        for leaf in tensors:
            self._outputs[id(leaf)] = weakref.ref(leaf)
            if leaf.grad_fn is not None:
                leaf.register_hook(listener.backward)
        node = _node_before_a_parameter([leaf for leaf in tensors if leaf.grad_fn is not None])
        if node is not None:
            listener.listen_to_weights(node)
        if torch.is_autocast_cache_enabled():
            self._watch_casts(scope.name, tensors, tensor_leaves(inputs))

    def _watch_casts(
        self, scope: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Notes the scope if other code uses casts of its weights that autocast has cached.

        The gradients of all uses are added up in the precision of the cast. A graph has casts of
        its own, so there the sums would be made later, in that of the weight.
        """
        addends: dict[Node, list[torch.Tensor]] = {}
        for cast, node, index in casts_between(outputs, inputs):
            own = addends.setdefault(cast, [])
            node.register_hook(functools.partial(_note_gradient, own, index))

        def compare(own: list[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
            if not own or not torch.equal(functools.reduce(operator.add, own), gradients[0]):
                self.with_shared_casts.add(scope)
            own.clear()

        for cast, own in addends.items():
            cast.register_prehook(functools.partial(compare, own))

    @contextlib.contextmanager
    def delaying(self) -> Iterator[None]:
        """Context whose backwards leave their weight gradients for ``weights``."""
        start = len(self.events)
        yield
        ran = self.events[start:]
        self.events[start:] = [replace(event, delayed=self._delays) for event in ran]
        self._delays += 1

    def weights(self) -> None:
        """Notes a ``backward_weight()``, which belongs to the oldest open ``delaying``."""
        self.events.append(Event("W", "", -1, delayed=self._weights))
        self._weights += 1

    def refusal(self, scope: Scope, *, split: bool) -> Mismatch | None:
        """The reason why a scope is not captured, given what was done with its gradients, or None.

        ``split`` says whether weight gradients are to be captured apart.
        """
        if scope.name in self.with_double_backward:
            return _DOUBLE_BACKWARD
        if scope.name in self.with_second_backward:
            return _SECOND_BACKWARD
        if scope.name in self.with_shared_casts:
            return _SHARED_CAST
        return (
            _SEPARATE_WEIGHT_BACKWARD
            if scope.name in self.with_separate_weight_backward and not split
            else None
        )

    @property
    def accumulates(self) -> bool:
        """Whether later microbatches of a step add to gradients that the first one makes."""
        return bool(self.accumulating - self.with_gradients)

    def copies_gradients(self, scope: Scope, chunk: ChunkMemory) -> str | None:
        """The reason to copy all gradients of a scope's weights, or None.

        If microbatches accumulate, a later one would soon need the memory of the first one's
        gradients.
        """
        if chunk.split or chunk.slots > 1:
            return "split" if chunk.split else "several_slots"
        if scope.name in self.with_gradients:
            return "grad_never_none"
        return "accumulated" if chunk.first_gradients else None

    def warn_of_eager_scopes(self, *, split: bool) -> None:
        """Warns of the scopes that are not captured."""
        second = self.with_second_backward - self.with_double_backward
        _warn_of(second, _SECOND_BACKWARD)
        _warn_of(self.with_shared_casts, _SHARED_CAST)
        if not split:
            _warn_of(
                self.with_separate_weight_backward - self.with_double_backward - second,
                _SEPARATE_WEIGHT_BACKWARD,
            )

    def _signature_id(self, scope: Scope, inputs: Any, use_reentrant: bool | None) -> int:
        leaves, structure = flatten(inputs)
        for number, known in enumerate(self.calls_by_signature):
            is_alike = known.scope is scope and known.use_reentrant is use_reentrant
            if is_alike and known.signature.fits(structure, leaves):
                return number
        signature = Signature.of(inputs, scope.name_input)
        self.calls_by_signature.append(ObservedCall(scope, signature, use_reentrant))
        return len(self.calls_by_signature) - 1

    def _is_output(self, leaf: Any) -> bool:
        reference = self._outputs.get(id(leaf))
        return reference is not None and reference() is leaf


_DOUBLE_BACKWARD = Mismatch(
    "double_backward",
    "its gradients were differentiated in the warm-up steps (create_graph=True), and a graph has "
    "no derivative of its backward",
)
_SECOND_BACKWARD = Mismatch(
    "second_backward",
    "a forward had several backwards in the warm-up steps (retain_graph=True, several losses), and "
    "a graph's saved tensors serve one: add the losses up and run one backward, if they allow it",
)
_SHARED_CAST = Mismatch(
    "autocast_cache",
    "other code used its weights in the warm-up steps, and autocast's cache casts a weight once "
    "for all, so gradients are added up in the precision of the cast: use "
    "torch.autocast(..., cache_enabled=False)",
)
_SEPARATE_WEIGHT_BACKWARD = Mismatch(
    "separate_weight_backward",
    "the weights had a backward of their own in the warm-up steps, as in a zero-bubble schedule, "
    "and a graph would compute all gradients at once: set GraphConfig(split_backward=True)",
)


def _warn_of(scopes: set[str], why: Mismatch) -> None:
    if scopes:
        warn(f"scope {min(scopes)!r} and {len(scopes) - 1} more stay eager: {why.message}")


class _Listener:
    """Hooks on one call that note when gradients arrive and when weight gradients are computed."""

    def __init__(self, observation: Observation, scope: str, number: int) -> None:
        self._observation, self._events = observation, observation.events
        self._scope, self._number = scope, number
        self._task: int | None = None
        self._weights_task: int | None = None
        self._accumulators: list[Node] = []
        self._has_weights = False

    def backward(self, gradient: torch.Tensor) -> None:
        """Notes a backward, as a hook on the outputs.

        Zero-bubble schedules run a node once more for its weights.
        """
        if torch.is_grad_enabled():  # create_graph=True
            self._observation.with_double_backward.add(self._scope)
        task = torch._C._current_graph_task_id()
        is_of_weights = self._accumulators and not self._has_weights
        if not is_of_weights and task not in (self._task or task, self._weights_task):
            self._observation.with_second_backward.add(self._scope)
        if self._task is None:
            self._task = task
            self._events.append(Event("B", self._scope, self._number, self._task))

    def listen_to_weights(self, node: Node) -> None:
        self._accumulators = [
            n for n, _ in node.next_functions if n is not None and _is_of_a_parameter(n)
        ]
        node.register_hook(self._weights)

    def _weights(self, *gradients: Any) -> None:
        """Notes a weight gradient, as a hook on the node that computes it.

        It may be part of a whole backward, or of a backward for weights alone.
        """
        task = torch._C._current_graph_task_id()
        if not self._has_weights and any(map(is_wanted, self._accumulators)):
            self._has_weights = True
            if self._task not in (None, task):
                self._observation.with_separate_weight_backward.add(self._scope)
        if self._task not in (None, task) and self._weights_task is None:
            self._weights_task = task
            self._events.append(Event("W", self._scope, self._number))


def _note_gradient(
    addends: list[torch.Tensor], index: int, gradients: Sequence[torch.Tensor | None], _: Any
) -> None:
    gradient = gradients[index]
    if gradient is not None:
        addends.append(gradient)


def casts_between(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Iterator[tuple[Node, Node, int]]:
    """The casts of parameters between inputs and outputs, each with a node that uses the cast.

    The number says which gradient of the node goes to the cast.
    """
    for node in nodes_behind(outputs, inputs):
        for index, (following, _) in enumerate(node.next_functions):
            if following is None or following.name() != "ToCopyBackward0":
                continue
            if _is_of_a_parameter(following.next_functions[0][0]):
                yield following, node, index


def _node_before_a_parameter(outputs: list[torch.Tensor]) -> Node | None:
    """A node of the autograd graph that feeds a leaf; None if there is none."""
    for node in nodes_behind(outputs):
        if any(_is_of_a_parameter(following) for following, _ in node.next_functions):
            return node
    return None


def _is_of_a_parameter(node: Node | None) -> bool:
    return isinstance(getattr(node, "variable", None), torch.nn.Parameter)
