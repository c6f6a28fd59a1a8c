"""One call of a scope as graphs: a forward, a backward, and the tensors they read and write."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.backends.base import Graph
from moe_graphs.engine.module_state import ModuleState
from moe_graphs.engine.scopes.select import Exit, Scope
from moe_graphs.engine.signature import Mismatch, Signature


@dataclass(frozen=True)
class OutputLeaf:
    """Where a leaf of the outputs comes from at replay: "graph" gives an index into the graph's
    outputs, "input" one into the leaves of the inputs, "constant" the value itself."""

    source: str
    value: Any


@dataclass
class Recording:
    """The graphs of one call. ``position`` is its place in the order of its slot.

    ``backward`` computes all gradients or, where ``weights`` exists, those of the inputs only.

    Forward outputs that are handed out alias static memory until the next replay (0-dim ones are
    copies); gradients are copied out of it at once, so the memory behind ``gradient_inputs`` and
    ``gradient_parameters`` is only borrowed: later captures of the slot use it again.
    """

    position: int
    scope: Scope
    signature: Signature
    state: ModuleState
    device: torch.device
    inputs: list[Any] = field(default_factory=list)
    tensor_indices: list[int] = field(default_factory=list)
    linked: dict[int, Recording] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)
    passed_through: dict[int, int] = field(default_factory=dict)
    output_leaves: list[OutputLeaf] = field(default_factory=list)
    output_structure: pytree.TreeSpec | None = None
    exit: Exit | None = None
    parameters: list[torch.Tensor] = field(default_factory=list)
    gradient_outputs: list[torch.Tensor | None] = field(default_factory=list)
    gradient_inputs: list[torch.Tensor | None] = field(default_factory=list)
    gradient_parameters: list[torch.Tensor] = field(default_factory=list)
    is_sole_user: list[bool] = field(default_factory=list)
    saved_outputs: list[torch.Tensor] = field(default_factory=list)
    forward: Graph | None = None
    backward: Graph | None = None
    weights: Graph | None = None
    replayed: int = 0
    copied_outputs: set[int] = field(default_factory=set)
    _watched: list[tuple[int, torch.UntypedStorage, int]] = field(default_factory=list)
    _linked_addresses: frozenset[int] = frozenset()
    _handed: list[weakref.ref | None] = field(default_factory=list)

    @property
    def has_backward(self) -> bool:
        return self.backward is not None or self.weights is not None

    def graphs(self) -> list[Graph]:
        graphs = (self.forward, self.backward, self.weights)
        return [graph for graph in graphs if graph is not None]

    def static_tensors(self) -> list[torch.Tensor]:
        """What this recording alone keeps alive: inputs, outputs, and incoming gradients if they
        have to stay until the weights' part."""
        inputs = [self.inputs[i] for i in self.tensor_indices if i not in self.linked]
        gradients = self.gradient_outputs if self.weights is not None else []
        return [*inputs, *self.own_outputs(), *gradients]

    def unused_inputs(self) -> list[str]:
        """The inputs that require a gradient and get none."""
        if not self.has_backward:
            return []
        inputs = [i for i in self.tensor_indices if self.inputs[i].requires_grad]
        gradients = self.gradient_inputs or [None] * len(inputs)
        pairs = zip(inputs, gradients, strict=True)
        return [self.signature.leaves[i].name for i, gradient in pairs if gradient is None]

    def own_outputs(self) -> list[torch.Tensor]:
        """The outputs that the graph makes, without inputs that it hands through."""
        return [o for i, o in enumerate(self.outputs) if i not in self.passed_through]

    def static_output(self, leaf: int) -> torch.Tensor | None:
        """The static tensor behind a leaf of the outputs, if it is handed out as an alias."""
        if leaf >= len(self.output_leaves) or self.output_leaves[leaf].source != "graph":
            return None
        index = self.output_leaves[leaf].value
        return self.outputs[index] if self._is_alias(index) else None

    def complete(self, uses: Mapping[int, int], linked_addresses: frozenset[int]) -> None:
        """After all captures. ``uses``: how many recordings use a parameter, by its id;
        ``linked_addresses``: of outputs that are another recording's static input."""
        self.state.freeze()
        self._linked_addresses = linked_addresses
        self.is_sole_user = [uses[id(parameter)] == 1 for parameter in self.parameters]
        module = self.scope.module
        tensors = (*module.parameters(), *module.buffers())
        owned = {t.untyped_storage().data_ptr() for t in tensors}
        storages = [(i, output.untyped_storage()) for i, output in enumerate(self.outputs)]
        # From now on more references to these storages are a user's.
        self._watched = [
            (i, storage, _references(storage))
            for i, storage in storages
            if self._is_alias(i) and storage.data_ptr() not in owned
        ]
        self._handed = [None] * len(self.outputs)

    def _is_alias(self, index: int) -> bool:
        """Whether an output is handed out as static memory."""
        return self.outputs[index].dim() > 0 and index not in self.passed_through

    def mismatch(self, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> Mismatch | None:
        """Why this call cannot be replayed, or None. Raises if the graph would read stale memory"""
        difference = self.signature.mismatch(structure, leaves, self.device.type)
        if difference is not None:
            return difference
        self.state.check_addresses()
        return self.state.mismatch()

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the inputs into place, except those that are already there."""
        for index, tensor in zip(self.tensor_indices, tensors, strict=False):
            static = self.inputs[index]
            if tensor.data_ptr() != static.data_ptr():
                dense(static.detach()).copy_(dense(tensor))

    def hand_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of this replay, as new tensor objects; ``tensors`` are its inputs."""
        outputs = [
            o.detach() if o.dim() and i not in self.copied_outputs else o.clone()
            for i, o in enumerate(self.outputs)
        ]
        for index, place in self.passed_through.items():
            outputs[index] = tensors[place]
        return outputs

    def note_handed(self, outputs: Sequence[torch.Tensor]) -> None:
        for index, _, _ in self._watched:
            self._handed[index] = weakref.ref(outputs[index])

    def rescue_outputs(self) -> bool:
        """Before a replay overwrites them: gives outputs that are still held memory of their own.

        False if something else than the tensor handed out (a view of it) holds the memory. Whoever
        did that once does it again (a pipeline's send that is waited for late), so from then on the
        output is handed out as a copy, unless another recording reads it in place.
        """
        for index, storage, references in self._watched:
            if _references(storage) <= references:
                continue
            handed = self._handed[index]
            tensor = handed() if handed is not None else None
            if tensor is not None:
                tensor.data = tensor.detach().clone()
            if _references(storage) > references:
                if self.outputs[index].data_ptr() not in self._linked_addresses:
                    self.copied_outputs.add(index)
                return False
        return True

    def release(self) -> None:
        """Drops graphs and static tensors. Idempotent."""
        for graph in self.graphs():
            graph.release()
        self.forward = self.backward = self.weights = None
        for tensors in (
            self.inputs, self.outputs, self.gradient_outputs, self.gradient_inputs,
            self.gradient_parameters, self.saved_outputs, self._watched,
        ):  # fmt: skip
            tensors.clear()
        self.linked.clear()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that has memory of its own: copies go there."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _references(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)
