"""A whole step as one graph: definition, batch, conditions of a replay, and replay."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import CallAudit
from moe_graphs.engine.backends.backend import Backend, Graph
from moe_graphs.engine.guards import torch_state
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.guards import Guards, names_before_running
from moe_graphs.engine.guards.introspection import tensor_hooks_of
from moe_graphs.engine.guards.torch_state import TorchState
from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.side_outputs import Assigned, Given
from moe_graphs.engine.tensors import (
    Mismatch,
    Signature,
    TensorSpec,
    copy_all,
    dense_pair,
    owned_leaves,
    results_of,
    static_copy,
    tensor_leaves,
)
from moe_graphs.engine.whole_step.fsdp import Sharding
from moe_graphs.engine.whole_step.grad_fields import StaticGradients, gradients_of, keep_apart
from moe_graphs.engine.whole_step.optimizers import FirstStepState, StepHooks
from moe_graphs.errors import CaptureError

# ---- what a graph is captured from: the step function, and what it works on


@dataclass(frozen=True)
class StepDefinition:
    """A step function and the objects that it works on.

    Attributes:
        state: objects besides model and optimizer that the step changes or reads.
        assigned: the attributes that the step assigns tensors to.
    """

    step: Callable[[Any], Any]
    model: nn.Module
    optimizer: Optimizer | None
    state: tuple[Any, ...]
    backend: Backend
    assigned: Assigned = field(default_factory=functools.partial(Assigned, "the step"))

    def given(self, batch: Any) -> Any:
        """The batch, with the attributes that the step reads if it assigns them, too."""
        return self.assigned.given(batch)

    def run(self, batch: Any) -> Any:
        """Runs the step; what it leaves in attributes is a part of its outputs.

        Afterwards parameters that FSDP2 has sharded are not gathered, and gradients that FSDP2 has
        made share no memory with one another.
        """
        parameters = list(self.parameters().values())
        before = gradients_of(parameters)
        result = self.assigned.run(batch, self.step)
        self.sharding.reshard()
        keep_apart(parameters, before)
        return result

    @functools.cached_property
    def sharding(self) -> Sharding:
        return Sharding(self.model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that have a gradient or may get one; a frozen one may have an old gradient."""
        return {
            name: p
            for name, p in self.model.named_parameters()
            if p.requires_grad or p.grad is not None
        }

    def optimizers(self) -> list[Optimizer]:
        """All optimizers, also those within ``state`` (the optimizer of a ``DeviceStep``)."""
        candidates = [self.optimizer, *self.state]
        candidates += [v for s in self.state if hasattr(s, "__dict__") for v in vars(s).values()]
        return list({id(c): c for c in candidates if isinstance(c, Optimizer)}.values())

    @contextlib.contextmanager
    def states_apart(self) -> Iterator[None]:
        """Context in which the states of an optimizer's first update lie in memory of their own.

        States last. In gaps between gradients, which do not, they would hold whole segments.
        """
        apart = contextlib.ExitStack()

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not optimizer.state:
                apart.enter_context(self.backend.memory_of_its_own())

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            apart.close()

        with apart, contextlib.ExitStack() as hooks:
            for each in self.optimizers():
                hooks.callback(each.register_step_pre_hook(begin).remove)
                hooks.callback(each.register_step_post_hook(end).remove)
            yield

    def names_before(self) -> AccessedNames:
        """The Python that the step may run, found by its code alone; nothing is run."""
        hooks = tensor_hooks_of(self.model.parameters())
        return names_before_running([self.step, *hooks], self.model.modules(), self.guards)

    def guards(
        self,
        accessed: AccessedNames,
        addresses: frozenset[int] | set[int] = frozenset(),
        *,
        constants: dict[str, Any] | None = None,
        optimizer: bool = True,
        schedulers: bool = True,
    ) -> Guards:
        """Guards on everything that the step's Python could read.

        With ``schedulers=False`` learning-rate schedulers are left out: between steps they may
        change, and only within a step they must not.
        """
        everything = {
            f"state[{i}]": each
            for i, each in enumerate(self.state)
            if schedulers or not isinstance(each, LRScheduler)
        }
        if optimizer and self.optimizer is not None:
            everything["optimizer"] = self.optimizer
        return Guards(
            {"": self.model, "step": self.step, **(constants or {})},
            accessed,
            addresses,
            everything=everything,
            tensors=fp8.tensors_of(self.model),
            tensor_names={id(p): name for name, p in self.model.named_parameters()},
            assigned=self.assigned.compared(),
            in_step=True,
        )


# ---- the batch: static buffers that the graph reads, and what fits into them


@dataclass(frozen=True)
class StaticBatch:
    """The batch of a recorded step.

    ``leaves`` has static tensors where the batch had tensors, and the captured constants elsewhere.
    """

    signature: Signature
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, batch: Any, device: torch.device) -> StaticBatch:
        """Makes a static copy of ``batch``.

        Raises:
            CaptureError: if a graph cannot read the batch.
        """
        signature = Signature.of(batch, input_name)
        unsupported = signature.unsupported()
        if unsupported is not None:
            raise CaptureError(unsupported)
        for spec in signature.leaves:
            if isinstance(spec, TensorSpec):
                _check(spec, device)
        leaves = signature.anew(pytree.tree_leaves(batch), lambda _, leaf: static_copy(leaf))
        return cls(signature, tuple(leaves))

    def tree(self) -> Any:
        """The static batch in the structure that the step takes."""
        return pytree.tree_unflatten(self.leaves, self.signature.structure)

    def tensors(self) -> list[Tensor]:
        return list({id(tensor): tensor for tensor in tensor_leaves(self.leaves)}.values())

    def named_tensors(self) -> dict[str, Tensor]:
        pairs = zip(self.signature.leaves, self.leaves, strict=True)
        return {spec.name: leaf for spec, leaf in pairs if isinstance(spec, TensorSpec)}

    def constants(self) -> dict[str, Any]:
        specs = zip(self.signature.leaves, self.leaves, strict=True)
        return {spec.name: leaf for spec, leaf in specs if not isinstance(spec, TensorSpec)}

    def mismatches(self, batch: Any, leaves: Sequence[Any], structure: Any) -> Iterator[Mismatch]:
        """The differences between a call's batch, given flat as well, and the captured one."""
        if structure != self.signature.structure:
            yield structure_mismatch(self.signature, batch)
        else:
            yield from self.signature.mismatches(structure, leaves)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copies a call's tensors into place, on the current stream. They must match."""
        targets, sources = [], []
        for number, (static, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            is_first = self.signature.first[number] == number
            if is_first and isinstance(static, Tensor) and leaf.data_ptr() != static.data_ptr():
                target, source = dense_pair(static, leaf)
                targets.append(target)
                sources.append(source)
        copy_all(targets, sources)


def input_name(path: Sequence[Any]) -> str:
    """The name of a leaf in messages: ``batch['tokens'][0]``, or that of an attribute."""
    if path and getattr(path[0], "name", None) in Given._fields:
        is_batch = path[0].name == Given._fields[0]
        return ("batch" if is_batch else "attribute ") + pytree.keystr(tuple(path[1:]))
    return "batch" + pytree.keystr(tuple(path))


def structure_mismatch(signature: Signature, batch: Any) -> Mismatch:
    """The mismatch that names leaves which are missing or too many."""
    captured = [spec.name for spec in signature.leaves]
    now = [input_name(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    missing = [name for name in captured if name not in now]
    extra = [name for name in now if name not in captured]
    parts = [f"{', '.join(missing[:4])} missing"] if missing else []
    parts += [f"{', '.join(extra[:4])} not known"] if extra else []
    found = "; ".join(parts) or "other containers around the same leaves"
    message = (
        f"the inputs are built differently: {found} ({len(captured)} leaves before, {len(now)} "
        f"now): pass the same keys, and the same number of microbatches"
    )
    return Mismatch("structure", message)


def _check(spec: TensorSpec, device: torch.device) -> None:
    if spec.device != device:
        raise CaptureError(
            f"input {spec.name!r} is on {spec.device} and the model on {device}: a graph reads "
            f"device memory only: move it there, for instance with StaticLoader(loader, device)"
        )
    if spec.requires_grad:
        raise CaptureError(
            f"input {spec.name!r} requires grad, and a whole step returns no gradients of its "
            f"inputs: detach it"
        )


# ---- the recorded step


@dataclass(frozen=True)
class RecordedStep:
    """A captured step, and the conditions under which it may be replayed.

    Attributes:
        with_history: numbers of outputs that are left in attributes and require a gradient.
        written: tensors that a replay changes and whose version it counts.
        modified: the same, with running statistics, whose version eager does not count, either.
        context, grad_enabled: the state of torch that it was captured under.
        entry: the state of FP8 that it finds.
        sharding: the settings of FSDP2, if it shards the model.
        hooks: hooks of the step; known from the end of the capture on.
        audit: what audits of the step compare with, or None.
    """

    graph: Graph
    pool: Any
    batch: StaticBatch
    outputs: list[Any]
    output_structure: pytree.TreeSpec
    with_history: list[int]
    gradients: StaticGradients | None
    guards: Guards
    first_step_state: FirstStepState
    context: TorchState
    grad_enabled: bool
    written: list[Tensor]
    modified: list[Tensor]
    entry: fp8.Entry | None
    sharding: Sharding | None
    hooks: StepHooks | None = None
    audit: CallAudit | None = None

    def mismatches(self, batch: Any, leaves: Sequence[Any], structure: Any) -> Iterator[Mismatch]:
        """The reasons why this call cannot be replayed. Does not wait for the device."""
        self.first_step_state.put_in()
        if self.sharding is not None:
            self.sharding.reshard()
        if torch.is_grad_enabled() != self.grad_enabled:
            message = "grad mode is not that of the capture: keep no_grad and its kin in the step"
            yield Mismatch("grad_mode", message)
        mode = torch_state.reason_of_modes()
        if mode is not None:
            yield Mismatch(mode, str(EAGER_CALLS[mode]))
        yield from self.batch.mismatches(batch, leaves, structure)
        yield from results_of(self._checks)
        shared = self.mismatch_of_memory(leaves)
        if shared is not None:
            yield shared

    def mismatch_of_memory(self, leaves: Sequence[Any]) -> Mismatch | None:
        """The mismatch of a batch whose memory or objects others know, too."""
        signature = self.batch.signature
        if len(leaves) != len(signature.leaves):
            return None
        return signature.mismatch_of_memory(leaves, self.modified, self.guards.asked_for)

    @functools.cached_property
    def _checks(self) -> list[Callable[[], Mismatch | None]]:
        objects = (self.sharding, self.guards, self.hooks, self.gradients)
        checks = [self.context.mismatch, self._mismatch_in_fp8]
        return checks + [each.mismatch for each in objects if each is not None]

    def _mismatch_in_fp8(self) -> Mismatch | None:
        if (None if fp8.is_absent() else fp8.Entry.of_now()) == self.entry:
            return None
        message = (
            "other modules of Transformer Engine have run in FP8 than before the capture: enter "
            "its autocast in every step alike, and capture when all of them have run"
        )
        return Mismatch("fp8", message)

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Replays the step and returns copies of the outputs, which are the caller's own."""
        self.first_step_state.put_in()  # a step that is captured anew is replayed unchecked
        self.batch.load(leaves)
        self.run()
        if self.entry is not None and self.entry.is_first:
            fp8.claim_first()
        # A replay changes these tensors unseen by autograd: an older autograd graph must notice.
        torch.autograd.graph.increment_version(self.written)
        leaves = owned_leaves(self.outputs)
        for number in self.with_history:
            leaves[number].requires_grad_()
        return pytree.tree_unflatten(leaves, self.output_structure)

    def run(self) -> None:
        """Replays on the present values of the static batch, with the gradients that are set."""
        if self.gradients is None:
            self.graph.replay()
        else:
            self.gradients.replay(self.graph)

    def left(self) -> list[Tensor | None]:
        """The tensors that the capture has left: outputs, and gradients of the parameters."""
        return [*self.outputs, *(self.gradients.left if self.gradients is not None else ())]

    def release(self) -> None:
        self.graph.release()

    def static_bytes(self) -> int:
        kept = [*self.batch.tensors(), *tensor_leaves(self.outputs)]
        if self.gradients is not None:
            found, left = self.gradients.found, self.gradients.left
            kept += {id(t): t for t in (*found, *left) if t is not None}.values()
        return sum(tensor.nbytes for tensor in kept)
