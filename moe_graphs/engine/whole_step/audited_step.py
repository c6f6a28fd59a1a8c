"""Audits of whole steps: forward, backward and update of one step run eagerly, once, for real.

An eager step runs beside the graph if that much memory is free. Otherwise it runs after the graph
has been released, and the next step is captured anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import Comparison, named_tensors
from moe_graphs.engine.checkpointing import Checkpoints
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import apart, tensor_leaves
from moe_graphs.engine.whole_step.capture_step import origins_of_step, without_room_for_gaps
from moe_graphs.engine.whole_step.grad_fields import gradients_of
from moe_graphs.engine.whole_step.recorded_step import RecordedStep, StepDefinition


def why_not(definition: StepDefinition, recorded: RecordedStep) -> str | None:
    """The reason why this step cannot be audited, or None. Missing memory is one more."""
    if recorded.entry is not None and fp8.has_scales(definition.model):
        return "fp8"
    if recorded.gradients is not None and not recorded.gradients.finds_as_captured():
        return "other_gradients"
    return None


def missing_bytes(definition: StepDefinition, recorded: RecordedStep) -> tuple[int, int]:
    """The bytes that are missing for an eager step beside the graph, and after its release.

    Each is 0 if the step fits. Outputs and gradients stay in the graph's pool after the release.
    """
    free = definition.backend.free_bytes()
    if free is None:
        return 0, 0
    staying = sum(each.nbytes for each in tensor_leaves(recorded.left()))
    pool = definition.backend.pool_bytes(recorded.pool)
    needed, released = without_room_for_gaps(pool), pool - staying
    return max(0, pool - free), max(0, needed - released - free)


def audited_step(
    definition: StepDefinition,
    recorded: RecordedStep,
    leaves: Sequence[Any],
    structure: Any,
    *,
    may_undo: bool,
) -> tuple[Any, str | None]:
    """Runs a step that matches the captured one eagerly.

    Returns its result, and the first difference from the capture or None.

    Args:
        may_undo: whether the step is put back if memory runs out.

    Raises:
        UndoneError: if memory ran out, and everything is as before the step.
    """
    audit, parameters = recorded.audit, list(definition.parameters().values())
    assert audit is not None
    lasting = [*definition.model.parameters(), *definition.model.buffers()]
    given = apart(leaves, lasting, recorded.batch.signature.first)
    origins = origins_of_step(definition, recorded.batch, given, gradients_of(parameters))
    named = partial(named_tensors, definition.model, recorded.batch.named_tensors())
    before = None
    if may_undo:
        guards = [recorded.guards.present()]
        before = Snapshot(definition.backend, guards=guards, gradients_of=parameters)
    comparison = Comparison(
        audit.forward, origins, named, before, Checkpoints(definition.backend.device)
    )
    with comparison.undone_without_memory(), comparison:
        result = definition.run(pytree.tree_unflatten(given, structure))
    outputs = pytree.tree_leaves(result)
    left = [each.detach() if isinstance(each, Tensor) else each for each in outputs]
    comparison.finish(
        [*left, *(gradients_of(parameters) if recorded.gradients is not None else ())]
    )
    written = recorded.guards.mismatch()
    if written is not None:
        comparison.differs(f"it changes what its Python reads: {written.message}")
    return result, comparison.difference
