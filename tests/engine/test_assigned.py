"""Attributes, averages and caches of a forward under graphs: values and gradients of eager."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, remove_weight_norm, weight_norm

import moe_graphs
from grids import by_turns
from moe_graphs import FullIteration, GraphConfig, GraphError, GraphWarning
from training_runs import DEVICES

WIDTH, STEPS = 8, 8
on_devices = pytest.mark.parametrize("device", DEVICES)


class Layer(nn.Module):
    """A layer that leaves a loss and a state, keeps an average and caches a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.aux_loss: Tensor | None = None
        self.masks: dict[int, Tensor] = {}
        self.left_norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in self.masks:
            self.masks[x.shape[-1]] = torch.linspace(0.5, 1.0, x.shape[-1], device=x.device)
        self.last = self.drop(self.l(x - self.average)) * self.masks[x.shape[-1]]
        self.aux_loss = self.last.square().mean()
        with torch.no_grad():
            self.average = self.average.mul(0.9).add(self.last.mean(0), alpha=0.1)
        self.left_norms = [x.detach().norm(), self.last.detach().norm()]
        return self.last.tanh()


def build(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3))).to(device)


def step_of(model: nn.Sequential, x: Tensor, times: int = 1) -> Tensor:
    """Forwards that are all in flight before the backwards; the losses are left by the layers."""
    losses = []
    for part in x.chunk(times):
        loss = model(part).square().mean()
        losses.append(loss + sum(0.1 * layer.aux_loss + layer.last.mean() for layer in model))
        for layer in model:
            layer.aux_loss = None
    for loss in losses:
        loss.backward()
    return losses[-1].detach()


def seen(model: nn.Module) -> list[Any]:
    """Everything that training code can see after a step."""
    found = [each.grad.clone() for each in model.parameters()]
    for layer in model:
        found += [layer.average.clone(), layer.last.detach().clone(), layer.last.requires_grad]
        found += [*map(Tensor.clone, layer.left_norms), len(layer.masks)]
    return found


def train(model: nn.Module, step: Any, *, steps: int = STEPS) -> list[Any]:
    torch.manual_seed(1)
    device, trace = next(model.parameters()).device, []
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x = torch.randn(4, WIDTH, generator=generator).to(device)
        trace += [step(x), *seen(model)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return trace


def check_same(found: list[Any], expected: list[Any]) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
        assert same, f"value {number}: {a} and eagerly {b}"


@on_devices
@pytest.mark.parametrize(("times", "audit_every"), by_turns([1, 2], [None, 2]))
def test_scopes_leave_attributes_as_eager_does(device, times, audit_every):
    model = build(device)
    eager = copy.deepcopy(model)
    expected = train(eager, lambda x: step_of(eager, x, times))
    config = GraphConfig("*", warmup_steps=2, on_mismatch="error", audit_every=audit_every)
    graphs = moe_graphs.graph(model, config)

    def step(x: Tensor) -> Tensor:
        with graphs.step():
            return step_of(model, x, times)

    check_same(train(model, step), expected)
    report = graphs.report()
    assert report.matched > 0
    assert not report.eager_calls.keys() - {"warmup"}
    graphs.release()


@on_devices
@pytest.mark.parametrize("audit_every", [None, 2])
def test_whole_steps_leave_attributes_as_eager_does(device, audit_every):
    model = build(device)
    eager = copy.deepcopy(model)
    expected = train(eager, lambda x: step_of(eager, x))
    graphed = FullIteration(
        lambda x: step_of(model, x),
        model=model,
        warmup_steps=2,
        on_mismatch="error",
        audit_every=audit_every,
    )
    check_same(train(model, graphed), expected)
    assert graphed.report().matched > 0
    graphed.release()


@on_devices
def test_an_average_that_is_replaced_is_an_input_of_the_next_call(device):
    model = build(device)
    eager = copy.deepcopy(model)
    config = GraphConfig("*", warmup_steps=2, on_mismatch="error")
    graphs = moe_graphs.graph(model, config)

    def with_resets(model: nn.Module, x: Tensor) -> Tensor:
        model[1].average = torch.full_like(model[1].average, 0.5)
        return step_of(model, x)

    def step(x: Tensor) -> Tensor:
        with graphs.step():
            return with_resets(model, x)

    check_same(train(model, step), train(eager, lambda x: with_resets(eager, x)))
    model[1].average = torch.zeros(WIDTH, device=device, dtype=torch.float64)
    with pytest.raises(GraphError, match=r"average'?: captured dtype"), graphs.step():
        step_of(model, torch.ones(4, WIDTH, device=device))
    graphs.release()


@on_devices
def test_a_capture_ahead_of_time_leaves_attributes_as_they_were(device):
    model = build(device)
    eager = copy.deepcopy(model)
    graphs = moe_graphs.graph(model, GraphConfig("*", warmup_steps=2, on_mismatch="error"))
    before = [layer.average for layer in model]
    graphs.capture(lambda: step_of(model, torch.ones(4, WIDTH, device=device)))
    assert all(a is layer.average for a, layer in zip(before, model, strict=True))

    def step(x: Tensor) -> Tensor:
        with graphs.step():
            return step_of(model, x)

    check_same(train(model, step), train(eager, lambda x: step_of(eager, x)))
    assert graphs.report().matched == 3 * STEPS
    graphs.release()


class Recurrent(nn.Module):
    """A layer whose state goes on from call to call, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.l(x) + self.state)
        return self.state.square()


def recurrent_step(model: nn.Sequential, x: Tensor) -> Tensor:
    model[0].state = torch.zeros(2, WIDTH, device=x.device)
    loss = sum(model(part).mean() for part in x.split(2))
    loss.backward()
    return loss.detach()


@on_devices
@pytest.mark.parametrize("engine", ["scopes", "scopes ahead of time", "whole step"])
def test_a_state_with_its_history_goes_on_through_the_calls_of_a_step(device, engine):
    torch.manual_seed(0)
    model = nn.Sequential(Recurrent()).to(device)
    eager = copy.deepcopy(model)
    config = GraphConfig("*", warmup_steps=2, on_capture_error="error")
    graphs = own = None
    if engine == "whole step":
        own = FullIteration(lambda x: recurrent_step(model, x), model=model)
    else:
        graphs = moe_graphs.graph(model, config)
    if engine == "scopes ahead of time":
        graphs.capture(lambda: recurrent_step(model, torch.ones(4, WIDTH, device=device)))

    def step(x: Tensor) -> Tensor:
        if own is not None:
            return own(x)
        with graphs.step():
            return recurrent_step(model, x)

    found, expected = [], []
    for trace, run, trained in (
        (found, step, model),
        (expected, lambda x: recurrent_step(eager, x), eager),
    ):
        generator = torch.Generator().manual_seed(2)
        for _ in range(STEPS):
            x = torch.randn(4, WIDTH, generator=generator).to(device)
            trace.append(run(x))
            trace += [each.grad.clone() for each in trained.parameters()]
            trained.zero_grad()
    check_same(found, expected)
    report = (own or graphs).report()
    assert report.matched > 0, report.eager_calls


_quiet = contextlib.nullcontext()


class Plain(nn.Module):
    """A layer with a tensor that is neither a parameter nor a buffer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.scale = torch.linspace(0.5, 1.0, WIDTH, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * self.scale


@on_devices
def test_a_plain_tensor_that_a_backward_needs_must_not_change(device):
    model = nn.Sequential(Plain(device)).to(device)
    graphs = moe_graphs.graph(model, GraphConfig("*", warmup_steps=1, audit_every=None))
    x = torch.ones(4, WIDTH, device=device)
    for _ in range(3):
        with graphs.step():
            model(x).sum().backward()
    with graphs.step():
        loss = model(x).sum()
        model[0].scale.add_(1.0)
        with pytest.raises(GraphError, match="modified in place before the backward"):
            loss.backward()
    assert graphs.report().matched == 3
    graphs.release()


@on_devices
def test_a_plain_tensor_that_is_replaced_runs_eagerly(device):
    model = nn.Sequential(Plain(device)).to(device)
    graphs = moe_graphs.graph(model, GraphConfig("*", warmup_steps=1))
    x = torch.ones(4, WIDTH, device=device)
    for number in range(6):
        if number == 4:
            model[0].scale = model[0].scale * 2.0
        says = pytest.warns(GraphWarning, match="'scale' was replaced") if number == 4 else _quiet
        with says, graphs.step():
            found = model(x)
            found.sum().backward()
        with torch.no_grad():
            assert torch.equal(found, model[0].l(x) * model[0].scale)
    report = graphs.report()
    assert (report.matched, report.eager_calls) == (3, {"warmup": 1, "moved": 2})
    graphs.release()


class Hooked(nn.Module):
    """Layers whose weights torch computes in hooks before the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.pruned = nn.Linear(WIDTH, WIDTH)
        prune.l1_unstructured(self.pruned, "weight", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.pruned(self.normed(x).tanh())


def hooked(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Hooked(), nn.Tanh()).to(device)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_devices
def test_weights_that_hooks_compute_are_right(device):
    model, eager = hooked(device), hooked(device)
    graphs = moe_graphs.graph(model, GraphConfig("*0", warmup_steps=2, on_mismatch="error"))

    def run(model: nn.Module, around: Any) -> list[Tensor]:
        trace = []
        for number in range(STEPS):
            x = torch.full((4, WIDTH), 0.1 * number, device=device)
            with around():
                model(x).square().mean().backward()
            trace += [parameter.grad.clone() for parameter in model.parameters()]
            trace += [model[0].normed.weight.detach().clone()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
        return trace

    check_same(run(model, graphs.step), run(eager, contextlib.nullcontext))
    assert graphs.report().matched == STEPS - 2
    remove_weight_norm(model[0].normed)
    with pytest.raises(GraphError), graphs.step():
        model(torch.ones(4, WIDTH, device=device))
    graphs.release()


class Logged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.logger = logging.getLogger("test_assigned")

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * (2.0 if self.logger.isEnabledFor(logging.DEBUG) else 1.0)


def test_a_logger_that_is_asked_is_asked_again_at_every_replay():
    model = nn.Sequential(Logged())
    graphs = moe_graphs.graph(model, GraphConfig("*", warmup_steps=1))
    for number in range(6):
        if number == 4:
            model[0].logger.setLevel(logging.DEBUG)
        with graphs.step():
            found = model(torch.ones(1, WIDTH))
            found.sum().backward()
        with torch.no_grad():
            assert torch.equal(found, model[0].l(torch.ones(1, WIDTH)) * (1.0 + (number > 3)))
    report = graphs.report()
    assert (report.matched, report.eager_calls) == (3, {"warmup": 1, "attribute": 2})
    model[0].logger.setLevel(logging.NOTSET)
    graphs.release()
