"""Transformer Engine's own tests of its graphs, on our engine.

They have interleaved orders, cached weights and keyword arguments. They run with the stand-in on
the CPU, and with the real Transformer Engine on a GPU.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import fake_transformer_engine
from grids import by_turns
from moe_graphs import make_graphed_callables

WIDTH, ROWS, STEPS = 32, 32, 4
# The order has two chunks and three microbatches, as their test of interleaved pipelines does.
ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]
MICROBATCHES = 3


class OnCpu:
    """The tests with the stand-in."""

    device, dtype = "cpu", torch.float32

    def __init__(self, monkeypatch) -> None:
        self.te = fake_transformer_engine.install(monkeypatch)
        self.te.FP8GlobalStateManager.quantization_state = self.te.GlobalState()

    def linear(self):
        return self.te.Linear(WIDTH, WIDTH)

    def autocast(self, kind):
        return self.te.autocast(recipe=self.te.Recipe(kind))


class OnGpu:
    device, dtype = "cuda", torch.bfloat16

    def __init__(self, monkeypatch) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()

    def linear(self):
        import transformer_engine.pytorch as te

        return te.Linear(WIDTH, WIDTH, params_dtype=self.dtype, bias=False)

    def autocast(self, kind):
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        made = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}[kind]()
        return te.autocast(enabled=True, recipe=made)


_waits = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="waits for transformer-engine (../shared/peers brings it to the GPU machine)",
)
WHERE = [OnCpu, pytest.param(OnGpu, marks=[pytest.mark.gpu, _waits])]
pytestmark = [
    pytest.mark.parametrize("where", WHERE),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformer_engine"),
]


class Chunk(nn.Module):
    """A chunk of layers. ``shift`` is a keyword argument, as a mask is."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.inner = linear

    def forward(self, x, *, shift, is_first_microbatch=None):
        return torch.tanh(self.inner(x, is_first_microbatch=is_first_microbatch)) + shift


def train(here, kind: str, cached: bool, graphed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    chunks = [Chunk(here.linear()).to(here.device) for _ in range(2)]
    for chunk in chunks:
        nn.init.normal_(chunk.inner.weight, std=0.2)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    flag = {"is_first_microbatch": True} if cached else {}
    functions = [chunk for chunk in chunks for _ in range(MICROBATCHES)]
    if graphed:
        sample = torch.zeros(ROWS, WIDTH, device=here.device, dtype=here.dtype, requires_grad=True)
        shift = torch.zeros(WIDTH, device=here.device, dtype=here.dtype)
        with here.autocast(kind):
            functions = make_graphed_callables(
                tuple(chunks),
                ((sample,),) * len(functions),
                sample_kwargs=({"shift": shift, **flag},) * len(functions),
                _order=ORDER,
                allow_unused_input=True,
            )
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        shape = (MICROBATCHES, ROWS, WIDTH)
        batch = (torch.randn(shape, generator=generator) * 2**step).to(here.device, here.dtype)
        shifts = torch.randn(MICROBATCHES, WIDTH, generator=generator).to(batch)
        with here.autocast(kind):
            found += run(functions, batch, shifts, cached)
        found += [p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
        states = [
            chunk.inner.fp8_meta[f"scaling_{way}"] for chunk in chunks for way in ("fwd", "bwd")
        ]
        found += [
            t.clone() for s in states for t in vars(s).values() if isinstance(t, torch.Tensor)
        ]
    if graphed:
        assert functions[0].graphs.report().replayed, functions[0].graphs.report()
    return found + [p.detach().clone() for p in parameters]


def run(functions, batch, shifts, cached) -> list[torch.Tensor]:
    """Runs in the order of the pipeline; gradients go from chunk to chunk by hand."""
    forwards, backwards = [0, 0], [0, 0]
    inputs, outputs, gradients, losses = {}, {}, {}, []
    for action in ORDER:
        chunk = abs(action) - 1
        if action > 0:
            number = forwards[chunk]
            forwards[chunk] += 1
            given = batch[number] if chunk == 0 else outputs[0, number].detach()
            x = inputs[chunk, number] = given.clone().requires_grad_()
            flag = {"is_first_microbatch": number == 0} if cached else {}
            function = functions[chunk * MICROBATCHES + number]
            outputs[chunk, number] = function(x, shift=shifts[number], **flag)
            continue
        number = backwards[chunk]
        backwards[chunk] += 1
        if chunk == 1:
            losses.append(outputs[1, number].float().square().mean())
            losses[-1].backward()
            gradients[number] = inputs[1, number].grad
        else:
            outputs[0, number].backward(gradients[number])
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize(("cached", "kind"), by_turns([False, True], ["delayed", "current"]))
def test_interleaved_pipelines_are_bitwise_eager(where, kind, cached, monkeypatch):
    expected = train(where(monkeypatch), kind, cached, graphed=False)
    found = train(where(monkeypatch), kind, cached, graphed=True)
    assert len(found) == len(expected)
    differing = [i for i, pair in enumerate(zip(found, expected, strict=True))
                 if not torch.equal(*pair)]  # fmt: skip
    assert not differing
