"""The first operation of a step whose output is not finite, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig
from moe_graphs.errors import NonFiniteError
from training_runs import DEVICES

WIDTH, ROWS = 4, 3
pytestmark = pytest.mark.parametrize("device", DEVICES)


class Scaled(nn.Module):
    """A linear layer whose output goes through a function that may leave the finite numbers."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.linear(x))


def log_of(x):
    return x.abs().log()


def root_of(x):
    return x.abs().sqrt()  # its derivative at 0 is infinite, times 0 of abs: NaN


def masked(x):
    hidden = x.masked_fill(torch.ones_like(x).triu(1).bool(), -torch.inf).softmax(-1)
    return hidden @ x.t()


def logarithm_in_place(x):
    return x.abs().clone().log_()


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.first = Scaled(function)
        self.second = nn.Sequential(nn.Linear(ROWS if function is masked else WIDTH, 2), nn.Tanh())

    def forward(self, x):
        return self.second(self.first(x))


class Training:
    """A model, its optimizer, and a step that graphs replay in one of two ways."""

    def __init__(self, function, device: str, engine: str) -> None:
        torch.manual_seed(0)
        self.device, self.engine, self.model = device, engine, Model(function).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, capturable=True)
        if engine == "scopes":
            config = GraphConfig("*first,*second", warmup_steps=2)
            self.graphs = moe_graphs.graph(self.model, config)
        else:
            options = {"model": self.model, "optimizer": self.optimizer}
            self.graphs = FullIteration(self.step, warmup_steps=2, **options)

    def step(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, batch=None):
        batch = torch.randn(ROWS, WIDTH, device=self.device) if batch is None else batch
        if self.engine == "scopes":
            return self.graphs.find_nonfinite(lambda: self.step(batch), self.optimizer)
        return self.graphs.find_nonfinite(batch)

    def until_replayed(self) -> Training:
        for _ in range(5):
            assert self.run().isfinite()
        assert self.graphs.report().matched
        return self

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values()]
        tensors += [value for of in self.optimizer.state.values() for value in of.values()]
        return [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def zero_first(self) -> None:
        for parameter in self.model.first.linear.parameters():
            parameter.zero_()


ENGINES = pytest.mark.parametrize("engine", ["scopes", "whole step"])


@ENGINES
@pytest.mark.parametrize("function", [log_of, logarithm_in_place])
def test_an_infinity_of_the_forward_is_named_with_module_line_and_ranges(device, engine, function):
    training = Training(function, device, engine).until_replayed()
    training.zero_first()
    before = training.state()
    with pytest.raises(NonFiniteError) as raised:
        training.run()
    found = raised.value.operation
    operation = "aten.log_" if function is logarithm_in_place else "aten.log"
    assert (found.operation, found.phase, found.module) == (operation, "forward", "first")
    assert __file__ in found.line
    assert found.inputs[0].endswith("from 0 to 0")
    assert found.output.endswith("12 -inf of 12")
    assert "the first NaN: aten.addmm" in str(raised.value)
    assert all(map(torch.equal, training.state(), before))


@ENGINES
def test_a_nan_of_the_backward_is_named_with_the_line_of_its_forward(device, engine):
    training = Training(root_of, device, engine).until_replayed()
    training.zero_first()
    with pytest.raises(NonFiniteError) as raised:
        training.run()
    found = raised.value.operation
    assert (found.phase, found.module) == ("backward", "first")
    assert found.line == f"{__file__}:{root_of.__code__.co_firstlineno + 1}"
    assert "the first NaN" in str(raised.value)


@ENGINES
def test_a_mask_of_infinities_is_no_error(device, engine):
    Training(masked, device, engine).until_replayed()


@ENGINES
def test_a_parameter_that_was_not_finite_before_is_named(device, engine):
    training = Training(torch.tanh, device, engine).until_replayed()
    with torch.no_grad():
        training.model.second[0].weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="'second.0.weight' was not finite before the step"):
        training.run()


@ENGINES
def test_a_batch_that_is_not_finite_is_named_by_what_reads_it(device, engine):
    training = Training(torch.tanh, device, engine).until_replayed()
    batch = torch.full((ROWS, WIDTH), torch.nan, device=device)
    with pytest.raises(NonFiniteError, match="reads a NaN: aten.addmm") as raised:
        training.run(batch)
    assert raised.value.operation.module == "first.linear"


@ENGINES
def test_training_goes_on_behind_the_error(device, engine):
    training = Training(torch.tanh, device, engine).until_replayed()
    with pytest.raises(NonFiniteError):
        training.run(torch.full((ROWS, WIDTH), torch.inf, device=device))
    replayed = training.graphs.report().matched
    assert training.run().isfinite()
    assert training.graphs.report().matched > replayed


def test_the_update_is_watched_as_well(device):
    training = Training(torch.tanh, device, "scopes").until_replayed()
    training.optimizer.param_groups[0]["lr"] = torch.tensor(torch.inf, device=device)
    with pytest.raises(NonFiniteError, match="parameter 'first.linear.weight'"):
        training.run()


def test_memory_that_nobody_has_written_holds_no_nan(device):
    def padded(x):
        rows = torch.empty(2 * ROWS, WIDTH, device=x.device)
        rows.view(-1)[: x.numel()].copy_(x.detach().reshape(-1))
        return x + 0 * rows.sum()

    trash = torch.full((2 * ROWS, WIDTH), torch.nan, device=device)
    del trash
    with moe_graphs.engine.nonfinite.NonFiniteWatch(nn.Identity()) as watch:
        padded(torch.ones(ROWS, WIDTH, device=device))
    assert not watch.found
