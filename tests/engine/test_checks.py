"""Checks of values in replayed forwards: no wait where they hold, an error by name where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, make_graphed_callables
from moe_graphs.engine.side_outputs import Checks
from moe_graphs.errors import CheckError
from training_runs import DEVICES

WIDTH = 4
on_devices = pytest.mark.parametrize("device", DEVICES)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not torch.isfinite(x).all():
            raise ValueError(f"not finite: {x}")
        return self.l(x)


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), nn.Tanh()).to(device)


def scopes(
    model: nn.Module, audit_every: int | str | None = "auto"
) -> tuple[Callable[[Tensor], Tensor], moe_graphs.Graphs]:
    config = GraphConfig("*0", warmup_steps=1, on_mismatch="error", audit_every=audit_every)
    graphs = moe_graphs.graph(model, config)

    def step(x: Tensor) -> Tensor:
        with graphs.step():
            loss = model(x).sum()
            loss.backward()
        return loss.detach()

    return step, graphs


def whole_steps(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], FullIteration]:
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        model.zero_grad()
        return loss

    graphed = FullIteration(step, model=model, warmup_steps=1, on_mismatch="error")
    return graphed, graphed


def callables(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], object]:
    x = torch.ones(2, WIDTH, device=next(model.parameters()).device)
    make_graphed_callables(model[0], (x,), on_mismatch="error")

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return step, model[0].graphs


ENGINES = [scopes, whole_steps, callables]


@on_devices
@pytest.mark.parametrize("engine", ENGINES)
def test_a_check_that_fails_is_an_error_with_its_line(device, engine):
    model = build(device)
    step, handle = engine(model)
    x = torch.ones(2, WIDTH, device=device)
    for _ in range(4):
        step(x)
    handle.check()
    assert handle.report().matched >= 3
    message = r"(scope '0'|the step|callable 0).*test_checks\.py:\d+: if not torch.isfinite"
    with pytest.raises(CheckError, match=message):
        step(x / 0.0)
        handle.check()
    step(x)
    handle.check()  # it is told once
    assert model[0].calls in (6, 7)  # callables have no warm-up, but whole steps capture by a call
    handle.release()


@pytest.mark.gpu
def test_a_check_is_read_without_waiting_at_the_next_step():
    model = build("cuda")
    step, graphs = scopes(model, audit_every=None)  # audits wait for the device
    x = torch.ones(2, WIDTH, device="cuda")
    for _ in range(3):
        step(x)
    graphs.check()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(CheckError, match="isfinite"):  # as soon as the device is that far
            for _ in range(1000):
                step(x / 0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graphs.release()


def asked(x: Tensor) -> Tensor:
    return -x if x.sum() > 0 else x


def caught(x: Tensor) -> Tensor:
    while x.isnan().any():
        x = x + 1
    return x


@pytest.mark.parametrize("function", [asked, caught, lambda x: bool(x.isnan().any())])
def test_other_branches_on_values_are_no_checks(function):
    with Checks() as checks:
        function(torch.ones(2))
    assert not checks.found
