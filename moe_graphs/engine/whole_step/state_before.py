"""Everything that a step touches, as it was before a capture."""

from __future__ import annotations

from torch import Tensor

from moe_graphs.engine.reads import Reads
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.whole_step.accumulators import check_hooks, forget_accumulators
from moe_graphs.engine.whole_step.grad_fields import gradients_of, set_gradients
from moe_graphs.engine.whole_step.optimizers import FirstStepState
from moe_graphs.engine.whole_step.step_definition import StepDefinition


class StateBefore:
    """A context: whatever happens inside, everything that the step touches is as before then.

    Attributes:
        reads: what is known of the Python that the step runs.
        gradients: ``.grad`` of the parameters, as it was found.
        first_step_state: what the optimizers' first steps make.
    """

    def __init__(self, definition: StepDefinition, reads: Reads | None) -> None:
        self._definition = definition
        known = [] if reads is None else [reads]
        self.reads = Reads.together(Reads.before_running(definition.step), *known)
        self._ran = reads is not None
        self._all_reads = Reads.together(definition.reads_before(), *known)
        self._parameters = list(definition.parameters().values())

    def __enter__(self) -> StateBefore:
        definition = self._definition
        self.gradients = gradients_of(self._parameters)
        guards = definition.guards(self._all_reads)  # more than what is compared at calls
        if not self._ran:
            guards.check_followable()
        self.first_step_state = FirstStepState(definition.optimizers())
        tensors = [
            *definition.model.parameters(),
            *definition.model.buffers(),
            *guards.tensors,
        ]
        tensors += [gradient for gradient in self.gradients if gradient is not None]
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        self._state = Snapshot(definition.backend, values=unique, on_host=True)
        self._python = Snapshot(
            guards=[guards],
            python_random=True,
            hooks_of=[*unique, definition.model, *definition.optimizers()],
        )
        check_hooks(definition.model)
        self._forget_accumulators()  # those of the caller's stream
        return self

    def tensors(self) -> list[Tensor]:
        """All that the step may change, besides ``.grad``."""
        return [*self._state.tensors, *self.first_step_state.tensors()]

    def put_back_values(self) -> None:
        """For another run from the same state. Gradients stay as they are set."""
        self._state.put_back()
        self.first_step_state.zero()

    def __exit__(self, *exception: object) -> None:
        self._state.put_back()
        self.first_step_state.take_away()
        if exception[0] is not None:
            self._python.put_back()
        set_gradients(self._parameters, self.gradients)
        self._forget_accumulators()  # those that an exception's traceback holds

    def _forget_accumulators(self) -> None:
        gathered = self._definition.sharding.unsharded_parameters()
        forget_accumulators(self._definition.model, gathered)
