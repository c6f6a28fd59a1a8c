"""`unchanged_weights`: codes are made once, the training stays the same, graphs hold none of it."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

import moe_graphs
from full_iterations import Run
from full_iterations import train as train_whole_steps
from moe_graphs import GraphConfig
from moe_graphs.kernels import fp8
from moe_graphs.layers import MoEConfig, MoELayer, unchanged_weights
from training_runs import DEVICES, eager_trace, loss_of, tiny_model, train

MOE = MoEConfig(num_experts=2, top_k=1, ffn_hidden_size=128, precision="fp8")


@contextlib.contextmanager
def counted():
    """Calls that quantize a weight for a layer, in both orientations."""
    with mock.patch.object(fp8, "_both", side_effect=fp8._both) as made:
        yield made


class InABlock(Run):
    def train_step(self, batch):
        with unchanged_weights():
            for tokens in batch["tokens"]:
                (loss_of(self.model, tokens)[0] * batch["scale"]).backward()
        self.update()
        return None


class Plain(InABlock):
    def train_step(self, batch):
        with mock.patch(f"{__name__}.unchanged_weights", contextlib.nullcontext):
            return super().train_step(batch)


@pytest.mark.parametrize("device", DEVICES)
def test_whole_steps_make_codes_once(device):
    options = dict(layers="moe", precision="fp8", microbatches=2)
    made, traces, launches = [], [], []
    for kind, graphed in ((Plain, False), (InABlock, False), (Plain, True), (InABlock, True)):
        run = kind(device, graphed=graphed, **options)
        with counted() as calls:
            traces.append(train_whole_steps(run, steps=5)[0])
        if graphed:
            assert run.step.report().matched == 2
            launches.append(run.step.report().kernels)
        else:
            made.append(calls.call_count)
    weights = 2 * 2  # of two layers
    assert made == [5 * 2 * weights, 5 * weights]
    assert launches[1] < launches[0]
    for trace in traces[1:]:
        trace.assert_equal(traces[0])


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_scopes_make_codes_in_each_replay(device):
    options = dict(layers="moe", precision="fp8")
    model = tiny_model(device, **options)
    graphs = moe_graphs.graph(model, GraphConfig("attn,moe", on_mismatch="error"))
    step = graphs.step

    @contextlib.contextmanager
    def in_a_block():
        with unchanged_weights(), step():
            yield

    with mock.patch.object(graphs, "step", in_a_block):
        found = train(model, graphs, device)
    assert graphs.report().matched > 0
    found.assert_equal(eager_trace(device, **options))


def test_a_block_around_a_whole_step_changes_nothing():
    options = dict(layers="moe", precision="fp8")
    traces = []
    for around in (contextlib.nullcontext, unchanged_weights):
        run = Run("cpu", graphed=True, **options)
        step = run.step

        def stepped(batch, step=step, around=around):
            with around():
                return step(batch)

        run.step = stepped
        traces.append(train_whole_steps(run, steps=6)[0])
        assert step.report().matched == 3
    traces[1].assert_equal(traces[0])


def test_layers_of_one_size_have_codes_of_their_own():
    outputs = []
    for around in (contextlib.nullcontext, unchanged_weights):
        torch.manual_seed(0)
        tokens = torch.randn(8, 128)
        with around():
            for _ in range(3):  # a layer is gone when the next one is made
                layer = MoELayer(MOE, 128)
                layer.init_weights()
                outputs.append(layer(tokens).hidden.detach())
    assert all(map(torch.equal, outputs[:3], outputs[3:]))


def test_an_update_within_the_block_is_an_error():
    layer, tokens = MoELayer(MOE, 128), torch.randn(8, 128)
    layer.init_weights()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with unchanged_weights():
        layer(tokens).hidden.sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="end the block before the update"):
            layer(tokens)
    layer(tokens)


def test_an_evaluation_within_the_block_keeps_nothing():
    layer = MoELayer(MOE, 128)
    layer.init_weights()
    with unchanged_weights(), torch.no_grad(), counted() as made:
        layer(torch.randn(8, 128))
    assert made.call_count == 0
