"""Every engine refuses by name what no graph can have, and replays the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moe_graphs
from grids import by_turns
from moe_graphs import GraphConfig
from refusal_runs import ENGINES, STEPS, WIDTH, Model, Scope, both, check, plain_backward, train
from training_runs import DEVICES

pytestmark = pytest.mark.filterwarnings("ignore")


@both(ENGINES)
@pytest.mark.parametrize("compile_", [
    torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 3, WIDTH)),
], ids=["scripted", "traced"])  # fmt: skip
def test_a_script_module_is_refused_by_name(engine, compile_):
    named, _ = check(lambda: Scope(compile_(nn.Tanh())), engine)
    assert len(named) == 1
    assert "inner' is a ScriptModule (torch.jit.script or torch.jit.trace)" in named[0]
    assert "put the module in its place that it was made from" in named[0]


def test_a_script_module_that_is_a_scope_is_refused_before_anything_runs():
    model = Model(torch.jit.script(nn.Tanh()))
    with pytest.raises(ValueError, match=r"pattern 'scope\*': module 'scope' is a ScriptModule"):
        moe_graphs.graph(model, GraphConfig("scope*"))


class _Table(Scope):
    """A module with attributes in a table, which raises KeyError for other names."""

    def __init__(self) -> None:
        super().__init__(forward=lambda s, x: s.linear(x) * s.gain)
        self.table = {"gain": 2.0}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.__dict__["table"][name]


@both(ENGINES)
def test_a_module_whose_getattr_raises_key_error_is_replayed(engine):
    named, report = check(_Table, engine)
    assert not named
    assert report.replayed


def _under_inference_mode(s, x):
    with torch.inference_mode():
        gain = s.linear.weight.mean()
    return s.linear(x) * gain.clone()


@both(ENGINES)
def test_inference_mode_within_is_replayed(engine):
    named, report = check(lambda: Scope(forward=_under_inference_mode), engine)
    assert not named
    assert report.replayed


def _keyed_by_a_parameter():
    scope = Scope(forward=lambda s, x: s.linear(x) * s.gains[s.linear.weight])
    scope.gains = {scope.linear.weight: 2.0}
    return scope


@both(("scopes", "callables"))
def test_a_dictionary_keyed_by_a_parameter_is_refused_by_name(engine):
    named, _ = check(_keyed_by_a_parameter, engine)
    assert len(named) == 1
    assert "is keyed by a parameter" in named[0]
    assert "key it by the parameter's name" in named[0]
    assert "tensor(" not in named[0]


@both(("scopes", "callables"))
def test_a_dictionary_keyed_by_a_parameter_and_read_with_a_default_is_refused_by_name(engine):
    def make():
        scope = Scope(forward=lambda s, x: s.linear(x) * s.gains.get(s.linear.weight, 1.0))
        scope.gains = {scope.linear.weight: 2.0}
        return scope

    named, _ = check(make, engine)
    assert len(named) == 1
    assert "dictionary 'gains' is keyed by a parameter" in named[0]


def test_a_dictionary_keyed_by_a_parameter_is_replayed_in_a_whole_step():
    named, report = check(_keyed_by_a_parameter, "whole steps")
    assert not named
    assert report.replayed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("engine", "kind"), by_turns(ENGINES, [nn.LSTM, nn.GRU, nn.RNN]))
def test_recurrent_layers_are_replayed(kind, engine, device):
    named, report = check(lambda: Scope(kind(WIDTH, WIDTH, batch_first=True)), engine, device)
    assert not named
    assert report.replayed


def _two_losses(model, x):
    found = model(x)
    found.square().mean().backward(retain_graph=True)
    loss = found.abs().mean()
    loss.backward()
    return loss.detach()


def _gradients_per_task(model, x):
    """Takes the gradients of each task apart and puts them together by hand, as PCGrad does."""
    found, parameters = model(x), list(model.parameters())
    losses = [found.square().mean(), found.abs().mean(), found.exp().mean()]
    tasks = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.stack([task[number] for task in tasks]).sum(0)
    return losses[0].detach()


_SEVERAL = pytest.mark.parametrize("backward", [_two_losses, _gradients_per_task])


@_SEVERAL
@pytest.mark.parametrize("options", [{}, {"split_backward": True}])
def test_two_losses_over_one_forward_stay_eager_counted_in_scopes(backward, options):
    make = lambda: Scope(nn.Tanh())  # noqa: E731
    with pytest.warns(moe_graphs.GraphWarning, match="a forward had several backwards in the"):
        named, report = check(make, "scopes", backward=backward, **options)
    assert not named
    assert report.replayed == 0
    assert report.eager_calls["second_backward"] == STEPS - 2


@_SEVERAL
def test_two_losses_over_one_forward_are_replayed_and_counted_in_callables(backward):
    named, report = check(lambda: Scope(nn.Tanh()), "callables", backward=backward)
    assert not named
    assert report.replayed
    assert report.eager_calls["backward: second_backward"]


def test_two_losses_over_one_forward_are_replayed_in_a_whole_step():
    named, report = check(lambda: Scope(nn.Tanh()), "whole steps", backward=_two_losses)
    assert not named
    assert report.replayed


def test_gradients_that_are_put_together_by_hand_are_counted_in_a_whole_step():
    _, report = check(lambda: Scope(nn.Tanh()), "whole steps", backward=_gradients_per_task)
    assert report.eager_calls["differs_from_eager"]


@_SEVERAL
def test_two_losses_that_begin_after_the_capture_are_right_and_counted(backward):
    steps = []

    def later(model, x):
        steps.append(x)
        return (plain_backward if len(steps) % STEPS in (1, 2, 3, 4) else backward)(model, x)

    named, report = check(lambda: Scope(nn.Tanh()), "scopes", backward=later)
    assert not named
    assert report.replayed
    assert report.eager_calls["backward: second_backward"]


@pytest.mark.gpu
@both(("scopes", "callables"))
def test_dropout_inside_of_cudnn_is_refused_by_name(engine):
    make = lambda: Scope(nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True))  # noqa: E731
    _, named, _ = train(make, engine, "cuda")
    assert len(named) == 1
    assert "'inner' (GRU) draws its dropout inside of cuDNN" in named[0]


def test_dropout_between_recurrent_layers_is_replayed_on_the_cpu():
    make = lambda: Scope(nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True))  # noqa: E731
    named, report = check(make, "scopes")
    assert not named
    assert report.replayed
