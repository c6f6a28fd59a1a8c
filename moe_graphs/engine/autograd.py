"""Walks over autograd's graph, how the gradients of a leaf add up, and backwards in two parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


def nodes_behind(outputs: Sequence[Tensor], inputs: Iterable[Tensor] = ()) -> Iterator[Node]:
    """Every node from the outputs up to the inputs, once, in a deterministic order."""
    seen: set[Node | None] = {tensor.grad_fn for tensor in inputs}
    stack = [output.grad_fn for output in reversed(outputs)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in reversed(node.next_functions))


def used_within(outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """The numbers of the outputs from which others of them are computed."""
    edges = {edge for node in nodes_behind(outputs) for edge in node.next_functions}
    own = ((each.grad_fn, each.output_nr) for each in outputs)
    return tuple(n for n, edge in enumerate(own) if edge[0] is not None and edge in edges)


def keeps_graph() -> bool:
    """Whether the running backward has ``retain_graph=True``, so that another one may follow."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and keeps is not None and keeps()


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that the outputs depend on."""
    found = {id(n.variable): n.variable for n in nodes_behind(outputs) if hasattr(n, "variable")}
    return list(found.values())


def history_before(outputs: Sequence[Tensor], first: int) -> Node | None:
    """A node that the outputs depend on and that is older than the sequence number ``first``."""
    return next((node for node in nodes_behind(outputs) if node._sequence_nr() < first), None)


class LeafUses:
    """The places where a graph uses its leaves; each has an addend of its own.

    Autograd adds up the gradients of a tensor in the order in which they arrive. A graph is one
    node for its caller, and this node has to return one addend per use, in the order of an eager
    backward. If it returned one sum, this sum would be added to the gradients of other uses (a
    residual around the scope, a weight that is tied) in another order, and the last bit would
    differ.

    Args:
        together: how many leaves, from the first one on, count as used once: their gradients are
            added up here, as a backward within a backward (reentrant checkpoint) does.

    Attributes:
        of: per use the number of its leaf. Leaves are in their order; the uses of a leaf are in the
            order in which their addends arrive (later uses first). A leaf without a use does not
            occur.
    """

    def __init__(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], together: int = 0
    ) -> None:
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        uses: list[list[tuple[int, int, Node]]] = [[] for _ in leaves]
        for node in nodes_behind(outputs):
            for edge, (following, _) in enumerate(node.next_functions):
                number = numbers.get(id(getattr(following, "variable", None)))
                if number is not None:
                    uses[number].append((-node._sequence_nr(), edge, node))
        uses[:together] = [found[:1] for found in uses[:together]]
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
        """Context in which a backward does not add up the addends of leaves with several uses.

        The backward leaves them in the dictionary, by leaf and use.
        """
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
        """The gradients per use: the leaf's whole gradient if it has one use, else its addend."""
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
        """The gradients per use; None where no gradient arrives."""
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
        if (addend := left[edge]) is not None:
            addends[key] = addend
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


# ---- a backward in two parts: first gradients of inputs, later those of weights
# Autograd runs the part of its graph that leads to the inputs. The nodes from which weights branch
# off keep the gradients that reached them. The second part starts from these nodes and computes
# nothing twice.

Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """The two parts for one autograd graph, in the order of the methods.

    Args:
        outputs: where the backward starts; all require gradients.
        inputs, parameters: leaves of the graph. If ``inputs`` is empty, the second part is all.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> None:
        self.parameters = parameters
        self._outputs, self._inputs = outputs, inputs
        self._of_leaf: dict[Node, set[int]] = {}
        self._to_inputs: dict[Node, bool] = {}
        self._explore()
        self._arrived: dict[Node, Gradients] = {}

    def input_gradients(self, gradient_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Runs the first part.

        The autograd graph is kept, and so are the gradients that arrived where the second part
        starts.
        """
        roots: dict[Node, list[Tensor | None]] = {}
        for output, gradient in zip(self._outputs, gradient_outputs, strict=True):
            node = output.grad_fn
            if node is not None and not self._leads_to_inputs(node):
                at_node = roots.setdefault(node, [None] * (output.output_nr + 1))
                at_node += [None] * (output.output_nr + 1 - len(at_node))
                at_node[output.output_nr] = gradient
        self._arrived = {node: tuple(gradients) for node, gradients in roots.items()}
        if not self._inputs:
            return []
        on_the_way = [(o, g) for o, g in zip(self._outputs, gradient_outputs, strict=True)
                      if self._leads_to_inputs(o.grad_fn)]  # fmt: skip
        handles = [node.register_prehook(partial(self._note, node)) for node in self._cut()]
        try:
            outputs, gradients = zip(*on_the_way, strict=True)
            found = torch.autograd.grad(
                outputs, self._inputs, gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        return list(found)

    def parameter_gradients(self) -> list[Tensor | None]:
        """Runs the second part."""
        found: dict[int, Tensor] = {}
        for nodes, parameters in self._groups():
            found.update(self._of_group(nodes, parameters))
        return [found.get(index) for index in range(len(self.parameters))]

    def _leads_to_inputs(self, node: Node | None) -> bool:
        return node is None or self._to_inputs[node]  # None: the output is an input itself

    def _note(self, node: Node, gradients: Gradients) -> None:
        self._arrived[node] = tuple(gradients)

    def _explore(self) -> None:
        """Finds for every node whether it leads to an input, and to which parameters."""
        inputs = {id(tensor) for tensor in self._inputs}
        parameters = {id(tensor): index for index, tensor in enumerate(self.parameters)}
        roots = [output.grad_fn for output in self._outputs if output.grad_fn is not None]
        stack = [(node, False) for node in roots]
        while stack:
            node, is_second_visit = stack.pop()
            if node in self._to_inputs:
                continue
            following = [n for n, _ in node.next_functions if n is not None]
            if not is_second_visit:
                stack.append((node, True))
                stack += [(n, False) for n in following if n not in self._to_inputs]
                continue
            variable = id(getattr(node, "variable", None))
            self._to_inputs[node] = variable in inputs or any(map(self._to_inputs.get, following))
            own = {parameters[variable]} if variable in parameters else set()
            # A node on the way to an input counts only for the parameters that branch off there.
            aside = (self._of_leaf[n] for n in following if not self._to_inputs[n])
            self._of_leaf[node] = own.union(*aside)

    def _cut(self) -> list[Node]:
        """Nodes on the way to an input from which a branch leads to a parameter."""
        return [node for node, found in self._of_leaf.items() if found and self._to_inputs[node]]

    def _groups(self) -> list[tuple[list[Node], set[int]]]:
        """Groups of starting nodes: nodes that share parameters have to run together."""
        groups: list[tuple[list[Node], set[int]]] = []
        for node in self._arrived:
            nodes, parameters = [node], self._of_leaf[node]
            separate = []
            for others, theirs in groups:
                if parameters & theirs:
                    nodes, parameters = others + nodes, parameters | theirs
                else:
                    separate.append((others, theirs))
            groups = [*separate, (nodes, parameters)]
        return [(nodes, parameters) for nodes, parameters in groups if parameters]

    def _of_group(self, nodes: list[Node], parameters: set[int]) -> dict[int, Tensor]:
        indices = sorted(parameters)
        edges, gradients = [], []
        for node in nodes:
            for number, gradient in enumerate(self._arrived[node]):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        if not edges:
            return {}
        # One node may lie behind another: then gradients of the other one must not reach it.
        together = nodes if len(nodes) > 1 else []
        as_arrived = [node.register_prehook(_always(self._arrived[node])) for node in together]
        try:
            wanted = [self.parameters[index] for index in indices]
            found = torch.autograd.grad(
                edges, wanted, gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in as_arrived:
                handle.remove()
        return {i: g for i, g in zip(indices, found, strict=True) if g is not None}


def _always(gradients: Gradients) -> Callable[[Any], Gradients]:
    return lambda _: gradients
