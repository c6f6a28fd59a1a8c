"""Whether the graph of a whole step computes what the step does: compared once, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_graphs.engine import fp8
from moe_graphs.engine.proof import (
    ELSEWHERE,
    Difference,
    Fingerprint,
    fingerprints,
    first_difference,
)
from moe_graphs.engine.ranks import Ranks
from moe_graphs.engine.signature import tensor_leaves
from moe_graphs.engine.snapshot import random_digest
from moe_graphs.engine.static_memory import owned_leaves
from moe_graphs.engine.tracing import Operations, differing_op
from moe_graphs.engine.whole_step.batch import StaticBatch
from moe_graphs.engine.whole_step.grad_fields import Gradients, gradients_of, set_gradients
from moe_graphs.engine.whole_step.recorded_step import RecordedStep
from moe_graphs.engine.whole_step.state_before import StateBefore
from moe_graphs.engine.whole_step.step_definition import StepDefinition
from moe_graphs.errors import CaptureError

_RUNS = 4  # more of both, where they differ
Looks = dict[str, Any]
"""By the names that messages use, what is kept of everything that a run leaves behind."""


class Proof:
    """Runs the step eagerly from the very state that the graph is replayed from.

    Of everything that either leaves behind only fingerprints are kept, so that it takes no second
    set of a model's memory; what differs is computed once more. Eager runs come before the
    capture, as far as that goes: beside a graph's pool they take the memory of a second step.

    Attributes:
        difference: the first one, after ``check``.
        not_reproducible: whether eager runs differ from one another, too.
    """

    def __init__(self, definition: StepDefinition, before: StateBefore, ranks: Ranks) -> None:
        self._definition, self._before, self._anywhere = definition, before, ranks.any
        self._parameters = list(definition.parameters().values())
        self.difference: Difference | None = None
        self.not_reproducible = False

    def expect(self, batch: StaticBatch, found: Gradients) -> None:
        """Runs the step eagerly, twice, or more often where the two differ; afterwards everything
        is as before it."""
        self._batch = batch
        self._entry = [None if g is None else g.detach().clone() for g in found]
        self._operations = Operations()
        self._expected = self._run_eagerly(found, operations=self._operations)
        self._again = [self._run_eagerly(found)]
        self.not_reproducible = self._anywhere(self._again[0] != self._expected)
        if self.not_reproducible:  # how much, is to be known before there is a pool
            self._again += [self._run_eagerly(found) for _ in range(_RUNS)]
        self._put_back(found)

    def check(self, recorded: RecordedStep, found: Gradients, operations: Operations) -> None:
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
        replayed = self._replay(recorded, found)
        wrong = [name for name in self._expected if not self._is_right(name, self._again, replayed)]
        if not self._anywhere(bool(wrong)):
            return
        wrong = self._still_wrong(wrong, replayed, recorded, found)
        if self._anywhere(bool(wrong)):  # what a rank runs, all have to: it holds collectives
            name = (wrong or list(self._expected))[0]
            difference = self._difference(name, recorded, found, is_here=bool(wrong))
            # Where runs vary somewhere, sums in another order are no more than that.
            is_worse = not (self.not_reproducible and difference.only_order_of_sums)
            if self._anywhere(bool(wrong) and is_worse):
                self.difference = difference

    def _still_wrong(
        self, wrong: list[str], replayed: Looks, recorded: RecordedStep, found: Gradients
    ) -> list[str]:
        """What more runs of both do not explain by what they differ from one another."""
        for _ in range(_RUNS):
            again, once_more = self._run_eagerly(found), self._replay(recorded, found)
            varies = again != self._expected or once_more != replayed
            self.not_reproducible |= self._anywhere(varies)
            wrong = [
                name
                for name in wrong
                if not self._is_right(name, [again], replayed)
                and (
                    once_more.get(name) == replayed.get(name)
                    or not _is_noise(replayed.get(name), once_more.get(name), self._expected[name])
                )
            ]
            if not self._anywhere(bool(wrong)):
                break
        self._definition.backend.make_room()
        return wrong

    def _is_right(self, name: str, others: list[Looks], replayed: Looks) -> bool:
        """The same bits or, where eager runs vary, about as near to them as another of these."""
        expected, found = self._expected[name], replayed.get(name)
        if found == expected:
            return True
        near = any(_is_noise(expected, other[name], found) for other in others)
        return self.not_reproducible and near

    def _difference(
        self, name: str, recorded: RecordedStep, found: Gradients, *, is_here: bool
    ) -> Difference:
        kept: list[dict[str, Tensor | None]] = []
        self._run_eagerly(found, kept, name)
        self._replay(recorded, found, kept, name)
        if not is_here:
            return ELSEWHERE
        eager, replayed = (each.get(name) for each in kept)
        return first_difference([name], [eager], [replayed]) or Difference(
            name, None, "one value", "another", 1
        )

    def _run_eagerly(
        self,
        found: Gradients,
        kept: list | None = None,
        name: str | None = None,
        operations: Operations | None = None,
    ) -> Looks:
        self._put_back(found)
        with operations or contextlib.nullcontext():
            outputs = self._definition.run(self._batch.tree())
        return self._look(tensor_leaves(outputs), kept, name)

    def _replay(
        self,
        recorded: RecordedStep,
        found: Gradients,
        kept: list | None = None,
        name: str | None = None,
    ) -> Looks:
        self._put_back(found)
        recorded.run()
        return self._look(tensor_leaves(recorded.outputs), kept, name)

    @torch.no_grad()
    def _put_back(self, found: Gradients) -> None:
        self._before.put_back_values()
        for static, value in zip(found, self._entry, strict=True):
            if static is not None:
                static.copy_(value)
        set_gradients(self._parameters, found)

    def _look(self, outputs: list[Tensor], kept: list | None, name: str | None) -> Looks:
        named = dict(self._named(outputs))
        if kept is not None:
            value = named.get(name)
            kept.append({name: value if value is None else owned_leaves([value.detach()])[0]})
        present = {key: tensor for key, tensor in named.items() if tensor is not None}
        found = dict(zip(present, fingerprints(list(present.values())), strict=True))
        random = random_digest(self._definition.backend)
        return {**dict.fromkeys(named), **found, "the random numbers drawn": random}

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


def _is_noise(first: Any, second: Any, other: Any) -> bool:
    prints = all(isinstance(each, Fingerprint) for each in (first, second, other))
    return prints and first.is_noise(second, other)
