"""Audits of whole steps: forward, backward and update of one step run eagerly, once, for real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import Comparison
from moe_graphs.engine.tensors import apart
from moe_graphs.engine.whole_step.capture_step import origins_of_step
from moe_graphs.engine.whole_step.grad_fields import gradients_of
from moe_graphs.engine.whole_step.recorded_step import RecordedStep, StepDefinition


def why_not(definition: StepDefinition, recorded: RecordedStep) -> str | None:
    """The reason why this step cannot be audited, or None."""
    backend = definition.backend
    if recorded.entry is not None and fp8.has_scales(definition.model):
        return "fp8"
    if recorded.gradients is not None and not recorded.gradients.finds_as_captured():
        return "other_gradients"
    free = backend.free_bytes()
    if free is not None and free < backend.pool_bytes(recorded.pool):
        return "memory"
    return None


def audited_step(
    definition: StepDefinition, recorded: RecordedStep, leaves: Sequence[Any], structure: Any
) -> tuple[Any, str | None]:
    """Runs a step that matches the captured one eagerly.

    Returns its result, and the first difference from the capture or None.
    """
    audit, parameters = recorded.audit, list(definition.parameters().values())
    assert audit is not None
    lasting = [*definition.model.parameters(), *definition.model.buffers()]
    given = apart(leaves, lasting, recorded.batch.signature.first)
    origins = origins_of_step(definition, recorded.batch, given, gradients_of(parameters))

    def named() -> dict[str, Tensor]:
        model, batch = definition.model, recorded.batch
        named = {f"input {name!r}": each for name, each in batch.named_tensors().items()}
        named |= {f"parameter {name!r}": each for name, each in model.named_parameters()}
        return named | {f"buffer {name!r}": each for name, each in model.named_buffers()}

    comparison = Comparison(audit.forward, origins, named)
    with comparison:
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
