"""A model of two scopes, trained eagerly and graphed, for what users of scopes run into."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.engine.report import Report

WIDTH = 8


class Block(nn.Module):
    """Something of everything: weights, a buffer that counts, dropout, an optional constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.inside: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
        if self.inside is not None:
            x = self.inside(x)
        return torch.tanh(self.dropout(self.linear(x)) * scale)


class Model(nn.Module):
    """Two scopes with an eager function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.second(self.first(x, scale=scale).sin(), scale=scale)


def build(device: str) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def data(device: str, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device=device)


def scopes(**options) -> GraphConfig:
    return GraphConfig(["f*t", "s*d"], **options)  # patterns for first and second


def train_step(model: nn.Module, graphs: moe_graphs.Graphs, x: torch.Tensor, **kwargs):
    """One SGD step; the gradients stay."""
    model.zero_grad()
    with graphs.step():
        output = model(x, **kwargs)
        output.square().mean().backward()
    update(model)
    return output


@torch.no_grad()
def update(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad


def warm(model: nn.Module, device: str, **options) -> moe_graphs.Graphs:
    """Graphs with everything captured and one step replayed."""
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2, **options))
    for _ in range(3):
        train_step(model, graphs, data(device))
    assert graphs.report().state == "captured"
    return graphs


def both(device: str, scenario: Callable, **options) -> Report:
    """Runs ``scenario(model, graphs) -> tensors`` eagerly and graphed; both must agree bitwise."""
    found = []
    for config in (GraphConfig(impl="none"), None):
        model = build(device)
        if config is None:
            graphs = warm(model, device, **options)
        else:
            graphs = moe_graphs.graph(model, config)
            for _ in range(3):
                train_step(model, graphs, data(device))
        tensors = list(scenario(model, graphs))
        tensors += [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        tensors.append(torch.rand(1, device=device))
        found.append([t.detach().clone() for t in tensors])
    eager, graphed = found
    assert len(eager) == len(graphed)
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
    report = graphs.report()
    graphs.release()
    return report
