"""Codes in FP8 that AdamW writes: the training stays the same, and no codes are older than weights."""

from __future__ import annotations

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch

import full_iterations
import moe_graphs
from full_iterations import Run
from full_iterations import train as train_whole_steps
from moe_graphs import GraphConfig, weight_codes
from moe_graphs.kernels import fp8
from moe_graphs.layers import MoEConfig, MoELayer
from moe_graphs.optim import AdamW
from training_runs import DEVICES, train

WEIGHTS = 2 * 2  # of two layers


@contextlib.contextmanager
def counted():
    """Calls that quantize a weight for a layer, in both orientations."""
    with mock.patch.object(fp8, "_both", side_effect=fp8._both) as made:
        yield made


def optimizer_of(model, device, fp8_codes=True, **options):
    rate = torch.tensor(1e-2, device=device)
    return AdamW(model.parameters(), lr=rate, fp8_codes=fp8_codes, **options)


def run_of(device, graphed, fp8_codes, **options):
    make = functools.partial(optimizer_of, fp8_codes=fp8_codes)
    with mock.patch.object(full_iterations, "optimizer_of", make):
        return Run(device, graphed=graphed, layers="moe", precision="fp8", **options)


def train_in_parts(run, steps, changed):
    """Traces of single steps; before some of them weights change in place, as by a load."""
    traces = []
    for step in range(steps):
        if changed and step in (1, 4, 5):
            with torch.no_grad():
                for name, parameter in run.model.named_parameters():
                    if name.endswith(".w1"):
                        parameter.mul_(0.75)
        traces.append(train_whole_steps(run, steps=1, first=step, total=steps)[0])
    return traces


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_whole_steps_and_eager_ones_train_as_without_codes(device, changed):
    made, traces, launches = [], [], []
    for graphed in (False, True):
        for fp8_codes in (False, True):
            run = run_of(device, graphed, fp8_codes)
            with counted() as calls:
                traces.append(train_in_parts(run, 7, changed))
            made.append(calls.call_count)
            if graphed:
                assert run.step.report().matched == 4
                launches.append(run.step.report().kernels)
    for found in traces[1:]:
        for trace, expected in zip(found, traces[0], strict=True):
            trace.assert_equal(expected)
    assert launches[1] < launches[0]
    if device == "cuda":
        assert made[:2] == [7 * WEIGHTS, WEIGHTS + 3 * 2 * changed]


@pytest.mark.parametrize("device", DEVICES)
def test_evaluations_and_loaded_weights_between_steps(device):
    traces, losses = [], []
    for fp8_codes in (False, True):
        run = run_of(device, True, fp8_codes)
        found = [train_whole_steps(run, steps=5, total=8)[0]]
        (batch,) = full_iterations.batches(device, 1, seed=2)
        losses.append([run.validate(batch)])
        weights = copy.deepcopy(run.model.state_dict())
        found.append(train_whole_steps(run, steps=2, first=5, total=8)[0])
        run.model.load_state_dict(weights)
        losses[-1].append(run.validate(batch))
        found.append(train_whole_steps(run, steps=1, first=7, total=8)[0])
        assert run.step.report().matched == 5
        traces.append(found)
    for trace, expected in zip(traces[1], traces[0], strict=True):
        trace.assert_equal(expected)
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[0][1]


def layer_and_optimizer(device="cpu", **options):
    torch.manual_seed(0)
    config = MoEConfig(num_experts=2, top_k=1, ffn_hidden_size=128, precision="fp8", **options)
    layer = MoELayer(config, 128).to(device, torch.bfloat16)
    layer.init_weights()
    return layer, AdamW(layer.parameters(), lr=1e-2, fp8_codes=True)


def step_of(layer, optimizer, tokens):
    layer(tokens).hidden.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_value_put_back_without_its_codes_is_quantized_anew():
    """The versions of a weight say nothing after a snapshot has set them back."""
    layer, optimizer = layer_and_optimizer()
    tokens = torch.randn(8, 128, dtype=torch.bfloat16)
    step_of(layer, optimizer, tokens)
    (first, *_) = weight_codes.written_codes(layer.parameters())
    first.ready()
    snapshot = moe_graphs.engine.snapshot.Snapshot(values=list(layer.parameters()))
    with torch.no_grad():
        first.weight.mul_(2)
    first.ready()
    snapshot.put_back()
    with torch.no_grad():
        first.weight.mul_(0.5)  # as many versions as before
    found = [tensor.clone() for each in first.ready() for tensor in each]
    expected = [tensor for each in fp8._both(first.weight, False) for tensor in each]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def test_codes_that_no_forward_uses_are_dropped():
    layer, optimizer = layer_and_optimizer()
    tokens = torch.randn(8, 128, dtype=torch.bfloat16)
    step_of(layer, optimizer, tokens)
    assert len(weight_codes.written_codes(layer.parameters())) == 2
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        optimizer.step()
    assert not weight_codes.written_codes(layer.parameters())


def test_a_copy_of_the_optimizer_keeps_codes_of_its_own():
    layer, optimizer = layer_and_optimizer()
    twin = copy.deepcopy(optimizer)
    assert twin._codes is not None
    assert twin._codes is not optimizer._codes
    loaded = AdamW(layer.parameters(), lr=1e-2)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded._codes is None


def test_states_of_8_bits_are_refused():
    with pytest.raises(ValueError, match="takes longer than to quantize weights in forwards"):
        AdamW([torch.nn.Parameter(torch.ones(3))], fp8_codes=True, state_dtype=torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_scopes_make_their_own(device):
    traces = []
    for config in (GraphConfig(impl="none"), GraphConfig("attn,moe", on_mismatch="error")):
        model = full_iterations.tiny_model(device, "moe", precision="fp8")
        graphs = moe_graphs.graph(model, config)
        make = functools.partial(AdamW, fp8_codes=True)
        with mock.patch.object(torch.optim, "AdamW", make):
            traces.append(train(model, graphs, device))
        if traces[1:]:
            assert graphs.report().matched > 0
            assert not weight_codes.written_codes(model.parameters())
    traces[1].assert_equal(traces[0])
