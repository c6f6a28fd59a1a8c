"""Scopes that keep their inputs only: training is bitwise that under torch's checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_graphs
from moe_graphs import GraphConfig
from training_runs import DEVICES
from two_scopes import WIDTH, Model, data, scopes, update

STEPS = 6


class Checkpointed(Model):
    """The model as somebody writes it with torch's checkpoint."""

    reentrant = False

    def forward(self, x, scale=1.0):
        def around(block, x):
            return checkpoint(lambda given: block(given, scale), x, use_reentrant=self.reentrant)

        return around(self.second, around(self.first, x).sin())


def build(kind, device):
    torch.manual_seed(0)
    return kind().to(device)


def trained(model, graphs, device, microbatches=1, steps=STEPS):
    """All that training leaves: outputs, gradients, parameters, buffers and random numbers."""
    torch.manual_seed(1)
    left = []
    for _ in range(steps):
        model.zero_grad()
        with graphs.step():
            for _ in range(microbatches):
                x = data(device).requires_grad_()
                output = model(x)
                output.square().mean().backward()
                left += [output, x.grad]
        left += [parameter.grad.clone() for parameter in model.parameters()]
        update(model)
    left += [*model.parameters(), *model.buffers(), torch.rand(4, device=device)]
    return [tensor.detach().clone() for tensor in left]


def both(device, microbatches=1, **options):
    """The graphs and their report, after a training that was compared with eager."""
    eager = build(Checkpointed, device)
    off = moe_graphs.graph(eager, GraphConfig(impl="none"))
    expected = trained(eager, off, device, microbatches)
    model = build(Model, device)
    options = {"warmup_steps": 2, "on_mismatch": "error", "recompute": True, **options}
    graphs = moe_graphs.graph(model, scopes(**options))
    found = trained(model, graphs, device, microbatches)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return graphs, graphs.report()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_training_is_that_under_checkpoint(device, microbatches):
    _, report = both(device, microbatches)
    assert report.matched == 2 * microbatches * (STEPS - 2)
    assert report.eager_calls == {"warmup": 2 * 2 * microbatches}
