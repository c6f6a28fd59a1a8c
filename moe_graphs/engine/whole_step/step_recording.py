"""Recording a whole step: rehearse, capture, and leave everything as it was."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from moe_graphs.engine.backends.base import Backend, Graph
from moe_graphs.engine.module_state import ModuleState
from moe_graphs.engine.preserve import (
    attributes_put_back_on_failure,
    no_garbage_collection,
    preserved_rng,
    preserved_values,
)
from moe_graphs.engine.rehearsal import source_line
from moe_graphs.engine.signature import Mismatch, tensor_leaves
from moe_graphs.engine.whole_step import data_parallel
from moe_graphs.engine.whole_step.accumulators import check_streams, forget_accumulators
from moe_graphs.engine.whole_step.optimizers import LateState
from moe_graphs.engine.whole_step.static_inputs import StaticInputs, owned_leaves
from moe_graphs.engine.whole_step.step_gradients import (
    Gradients,
    StaticGradients,
    gradients_of,
    set_gradients,
    static_gradients,
)
from moe_graphs.engine.whole_step.step_rehearsal import Rehearsal, Subject, rehearse
from moe_graphs.engine.whole_step.watched import Watched
from moe_graphs.errors import CaptureError, GraphError


@dataclass(frozen=True)
class StepRecording:
    """One captured step. ``written``: parameters and buffers that a replay changes."""

    graph: Graph
    pool: Any
    inputs: StaticInputs
    outputs: list[Any]
    output_structure: pytree.TreeSpec
    gradients: StaticGradients | None
    modules: ModuleState
    watched: Watched
    late_state: LateState
    grad_mode: tuple[bool, bool]
    written: list[torch.Tensor]

    def mismatch(self, batch: Any, leaves: Sequence[Any], structure: Any) -> Mismatch | None:
        """Why this call cannot be replayed, or None. Does not synchronise."""
        self.late_state.put_in()
        if _grad_mode() != self.grad_mode:
            message = "grad mode is not that of the capture: keep no_grad and its kin in the step"
            return Mismatch("grad_mode", message)
        try:
            self.modules.check_addresses()
        except GraphError as error:
            return Mismatch("model_moved", str(error))
        return (
            self.inputs.mismatch(batch, leaves, structure)
            or self.modules.mismatch()
            or self.watched.mismatch()
            or (self.gradients.mismatch() if self.gradients is not None else None)
        )

    def replay(self, leaves: Sequence[Any]) -> Any:
        self.inputs.load(leaves)
        if self.gradients is not None:
            self.gradients.load()
        self.graph.replay()
        if self.gradients is not None:
            self.gradients.attach()
        # A replay changes them behind autograd's back: an older graph must not use them unnoticed.
        torch.autograd.graph.increment_version(self.written)
        return pytree.tree_unflatten(owned_leaves(self.outputs), self.output_structure)

    def release(self) -> None:
        self.graph.release()

    def static_bytes(self) -> int:
        kept = [*self.inputs.tensors(), *tensor_leaves(self.outputs)]
        if self.gradients is not None:
            found, left = self.gradients.found, self.gradients.left
            kept += {id(t): t for t in (*found, *left) if t is not None}.values()
        return sum(tensor.nbytes for tensor in kept)


def record_step(
    subject: Subject, batch: Any, rehearsals: int, group: dist.ProcessGroup | None
) -> StepRecording:
    """Captures the step as called now, on all ranks of the group. Nothing it touches is changed.

    Raises:
        CaptureError: what in the step cannot be captured, with its line.
    """
    backend, recording = subject.backend, None
    try:
        data_parallel.check_settings(subject.model)
        with no_garbage_collection(), _preserved(subject) as (entry, late_state), backend.session():
            with data_parallel.together(group, backend.device):
                prepared = _prepare(subject, batch, rehearsals, entry, late_state)
            with data_parallel.together(group, backend.device):
                recording = _record(subject, prepared, late_state)
        return recording
    except CaptureError as error:
        _release(recording, backend)
        raise CaptureError(f"capture of the step failed: {error}; it runs eagerly now") from error
    except Exception as error:
        _release(recording, backend)
        line = source_line(traceback.extract_tb(error.__traceback__))
        raise CaptureError(
            f"capture of the step failed with {type(error).__name__}{_memory(error)}: {error}; "
            f"at {line}; it runs eagerly now"
        ) from error


@dataclass(frozen=True)
class _Prepared:
    """Where the capture starts: ``found`` are the gradients that are set for it."""

    inputs: StaticInputs
    modules: ModuleState
    seen: Rehearsal
    found: Gradients
    pool: Any


def _prepare(
    subject: Subject, batch: Any, rehearsals: int, entry: Gradients, late_state: LateState
) -> _Prepared:
    """All that may be refused before the capture."""
    named = subject.trainable()
    inputs = StaticInputs.of(batch, subject.backend.device)
    modules = ModuleState("full iteration", subject.model)
    modules.check_capturable()
    seen = rehearse(subject, inputs, modules, rehearsals)
    late_state.check()
    check_streams(subject.model, seen.stale)
    found = entry
    if seen.touches_gradients:
        found = static_gradients(list(named.values()), entry, seen.dropped)
    set_gradients(list(named.values()), found)
    # What the rehearsals left in the allocator's cache would lie beside the graph's own pool, and
    # their cuBLAS workspace outside of it, to be unmapped when another graph is released.
    subject.backend.release()
    return _Prepared(inputs, modules, seen, found, subject.backend.new_pool())


def _record(subject: Subject, prepared: _Prepared, late_state: LateState) -> StepRecording:
    named, inputs, seen = subject.trainable(), prepared.inputs, prepared.seen
    tensors = [*subject.model.parameters(), *subject.model.buffers(), *inputs.tensors()]
    watched = subject.watch(optimizer=seen.optimizer_steps, schedulers=False)
    versions = [tensor._version for tensor in tensors]
    with subject.backend.record(prepared.pool) as graphs:
        outputs = subject.step(inputs.tree())
    both = zip(tensors, versions, strict=True)
    written = [tensor for tensor, version in both if tensor._version != version]
    leaves, structure = pytree.tree_flatten(outputs)
    parameters = list(named.values())
    left = gradients_of(parameters)
    prepared.modules.freeze()
    recording = StepRecording(
        graph=graphs[0],
        pool=prepared.pool,
        inputs=inputs,
        outputs=[leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        output_structure=structure,
        gradients=StaticGradients(list(named), parameters, seen.dropped, prepared.found, left)
        if seen.touches_gradients
        else None,
        modules=prepared.modules,
        watched=watched,
        late_state=late_state,
        grad_mode=_grad_mode(),
        written=written,
    )
    if any(static is tensor for tensor in written for static in inputs.tensors()):
        recording.release()
        raise CaptureError("the step modifies its inputs in place: clone them before")
    return recording


@contextlib.contextmanager
def _preserved(subject: Subject) -> Iterator[tuple[Gradients, LateState]]:
    """Whatever happens inside: everything the step touches is as before afterwards."""
    parameters = list(subject.trainable().values())
    entry, watched = gradients_of(parameters), subject.watch()
    late_state = LateState(subject.optimizers())
    tensors = [*subject.model.parameters(), *subject.model.buffers(), *watched.tensors]
    tensors += [gradient for gradient in entry if gradient is not None]
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    with (
        preserved_values(unique, on_host=True),
        preserved_rng(subject.backend.device, subject.backend.generators),
        attributes_put_back_on_failure(subject.model),
    ):
        forget_accumulators(subject.model)  # those of the caller's stream
        try:
            yield entry, late_state
        finally:
            late_state.take_away()
            watched.put_back()
            set_gradients(parameters, entry)
            forget_accumulators(subject.model)  # those that an exception's traceback holds


def _release(recording: StepRecording | None, backend: Backend) -> None:
    if recording is not None:
        recording.release()
    backend.release()


def _grad_mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _memory(error: Exception) -> str:
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f" ({free / 2**20:.0f} of {total / 2**20:.0f} MiB free)"
