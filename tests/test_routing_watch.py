"""The load of experts: counts per layer, eagerly and in graphs, and what a log gets of them."""

from __future__ import annotations

import contextlib

import pytest
import torch

import moe_graphs
from moe_graphs import GraphConfig, routing
from moe_graphs.routing import LayerLoad, LoadReport
from training_runs import DEVICES, loss_of, microbatches, tiny_model

LAYERS = 2  # of the tiny model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("scopes", "recompute"),
    [
        (None, False),
        pytest.param("full", True, marks=pytest.mark.long),
        pytest.param("full", False, marks=pytest.mark.long),
        pytest.param("moe_router,moe_preprocess", False, marks=pytest.mark.long),
    ],
)
def test_counts_are_those_of_the_recorded_choices(device, scopes, recompute):
    """Forwards count once, also those that run again in a backward, and training is the same."""

    def run(watched: bool):
        model = tiny_model(device, "moe")
        watch = routing.watch(model) if watched else None
        config = GraphConfig(scopes, warmup_steps=2, recompute=recompute, on_mismatch="error")
        graphs = None if scopes is None else moe_graphs.graph(model, config)
        pairs, losses = torch.zeros(LAYERS, 4, dtype=torch.int64), []
        for batches in microbatches(device, 5):
            with contextlib.nullcontext() if graphs is None else graphs.step():
                for tokens in batches:
                    with routing.record(model) as choices:
                        loss, output = loss_of(model, tokens)
                    loss.backward()
                    losses += [loss.detach(), output.aux_loss.detach()]
                    for layer, each in enumerate(choices):
                        pairs[layer] += each.flatten().bincount(minlength=4).cpu()
        with torch.no_grad():
            model.eval()(batches[0][:, :-1])  # evaluation does not count
        return watch, pairs, losses, [p.grad for p in model.parameters() if p.grad is not None]

    watch, pairs, losses, gradients = run(True)
    report = watch.report()
    assert [layer.pairs for layer in report.layers] == [tuple(each.tolist()) for each in pairs]
    total = sum(layer.aux_loss for layer in report.layers)
    assert total == pytest.approx(losses[-1].item(), rel=1e-5)
    _, _, plain, plain_gradients = run(False)
    assert all(map(torch.equal, losses + gradients, plain + plain_gradients))
    watch.reset()
    assert {sum(layer.pairs) for layer in watch.report().layers} == {0}


REPORT = LoadReport(
    (
        LayerLoad("layers.0.moe", (6, 2, 0, 0), 0.25),
        LayerLoad("layers.10.moe", (2, 2, 2, 2), 0.5),
        LayerLoad("other", (0, 0, 0, 0), None),
    )
)


def test_a_report_has_a_row_for_each_layer():
    assert str(REPORT).splitlines() == [
        "layer          max/mean  unused    aux loss  most chosen",
        "layers.0.moe       3.00       2     0.25000  0 1 2 3",
        "layers.10.moe      1.00       0     0.50000  0 1 2 3",
        "other              0.00       4           -  0 1 2 3",
    ]


def test_loads_of_ranks_are_added_up():
    """Ranks of a pipeline have layers of their own."""
    other = LoadReport((LayerLoad("layers.0.moe", (0, 2, 2, 0), 0.75), REPORT.layers[2]))
    found = LoadReport.of_ranks([LoadReport(REPORT.layers[:2]), other])
    assert found.layers == (
        LayerLoad("layers.0.moe", (6, 4, 2, 0), 0.5),
        REPORT.layers[1],
        REPORT.layers[2],
    )


def test_numbers_for_a_log_and_a_writer():
    assert REPORT.scalars() == {
        "experts/max_over_mean": 3.0,
        "experts/unused": 6.0,
        "experts/aux_loss": 0.75,
    }
    assert "experts/aux_loss" not in LoadReport(REPORT.layers[2:]).scalars()

    class Writer(list):
        def add_scalar(self, name, value, step):
            self.append((name, value, step))

    REPORT.write(writer := Writer(), 7)
    assert ("experts/max_over_mean/layers.0.moe", 3.0, 7) in writer
    assert ("experts/unused", 6.0, 7) in writer
    assert len(writer) == 3 + 2 * 3


def test_a_model_is_watched_once_and_is_as_before_after_the_end():
    model = tiny_model("cpu", "moe")
    watch = routing.watch(model)
    with pytest.raises(ValueError, match="is watched already"):
        routing.watch(model)
    watch.close()
    assert model.layers[0].moe.expert_load is None
    routing.watch(model).close()
    with pytest.raises(ValueError, match="has no layers with experts"):
        routing.watch(model.head)
