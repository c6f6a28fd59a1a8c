"""One call of a scope as graphs: a forward, a backward, and the tensors they read and write."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moe_graphs.capture.backends.base import Backend, Graph
from moe_graphs.capture.errors import CaptureError
from moe_graphs.capture.module_state import ModuleState
from moe_graphs.capture.rehearsal import capturable_only
from moe_graphs.capture.scopes import Call, Exit, Scope
from moe_graphs.capture.signature import Mismatch, Signature, TensorSpec

# The stand-in of a parameter during the capture, by id -> the parameter.
Originals = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Link:
    """An input that was the untouched output ``output`` of observed call ``call``."""

    call: int
    output: int


@dataclass(frozen=True)
class ObservedCall:
    """What an eager call of a scope looked like. ``leaves`` are its inputs, detached."""

    scope: Scope
    signature: Signature
    leaves: tuple[Any, ...]
    links: dict[int, Link]
    arguments: Call


@dataclass(frozen=True)
class OutputLeaf:
    """Where a leaf of the outputs comes from at replay: "graph" gives an index into the graph's
    outputs, "input" one into the leaves of the inputs, "constant" the value itself."""

    source: str
    value: Any


@dataclass
class Recording:
    """The graphs of one call. ``position`` is its place in the order of its slot.

    Forward outputs that are handed out alias static memory until the next replay (0-dim ones are
    copies); gradients are copied out of it at once, so the memory behind ``gradient_inputs`` and
    ``gradient_parameters`` is only borrowed: later captures of the slot use it again.
    """

    position: int
    observed: ObservedCall
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
    replayed: int = 0
    _saved: set[int] = field(default_factory=set)
    _watched: list[tuple[int, Any, int]] = field(default_factory=list)
    _handed: list[weakref.ref | None] = field(default_factory=list)

    @property
    def scope(self) -> Scope:
        return self.observed.scope

    @property
    def signature(self) -> Signature:
        return self.observed.signature

    def static_tensors(self) -> list[torch.Tensor]:
        """What this recording alone keeps alive: inputs and outputs."""
        inputs = [self.inputs[i] for i in self.tensor_indices if i not in self.linked]
        outputs = [o for i, o in enumerate(self.outputs) if i not in self.passed_through]
        return [*inputs, *outputs]

    # ---- capture

    def allocate_inputs(self, recordings: dict[int, Recording]) -> None:
        """Static inputs, filled with the observed values; a linked one is the other's output."""
        self.inputs = list(self.observed.leaves)
        for index, spec in enumerate(self.signature.leaves):
            if not isinstance(spec, TensorSpec):
                continue
            self.tensor_indices.append(index)
            link = self.observed.links.get(index)
            source = recordings.get(link.call) if link is not None else None
            shared = source.static_output(link.output) if source is not None else None
            if shared is not None and TensorSpec.of(spec.name, shared) == spec:
                self.linked[index] = source
                static = shared.detach()
            else:
                static = _dense(self.observed.leaves[index]).clone().expand(spec.shape)
            self.inputs[index] = static.requires_grad_(spec.requires_grad)

    def static_output(self, leaf: int) -> torch.Tensor | None:
        """The static tensor behind a leaf of the outputs, if it is handed out as an alias."""
        if leaf >= len(self.output_leaves) or self.output_leaves[leaf].source != "graph":
            return None
        index = self.output_leaves[leaf].value
        output = self.outputs[index]
        return output if output.dim() and index not in self.passed_through else None

    def rehearse(self, known: Sequence[torch.Tensor]) -> None:
        """Runs the call once on the observed values: lazy initialisation happens here, and what
        cannot be in a graph is refused. ``known``: the model's parameters and buffers."""
        leaves = [
            leaf.detach().requires_grad_(spec.requires_grad)
            if isinstance(spec, TensorSpec)
            else leaf
            for spec, leaf in zip(self.signature.leaves, self.observed.leaves, strict=True)
        ]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with self._as_observed(), capturable_only(self.device, [*known, *inputs]):
            outputs, _ = self._run(leaves)
        outputs = [o for o in pytree.tree_leaves(outputs) if _requires_grad(o)]
        if outputs:
            gradients = [torch.zeros_like(o) for o in outputs]
            wanted = _reachable_leaves(outputs)
            with capturable_only(self.device):
                torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)

    def record_forward(self, backend: Backend, pool: Any, originals: Originals) -> None:
        statics = [self.inputs[i] for i in self.tensor_indices]
        versions = [static._version for static in statics]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._note_saved, _unchanged)
        with self._as_observed(), hooks, backend.record(pool) as graphs:
            outputs, self.exit = self._run(self.inputs)
        (self.forward,) = graphs
        for index, static, version in zip(self.tensor_indices, statics, versions, strict=True):
            if static._version != version:
                raise CaptureError(
                    f"input {self.signature.leaves[index].name!r} is modified in place, which a "
                    f"replay would do to its own copy only: clone it before modifying it"
                )
        self._describe_outputs(outputs, originals)

    def record_backward(
        self, backend: Backend, pool: Any, originals: Originals, buffers: dict
    ) -> None:
        """``buffers`` holds the incoming gradients, shared by all recordings of the slot."""
        live = [o for o, needed in zip(self.outputs, self.differentiable, strict=True) if needed]
        if live:
            wanted = [t for t in self.inputs if _requires_grad(t)]
            leaves = self._find_parameters(live)
            self.gradient_outputs = _shared_buffers(live, buffers)
            with backend.record(pool) as graphs:
                gradients = torch.autograd.grad(
                    live, [*wanted, *leaves], self.gradient_outputs, allow_unused=True
                )
            (self.backward,) = graphs
            borrowed = [None if g is None else backend.borrow(g.detach()) for g in gradients]
            self.gradient_inputs = borrowed[: len(wanted)]
            used = list(zip(leaves, borrowed[len(wanted) :], strict=True))
            self.parameters = [originals.get(id(p), p) for p, g in used if g is not None]
            self.gradient_parameters = [g for _, g in used if g is not None]
        # From here on nothing holds the autograd graph: what it saved is free for later captures.
        self.outputs = [output.detach() for output in self.outputs]
        self.saved_outputs = [o for o in self.outputs if o.data_ptr() in self._saved]

    def complete(self, uses: Mapping[int, int]) -> None:
        """After all captures. ``uses``: how many recordings use a parameter, by its id.

        From now on more references to an output are a user's.
        """
        self.state.freeze()
        self.is_sole_user = [uses[id(parameter)] == 1 for parameter in self.parameters]
        module = self.scope.module
        tensors = (*module.parameters(), *module.buffers())
        owned = {t.untyped_storage().data_ptr() for t in tensors}
        for index, output in enumerate(self.outputs):
            storage = output.untyped_storage()
            aliased = output.dim() and index not in self.passed_through
            if aliased and storage.data_ptr() not in owned:
                self._watched.append((index, storage, 0))
        self._handed = [None] * len(self.outputs)
        for place, (index, storage, _) in enumerate(self._watched):
            self._watched[place] = (index, storage, _references(storage))

    def _run(self, leaves: Sequence[Any]) -> tuple[Any, Exit | None]:
        inputs = pytree.tree_unflatten(leaves, self.signature.structure)
        arguments = self.observed.arguments.without_tensors()
        return self.scope.run(inputs, arguments, capturing=True)

    @contextlib.contextmanager
    def _as_observed(self) -> Iterator[None]:
        autocast = self.signature.autocast
        if autocast.enabled and autocast.cached:
            raise CaptureError(
                "autocast caches casts of weights, and a graph would keep a stale one: use "
                "torch.autocast(..., cache_enabled=False)"
            )
        dtype, enabled = autocast.dtype, autocast.enabled
        cast = torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=False)
        with torch.enable_grad(), cast:
            yield

    def _note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.add(tensor.data_ptr())
        return tensor

    def _describe_outputs(self, outputs: Any, originals: Originals) -> None:
        leaves, self.output_structure = pytree.tree_flatten(outputs)
        inputs = {id(self.inputs[i]): i for i in self.tensor_indices}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in originals:
                self.output_leaves.append(OutputLeaf("constant", originals.get(id(leaf), leaf)))
            elif id(leaf) in inputs and not leaf.requires_grad:
                self.output_leaves.append(OutputLeaf("input", inputs[id(leaf)]))
            else:
                if id(leaf) in inputs:
                    # The caller gets its own tensor back, but its gradient comes through here:
                    # added up in one place, in the order in which the eager backward adds it up.
                    place = self.tensor_indices.index(inputs[id(leaf)])
                    self.passed_through[len(self.outputs)] = place
                self.output_leaves.append(OutputLeaf("graph", len(self.outputs)))
                self.outputs.append(leaf)
                self.differentiable.append(leaf.requires_grad)

    def _find_parameters(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every leaf that the outputs depend on, parameters of other modules included."""
        inputs = {id(self.inputs[i]) for i in self.tensor_indices}
        return [leaf for leaf in _reachable_leaves(outputs) if id(leaf) not in inputs]

    # ---- replay

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
                _dense(static.detach()).copy_(_dense(tensor))

    def hand_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of this replay, as new tensor objects; ``tensors`` are its inputs."""
        outputs = [o.detach() if o.dim() else o.clone() for o in self.outputs]
        for index, place in self.passed_through.items():
            outputs[index] = tensors[place]
        return outputs

    def note_handed(self, outputs: Sequence[torch.Tensor]) -> None:
        for index, _, _ in self._watched:
            self._handed[index] = weakref.ref(outputs[index])

    def rescue_outputs(self) -> bool:
        """Before a replay overwrites them: gives outputs that are still held memory of their own.

        False if something else than the tensor handed out (a view of it) holds the memory.
        """
        for index, storage, references in self._watched:
            if _references(storage) <= references:
                continue
            handed = self._handed[index]
            tensor = handed() if handed is not None else None
            if tensor is not None:
                tensor.data = tensor.detach().clone()
            if _references(storage) > references:
                return False
        return True

    def release(self) -> None:
        """Drops graphs and static tensors. Idempotent."""
        for graph in (self.forward, self.backward):
            if graph is not None:
                graph.release()
        self.forward = self.backward = None
        for tensors in (
            self.inputs, self.outputs, self.gradient_outputs, self.gradient_inputs,
            self.gradient_parameters, self.saved_outputs, self._watched,
        ):  # fmt: skip
            tensors.clear()
        self.linked.clear()


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that has memory of its own: copies go there."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _references(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def _shared_buffers(outputs: Sequence[torch.Tensor], buffers: dict) -> list[torch.Tensor]:
    """Static incoming gradients. They are only read, and only within one backward, so recordings
    share them: one per layout and per place among this recording's outputs of that layout."""
    taken: Counter[Any] = Counter()
    chosen = []
    for output in outputs:
        layout = (tuple(output.shape), output.stride(), output.dtype)
        key = (layout, taken[layout])
        taken[layout] += 1
        if key not in buffers:
            buffers[key] = torch.empty_like(output, requires_grad=False)
        chosen.append(buffers[key])
    return chosen


def _reachable_leaves(outputs: Sequence[torch.Tensor]) -> list[nn.Parameter | torch.Tensor]:
    """The leaves of the autograd graph behind ``outputs``, in a deterministic order."""
    leaves: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack = [output.grad_fn for output in reversed(outputs)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        stack.extend(following for following, _ in reversed(node.next_functions))
    return list(leaves.values())
