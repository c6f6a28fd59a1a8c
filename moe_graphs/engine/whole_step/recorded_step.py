"""A whole step as one graph, once recorded: whether a call may replay it, and its replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine import context, fp8
from moe_graphs.engine.backends.backend import Graph
from moe_graphs.engine.context import Context
from moe_graphs.engine.guards import Guards
from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.signature import Mismatch, tensor_leaves
from moe_graphs.engine.static_memory import owned_leaves
from moe_graphs.engine.whole_step.batch import StaticBatch
from moe_graphs.engine.whole_step.fsdp import Sharding
from moe_graphs.engine.whole_step.grad_fields import StaticGradients
from moe_graphs.engine.whole_step.optimizers import FirstStepState
from moe_graphs.engine.whole_step.step_hooks import StepHooks


@dataclass(frozen=True)
class RecordedStep:
    """``written``: parameters and buffers that a replay changes; ``context``, ``grad_enabled``:
    the state of torch that it was captured under; ``entry``: what it finds in FP8; ``sharding``:
    the settings of FSDP2; ``hooks``: known from the end of the capture on."""

    graph: Graph
    pool: Any
    batch: StaticBatch
    outputs: list[Any]
    output_structure: pytree.TreeSpec
    gradients: StaticGradients | None
    guards: Guards
    first_step_state: FirstStepState
    context: Context
    grad_enabled: bool
    written: list[Tensor]
    entry: fp8.Entry | None
    sharding: Sharding
    hooks: StepHooks | None = None

    def mismatch(self, batch: Any, leaves: Sequence[Any], structure: Any) -> Mismatch | None:
        """Why this call cannot be replayed, or None. Does not synchronise."""
        self.first_step_state.put_in()
        self.sharding.rest()
        if torch.is_grad_enabled() != self.grad_enabled:
            message = "grad mode is not that of the capture: keep no_grad and its kin in the step"
            return Mismatch("grad_mode", message)
        mode = context.reason_of_modes()
        if mode is not None:
            return Mismatch(mode, str(EAGER_CALLS[mode]))
        return (
            self.batch.mismatch(batch, leaves, structure)
            or self.context.mismatch()
            or self._mismatch_in_fp8()
            or self.sharding.mismatch()
            or self.guards.mismatch()
            or (self.hooks.mismatch() if self.hooks is not None else None)
            or (self.gradients.mismatch() if self.gradients is not None else None)
        )

    def _mismatch_in_fp8(self) -> Mismatch | None:
        if fp8.Entry.of_now() == self.entry:
            return None
        message = (
            "other modules of Transformer Engine have run in FP8 than before the capture: enter "
            "its autocast in every step alike, and capture when all of them have run"
        )
        return Mismatch("fp8", message)

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Returns copies of the outputs, the caller's own."""
        self.batch.load(leaves)
        self.run()
        if self.entry is not None and self.entry.is_first:
            fp8.claim_first()
        # A replay changes them behind autograd's back: an older graph must not use them unnoticed.
        torch.autograd.graph.increment_version(self.written)
        return pytree.tree_unflatten(owned_leaves(self.outputs), self.output_structure)

    def run(self) -> None:
        """On what the batch's memory has, with the gradients that are set."""
        if self.gradients is None:
            self.graph.replay()
        else:
            self.gradients.replay(self.graph)

    def release(self) -> None:
        self.graph.release()

    def static_bytes(self) -> int:
        kept = [*self.batch.tensors(), *tensor_leaves(self.outputs)]
        if self.gradients is not None:
            found, left = self.gradients.found, self.gradients.left
            kept += {id(t): t for t in (*found, *left) if t is not None}.values()
        return sum(tensor.nbytes for tensor in kept)
