"""Audits of whole steps: forward, backward and update of one step run eagerly, once, for real.

An audit allocates outside of the graph's pool, if that much memory is free. What the allocator adds
to the pool of a graph, it keeps as long as the graph. Otherwise the step runs in the graph's own
pool, where memory of the graph's operations is free between two replays. The next replay writes
there again, so results and gradients are copied at the end, and the allocator's table of the pool
has to be as before. If it is not, because a cache or a library holds something, the graph never
replays again: the step is captured anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import Comparison, named_tensors
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import apart, is_sharded_by_fsdp, owned_leaves, tensor_leaves
from moe_graphs.engine.whole_step import fsdp
from moe_graphs.engine.whole_step.capture_step import origins_of_step
from moe_graphs.engine.whole_step.grad_fields import gradients_of
from moe_graphs.engine.whole_step.recorded_step import RecordedStep, StepDefinition

_SMALLEST = 2 << 20  # bytes that the allocator takes at least


def why_not(definition: StepDefinition, recorded: RecordedStep) -> str | None:
    """The reason why this step cannot be audited, or None. ``Room`` has one more."""
    if recorded.entry is not None and fp8.has_scales(definition.model):
        return "fp8"
    if recorded.gradients is not None and not recorded.gradients.finds_as_captured():
        return "other_gradients"
    return None


@dataclass(frozen=True)
class Room:
    """The memory for an eager step.

    Attributes:
        missing: the bytes that are missing for it; 0 if it fits.
        held: what is held of the graph's pool if the step is to run there, else None.
    """

    missing: int = 0
    held: frozenset[Any] | None = None

    @classmethod
    def for_step(cls, definition: StepDefinition, recorded: RecordedStep, in_pool: bool) -> Room:
        """Room beside the graph, or else, if ``in_pool`` says that it may be, in its pool."""
        backend = definition.backend
        free = backend.free_bytes()
        missing = 0 if free is None else max(0, backend.pool_bytes(recorded.pool) - free)
        held = backend.held_in(recorded.pool) if missing and in_pool else None
        if free is None or held is None:
            return cls(missing)
        # What leaves the step needs memory in the pool, beside what the graph has left there, and
        # more outside for its copy.
        leaving = 2 * (_SMALLEST + sum(each.nbytes for each in tensor_leaves(recorded.left())))
        return cls(missing if leaving > free else 0, held)


def may_run_in_pool(definition: StepDefinition) -> bool:
    """Whether no library is known to keep memory of a step, as DDP and FSDP2 do."""
    modules = definition.model.modules()
    return not (fsdp.wrappers(definition.model) or any(map(is_sharded_by_fsdp, modules)))


def audited_in_pool(
    definition: StepDefinition, recorded: RecordedStep, leaves: Sequence[Any], structure: Any
) -> tuple[Any, str | None]:
    """Runs ``audited_step`` in the pool of the graph; what leaves is copied.

    After a difference nothing is copied, because the graph does not replay any more.
    """
    named = definition.parameters()
    before = {name: parameter.grad for name, parameter in named.items()}
    with definition.backend.allocating_in(recorded.pool):
        made, difference = audited_step(definition, recorded, leaves, structure, may_undo=True)
    if difference is not None:
        return made, difference
    if recorded.gradients is not None:
        recorded.gradients.take_over(before)
    outputs, of_result = pytree.tree_flatten(made)
    copies = owned_leaves(outputs)
    for number in recorded.with_history:
        copies[number].requires_grad_()
    return pytree.tree_unflatten(copies, of_result), None


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
    comparison = Comparison(audit.forward, origins, named, before)
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
