"""Gradients of the inputs first, those of the weights later: bitwise those of one backward."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import GraphConfig, GraphError, GraphWarning
from moe_graphs.engine.autograd import SplitBackward
from training_runs import DEVICES, loss_of, microbatches, tiny_model

WIDTH = 8


class Diamond(nn.Module):
    """Weights beside the way, before it, shared by two nodes of it, and not on it at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.first(x))
        h = self.shared(torch.sin(self.shared(h)))
        return self.norm(h + x) * torch.sigmoid(self.gate), self.bias * 2


def test_the_two_parts_are_bitwise_one_backward():
    torch.manual_seed(0)
    module = Diamond()
    x = torch.randn(4, WIDTH, requires_grad=True)
    parameters = list(module.parameters())
    outputs = module(x)
    gradients = [torch.randn_like(o) for o in outputs]
    expected = torch.autograd.grad(outputs, [x, *parameters], gradients, retain_graph=True)

    split = SplitBackward(outputs, [x], parameters)
    found = split.input_gradients(gradients) + split.parameter_gradients()
    assert all(map(torch.equal, found, expected))


def test_the_first_part_computes_no_gradient_of_a_weight_and_the_second_none_of_an_input():
    calls = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            calls.append("product")
            x, w = ctx.saved_tensors
            return g * w, g * x

    x, w, v = (torch.randn(3, requires_grad=True) for _ in range(3))
    middle = Product.apply(x, w)
    output = Product.apply(middle.sin(), v.exp())
    split = SplitBackward([output], [x], [w, v])
    node = middle.sin().grad_fn
    assert node is not None
    split.input_gradients([torch.ones(3)])
    assert len(calls) == 2
    split.parameter_gradients()
    assert len(calls) == 4  # each node once more, and no walk from one to the other


def test_experts_compute_each_gradient_in_its_own_part(monkeypatch):
    calls = []
    # The package exports a function of the module's name.
    grouped_gemm = importlib.import_module("moe_graphs.kernels.gemm")
    for name in ("grouped_gemm_dgrad", "grouped_gemm_wgrad"):
        original = getattr(grouped_gemm, name)

        def noted(*arguments, name=name, original=original):
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(grouped_gemm, name, noted)
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    output = grouped_gemm.grouped_gemm(x, w, offsets)
    expected = torch.autograd.grad(output, [x, w], torch.ones_like(output), retain_graph=True)
    calls.clear()
    split = SplitBackward([output], [x], [w])
    (dx,) = split.input_gradients([torch.ones_like(output)])
    assert calls == ["grouped_gemm_dgrad"]
    (dw,) = split.parameter_gradients()
    assert calls == ["grouped_gemm_dgrad", "grouped_gemm_wgrad"]
    assert torch.equal(dx, expected[0])
    assert torch.equal(dw, expected[1])


def test_without_inputs_everything_is_second_part():
    w = torch.randn(3, requires_grad=True)
    output = (w * 2).sin()
    split = SplitBackward([output], [], [w])
    assert split.input_gradients([torch.ones(3)]) == []
    (found,) = split.parameter_gradients()
    assert torch.equal(found, torch.autograd.grad(output, w, torch.ones(3))[0])


# ---- in the engine

CONFIG = dict(scopes="attn,moe,mlp", split_backward=True, on_mismatch="error")


def run(device: str, config: GraphConfig, delay: int) -> tuple[list, moe_graphs.Graphs]:
    """Runs four steps of four microbatches; weight gradients come ``delay`` microbatches later."""
    model = tiny_model(device)
    graphs = moe_graphs.graph(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, data = [], iter(microbatches(device, 8))
    for _ in range(4):
        with graphs.step():
            waiting = 0
            for tokens in [*next(data), *next(data)]:
                loss = loss_of(model, tokens)[0]
                with graphs.delayed_weights():
                    loss.backward()
                waiting += 1
                if waiting > delay:
                    graphs.backward_weight()
                    waiting -= 1
                found.append(loss.detach().clone())
            for _ in range(waiting):
                graphs.backward_weight()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found, graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delay", [0, 4, pytest.param(1, marks=pytest.mark.long)])
def test_delayed_weights_are_bitwise_eager(device, delay):
    expected, _ = run(device, GraphConfig(impl="none", split_backward=True), delay)
    found, graphs = run(device, GraphConfig(**CONFIG, warmup_steps=2), delay)
    assert all(map(torch.equal, found, expected))
    report = graphs.report()
    assert report.matched == 2 * 4 * 2
    assert report.slots == (max(1, min(4, delay + 1)),)
    assert all(scope.weight_graphs == scope.forward_graphs for scope in report.scopes)


@pytest.mark.parametrize("device", DEVICES)
def test_with_split_graphs_an_ordinary_backward_is_whole(device):
    def train(config):
        model = tiny_model(device)
        graphs = moe_graphs.graph(model, config)
        for tokens, _ in microbatches(device, 3):
            with graphs.step():
                loss_of(model, tokens)[0].backward()
        return [p.grad for p in model.parameters()]

    expected = train(GraphConfig(impl="none"))
    assert all(map(torch.equal, train(GraphConfig(**CONFIG, warmup_steps=1)), expected))


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_gradient_too_many_or_too_few_is_an_error_and_the_next_step_is_right(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    config = GraphConfig(["[0]"], split_backward=True, on_mismatch="error", warmup_steps=1)
    graphs = moe_graphs.graph(model, config)
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)

    def step(weights: int) -> torch.Tensor:
        model.zero_grad()
        with graphs.step():
            loss = model(x).square().sum()
            with graphs.delayed_weights():
                loss.backward()
            for _ in range(weights):
                graphs.backward_weight()
        return model[0].weight.grad.clone()

    expected = step(1)
    assert torch.equal(step(1), expected)
    with pytest.raises(GraphError, match="without a backward that waits"):
        step(2)
    assert torch.equal(step(1), expected)
    with pytest.raises(GraphError, match="1 backward.s. whose weight gradients are missing"):
        step(0)
    assert torch.equal(step(1), expected)
    with pytest.raises(GraphError, match="inside 'with graphs.step"), graphs.delayed_weights():
        pass
    model[0].weight.register_hook(lambda g: g)
    with pytest.raises(GraphError, match="has gradient hooks"):
        step(1)


def test_delayed_weights_need_split_graphs():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    graphs = moe_graphs.graph(model, GraphConfig(["[0]"]))
    with pytest.raises(GraphError, match="split_backward=True"), graphs.delayed_weights():
        pass


def in_two_parts(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """Gradients of the input and, by a backward of their own, of the weights.

    Zero-bubble schedules ask for them in this way.
    """
    hidden = model[0](x)
    node, gradient = hidden.grad_fn, torch.ones_like(hidden)
    (dx,) = torch.autograd.grad(hidden, x, gradient, retain_graph=True)
    edge = torch.autograd.graph.GradientEdge(node, 0)
    later = gradient if scale == 1.0 else gradient * scale
    return [dx, *torch.autograd.grad(edge, list(model[0].parameters()), later)]


@pytest.mark.parametrize("device", DEVICES)
def test_autograd_asks_for_the_weights_later_as_zero_bubble_schedules_do(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    config = GraphConfig(["[0]"], split_backward=True, on_mismatch="error", warmup_steps=1)
    graphs = moe_graphs.graph(model, config)
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)

    def step(scale: float = 1.0) -> list[torch.Tensor]:
        with graphs.step():
            return in_two_parts(model, x, scale)

    expected = step()
    assert all(map(torch.equal, step(), expected))
    assert graphs.report().matched == 1
    with pytest.raises(GraphError, match="with other output gradients"):
        step(2.0)
    assert all(map(torch.equal, step(), expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:.*outside_step:moe_graphs.GraphWarning")
def test_weights_that_are_asked_for_later_of_whole_graphs_are_eager_and_told_once(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    graphs = moe_graphs.graph(model, GraphConfig(["[0]"], warmup_steps=1))
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    expected = in_two_parts(model, x)
    with pytest.warns(GraphWarning, match=r"'0' and 0 more .*split_backward=True"), graphs.step():
        in_two_parts(model, x)
    for _ in range(2):
        with graphs.step():
            assert all(map(torch.equal, in_two_parts(model, x), expected))
    report = graphs.report()
    assert report.state == "captured"
    assert report.eager_calls == {"warmup": 1, "outside_step": 1, "separate_weight_backward": 2}
    assert "split_backward=True" in report.scopes[0].refused


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:.*outside_step:moe_graphs.GraphWarning")
def test_weights_that_are_asked_for_later_only_after_the_capture_are_right_and_counted(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    graphs = moe_graphs.graph(model, GraphConfig(["[0]"], warmup_steps=1, audit_every=None))
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    expected = in_two_parts(model, x)
    for _ in range(3):
        with graphs.step():
            model(x).sum().backward()
    model.zero_grad()
    with graphs.step():
        assert all(map(torch.equal, in_two_parts(model, x), expected))
    assert graphs.report().eager_calls["backward: second_backward"] == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_of_everything_that_runs_twice_is_not_taken_for_one_of_the_weights(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    graphs = moe_graphs.graph(model, GraphConfig(["[0]"], warmup_steps=1))
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)

    def twice():
        with graphs.step():
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()

    with pytest.warns(GraphWarning, match="a forward had several backwards"):
        twice()
    with graphs.step():
        model(x).sum().backward()
    assert graphs.report().eager_calls == {"warmup": 1, "second_backward": 1}
