"""Walks over autograd's graph, and how the gradients of a leaf come together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node


def nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """Every node that the outputs depend on, once, in a deterministic order."""
    seen: set[Node] = set()
    stack = [output.grad_fn for output in reversed(outputs)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in reversed(node.next_functions))


def keeps_graph() -> bool:
    """The running backward has ``retain_graph=True``, so another one may follow."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and keeps is not None and keeps()


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that the outputs depend on."""
    found = {id(n.variable): n.variable for n in nodes_behind(outputs) if hasattr(n, "variable")}
    return list(found.values())


class LeafUses:
    """The places where a graph uses its leaves, each of which has an addend of its own.

    Autograd adds the gradients of a tensor up in the order in which they arrive. A graph that is
    one node for its caller has to hand on one addend per use, in the order of an eager backward:
    one sum of them would be added to those of other uses (a residual around the scope, a weight
    that is tied) in another order, and the last bit would differ.

    Attributes:
        of: per use the number of its leaf: leaves in their order, uses of a leaf in the order in
            which their addends arrive (later uses first). A leaf that nothing uses is not there.
    """

    def __init__(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        uses: list[list[tuple[int, int, Node]]] = [[] for _ in leaves]
        for node in nodes_behind(outputs):
            for edge, (following, _) in enumerate(node.next_functions):
                number = numbers.get(id(getattr(following, "variable", None)))
                if number is not None:
                    uses[number].append((-node._sequence_nr(), edge, node))
        self._leaves = tuple(leaves)
        self._counts = [len(found) for found in uses]
        self._apart: list[list[tuple[Node, int]]] = []
        self.of: list[int] = []
        for number, found in enumerate(uses):
            ordered = sorted(found, key=lambda use: use[:2])
            self._apart.append([(node, edge) for _, edge, node in ordered if len(found) > 1])
            self.of += [number] * len(found)

    @contextlib.contextmanager
    def kept_apart(self) -> Iterator[dict[tuple[int, int], Tensor]]:
        """Within this context a backward leaves the addends of leaves with several uses in the
        dictionary, by leaf and use, instead of adding them up."""
        addends: dict[tuple[int, int], Tensor] = {}
        of_node: dict[Node, list[tuple[int, tuple[int, int]]]] = {}
        for number, uses in enumerate(self._apart):
            for use, (node, edge) in enumerate(uses):
                of_node.setdefault(node, []).append((edge, (number, use)))
        handles = [
            node.register_hook(partial(_take_out, edges, addends))
            for node, edges in of_node.items()
        ]
        try:
            yield addends
        finally:
            for handle in handles:
                handle.remove()

    def spread(
        self, gradients: Sequence[Tensor | None], addends: dict[tuple[int, int], Tensor]
    ) -> list[Tensor | None]:
        """Per use: what came in one piece (``gradients``, per leaf), or its addend."""
        spread: list[Tensor | None] = []
        for number, (count, gradient) in enumerate(zip(self._counts, gradients, strict=True)):
            if count == 1:
                spread.append(gradient)
            else:
                spread += [addends.get((number, use)) for use in range(count)]
        return spread

    def gradients(
        self,
        outputs: Sequence[Tensor],
        gradient_outputs: Sequence[Tensor],
        *,
        retain_graph: bool = False,
    ) -> list[Tensor | None]:
        """The gradients per use; None where nothing arrives."""
        if not self._leaves:
            return []
        with self.kept_apart() as addends:
            gradients = torch.autograd.grad(
                outputs,
                self._leaves,
                gradient_outputs,
                retain_graph=retain_graph,
                allow_unused=True,
            )
        return self.spread(gradients, addends)


def _take_out(
    edges: Sequence[tuple[int, tuple[int, int]]],
    addends: dict[tuple[int, int], Tensor],
    grad_inputs: tuple[Tensor | None, ...],
    grad_outputs: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    left = list(grad_inputs)
    for edge, key in edges:
        if left[edge] is not None:
            addends[key] = left[edge]
            left[edge] = None
    return tuple(left)


def is_wanted(node: Node | None) -> bool:
    """Whether the running backward needs the gradient that goes to ``node``."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf in torch.autograd.grad(): its gradient goes to the caller
        return True


def accumulates(node: Node | None) -> bool:
    """Whether a gradient handed to ``node`` is added to a ``.grad`` by the running backward."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
