"""Footguns of captured graphs, each as a test: this table is the documentation.

"right" means that the result is bitwise that of an eager model. "eager" means that this call runs
eagerly, with a right result, and is counted under the given reason. "error" means that an error is
raised before anything is launched; it names the scope and what is wrong.

| what you do                                             | what happens                      |
|---------------------------------------------------------|-----------------------------------|
| keep an output of a scope beyond the step               | right                             |
| keep a view of an output                                | eager: output_held, later copies  |
| modify an output in place before its backward           | error; right if nothing saved it  |
| modify an input in place inside a scope                 | error at capture                  |
| draw random numbers in a scope                          | right, new ones every replay      |
| ``.item()``, ``.tolist()``, masks in a scope            | error at capture, with the line   |
| read a tensor that is no input, parameter or buffer     | error at capture, with the line   |
| change a flag or a number on a module (dropout.p)       | eager: attribute                  |
| pass another batch size, dtype, constant                | eager: shape, dtype, constant     |
| eval(), no_grad between replays                         | eager: training_flag, no_grad     |
| toggle requires_grad of a parameter                     | eager: requires_grad              |
| put a hook on a module inside a scope                   | error at capture; later eager: hooks |
| replace a parameter, move the model, ``p.data = ...``   | eager: moved, with a warning      |
| replace a submodule                                     | eager: moved, with a warning      |
| load_state_dict                                         | right; with assign=True: eager    |
| state_dict, deepcopy, pickle                            | right: no trace of the graphs     |
| autocast with its cache                                 | error at capture                  |
| accumulate gradients, ``autograd.grad``, tensor hooks   | right: gradients are your own     |
| more microbatches in flight than in the observed step   | eager: slots_full                 |
| run a backward twice, or after its step                 | error                             |
| raise between forward and backward                      | right from the next step on       |
| checkpoint activations around a scope                   | eager: recompute and the like     |
| checkpoint activations inside a scope                   | error at capture                  |
| forget graphs.step()                                    | eager: outside_step               |
| graph two models in a process                           | right                             |
| capture inside a scope that raises                      | error; the model trains on eagerly |

This file tests outputs, the inside of a scope, and the whole. ``test_footguns_calls`` tests calls,
parameters and modules. ``test_footguns_gradients`` tests gradients and order.
"""

from __future__ import annotations

import gc

import pytest
import torch

import moe_graphs
from moe_graphs import CaptureError, GraphConfig, GraphWarning
from training_runs import DEVICES
from two_scopes import WIDTH, both, build, data, scopes, train_step, warm

pytestmark = pytest.mark.parametrize("device", DEVICES)


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
    assert report.matched == 2 * (1 + 3)


def test_a_view_of_an_output_that_is_kept_makes_the_call_eager(device):
    def scenario(model, graphs):
        kept = []
        for _ in range(3):
            kept.append(train_step(model, graphs, data(device)).detach()[1:])
        return kept

    report = both(device, scenario)
    assert report.eager_calls["output_held"] == 2


def test_a_view_of_an_output_sees_what_is_written_to_the_output_later(device):
    """The output and its view stay on one memory: neither moves alone."""

    def scenario(model, graphs):
        output = train_step(model, graphs, data(device))
        view = output.detach().view(-1)
        train_step(model, graphs, data(device))
        with torch.no_grad():
            output.add_(1.0)
        return [output, view]

    assert both(device, scenario).eager_calls["output_held"] == 1


@pytest.mark.parametrize("changed", ["second", "third"])
def test_an_output_of_a_frozen_scope_that_two_scopes_take(device, changed):
    """The memory of that output is the input of both scopes.

    If one of the scopes gets another tensor, the other one's backward still needs what is there,
    and a later call must not find that other tensor.
    """
    found = []
    for config in (GraphConfig(impl="none"), GraphConfig(["[012]"], warmup_steps=2)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(device)
        model[0].requires_grad_(False)
        graphs = moe_graphs.graph(model, config)
        for number in range(6):
            with graphs.step():
                output = model[0](data(device))
                other = output * 2 if number > 3 else output
                second = model[1](other if changed == "second" else output)
                third = model[2](other if changed == "third" else output)
                (second * third).square().mean().backward()
        found.append([second, third, *(p.grad for p in model[1:].parameters())])
    assert all(map(torch.equal, *found))
    assert graphs.report().eager_calls["input_moved"] == 2


def test_modifying_a_saved_output_in_place_is_an_error_as_in_eager(device):
    for config in (GraphConfig(impl="none"), None):
        model = build(device)
        graphs = moe_graphs.graph(model, config) if config else warm(model, device)
        with pytest.raises(RuntimeError, match="modified (in place|by an inplace)"), graphs.step():
            output = model.first(data(device))  # tanh saves its output
            output.mul_(2)
            output.sum().backward()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_modifying_a_weight_before_its_backward_is_an_error_as_in_eager(device, is_frozen):
    for config in (GraphConfig(impl="none"), None):
        model = build(device)
        weight = model.second.linear.weight.requires_grad_(not is_frozen)
        graphs = moe_graphs.graph(model, config) if config else warm(model, device)
        with pytest.raises(RuntimeError, match="modified (in place|by an inplace)"), graphs.step():
            output = model(data(device))
            with torch.no_grad():
                weight.mul_(2)
            output.sum().backward()


def test_modifying_an_input_in_place_inside_a_scope_is_refused(device):
    model = build(device)
    model.first.inside = lambda x: x.mul_(2)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1, on_capture_error="error"))
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
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1, on_capture_error="error"))
    message = "'second': capture of its forward failed: .*reads values on the host.*test_footguns"
    with pytest.raises(CaptureError, match=message):
        train_step(model, graphs, data(device))
    assert graphs.report().state == "capture_failed"


def test_a_tensor_from_outside_is_read_where_it_lies(device):
    """A guard compares and keeps the tensor, so the graph may read its address."""
    model = build(device)
    outside = torch.randn(WIDTH, device=device)
    model.first.inside = lambda x: x + outside
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1, on_capture_error="error"))
    for _ in range(3):
        train_step(model, graphs, data(device))
    assert graphs.report().matched >= 2
    graphs.release()

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
    graphs = moe_graphs.graph(model, scopes(warmup_steps=1, on_capture_error="error"))
    with pytest.raises(CaptureError, match="'first': .*module 'linear' has hooks"):
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

    assert both(device, scenario, on_mismatch="error").matched == 2 * 3


@pytest.mark.parametrize("cache", [False, True])
def test_autocast_with_and_without_its_cache(device, cache):
    def step(model, graphs):
        model.zero_grad()
        with graphs.step():
            with torch.autocast(device, torch.bfloat16, cache_enabled=cache):
                output = model(data(device))
            output.float().square().mean().backward()
        return [output.detach().clone(), *(p.grad.clone() for p in model.parameters())]

    def run(config):
        model = build(device)
        graphs = moe_graphs.graph(model, config)
        return [each for _ in range(4) for each in step(model, graphs)], graphs

    (eager, _), (graphed, graphs) = run(GraphConfig(impl="none")), run(scopes(warmup_steps=2))
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
    assert graphs.report().matched == 4
    train_step(graphs.model, graphs, data(device))
    assert graphs.report().scopes[0].eager_calls == {"warmup": 2, "autocast": 1}


# ---- the whole


def test_a_forward_outside_a_step_is_eager(device):
    def scenario(model, graphs):
        model.zero_grad()
        model(data(device)).sum().backward()
        return []

    with pytest.warns(GraphWarning, match=r"outside_step\): .*inside of it") as said:
        assert both(device, scenario).eager_calls["outside_step"] == 2
    assert len(said) == 1


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
    assert handles[1].report().matched == 8


def test_graphing_a_model_twice_is_refused_until_it_is_released(device):
    model = build(device)
    graphs = moe_graphs.graph(model, scopes())
    with pytest.raises(ValueError, match="has graphs already: release"):
        moe_graphs.graph(model, scopes())
    graphs.release()
    graphs.release()
    assert "forward" not in model.first.__dict__
    moe_graphs.graph(model, scopes()).release()


class Keeps(torch.autograd.Function):
    """An autograd function that only a garbage collection frees; its backward runs only once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.me, ctx.kept = ctx, [2.0]
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (factor,), ctx.kept = ctx.kept, None
        return gradient * factor + 0 * ctx.saved_tensors[0]


class Keeping(torch.nn.Linear):
    def forward(self, x):
        return super().forward(Keeps.apply(x))


def test_garbage_of_captures_holds_no_output(device):
    """Trial runs leave garbage, as they do with Transformer Engine's functions."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Keeping(WIDTH, WIDTH) for _ in range(3))).to(device)
    graphs = moe_graphs.graph(model, GraphConfig(("0*", "1*", "2*"), warmup_steps=2))
    gc.disable()
    try:
        for _ in range(5):
            with graphs.step():
                for _ in range(2):
                    model(data(device)).square().mean().backward()
    finally:
        gc.enable()
    assert set(graphs.report().eager_calls) == {"warmup", "backward: not_captured"}
