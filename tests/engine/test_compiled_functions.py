"""Functions of torch.compile inside of what is captured are refused before dynamo gives them up.

Under a mode that sees operations dynamo runs a function uncompiled, and some versions of torch do
so for good. The numbers of training would be others from the first warm-up step on.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import CaptureError, FullIteration, GraphConfig, make_graphed_callables

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo asks for it


def not_as_eager(graph_module, inputs):
    def run(*arguments):
        outputs = graph_module(*arguments)
        return [1.5 * o if isinstance(o, torch.Tensor) else o for o in outputs]

    return run


@torch.compile(backend=not_as_eager)
def compiled(x):
    return torch.tanh(x)


class CompiledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return compiled(gradient)


class Scope(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.linear(x))


def train(function, engine):
    """Losses and gradients of a training, and the error by which it was refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scope(function))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    refused = []

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    run, graphs = step, None
    if engine == "scopes":
        graphs = moe_graphs.graph(
            model, GraphConfig("1*", warmup_steps=2, on_capture_error="error")
        )
    elif engine == "whole steps":
        run = graphs = FullIteration(step, model=model, warmup_steps=2, on_capture_error="error")
    elif engine == "callables":
        with pytest.raises(CaptureError) as error:
            make_graphed_callables(model[1], (torch.ones(3, 4, requires_grad=True),))
        refused.append(str(error.value))
    seen = []
    for _ in range(5):
        x = torch.randn(3, 4, generator=generator)
        try:
            if engine == "scopes":
                with graphs.step():
                    loss = step(x)
            else:
                loss = run(x)
        except CaptureError as error:
            refused.append(str(error))
            loss = loss if engine == "scopes" else step(x)
        seen += [loss.clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen, refused


@pytest.mark.parametrize(
    "function", [compiled, CompiledBackward.apply], ids=["forward", "backward"]
)
@pytest.mark.parametrize("engine", ["scopes", "whole steps", "callables"])
def test_refused_and_training_goes_on_compiled(engine, function):
    torch.compiler.reset()
    expected, _ = train(function, None)
    found, refused = train(function, engine)
    assert all(map(torch.equal, found, expected))
    assert len(refused) == 1
    assert "torch.compile" in refused[0]
