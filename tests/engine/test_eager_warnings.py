"""Warnings of eager calls that nobody has asked for: one per scope and reason."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import moe_graphs
import two_scopes
from moe_graphs import FullIteration, GraphConfig, GraphWarning
from training_runs import DEVICES
from two_scopes import WIDTH, build, data, train_step, warm

pytestmark = pytest.mark.parametrize("device", DEVICES)
PACKAGE = moe_graphs.__path__[0]


def a_hook(*_) -> None:
    pass


def smaller_batch(model, device):
    return data(device, rows=3)


def late_hook(model, device):
    model.first.linear.register_forward_hook(a_hook)
    return data(device)


def other_number(model, device):
    model.first.dropout.p = 0.25
    return data(device)


def switched(model, device):
    model.first.eval()
    return data(device)


CHANGES = {
    "shape": (smaller_batch, r"input 'x': captured shape \(4, 8\), got \(3, 8\): pad .*drop_last"),
    "hooks": (late_hook, "module 'linear' has hooks .*a_hook.* now, .*: remove them"),
    "attribute": (other_number, "'dropout.p' was 0.3 at the capture and is 0.25 now: set it back"),
    "training_flag": (switched, "training' was True at the capture and is False now: set it back"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_the_third_eager_call_warns_with_detail_and_remedy(device, reason):
    model = build(device)
    graphs = warm(model, device)
    change, message = CHANGES[reason]
    for _ in range(2):
        train_step(model, graphs, change(model, device))
    said_of = rf"scope 'first' ran eagerly 3 times \({reason}\): .*{message}"
    with pytest.warns(GraphWarning, match=said_of) as said:
        train_step(model, graphs, change(model, device))
    assert len(said) == 1  # the second scope has the same to say, or nothing
    assert not said[0].filename.startswith(PACKAGE)  # a line of the training, none of the engine
    for _ in range(36):
        train_step(model, graphs, change(model, device))
    assert graphs.report().scopes[0].eager_calls[reason] == 39
    assert graphs.report().scopes[0].details.keys() == {reason}


def test_replays_between_eager_calls_do_not_hide_them(device):
    model = build(device)
    graphs = warm(model, device)
    for rows in (3, 4, 4, 4) * 2:
        train_step(model, graphs, data(device, rows))
    with pytest.warns(GraphWarning, match="3 times"):
        train_step(model, graphs, data(device, rows=3))


def test_a_forgotten_step_warns_at_once(device):
    model = build(device)
    graphs = moe_graphs.graph(model, GraphConfig("f*t,s*d"))
    with pytest.warns(GraphWarning, match=r"outside_step\): .*put forwards and backwards") as said:
        model(data(device)).sum().backward()
    assert len(said) == 1
    for _ in range(5):
        model(data(device)).sum().backward()
    assert graphs.report().eager_calls == {"outside_step": 12}


def test_a_warning_changes_no_globals_of_the_training(device):
    vars(two_scopes).pop("__warningregistry__", None)  # of another warning
    model = build(device)
    _graphs = moe_graphs.graph(model, GraphConfig("f*t,s*d"))
    with pytest.warns(GraphWarning, match="outside_step") as said:
        model(data(device)).sum().backward()
    assert said[0].filename == two_scopes.__file__
    assert "__warningregistry__" not in vars(two_scopes)


def test_what_is_asked_for_is_no_warning(device):
    model = build(device)
    graphs = warm(model, device)
    for _ in range(5):
        with torch.no_grad():
            model(data(device, rows=2))
        with graphs.paused():
            model(data(device, rows=2)).sum().backward()
    assert graphs.report().eager_calls == {"warmup": 4, "no_grad": 10, "paused": 10}


def test_a_warm_up_that_never_ends_says_why(device):
    model = build(device)
    graphs = moe_graphs.graph(model, GraphConfig("f*t,s*d"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        train_step(model, graphs, data(device))
        train_step(model, graphs, data(device))
        with pytest.warns(GraphWarning, match=r"saved_tensors_hooks\): .*checkpointing"):
            train_step(model, graphs, data(device))
        train_step(model, graphs, data(device))
    assert graphs.report().eager_calls == {"saved_tensors_hooks": 8}


def test_whole_steps_warn_at_the_third_call_as_well(device):
    model = build(device)

    def plain(batch):
        model.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        return loss

    step = FullIteration(plain, model=model, warmup_steps=2)
    for _ in range(4):
        step({"x": data(device)})
    for _ in range(2):
        step({"x": data(device, rows=3)})
    said_of = (
        r"full iteration ran eagerly 3 times \(shape\): input \"batch\['x'\]\": captured shape"
    )
    with pytest.warns(GraphWarning, match=said_of):
        step({"x": data(device, rows=3)})
    step({"x": data(device, rows=3)})
    assert step.report().details["shape"].endswith("of a FullIteration)")


def test_callables_warn_at_the_third_call_as_well(device):
    layer = nn.Linear(WIDTH, WIDTH, device=device)
    sample = torch.ones(4, WIDTH, device=device, requires_grad=True)
    moe_graphs.make_graphed_callables(layer, (sample,))
    for _ in range(2):
        layer(sample[:3]).sum().backward()
    with pytest.warns(GraphWarning, match=r"'callable 0' ran eagerly 3 times \(shape\): input 'in"):
        layer(sample[:3]).sum().backward()
    layer(sample[:3]).sum().backward()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.a(x), self.b(x)


def test_backwards_that_no_graph_serves_warn_too(device):
    model = nn.Sequential(Both()).to(device)
    graphs = moe_graphs.graph(model, GraphConfig("*0", warmup_steps=2, audit_every=None))

    def step(together: bool) -> None:
        with graphs.step():
            a, b = model(data(device))
            (a + b if together else a).sum().backward()
        model.zero_grad()

    for together in (True, True, True, True, False, False):
        step(together)
    with pytest.warns(GraphWarning, match=r"'0' ran eagerly 3 times \(backward: other_outputs\)"):
        step(together=False)
    step(together=False)
    assert graphs.report().eager_calls == {"warmup": 2, "backward: other_outputs": 4}


def test_capturing_again_counts_anew(device):
    model = build(device)
    graphs = warm(model, device)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                train_step(model, graphs, data(device, rows=3))
        graphs.recapture()
        for _ in range(3):
            train_step(model, graphs, data(device))
    assert not graphs.fallbacks.details
