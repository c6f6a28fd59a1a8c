"""Captures one observed call of a scope into a ``Recording``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.backends.base import Backend
from moe_graphs.engine.module_state import ModuleState
from moe_graphs.engine.rehearsal import capturable_only
from moe_graphs.engine.scopes.memory import CallMemory, nbytes
from moe_graphs.engine.scopes.observation import ObservedCall
from moe_graphs.engine.scopes.recording import OutputLeaf, Recording, dense
from moe_graphs.engine.scopes.select import Exit
from moe_graphs.engine.scopes.split_backward import SplitBackward
from moe_graphs.engine.signature import TensorSpec, tensor_leaves
from moe_graphs.errors import CaptureError

# The stand-in of a parameter during the capture, by id -> the parameter.
Originals = Mapping[int, torch.Tensor]
# "forward_pre_hooks" and so on -> what to call with the module and the values.
Hooks = Mapping[str, Callable[..., None]]


class CallCapture:
    """The steps of a capture, in the order of its methods. Lives as long as the session."""

    def __init__(
        self,
        observed: ObservedCall,
        leaves: Sequence[Any],
        position: int,
        backend: Backend,
        pool: Any,
        *,
        split: bool = False,
        hooks: Hooks | None = None,
    ) -> None:
        """``leaves``: detached inputs to start from; ``split``: weights' gradients apart;
        ``hooks``: called with the module and the values around every run, outside the graphs."""
        state = ModuleState(observed.scope.name, observed.scope.module)
        state.check_capturable()
        self.recording = Recording(
            position, observed.scope, observed.signature, state, backend.device
        )
        self._observed = observed
        self._leaves = leaves
        self._split = split
        self._hooks = hooks or {}
        self._backend = backend
        self.pool = pool
        self._saved: set[int] = set()
        self._backward: SplitBackward | None = None

    def rehearse(self, known: Sequence[torch.Tensor]) -> CallMemory:
        """Runs the call once on the observed values: lazy initialisation happens here, and what
        cannot be in a graph is refused. ``known``: the model's parameters and buffers."""
        meter = self._backend.meter()
        leaves = [
            leaf.detach().requires_grad_(spec.requires_grad)
            if isinstance(spec, TensorSpec)
            else leaf
            for spec, leaf in zip(self._observed.signature.leaves, self._leaves, strict=True)
        ]
        with (
            self._as_observed(),
            self._forward_hooks(leaves) as produced,
            capturable_only(self._backend.device, [*known, *tensor_leaves(leaves)]),
            meter,
        ):
            produced["output"], _ = self._run(leaves)
        forward, kept = meter.peak, meter.alive()
        produced = tensor_leaves(produced["output"])
        outputs = [output for output in produced if output.requires_grad]
        gradients = [torch.zeros_like(o) for o in outputs]
        if outputs:
            wanted = _reachable_leaves(outputs)
            with self._backward_hooks(gradients), capturable_only(self._backend.device), meter:
                torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        linked = [leaves[index] for index in self._observed.links]
        return CallMemory(
            scope=self.recording.scope.name,
            inputs=nbytes(tensor_leaves(leaves)) - nbytes(linked),
            linked=nbytes(linked),
            outputs=nbytes([o for o in produced if not any(o is leaf for leaf in leaves)]),
            kept=kept,
            forward=forward,
            backward=meter.peak,
            gradients=nbytes(gradients),
        )

    def allocate_inputs(self, others: Mapping[int, Recording]) -> None:
        """Static inputs, filled with the observed values; a linked one is another's output."""
        recording, observed = self.recording, self._observed
        recording.inputs = list(self._leaves)
        for index, spec in enumerate(observed.signature.leaves):
            if not isinstance(spec, TensorSpec):
                continue
            recording.tensor_indices.append(index)
            link = observed.links.get(index)
            source = others.get(link.call) if link is not None else None
            output = source.static_output(link.output) if source is not None else None
            if output is not None and TensorSpec.of(spec.name, output) == spec:
                recording.linked[index] = source
                static = output.detach()
            else:
                static = dense(self._leaves[index]).clone().expand(spec.shape)
            recording.inputs[index] = static.requires_grad_(spec.requires_grad)

    def record_forward(self, originals: Originals) -> None:
        recording = self.recording
        statics = [recording.inputs[i] for i in recording.tensor_indices]
        versions = [static._version for static in statics]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._note_saved, _unchanged)
        with (
            self._as_observed(),
            self._forward_hooks(recording.inputs) as produced,
            hooks,
            self._backend.record(self.pool) as graphs,
        ):
            produced["output"], recording.exit = self._run(recording.inputs)
        outputs = produced.pop("output")
        (recording.forward,) = graphs
        for index, static, version in zip(recording.tensor_indices, statics, versions, strict=True):
            if static._version != version:
                raise CaptureError(
                    f"input {recording.signature.leaves[index].name!r} is modified in place, "
                    f"which a replay would do to its own copy only: clone it before modifying it"
                )
        self._describe_outputs(outputs, originals)

    def record_backward(self, originals: Originals, buffers: dict) -> None:
        """``buffers`` holds the incoming gradients, shared by all recordings that compute all
        gradients at once. Split, those of the weights follow with ``record_weights``."""
        recording = self.recording
        outputs = zip(recording.outputs, recording.differentiable, strict=True)
        live = [output for output, needed in outputs if needed]
        wanted = [t for t in recording.inputs if _requires_grad(t)]
        leaves = self._find_parameters(live)
        if live:
            recording.gradient_outputs = _shared_buffers(live, {} if self._split else buffers)
        with self._backward_hooks(recording.gradient_outputs):
            self._record_gradients(live, wanted, leaves, originals)
        if not self._split:
            self.finish()

    def _record_gradients(
        self,
        live: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        originals: Originals,
    ) -> None:
        recording = self.recording
        if live and self._split:
            self._backward = SplitBackward(live, wanted, leaves)
            if wanted:
                with self._backend.record(self.pool) as graphs:
                    gradients = self._backward.input_gradients(recording.gradient_outputs)
                (recording.backward,) = graphs
                recording.gradient_inputs = self._borrowed(gradients)
            else:
                self._backward.input_gradients(recording.gradient_outputs)
        elif live:
            with self._backend.record(self.pool) as graphs:
                gradients = torch.autograd.grad(
                    live, [*wanted, *leaves], recording.gradient_outputs, allow_unused=True
                )
            (recording.backward,) = graphs
            recording.gradient_inputs = self._borrowed(gradients[: len(wanted)])
            self._note_parameters(leaves, gradients[len(wanted) :], originals)

    def record_weights(self, originals: Originals) -> None:
        """Split, after all ``record_backward`` of the slot: the gradients of the weights."""
        if self._backward is None:
            return
        leaves = self._backward.parameters
        if leaves:
            with self._backend.record(self.pool) as graphs:
                gradients = self._backward.parameter_gradients()
            (self.recording.weights,) = graphs
            self._note_parameters(leaves, gradients, originals)

    def finish(self) -> None:
        """Drops the autograd graph: what it saved is free for captures that follow."""
        recording = self.recording
        self._backward = None
        recording.outputs = [output.detach() for output in recording.outputs]
        recording.saved_outputs = [o for o in recording.outputs if o.data_ptr() in self._saved]

    def _borrowed(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [None if g is None else self._backend.borrow(g.detach()) for g in gradients]

    def _note_parameters(
        self,
        leaves: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        originals: Originals,
    ) -> None:
        used = [(p, g) for p, g in zip(leaves, gradients, strict=True) if g is not None]
        self.recording.parameters = [originals.get(id(p), p) for p, _ in used]
        self.recording.gradient_parameters = self._borrowed([g for _, g in used])

    def _run(self, leaves: Sequence[Any]) -> tuple[Any, Exit | None]:
        inputs = pytree.tree_unflatten(leaves, self._observed.signature.structure)
        return self._observed.scope.run(inputs, self._observed.arguments, capturing=True)

    @contextlib.contextmanager
    def _forward_hooks(self, leaves: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """The block puts the scope's output under "output"."""
        produced: dict[str, Any] = {}
        args, kwargs = (), {}
        if self._hooks:
            args, kwargs = pytree.tree_unflatten(leaves, self._observed.signature.structure)
        self._call_hook("forward_pre_hooks", args, kwargs)
        yield produced
        self._call_hook("forward_hooks", args, kwargs, produced["output"])

    @contextlib.contextmanager
    def _backward_hooks(self, gradients: Sequence[torch.Tensor]) -> Iterator[None]:
        self._call_hook("backward_pre_hooks", tuple(gradients))
        yield
        self._call_hook("backward_hooks", tuple(self.recording.gradient_inputs), tuple(gradients))

    def _call_hook(self, kind: str, *values: Any) -> None:
        if kind in self._hooks:
            self._hooks[kind](self._observed.scope.module, *values)

    @contextlib.contextmanager
    def _as_observed(self) -> Iterator[None]:
        autocast = self._observed.signature.autocast
        if autocast.enabled and autocast.cached:
            raise CaptureError(
                "autocast caches casts of weights, and a graph would keep a stale one: use "
                "torch.autocast(..., cache_enabled=False)"
            )
        kind, dtype, enabled = self._backend.device.type, autocast.dtype, autocast.enabled
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            yield

    def _note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.add(tensor.data_ptr())
        return tensor

    def _describe_outputs(self, outputs: Any, originals: Originals) -> None:
        recording = self.recording
        leaves, recording.output_structure = pytree.tree_flatten(outputs)
        inputs = {id(recording.inputs[i]): i for i in recording.tensor_indices}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in originals:
                constant = OutputLeaf("constant", originals.get(id(leaf), leaf))
                recording.output_leaves.append(constant)
            elif id(leaf) in inputs and not leaf.requires_grad:
                recording.output_leaves.append(OutputLeaf("input", inputs[id(leaf)]))
            else:
                number = len(recording.outputs)
                if id(leaf) in inputs:
                    # The caller gets its own tensor back, but its gradient comes through here:
                    # added up in one place, in the order in which the eager backward adds it up.
                    place = recording.tensor_indices.index(inputs[id(leaf)])
                    recording.passed_through[number] = place
                recording.output_leaves.append(OutputLeaf("graph", number))
                recording.outputs.append(leaf)
                recording.differentiable.append(leaf.requires_grad)

    def _find_parameters(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every leaf that the outputs depend on, parameters of other modules included."""
        inputs = {id(self.recording.inputs[i]) for i in self.recording.tensor_indices}
        return [leaf for leaf in _reachable_leaves(outputs) if id(leaf) not in inputs]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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


def _reachable_leaves(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
