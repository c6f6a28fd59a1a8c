"""Gradients, and the order of forwards and backwards: rows of the table in test_footguns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_graphs
from moe_graphs import CaptureError, GraphConfig, GraphError
from moe_graphs.engine.partial import recording
from training_runs import DEVICES
from two_scopes import WIDTH, both, build, data, scopes, train_step, update, warm

pytestmark = pytest.mark.parametrize("device", DEVICES)


# ---- gradients


def test_gradients_are_your_own(device):
    """Gradients of parameters and inputs outlive the next replays, accumulated or not."""
    model = build(device)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2, on_mismatch="error"))
    kept, values = [], []
    for _ in range(5):
        model.zero_grad()
        inputs = [data(device).requires_grad_() for _ in range(2)]
        own = []
        with graphs.step():
            for x in inputs:
                model(x).sum().backward()
                own += [x.grad, *(p.grad for p in model.parameters())]
                own = list(dict.fromkeys(own))  # the second backward added to the parameters'
        kept.append(own)
        values.append([gradient.clone() for gradient in own])
    assert graphs.report().matched == 2 * 2 * 3
    addresses = [{g.untyped_storage().data_ptr() for g in own} for own in kept]
    assert len(set().union(*addresses)) == 5 * (2 + 4)
    assert not set().union(*addresses[2:]) & static_addresses(graphs)
    for now, then in zip(kept, values, strict=True):
        assert all(map(torch.equal, now, then))


def static_addresses(graphs: moe_graphs.Graphs) -> set[int]:
    """Addresses that the graphs read and write: inputs, outputs, and the gradients of both."""
    tensors = []
    for site in graphs.captured.sites:
        tensors += site.static_tensors()
        tensors += [*site.backward.targets, *site.backward.gradients]
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None}


@pytest.mark.parametrize("large", [1, 1 << 22])
def test_accumulating_gradients_over_microbatches(device, monkeypatch, large):
    """One static buffer for both microbatches would not do (pytorch#181723).

    torch's own helper returns such a buffer.
    """
    monkeypatch.setattr(recording, "_LARGE", large)

    def scenario(model, graphs):
        model.zero_grad()
        with graphs.step():
            for _ in range(3):
                model(data(device)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert both(device, scenario, on_mismatch="error").matched == 2 * (1 + 3)


def test_accumulating_with_hooks_and_with_a_parameter_of_two_scopes(device):
    def scenario(model, graphs):
        model.zero_grad()
        seen: list[torch.Tensor] = []
        weight, bias = model.first.linear.weight, model.first.linear.bias
        handles = [
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
            bias.register_hook(lambda gradient: seen.append(gradient)),
        ]
        with graphs.step():
            for _ in range(3):
                model(data(device)).square().sum().backward()
        for handle in handles:
            handle.remove()
        assert len(seen) == 6
        return seen

    both(device, scenario, on_mismatch="error")

    def run(config):
        model = build(device)
        model.second.linear.weight = model.first.linear.weight
        graphs = moe_graphs.graph(model, config)
        found = []
        for _ in range(4):
            model.zero_grad()
            with graphs.step():
                for _ in range(3):
                    model(data(device)).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
            update(model)
        return found

    eager, graphed = run(GraphConfig(impl="none")), run(scopes(warmup_steps=1))
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))


def test_autograd_grad_and_tensor_hooks_get_gradients_that_last(device):
    def scenario(model, graphs):
        parameters = list(model.parameters())
        seen: list[torch.Tensor] = []
        with graphs.step():
            seen += torch.autograd.grad(model(data(device)).sum(), parameters)
            handle = parameters[0].register_hook(lambda gradient: seen.append(gradient))
            model(data(device)).sum().backward()
            seen += torch.autograd.grad(model(data(device)).sum(), parameters)
        handle.remove()
        return seen

    both(device, scenario, on_mismatch="error")


def test_a_gradient_of_an_input_lasts(device):
    def run(config):
        model = build(device)
        graphs = moe_graphs.graph(model, config)
        found = []
        for _ in range(4):
            x = data(device).requires_grad_()
            train_step(model, graphs, x)
            found.append(x.grad)
        return found

    eager, graphed = run(GraphConfig(impl="none")), run(scopes(warmup_steps=1))
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))


def test_none_stays_none(device):
    """A parameter that a scope does not use has no gradient, before and after the capture."""
    model = build(device)
    model.first.unused = nn.Parameter(torch.ones(3, device=device))
    graphs = warm(model, device)
    train_step(model, graphs, data(device))
    assert model.first.unused.grad is None
    assert model.first.linear.weight.grad is not None


# ---- order


def test_more_microbatches_in_flight_than_captured_run_eagerly(device):
    def scenario(model, graphs):
        x = [data(device) for _ in range(3)]
        with graphs.step():
            losses = [model(each).square().sum() for each in x]
            for loss in losses:
                loss.backward()
        return [p.grad for p in model.parameters()] + [train_step(model, graphs, data(device))]

    report = both(device, scenario)
    assert (report.slots, report.eager_calls["slots_full"]) == ((1,), 4)


def test_more_microbatches_in_flight_than_captured_are_an_error_that_says_both_numbers(device):
    model = build(device)
    graphs = warm(model, device, on_mismatch="error")
    with graphs.step():
        first = model(data(device)).sum()
        with pytest.raises(GraphError, match="would make 2, and 1 were captured"):
            model(data(device))
        first.backward()


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_microbatches_in_flight_in_the_warm_up_get_a_slot_each(device, order):
    def scenario(model, graphs):
        found = []
        for _ in range(3):
            model.zero_grad()
            with graphs.step():
                losses = [model(data(device)).square().sum() for _ in range(3)]
                for loss in losses if order == "first in, first out" else reversed(losses):
                    loss.backward()
            found += [p.grad.clone() for p in model.parameters()]
            update(model)
        return found

    model = build(device)
    expected = scenario(model, moe_graphs.graph(model, GraphConfig(impl="none")))
    for warmup_steps in (1, 2):
        model = build(device)
        graphs = moe_graphs.graph(model, scopes(warmup_steps=warmup_steps, on_mismatch="error"))
        found = scenario(model, graphs)
        assert all(map(torch.equal, found, expected))
        assert graphs.report().slots == (3,)
    assert graphs.report().captured == 6


def in_flight_two_by_two(model, graphs, device, count):
    """Gradients after a step of 1F1B of depth two."""
    model.zero_grad()
    with graphs.step():
        waiting = []
        for _ in range(count):
            waiting.append(model(data(device)).square().sum())
            if len(waiting) == 2:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_steps_of_other_numbers_of_microbatches(device):
    def scenario(model, graphs):
        return [g for n in (3, 3, 8, 1, 2) for g in in_flight_two_by_two(model, graphs, device, n)]

    model = build(device)
    expected = scenario(model, moe_graphs.graph(model, GraphConfig(impl="none")))
    model = build(device)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1, on_mismatch="error"))
    assert all(map(torch.equal, scenario(model, graphs), expected))
    report = graphs.report()
    assert (report.slots, report.captured, report.matched) == ((2,), 4, 2 * (3 + 8 + 1 + 2))


def test_a_microbatch_abandoned_while_another_is_in_flight(device):
    def scenario(model, graphs):
        found = in_flight_two_by_two(model, graphs, device, 3)
        with pytest.raises(ZeroDivisionError), graphs.step():
            first = model(data(device)).square().sum()
            model(data(device)).square().sum()
            first.backward()
            raise ZeroDivisionError
        return found + in_flight_two_by_two(model, graphs, device, 4)

    model = build(device)
    expected = scenario(model, moe_graphs.graph(model, GraphConfig(impl="none")))
    model = build(device)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1, on_mismatch="error"))
    assert all(map(torch.equal, scenario(model, graphs), expected))
    assert graphs.report().abandoned == 2


def test_a_backward_without_a_retained_graph_and_one_after_its_step_are_errors(device):
    model = build(device)
    graphs = warm(model, device)
    with graphs.step():
        loss = model(data(device)).sum()
        loss.backward()
        with pytest.raises(GraphError, match="'second': a second backward of the same forward"):
            loss.backward()
        late = model(data(device)).sum()
    with pytest.raises(GraphError, match="belongs to a step that has ended"):
        late.backward()
    train_step(model, graphs, data(device))
    assert graphs.report().abandoned == 2


def test_an_exception_between_forward_and_backward(device):
    def scenario(model, graphs):
        with pytest.raises(ZeroDivisionError), graphs.step():
            model(data(device)).sum()
            raise ZeroDivisionError
        return [train_step(model, graphs, data(device)) for _ in range(2)]

    report = both(device, scenario, on_mismatch="error")
    assert report.abandoned == 2


def test_a_microbatch_that_is_dropped_inside_a_step(device):
    def scenario(model, graphs):
        model.zero_grad()
        with graphs.step():
            model(data(device))
            model(data(device)).sum().backward()
        return []

    assert both(device, scenario, on_mismatch="error").abandoned == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_runs_eagerly(device, reentrant):
    def scenario(model, graphs):
        model.zero_grad()
        x = data(device).requires_grad_()
        with graphs.step():
            hidden = checkpoint(model.first, x, use_reentrant=reentrant)
            model.second(hidden).square().sum().backward()
        return [x.grad]

    report = both(device, scenario)
    expected = {"no_grad"} if reentrant else {"saved_tensors_hooks"}
    assert report.scopes[0].eager_calls.keys() == {"warmup", "recompute", *expected}


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_under_activation_checkpointing_inside_a_scope_is_refused(device, reentrant):
    """A recomputation in a replay would draw another dropout mask."""
    model = build(device)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device)
    model.second.block = block
    model.second.inside = lambda x: checkpoint(block, x, use_reentrant=reentrant)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1, on_capture_error="error"))
    with pytest.raises(CaptureError, match="'second': .*random numbers are drawn within torch.uti"):
        train_step(model, graphs, data(device))
    train_step(model, graphs, data(device))
    assert graphs.report().state == "capture_failed"


class ScalesGradients(nn.Module):
    """A layer whose backward alone reads the first tensor of a list."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.scales = [torch.full((4,), each, device=device) for each in (1.5, 0.5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return y.view_as(y)

            @staticmethod
            def backward(ctx, gradient):
                return gradient * layer.scales[0]

        return Scaled.apply(self.l(x).tanh())


@pytest.mark.filterwarnings("ignore:.*'scales.0.' was replaced:moe_graphs.errors.GraphWarning")
def test_a_tensor_that_a_backward_alone_reads_is_compared(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ScalesGradients(device)).to(device)
    eager = copy.deepcopy(model)
    config = moe_graphs.GraphConfig("*1", warmup_steps=2, audit_every=None)
    graphs = moe_graphs.graph(model, config)
    for step in range(6):
        x = torch.randn(2, 4, device=device)
        for each in (model, eager):
            each.zero_grad()
            if step == 4:
                each[1].scales.reverse()
        with graphs.step():
            model(x).square().mean().backward()
        eager(x).square().mean().backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs), step
    assert graphs.report().eager_calls == {"warmup": 2, "moved": 2}
