"""Training with ``MoEConfig(recompute="experts")`` in graphs is eager training without it."""

from __future__ import annotations

import pytest

import moe_graphs
from full_iterations import Run
from full_iterations import train as train_whole_steps
from moe_graphs import GraphConfig
from moe_graphs.dispatch import AllGatherDispatcher, AllToAllDispatcher, PaddedDispatcher
from moe_graphs.layers.moe import moe_layers
from training_runs import DEVICES, eager_trace, tiny_model, train

CASES = {
    "local": (None, dict(scopes="attn,moe")),
    "local, split backward": (None, dict(scopes="moe", split_backward=True)),
    "padded": (PaddedDispatcher(1.0), dict(scopes="full")),
    "all_gather": (AllGatherDispatcher(), dict(scopes="moe_router,moe_preprocess")),
    "all_to_all": (AllToAllDispatcher(), dict(scopes="attn,moe_router,moe_preprocess")),
}
# The backward of experts takes one way with a dispatcher that pads, and one without.
SHORT = ("local, split backward", "padded")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SHORT else pytest.mark.long) for case in CASES]
)
def test_graphs(device, case):
    dispatcher, config = CASES[case]
    options = dict(layers="moe", dispatcher=dispatcher)
    model = tiny_model(device, **options, recompute="experts")
    assert all(layer.experts.recompute for layer in moe_layers(model))
    graphs = moe_graphs.graph(model, GraphConfig(**config, warmup_steps=2, on_mismatch="error"))
    found = train(model, graphs, device)
    assert graphs.report().matched > 0
    found.assert_equal(eager_trace(device, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_whole_steps(device):
    expected, _ = train_whole_steps(Run(device, graphed=False, layers="moe"), steps=6)
    run = Run(device, graphed=True, layers="moe")
    for layer in moe_layers(run.model):
        layer.experts.recompute = True
    found, _ = train_whole_steps(run, steps=6)
    assert run.step.report().matched == 3
    found.assert_equal(expected)
