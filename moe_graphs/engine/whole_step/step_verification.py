"""Whether the graph of a whole step computes what the step does: compared once, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_graphs.engine import fp8
from moe_graphs.engine.ranks import Ranks
from moe_graphs.engine.signature import tensor_leaves
from moe_graphs.engine.snapshot import random_digest
from moe_graphs.engine.tracing import Operations, differing_op
from moe_graphs.engine.verify import ByFingerprint, Verdict
from moe_graphs.engine.whole_step.batch import StaticBatch
from moe_graphs.engine.whole_step.grad_fields import Gradients, gradients_of, set_gradients
from moe_graphs.engine.whole_step.recorded_step import RecordedStep
from moe_graphs.engine.whole_step.state_before import StateBefore
from moe_graphs.engine.whole_step.step_definition import StepDefinition
from moe_graphs.errors import CaptureError


class StepVerification:
    """Runs the step eagerly from the very state that the graph is replayed from.

    Args:
        found: the gradients that are set for the capture.
    """

    def __init__(
        self,
        definition: StepDefinition,
        before: StateBefore,
        ranks: Ranks,
        batch: StaticBatch,
        found: Gradients,
    ) -> None:
        self._definition, self._before, self._anywhere = definition, before, ranks.any
        self._parameters = list(definition.parameters().values())
        self._batch, self._found = batch, found
        self._entry = [None if g is None else g.detach().clone() for g in found]
        self._strategy = ByFingerprint(ranks.any)
        self._operations = Operations()
        self._watch: contextlib.AbstractContextManager[Any] = self._operations  # of the first run

    def expect(self) -> None:
        """Runs the step eagerly; afterwards everything is as before it."""
        self._strategy.expect(self._run_eagerly)
        self._put_back()

    def check(self, recorded: RecordedStep, operations: Operations) -> Verdict:
        """Replays the step, and compares. Leaves what the replay has left.

        Raises:
            CaptureError: if even what was captured is not what was run.
        """
        differing_ops = differing_op(self._operations, operations)
        if self._anywhere(differing_ops is not None):
            differing_ops = differing_ops or "on another rank"
            raise CaptureError(
                f"the capture does something else than a run: {differing_ops}: the step depends on "
                f"state that Python keeps (a counter, random, time), and a replay runs no Python"
            )
        replay, make_room = partial(self._replay, recorded), self._definition.backend.make_room
        return self._strategy.check(self._run_eagerly, replay, make_room)

    def _run_eagerly(self) -> dict[str, Any]:
        self._put_back()
        watch, self._watch = self._watch, contextlib.nullcontext()
        with watch:
            outputs = self._definition.run(self._batch.tree())
        return self._left(tensor_leaves(outputs))

    def _replay(self, recorded: RecordedStep) -> dict[str, Any]:
        self._put_back()
        recorded.run()
        return self._left(tensor_leaves(recorded.outputs))

    @torch.no_grad()
    def _put_back(self) -> None:
        self._before.put_back_values()
        for static, value in zip(self._found, self._entry, strict=True):
            if static is not None:
                static.copy_(value)
        set_gradients(self._parameters, self._found)

    def _left(self, outputs: list[Tensor]) -> dict[str, Any]:
        random = random_digest(self._definition.backend)
        return {**dict(self._named(outputs)), "the random numbers drawn": random}

    def _named(self, outputs: list[Tensor]) -> Iterator[tuple[str, Tensor | None]]:
        names = {id(t): name for name, t in self._definition.model.named_parameters()}
        names |= {id(t): f"buffer {name}" for name, t in self._definition.model.named_buffers()}
        for number, output in enumerate(outputs):
            yield f"output {number}", output
        for number, tensor in enumerate(self._before.tensors()):
            yield names.get(id(tensor), f"tensor {number} of the optimizer or of state="), tensor
        for parameter, gradient in zip(
            self._parameters, gradients_of(self._parameters), strict=True
        ):
            yield f"the gradient of {names[id(parameter)]}", gradient
        yield from fp8.named_tensors().items()
