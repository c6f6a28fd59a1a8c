"""What users of captured graphs run into, each as a test: this file is the documentation.

"right": the result is bitwise that of an eager model. "eager": likewise, by running that call
eagerly, counted under the given reason. "error": raised before anything is launched, with the
name of the scope and of what is wrong.

| what you do                                             | what happens                      |
|---------------------------------------------------------|-----------------------------------|
| keep an output of a scope beyond the step               | right                             |
| keep a view of it                                       | eager: output_held, later copies   |
| modify an output in place before its backward           | error, or right if nothing saved it |
| modify an input in place inside a scope                 | error at capture                  |
| draw random numbers in a scope                          | right, new ones every replay      |
| ``.item()``, ``.tolist()``, masks in a scope            | error at capture, with the line   |
| read a tensor that is no input, parameter or buffer     | error at capture, with the line   |
| change a flag or a number on a module (dropout.p)       | eager: attribute                  |
| pass another batch size, dtype, constant                | eager: shape, dtype, constant     |
| eval(), no_grad between replays                         | eager: training_flag, no_grad     |
| toggle requires_grad of a parameter                     | eager: requires_grad              |
| put a hook on a module inside a scope                   | error at capture, later eager: hooks |
| replace a parameter, move the model, ``p.data = ...``   | eager: moved, with a warning      |
| replace a submodule                                     | eager: moved, with a warning      |
| load_state_dict                                         | right; with assign=True: eager    |
| state_dict, deepcopy, pickle                            | right: no trace of the graphs     |
| autocast with its cache                                 | error at capture                  |
| accumulate gradients, ``autograd.grad``, tensor hooks   | right: gradients are your own     |
| more microbatches in flight than in the observed step   | eager: slots_full                 |
| run a backward twice, or after its step                 | error                             |
| raise between forward and backward                      | right from the next step on       |
| checkpoint activations around a scope                   | eager: recompute and its kin      |
| checkpoint activations inside a scope                   | error at capture                  |
| forget graphs.step()                                    | eager: outside_step               |
| graph two models in a process                           | right                             |
| capture inside a scope that raises                      | error; the model trains on eagerly |
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_graphs
from moe_graphs import CaptureError, GraphConfig, GraphError, GraphWarning
from moe_graphs.engine.scopes import parameter_gradients as gradients
from training_runs import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)
WIDTH = 8


class Block(nn.Module):
    """Something of everything: weights, a buffer that counts, dropout, an optional constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.inside: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
        if self.inside is not None:
            x = self.inside(x)
        return torch.tanh(self.dropout(self.linear(x)) * scale)


class Model(nn.Module):
    """Two scopes with an eager function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.second(self.first(x, scale=scale).sin(), scale=scale)


def build(device: str) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def data(device: str, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device=device)


def scopes(**options) -> GraphConfig:
    return GraphConfig(["f*t", "s*d"], **options)  # patterns for first and second


def train_step(model: nn.Module, graphs: moe_graphs.Graphs, x: torch.Tensor, **kwargs):
    """One SGD step; the gradients stay."""
    model.zero_grad()
    with graphs.step():
        output = model(x, **kwargs)
        output.square().mean().backward()
    update(model)
    return output


@torch.no_grad()
def update(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad


def warm(model: nn.Module, device: str, **options) -> moe_graphs.Graphs:
    """Graphs with everything captured and one step replayed."""
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2, **options))
    for _ in range(3):
        train_step(model, graphs, data(device))
    assert graphs.report().state == "captured"
    return graphs


def both(device: str, scenario: Callable, **options) -> moe_graphs.Report:
    """Runs ``scenario(model, graphs) -> tensors`` eagerly and graphed; both must agree bitwise."""
    found = []
    for config in (GraphConfig(impl="none"), None):
        model = build(device)
        if config is None:
            graphs = warm(model, device, **options)
        else:
            graphs = moe_graphs.graph(model, config)
            for _ in range(3):
                train_step(model, graphs, data(device))
        tensors = list(scenario(model, graphs))
        tensors += [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        tensors.append(torch.rand(1, device=device))
        found.append([t.detach().clone() for t in tensors])
    eager, graphed = found
    assert len(eager) == len(graphed)
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
    report = graphs.report()
    graphs.release()
    return report


# ---- outputs


def test_keeping_an_output_keeps_its_value(device):
    def scenario(model, graphs):
        kept = []
        handle = model.first.register_forward_hook(lambda *args: kept.append(args[2]))
        for _ in range(3):
            kept.append(train_step(model, graphs, data(device)))
        handle.remove()
        return kept

    report = both(device, scenario)
    assert report.replayed == 2 * (1 + 3)


def test_a_view_of_an_output_that_is_kept_makes_the_call_eager(device):
    def scenario(model, graphs):
        kept = []
        for _ in range(3):
            kept.append(train_step(model, graphs, data(device)).detach()[1:])
        return kept

    report = both(device, scenario)
    assert report.eager_calls["output_held"] == 2


def test_modifying_a_saved_output_in_place_is_an_error_as_in_eager(device):
    for config in (GraphConfig(impl="none"), None):
        model = build(device)
        graphs = moe_graphs.graph(model, config) if config else warm(model, device)
        with pytest.raises(RuntimeError, match="modified (in place|by an inplace)"), graphs.step():
            output = model.first(data(device))  # tanh saves its output
            output.mul_(2)
            output.sum().backward()


def test_modifying_an_input_in_place_inside_a_scope_is_refused(device):
    model = build(device)
    model.first.inside = lambda x: x.mul_(2)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1))
    with pytest.raises(CaptureError, match="'f.*input 'x' is modified in place.*clone it"):
        train_step(model, graphs, data(device))


# ---- what is inside a scope


def test_dropout_draws_new_numbers_every_replay_and_those_of_eager(device):
    def scenario(model, graphs):
        x = data(device)
        with torch.no_grad():
            for block in (model.first, model.second):
                block.linear.bias.fill_(1.0)
        masks = [train_step(model, graphs, x) == 0 for _ in range(3)]
        assert not torch.equal(masks[0], masks[1])
        return masks

    assert set(both(device, scenario, on_mismatch="error").eager_calls) == {"warmup"}


HOST_READS = {
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x.sum(1).tolist()[0],
    "mask": lambda x: x[x.sum(1) > -1e9],
    "nonzero": lambda x: x * x.nonzero().shape[0],
    "branch": lambda x: x if x.sum() > 0 else -x,
    "cpu": lambda x: x * x.detach().cpu().sum().to(x.device),
}


@pytest.mark.parametrize("read", HOST_READS)
def test_reading_values_on_the_host_in_a_scope_names_the_line(device, read):
    model = build(device)
    model.second.inside = HOST_READS[read]
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1))
    message = "'second': capture of its forward failed: .*reads values on the host.*test_footguns"
    with pytest.raises(CaptureError, match=message):
        train_step(model, graphs, data(device))
    assert graphs.report().state == "capture_failed"


def test_a_tensor_from_outside_is_refused_by_name_of_the_operation(device):
    """The graph would keep reading the address of a tensor that nobody keeps."""
    model = build(device)
    outside = torch.randn(WIDTH, device=device)
    model.first.inside = lambda x: x + outside
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1))
    message = r"'first': .*aten.add reads a tensor \(8,\).*register it as a buffer.*test_footguns"
    with pytest.raises(CaptureError, match=message):
        train_step(model, graphs, data(device))

    def scenario(model, graphs):
        return [train_step(model, graphs, data(device))]

    both(device, scenario)


def test_changing_a_number_on_a_module_makes_the_call_eager(device):
    def scenario(model, graphs):
        model.first.dropout.p = 0.6
        return [train_step(model, graphs, data(device))]

    report = both(device, scenario)
    assert report.scopes[0].eager_calls == {"warmup": 2, "attribute": 1}
    assert report.scopes[1].eager_calls == {"warmup": 2}


def test_hooks_inside_a_scope_are_refused_at_capture_and_run_later(device):
    model = build(device)
    handle = model.first.linear.register_forward_hook(lambda *args: None)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1))
    with pytest.raises(CaptureError, match="'first': .*submodule 'linear' has hooks"):
        train_step(model, graphs, data(device))
    handle.remove()

    def scenario(model, graphs):
        seen = []
        handle = model.first.linear.register_forward_hook(lambda *args: seen.append(args[2]))
        train_step(model, graphs, data(device))
        handle.remove()
        train_step(model, graphs, data(device))
        assert len(seen) == 1
        return seen

    assert both(device, scenario).scopes[0].eager_calls == {"warmup": 2, "hooks": 1}


def test_hooks_on_the_scope_itself_run_on_every_replay(device):
    def scenario(model, graphs):
        seen = []
        handles = [
            model.second.register_forward_hook(lambda *args: seen.append(args[2].clone())),
            model.second.register_full_backward_hook(lambda *args: seen.append(args[2][0].clone())),
        ]
        train_step(model, graphs, data(device))
        train_step(model, graphs, data(device))
        for handle in handles:
            handle.remove()
        assert len(seen) == 4
        return seen

    assert both(device, scenario, on_mismatch="error").replayed == 2 * 3


def test_autocast_has_to_run_without_its_cache(device):
    def step(model, graphs, cache: bool):
        model.zero_grad()
        with graphs.step():
            with torch.autocast(device, torch.bfloat16, cache_enabled=cache):
                output = model(data(device))
            output.float().square().mean().backward()
        return output

    graphs = moe_graphs.graph(build(device), scopes(warmup_steps=1))
    with pytest.raises(CaptureError, match="cache_enabled=False"):
        step(graphs.model, graphs, True)

    def run(config):
        model = build(device)
        graphs = moe_graphs.graph(model, config)
        return [step(model, graphs, False).detach().clone() for _ in range(4)], graphs

    (eager, _), (graphed, graphs) = run(GraphConfig(impl="none")), run(scopes(warmup_steps=2))
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
    assert graphs.report().replayed == 4
    train_step(graphs.model, graphs, data(device))
    assert graphs.report().scopes[0].eager_calls == {"warmup": 2, "autocast": 1}


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
    assert report.scopes[0].replayed == 2


@pytest.mark.parametrize("reason", CHANGES)
def test_a_call_that_differs_is_an_error_on_request(device, reason):
    model = build(device)
    graphs = warm(model, device, on_mismatch="error")
    args, kwargs = CHANGES[reason](model, device)
    name = "scale" if reason == "constant" else "x"
    with pytest.raises(GraphError, match=f"scope 'first': input '{name}': captured"):
        train_step(model, graphs, *args, **kwargs)


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
    assert (report.captured, report.replayed) == (2, 2)


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
        # So that the freed memory is not handed out again.
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


# ---- gradients


def test_gradients_are_your_own(device):
    """Those of parameters and of inputs outlive the replays that follow, accumulated or not."""
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
    assert graphs.report().replayed == 2 * 2 * 3
    addresses = [{g.untyped_storage().data_ptr() for g in own} for own in kept]
    assert len(set().union(*addresses)) == 5 * (2 + 4)
    assert not set().union(*addresses[2:]) & static_addresses(graphs)
    for now, then in zip(kept, values, strict=True):
        assert all(map(torch.equal, now, then))


def static_addresses(graphs: moe_graphs.Graphs) -> set[int]:
    """Of what the graphs read and write: inputs, outputs, and the gradients of both."""
    tensors = list(graphs.captured.static_tensors())
    for place in graphs.captured.places:
        tensors += [*place.backward.targets, *place.backward.gradients]
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None}


@pytest.mark.parametrize("large", [1, 1 << 22])
def test_accumulating_gradients_over_microbatches(device, monkeypatch, large):
    """pytorch#181723: torch's own helper returns one static buffer for both."""
    monkeypatch.setattr(gradients, "_LARGE", large)

    def scenario(model, graphs):
        model.zero_grad()
        with graphs.step():
            for _ in range(3):
                model(data(device)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert both(device, scenario, on_mismatch="error").replayed == 2 * (1 + 3)


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
    """1F1B of depth two: gradients after the step."""
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
    assert (report.slots, report.captured, report.replayed) == ((2,), 4, 2 * (3 + 8 + 1 + 2))


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


def test_a_second_backward_and_one_after_its_step_are_errors(device):
    model = build(device)
    graphs = warm(model, device)
    with graphs.step():
        loss = model(data(device)).sum()
        loss.backward(retain_graph=True)
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
def test_activation_checkpointing_inside_a_scope_is_refused(device, reentrant):
    """Its recomputation would draw another dropout mask in a replay."""
    model = build(device)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device)
    model.second.block = block
    model.second.inside = lambda x: checkpoint(block, x, use_reentrant=reentrant)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1))
    message = "use_reentrant=True" if reentrant else "activation checkpointing"
    with pytest.raises(CaptureError, match=f"'second': .*{message}"):
        train_step(model, graphs, data(device))
    train_step(model, graphs, data(device))
    assert graphs.report().state == "capture_failed"


# ---- the whole


def test_a_forward_outside_a_step_is_eager(device):
    def scenario(model, graphs):
        model.zero_grad()
        model(data(device)).sum().backward()
        return []

    assert both(device, scenario).eager_calls["outside_step"] == 2


def test_two_models_in_a_process_do_not_know_of_each_other(device):
    def run(graphed: bool):
        models = [build(device), build(device)]
        config = scopes(warmup_steps=2) if graphed else GraphConfig(impl="none")
        handles = [moe_graphs.graph(model, config) for model in models]
        seen = []
        for step in range(6):
            for model, graphs in zip(models, handles, strict=True):
                seen.append(train_step(model, graphs, data(device)).detach().clone())
            if step == 4:
                handles[0].release()
        return seen, handles

    (eager, _), (graphed, handles) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
    assert handles[0].report().state == "released"
    assert handles[1].report().replayed == 8


def test_graphing_a_model_twice_is_refused_until_it_is_released(device):
    model = build(device)
    graphs = moe_graphs.graph(model, scopes())
    with pytest.raises(ValueError, match="has graphs already: release"):
        moe_graphs.graph(model, scopes())
    graphs.release()
    graphs.release()
    assert "forward" not in model.first.__dict__
    moe_graphs.graph(model, scopes()).release()
