"""A failed capture is a warning, and training goes on eagerly; on request it is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import CaptureError, FullIteration, GraphConfig, GraphWarning
from training_runs import DEVICES
from two_scopes import WIDTH, build, data, scopes, train_step, update

STEPS = 6
REFUSED = r"capture of (its forward|the step) failed: .*reads values on the host"
pytestmark = pytest.mark.parametrize("device", DEVICES)


def reads_on_the_host(device: str) -> nn.Module:
    model = build(device)
    model.second.inside = lambda x: x * x.detach().sum().item()
    return model


class Training:
    """Training by one of the engines, or eagerly; ``values`` are the parameters of every step."""

    def __init__(self, device: str, engine: str, **options: str) -> None:
        self.model, self.device = reads_on_the_host(device), device
        self.values: list[torch.Tensor] = []
        self.graphs = None
        if engine == "scopes":
            self.graphs = moe_graphs.graph(self.model, scopes(warmup_steps=2, **options))
        elif engine == "whole steps":
            self.graphs = FullIteration(self.plain, model=self.model, warmup_steps=2, **options)
        self.engine = engine

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad()
        output = self.model(x)
        output.square().mean().backward()
        update(self.model)
        return output

    def step(self) -> None:
        x = data(self.device)
        if self.engine == "scopes":
            train_step(self.model, self.graphs, x)
        else:
            (self.graphs or self.plain)(x)
        self.values += [p.detach().clone() for p in self.model.parameters()]

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.step()
        return self


ENGINES = pytest.mark.parametrize("engine", ["scopes", "whole steps"])


@ENGINES
def test_by_default_it_warns_once_and_training_goes_on_bitwise(device, engine):
    expected = Training(device, "eager").run(STEPS)
    found = Training(device, engine)
    with pytest.warns(GraphWarning, match=REFUSED) as said:
        found.run(STEPS)
    assert len(said) == 1
    assert all(map(torch.equal, found.values, expected.values))
    report = found.graphs.report()
    assert (report.state, report.matched) == ("capture_failed", 0)
    assert report.off_because == str(said[0].message)
    assert f"no graphs: {report.off_because}" in str(report)


@ENGINES
def test_it_is_an_error_on_request_and_training_may_go_on(device, engine):
    found = Training(device, engine, on_capture_error="error")
    with pytest.raises(CaptureError, match=REFUSED):
        found.run(STEPS)
    found.run(2)  # without a warning, which would be an error
    assert found.graphs.report().eager_calls["capture_failed"] >= 2


@ENGINES
def test_a_capture_that_was_asked_for_is_an_error_in_any_case(device, engine):
    found = Training(device, engine)
    x = data(device)
    with pytest.raises(CaptureError, match=REFUSED):
        if engine == "scopes":
            found.graphs.capture(lambda: found.model(x).sum().backward())
        else:
            found.graphs.capture(x)


def test_graphs_are_captured_again_once_the_reason_is_gone(device):
    found = Training(device, "scopes")
    with pytest.warns(GraphWarning, match=REFUSED):
        found.run(2)
    found.model.second.inside = lambda x: x
    found.graphs.recapture()
    found.run(4)
    report = found.graphs.report()
    assert (report.state, report.off_because) == ("captured", None)
    assert report.replayed > 0


def test_callables_are_captured_ahead_of_time_so_there_it_is_an_error(device):
    model = reads_on_the_host(device)
    sample = torch.ones(4, WIDTH, device=device, requires_grad=True)
    with pytest.raises(CaptureError, match=REFUSED):
        moe_graphs.make_graphed_callables(model.second, (sample,))


def test_other_answers_are_refused(device):
    with pytest.raises(ValueError, match="on_capture_error='raise': accepted are 'eager', 'error'"):
        GraphConfig("*0", on_capture_error="raise")
    with pytest.raises(ValueError, match="on_capture_error='raise': accepted are 'eager', 'error'"):
        FullIteration(print, model=build(device), on_capture_error="raise")
