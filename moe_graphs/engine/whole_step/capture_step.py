"""Recording a whole step: try it, capture it, verify it, and leave everything as it was."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.context import Context
from moe_graphs.engine.explained import explained
from moe_graphs.engine.fp8 import Entry
from moe_graphs.engine.ranks import Ranks
from moe_graphs.engine.reads import Reads
from moe_graphs.engine.tracing import Operations
from moe_graphs.engine.verify import Verdict
from moe_graphs.engine.whole_step import data_parallel
from moe_graphs.engine.whole_step.accumulators import (
    check_streams,
)
from moe_graphs.engine.whole_step.batch import StaticBatch
from moe_graphs.engine.whole_step.fsdp import Sharding
from moe_graphs.engine.whole_step.grad_fields import (
    Gradients,
    StaticGradients,
    gradients_of,
    gradients_to_find,
    set_gradients,
)
from moe_graphs.engine.whole_step.recorded_step import RecordedStep
from moe_graphs.engine.whole_step.state_before import StateBefore
from moe_graphs.engine.whole_step.step_definition import StepDefinition
from moe_graphs.engine.whole_step.step_hooks import StepHooks
from moe_graphs.engine.whole_step.step_trials import TriedStep, try_step
from moe_graphs.engine.whole_step.step_verification import StepVerification
from moe_graphs.errors import CaptureError


def record_step(
    definition: StepDefinition,
    batch: Any,
    reads: Reads | None,
    *,
    rehearsals: int,
    verify: bool,
    ranks: Ranks,
) -> tuple[RecordedStep, Verdict | None]:
    """Captures the step as called now, on all ranks. Nothing it touches is changed.

    reads: the Python that a real call has run, if there was one.

    Raises:
        CaptureError: what in the step cannot be captured, with its line.
    """
    backend = definition.backend
    with (
        explained("capture of the step", backend, then="it runs eagerly now"),
        contextlib.ExitStack() as failing,
    ):
        failing.callback(backend.release)
        data_parallel.check_settings(definition.model)
        definition.sharding.rest()
        gc.collect()  # none while a capture runs
        backend.make_room()  # what eager steps have left there serves no other stream
        with StateBefore(definition, reads) as before, backend.on_stream():
            with ranks.together():
                prepared = _prepare(definition, batch, rehearsals, before)
            ranks.join(prepared.seen.groups)
            with ranks.together():
                data_parallel.check_memory(ranks.group)
                verification = None
                if verify:
                    static, found = prepared.batch, prepared.found
                    verification = StepVerification(definition, before, ranks, static, found)
                    verification.expect()
                operations = Operations()
                recorded = _record(definition, prepared, before, operations)
                failing.callback(recorded.release)
                verdict = verification.check(recorded, operations) if verification else None
        # Behind the context, which makes autograd forget the nodes: these are the caller's.
        updating = definition.optimizers() if prepared.seen.optimizer_steps else []
        if recorded.gradients is not None:
            recorded.gradients.settled()
        hooks = StepHooks(definition.parameters(), updating)
        failing.pop_all()  # nothing has failed
        return replace(recorded, hooks=hooks), verdict


@dataclass(frozen=True)
class _Prepared:
    """The state from which the capture starts: ``found`` are the gradients that are set for it."""

    batch: StaticBatch
    state: Context
    seen: TriedStep
    found: Gradients
    pool: Any
    entry: Entry | None


def _prepare(
    definition: StepDefinition, batch: Any, rehearsals: int, before: StateBefore
) -> _Prepared:
    """All that may be refused before the capture."""
    state = Context(definition.backend.device.type)
    if state.has_autocast_cache:
        raise CaptureError(
            "called under autocast, whose cache of weights would go stale: enter autocast "
            "inside the step, or use torch.autocast(..., cache_enabled=False)"
        )
    static = StaticBatch.of(batch, definition.backend.device)
    entry = Entry.of_now()
    seen = try_step(definition, static, before.reads, rehearsals)
    before.first_step_state.check()
    check_streams(definition.model, seen.stale)
    parameters = list(definition.parameters().values())
    found: Gradients = before.gradients
    if seen.touches_gradients:
        found = gradients_to_find(parameters, before.gradients, seen.dropped)
    set_gradients(parameters, found)
    return _Prepared(static, state, seen, found, definition.backend.new_pool(), entry)


def _record(
    definition: StepDefinition, prepared: _Prepared, before: StateBefore, operations: Operations
) -> RecordedStep:
    named, batch, seen = definition.parameters(), prepared.batch, prepared.seen
    tensors = [*definition.model.parameters(), *definition.model.buffers()]
    guards = definition.guards(
        seen.reads,
        seen.read,
        constants=batch.constants(),
        optimizer=seen.optimizer_steps,
        schedulers=False,
    )
    versions = [tensor._version for tensor in tensors]
    # What eager runs left in the allocator's cache would lie beside the graph's own pool.
    definition.backend.release()
    with definition.backend.record(prepared.pool) as graphs, operations:
        outputs = definition.run(batch.tree())
    both = zip(tensors, versions, strict=True)
    written = [tensor for tensor, version in both if tensor._version != version]
    leaves, structure = pytree.tree_flatten(outputs)
    parameters = list(named.values())
    left = gradients_of(parameters)
    gradients = None
    if seen.touches_gradients:
        gradients = StaticGradients(list(named), parameters, seen.dropped, prepared.found, left)
    return RecordedStep(
        graph=graphs[0],
        pool=prepared.pool,
        batch=batch,
        outputs=[leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        output_structure=structure,
        gradients=gradients,
        guards=guards,
        first_step_state=before.first_step_state,
        context=prepared.state,
        grad_enabled=torch.is_grad_enabled(),
        written=written,
        entry=prepared.entry,
        sharding=Sharding(definition.model),
    )
