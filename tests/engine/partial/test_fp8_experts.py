"""Training with ``MoEConfig(precision="fp8")`` in graphs is the same training without graphs."""

from __future__ import annotations

import pytest

import moe_graphs
from full_iterations import Run
from full_iterations import train as train_whole_steps
from moe_graphs import GraphConfig, portable_launches
from moe_graphs.dispatch import AllToAllDispatcher, PaddedDispatcher
from moe_graphs.kernels.routed_experts import fp8
from moe_graphs.layers.moe import moe_layers
from training_runs import DEVICES, eager_trace, tiny_model, train

SPLIT = dict(scopes="moe", split_backward=True)
CASES = {
    "local": (None, dict(scopes="attn,moe"), "none", "fp8"),
    "local, rows": (None, dict(scopes="attn,moe"), "none", "fp8_rows"),
    "local, powers": (None, dict(scopes="attn,moe"), "none", "fp8_powers"),
    "local, split backward": (None, SPLIT, "none", "fp8"),
    "padded, recomputed": (PaddedDispatcher(1.0), dict(scopes="full"), "experts", "fp8"),
    "all_to_all": (
        AllToAllDispatcher(), dict(scopes="attn,moe_router,moe_preprocess"), "none", "fp8",
    ),
}  # fmt: skip
ALIKE = ("local, powers", "local, split backward")  # others of these cases have what they have


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in ALIKE else ()) for case in CASES]
)
def test_graphs(device, case):
    dispatcher, config, recompute, precision = CASES[case]
    options = dict(layers="moe", dispatcher=dispatcher, precision=precision)
    model = tiny_model(device, **options, recompute=recompute)
    assert all(layer.experts.precision == precision for layer in moe_layers(model))
    graphs = moe_graphs.graph(model, GraphConfig(**config, warmup_steps=2, on_mismatch="error"))
    found = train(model, graphs, device)
    assert graphs.report().matched > 0
    found.assert_equal(eager_trace(device, **options))


def test_launches_are_counted_within_scopes(monkeypatch):
    """Kernels count launches that others would be faster than; a replay need not count them."""
    quantized = fp8.swiglu_quantized

    def counted(*given):
        portable_launches.count("of this test")
        return quantized(*given)

    monkeypatch.setattr(fp8, "swiglu_quantized", counted)
    model = tiny_model("cpu", layers="moe", precision="fp8")
    graphs = moe_graphs.graph(model, GraphConfig("moe", warmup_steps=2, on_mismatch="error"))
    train(model, graphs, "cpu")
    assert graphs.report().matched > 0
    assert graphs.report().portable_launches["of this test"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_whole_steps(device):
    options = dict(layers="moe", precision="fp8")
    expected, _ = train_whole_steps(Run(device, graphed=False, **options), steps=6)
    run = Run(device, graphed=True, **options)
    found, _ = train_whole_steps(run, steps=6)
    assert run.step.report().matched == 3
    found.assert_equal(expected)
