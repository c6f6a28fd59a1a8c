"""Small training runs, eager or under an engine, for what an engine refuses by name."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphError, make_graphed_callables

ENGINES = ("scopes", "callables", "whole steps")
WIDTH, STEPS = 4, 6


class Scope(nn.Module):
    def __init__(self, inner: nn.Module | None = None, forward=None) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), inner
        self.run = forward or (lambda s, x: s.inner(s.linear(x)))

    def forward(self, x):
        found = self.run(self, x)
        return found[0] if isinstance(found, tuple) else found


class Model(nn.Module):
    def __init__(self, scope: nn.Module) -> None:
        super().__init__()
        self.pre, self.scope, self.post = nn.Linear(WIDTH, WIDTH), scope, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.post(self.scope(self.pre(x)))


def plain_backward(loss_of, x):
    loss = loss_of(x).square().mean()
    loss.backward()
    return loss.detach()


def train(make, engine, device="cpu", backward=plain_backward, before=None, **options):
    """Trains; returns the results of every step, the named errors, and the report.

    ``before`` is called with the model and the number of the step before each step.
    """
    torch.manual_seed(0)
    model, named, seen = Model(make()).to(device), [], []
    step, graphs = (lambda x: backward(model, x)), None
    sample = torch.ones(2, 3, WIDTH, device=device, requires_grad=True)
    try:
        if engine == "scopes":
            refusing = GraphConfig("scope*", warmup_steps=2, on_capture_error="error", **options)
            graphs = moe_graphs.graph(model, refusing)
        elif engine == "callables":
            make_graphed_callables(model.scope, (sample,), **options)
            graphs = model.scope.graphs
        elif engine == "whole steps":
            step = graphs = FullIteration(
                step, model=model, warmup_steps=2, on_capture_error="error"
            )
    except (GraphError, ValueError) as error:
        named.append(str(error))
    torch.manual_seed(1)
    for number in range(STEPS):
        if before is not None:
            before(model, number)
        x, out = torch.randn(2, 3, WIDTH, device=device), None
        try:
            with graphs.step() if engine == "scopes" and graphs else contextlib.nullcontext():
                out = step(x)
        except GraphError as error:
            named.append(str(error))
            out = step(x) if out is None else out
        seen += [out.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.zero_grad()
    report = graphs.report() if graphs else None
    if graphs:
        graphs.release()
    return seen, named, report


def check(make, engine, device="cpu", **options):
    """Checks that results are bitwise those of eager training; returns errors and report."""
    eager, _, _ = train(make, None, device, **options)
    found, named, report = train(make, engine, device, **options)
    assert len(eager) == len(found)
    assert all(map(torch.equal, eager, found))
    return named, report


def both(of):
    return pytest.mark.parametrize("engine", of)
