"""A model with a training step that tests bend, run eagerly and as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moe_graphs.engine.whole_step.full_iteration import FullIteration
from training_runs import Trace

WIDTH = 8


class Model(nn.Module):
    """Weights, dropout, a counting buffer, and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
        return self.second(self.dropout(torch.tanh(self.first(x))))


class Toy:
    """A model with a training step that tests can bend: ``inside`` runs within it."""

    def __init__(
        self,
        device: str,
        *,
        zero: str = "end",
        update: bool = True,
        rate: float | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.zero, self.update = device, zero, update
        self.model = Model().to(device)
        options: dict[str, Any] = {"fused": True}
        if device == "cuda":
            options["capturable"] = True
        lr = torch.tensor(0.01, device=device) if rate is None else rate
        make = optimizer or (lambda p: torch.optim.AdamW(p, lr=lr, **options))
        self.optimizer = make(self.model.parameters())
        self.inside: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss

    def step(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        if self.zero == "start":
            self.optimizer.zero_grad()
        if self.zero == "start in place":
            self.optimizer.zero_grad(set_to_none=False)
        losses = []
        for x in batch["x"]:
            loss = self.inside(self.model(x).square().mean() * batch.get("scale", 1.0))
            loss.backward()
            losses.append(loss)
        if self.update:
            self.optimizer.step()
        if self.zero == "end":
            self.optimizer.zero_grad()
        return {"losses": losses, "calls": self.model.calls}

    def owning_step(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The buffer that is returned goes on counting: a copy, as from a graph."""
        return pytree.tree_map(lambda t: t.detach().clone(), self.step(batch))

    def graph(self, **options: Any) -> FullIteration:
        options = {"on_mismatch": "error", **options}
        return FullIteration(self.step, model=self.model, optimizer=self.optimizer, **options)

    def batch(self, rows: int = 4, count: int = 2, **more: Any) -> dict[str, Any]:
        return {"x": [torch.randn(rows, WIDTH, device=self.device) for _ in range(count)], **more}

    def trace(self) -> Trace:
        trace = Trace()
        trace.note_state(self.model, "now")
        for name, parameter in self.model.named_parameters():
            trace.note(f"grad {name}", parameter.grad)
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                trace.note(f"{key} {name}", torch.as_tensor(value))
        trace.note("rng", torch.get_rng_state())
        if self.device == "cuda":
            trace.note("cuda rng", torch.cuda.get_rng_state())
        return trace


Scenario = Callable[[Toy, Callable[[dict[str, Any]], Any]], Any]


def both(device: str, scenario: Scenario, options: dict[str, Any] | None = None, **toy: Any):
    """Runs ``scenario(toy, step)`` eagerly and graphed from a captured state; they must agree."""
    traces, report = [], None
    for graphed in (False, True):
        made = Toy(device, **toy)
        step = made.graph(**(options or {})) if graphed else made.owning_step
        for _ in range(5):
            step(made.batch())
            if not made.update:
                made.optimizer.step()
                made.optimizer.zero_grad()
        returned = scenario(made, step)
        trace = made.trace()
        for number, leaf in enumerate(pytree.tree_leaves(returned)):
            trace.note(f"returned {number}", leaf)
        traces.append(trace)
        if graphed:
            report = step.report()
            assert report.matched >= 2
    traces[1].assert_equal(traces[0])
    return report


def warm(toy: Toy, **options: Any) -> FullIteration:
    step = toy.graph(**options)
    for _ in range(5):
        step(toy.batch())
    assert step.report().state == "captured"
    return step


def add_hook(toy):
    toy.model.first.register_forward_hook(lambda *_: None)
