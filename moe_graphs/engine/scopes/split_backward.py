"""A backward in two parts: first the gradients of the inputs, later those of the weights.

Autograd runs the whole graph behind the outputs for the inputs' sake; what lies aside, between a
node on the way to an input and a weight, is left out. The second part starts from those nodes, with
the gradients that reached them in the first part, and computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """The two parts for one autograd graph, in the order of the methods.

    Args:
        outputs: where the backward starts; all require gradients.
        inputs, parameters: leaves of the graph. ``inputs`` may be empty: then all is second part.
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
        """The first part. Keeps the autograd graph and what arrived where the second part starts"""
        roots: dict[Node, list[Tensor | None]] = {}
        for output, gradient in zip(self._outputs, gradient_outputs, strict=True):
            node = output.grad_fn
            if not self._leads_to_inputs(node):
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
        """The second part."""
        found: dict[int, Tensor] = {}
        for nodes, parameters in self._groups():
            found.update(self._of_group(nodes, parameters))
        return [found.get(index) for index in range(len(self.parameters))]

    def _leads_to_inputs(self, node: Node | None) -> bool:
        return node is None or self._to_inputs[node]  # None: the output is an input itself

    def _note(self, node: Node, gradients: Gradients) -> None:
        self._arrived[node] = tuple(gradients)

    def _explore(self) -> None:
        """For every node, whether it leads to an input, and to which parameters."""
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
            # Of a node on the way, only what lies aside of the way.
            aside = (self._of_leaf[n] for n in following if not self._to_inputs[n])
            self._of_leaf[node] = own.union(*aside)

    def _cut(self) -> list[Node]:
        """Nodes on the way to an input from which something leads aside to a parameter."""
        return [node for node, found in self._of_leaf.items() if found and self._to_inputs[node]]

    def _groups(self) -> list[tuple[list[Node], set[int]]]:
        """Starting nodes that share parameters have to run together."""
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
        # One node may lie behind another: then it must not be reached by what comes from there.
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
