"""Errors say what to do: the names, patterns and calls that they mention exist."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphWarning
from moe_graphs.engine.partial.scope import find_scopes
from moe_graphs.training.capturable import tensor_hyperparameters
from two_scopes import build, data, scopes, train_step, warm


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.self_attn = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.mlp(self.self_attn(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def step(model, graphs) -> None:
    with graphs.step():
        model(torch.randn(4, 8)).sum().backward()
    model.zero_grad()


def test_a_read_on_the_host_names_the_line_and_the_ways_out():
    model = build("cpu")
    model.first.inside = lambda x: x * x.sum().item()
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1))
    ways = "keep them in tensors on the device .* choose scopes that leave this module out"
    with pytest.warns(GraphWarning, match=rf"reads values on the host.*{ways}, at .*test_remedies"):
        train_step(model, graphs, data("cpu"))


def test_a_loop_over_experts_names_the_conversion():
    model = build("cpu")
    model.first.inside = lambda x: x.index_add(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0])
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1))
    with pytest.warns(GraphWarning, match="MoELayer.from_experts converts a loop over experts"):
        train_step(model, graphs, data("cpu"))


class Tracer:
    def __call__(self, *_) -> None:
        pass


def test_hooks_name_their_owner_and_a_pattern_that_avoids_them():
    model = Decoder()
    for layer in model.layers:
        layer.mlp.register_forward_hook(Tracer())
    graphs = moe_graphs.graph(model, GraphConfig("layers.*", warmup_steps=1))
    said_of = r"module 'mlp' has hooks \(test_remedies.Tracer\).*: '\*.self_attn' is one"
    with pytest.warns(GraphWarning, match=said_of) as said:
        step(model, graphs)
    graphs.release()
    (pattern,) = re.findall(r"'(\*[^']+)' is one", str(said[0].message))
    graphs = moe_graphs.graph(model, GraphConfig(pattern, warmup_steps=1))
    for _ in range(3):
        step(model, graphs)
    assert graphs.report().matched == 4


def test_hooks_everywhere_name_no_pattern():
    model = Decoder()
    for module in [*model.layers[0].children()]:
        module.register_forward_hook(Tracer())
    graphs = moe_graphs.graph(model, GraphConfig("layers.0", warmup_steps=1))
    with pytest.warns(GraphWarning, match="choose scopes that leave this module out"):
        step(model, graphs)


@pytest.mark.parametrize("scope", ["attn", "mlp", "moe_router", "full"])
def test_a_scope_of_staged_layers_names_patterns_that_this_model_has(scope):
    model = Decoder()
    with pytest.raises(ValueError, match="this model has none") as error:
        moe_graphs.graph(model, GraphConfig(scope))
    assert "take 'full'" not in str(error.value)
    patterns = re.findall(r"'([^' ]*[*][^' ]*)'", str(error.value))
    assert patterns == ["layers.*", "*.mlp", "*.self_attn"]
    assert all(len(find_scopes(model, GraphConfig(pattern))) == 2 for pattern in patterns)


def test_a_model_without_layers_gets_patterns_as_well():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "act": nn.ReLU()})
    with pytest.raises(ValueError, match=r"such as '\*encoder'$"):
        moe_graphs.graph(model, GraphConfig("full"))


def test_memory_that_has_moved_says_by_which_call_to_capture_again():
    model = build("cpu")
    graphs = warm(model, "cpu")
    model.first.linear.weight = nn.Parameter(model.first.linear.weight.detach().clone())
    with pytest.warns(GraphWarning, match=r"capture again \(graphs.recapture\(\), step.capture"):
        train_step(model, graphs, data("cpu"))
    graphs.recapture()
    for _ in range(4):
        train_step(model, graphs, data("cpu"))
    assert graphs.report().state == "captured"


@pytest.mark.parametrize("of", ["tensor_hyperparameters", "FullIteration"])
def test_capturable_without_fused_is_our_own_error(of):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    with pytest.raises(ValueError, match="AdamW has capturable=True.*: pass fused=True, too"):
        if of == "FullIteration":
            FullIteration(print, model=model, optimizer=optimizer)
        else:
            tensor_hyperparameters(optimizer)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True, fused=True)
    tensor_hyperparameters(optimizer)
    FullIteration(print, model=model, optimizer=optimizer)


def test_no_graphs_with_scopes_says_how_to_choose():
    with pytest.raises(ValueError, match="leave scopes out .* or leave impl out to capture them"):
        GraphConfig("attn", impl="none")
    GraphConfig(impl="none")
    GraphConfig("attn")
