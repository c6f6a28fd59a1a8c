"""Calls and models that differ from what was captured: rows of the table in test_footguns."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import GraphConfig, GraphError, GraphWarning
from training_runs import DEVICES
from two_scopes import WIDTH, Block, both, build, data, train_step, warm

pytestmark = pytest.mark.parametrize("device", DEVICES)

# ---- calls that differ from the capture

CHANGES = {
    "shape": lambda model, device: ([data(device, 6)], {}),
    "dtype": lambda model, device: ([data(device).double().float().half()], {}),
    "stride": lambda model, device: ([data(device, WIDTH).t()[:4]], {}),
    "requires_grad": lambda model, device: ([data(device).requires_grad_()], {}),
    "constant": lambda model, device: ([data(device)], {"scale": 0.5}),
}


@pytest.mark.parametrize("reason", [c for c in CHANGES if c != "dtype"])
def test_a_call_that_differs_runs_eagerly_and_the_next_one_is_replayed(device, reason):
    def scenario(model, graphs):
        args, kwargs = CHANGES[reason](model, device)
        return [
            train_step(model, graphs, *args, **kwargs),
            train_step(model, graphs, data(device)),
        ]

    report = both(device, scenario)
    assert report.scopes[0].eager_calls == {"warmup": 2, reason: 1}
    assert report.scopes[0].matched == 2


@pytest.mark.parametrize("reason", CHANGES)
def test_a_call_that_differs_is_an_error_on_request(device, reason):
    model = build(device)
    graphs = warm(model, device, on_mismatch="error")
    args, kwargs = CHANGES[reason](model, device)
    name = "scale" if reason == "constant" else "x"
    with pytest.raises(GraphError, match=f"scope 'first': input '{name}': captured"):
        train_step(model, graphs, *args, **kwargs)


def test_an_error_names_every_difference_of_the_call(device):
    model = build(device)
    graphs = warm(model, device, on_mismatch="error")
    model.first.training = False
    model.first.dropout.p = 0.2
    with torch.autocast(device, torch.bfloat16), pytest.raises(GraphError) as raised:
        train_step(model, graphs, data(device, 6), scale=0.5)
    lines = str(raised.value).splitlines()
    parts = ("shape", "'scale'", "autocast", "dropout.p.*also different: 'training'")
    for line, part in zip(lines, parts, strict=False):
        assert re.search(part, line), lines
    assert len(lines) >= 4


def test_scopes_that_are_no_longer_replayed_say_so_once(device):
    model = build(device)
    graphs = warm(model, device)

    for _ in range(2):
        train_step(model, graphs, data(device), scale=0.5)
    said_of = r"'first' ran eagerly 3 times \(constant\): input 'scale': .*pass it as a tensor"
    with pytest.warns(GraphWarning, match=said_of) as said:
        train_step(model, graphs, data(device), scale=0.5)
    assert len(said) == 1  # the second scope has the same to say
    for _ in range(9):
        train_step(model, graphs, data(device), scale=0.5)


def test_eval_and_no_grad_between_replays(device):
    def scenario(model, graphs):
        seen = []
        for rows in (4, 7):
            model.eval()
            with torch.no_grad():
                seen.append(model(data(device, rows)))
            model.train()
            with torch.no_grad():
                seen.append(model(data(device, rows)))
            seen.append(train_step(model, graphs, data(device)))
        model.eval()
        seen.append(train_step(model, graphs, data(device)))
        model.train()
        return seen

    report = both(device, scenario)
    assert report.eager_calls == {"warmup": 4, "no_grad": 8, "training_flag": 2}


def test_freezing_a_parameter_makes_its_scope_eager(device):
    def scenario(model, graphs):
        model.first.linear.weight.requires_grad_(False)
        return [train_step(model, graphs, data(device))]

    assert both(device, scenario).scopes[0].eager_calls == {"warmup": 2, "requires_grad": 1}


def test_an_expanded_input_and_a_repeated_scope(device):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.block(x))

    def run(config):
        torch.manual_seed(0)
        model = Twice().to(device)
        graphs = moe_graphs.graph(model, config)
        seen = []
        for _ in range(4):
            x = torch.randn(1, WIDTH, device=device).expand(4, WIDTH)
            seen += [train_step(model, graphs, x).detach().clone()]
            seen += [p.grad.clone() for p in model.parameters()]
        return seen, graphs.report()

    (eager, _), (graphed, report) = run(GraphConfig(impl="none")), run(GraphConfig("bl*"))
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
    assert (report.captured, report.matched) == (2, 2)


# ---- parameters, buffers, modules


def _replace(model):
    model.second.linear.weight = nn.Parameter(model.second.linear.weight.detach().clone())


def _assign(model):
    model.second.linear.weight.data = model.second.linear.weight.detach().clone()


def _replace_buffer(model):
    model.second.calls = model.second.calls.clone()


def _load_assign(model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _replace_module(model):
    model.second.linear = copy.deepcopy(model.second.linear)


MOVES = {
    "replaced parameter": (_replace, "'second' .*'linear.weight' was replaced"),
    "assigned .data": (_assign, "'second' .*'linear.weight' lies at another address"),
    "replaced buffer": (_replace_buffer, "'second' .*'calls' was replaced"),
    "load_state_dict(assign=True)": (_load_assign, "'first' .* was replaced"),
    "converted model": (lambda model: model.double().float(), "'first' .*'calls' was replaced"),
    "replaced submodule": (_replace_module, "'second' .*'linear.*' was replaced by another"),
}


@pytest.mark.parametrize("move", MOVES)
def test_memory_that_the_graphs_read_has_moved(device, move):
    change, message = MOVES[move]
    keep = []

    def scenario(model, graphs):
        # These copies prevent that the freed memory is handed out again.
        keep.append([copy.deepcopy(model), [t.detach() for t in model.state_dict().values()]])
        change(model)
        if graphs.config.impl == "none":
            return [train_step(model, graphs, data(device)) for _ in range(2)]
        with pytest.warns(GraphWarning) as told:
            first = train_step(model, graphs, data(device))
        assert any(re.search(message, str(each.message)) for each in told)
        return [first, train_step(model, graphs, data(device))]

    report = both(device, scenario)
    assert max(scope.eager_calls.get("moved", 0) for scope in report.scopes) == 2
    model = build(device)
    graphs = warm(model, device, on_mismatch="error")
    change(model)
    with pytest.raises(GraphError, match="was replaced|lies at another"):
        train_step(model, graphs, data(device))
    graphs.release()
    train_step(model, graphs, data(device))


def test_load_state_dict_in_place_is_seen_by_the_graphs(device):
    def scenario(model, graphs):
        generator = torch.Generator().manual_seed(3)
        state = {
            key: torch.rand(value.shape, generator=generator)
            for key, value in model.state_dict().items()
        }
        model.load_state_dict(state)
        return [train_step(model, graphs, data(device))]

    assert set(both(device, scenario, on_mismatch="error").eager_calls) == {"warmup"}


def test_state_dict_deepcopy_and_pickle_show_no_graphs(device):
    model = build(device)
    keys = list(model.state_dict())
    graphs = warm(model, device)
    assert list(model.state_dict()) == keys
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in (copied, pickled, copy.deepcopy(copied)):
        x, before = data(device), graphs.report()
        torch.manual_seed(1)
        expected = twin(x)
        assert graphs.report() == before
        torch.manual_seed(1)
        with graphs.paused():
            assert torch.equal(expected, model(x))
        assert twin.first is not model.first
        assert twin.first.linear.weight.data_ptr() != model.first.linear.weight.data_ptr()
