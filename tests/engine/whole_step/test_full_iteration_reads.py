"""Names that a step reads and that only a run shows: wrappers, methods found by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_graphs import GraphError
from moe_graphs.engine.whole_step.full_iteration import FullIteration


class Wrapper:
    """A wrapper that poses as the optimizer that it holds, as Lightning's does."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self._wrapped = wrapped
        self.__class__ = type("Wrapped", (Wrapper, type(wrapped)), {})

    def __getattr__(self, name: str):
        return getattr(self._wrapped, name)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(inputs)


class Step:
    """A callable that is no function: only a run shows what it calls."""

    def __init__(self, model: Counting) -> None:
        self.model = model

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad()
        loss = self.model.run(inputs).sum()
        loss.backward()
        return loss


def test_a_rate_read_through_a_wrapped_optimizer():
    model = nn.Linear(2, 2)
    held = [Wrapper(torch.optim.SGD(model.parameters(), lr=0.5))]

    def step(inputs):
        model.zero_grad()
        loss = model(inputs).sum() * held[0].param_groups[0]["lr"]
        loss.backward()
        return loss

    graphed = FullIteration(step, model=model, warmup_steps=2, on_mismatch="error")
    for _ in range(4):
        graphed(torch.ones(1, 2))
    held[0].param_groups[0]["lr"] = 0.25
    with pytest.raises(GraphError, match=r"\['lr'\]. was 0.5 at the capture and is 0.25 now"):
        graphed(torch.ones(1, 2))


def test_a_callable_object_that_counts_is_replayed():
    model = Counting()
    graphed = FullIteration(Step(model), model=model, warmup_steps=2, on_capture_error="error")
    for _ in range(4):
        graphed(torch.ones(1, 2))
    assert model.calls == 4
    assert graphed.report().matched == 2
