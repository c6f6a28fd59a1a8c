"""A whole step as one graph trains bit for bit like the eager step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from full_iterations import Run, batches, train
from moe_graphs import FullIteration, GraphError, GraphWarning
from moe_graphs.engine import buffer_lease
from moe_graphs.training.forward_backward import GraphedForwardBackward
from moe_graphs.training.static_loader import StaticLoader
from training_runs import DEVICES, Trace, loss_of, tiny_model

pytestmark = pytest.mark.parametrize("device", DEVICES)
RUNS = {
    "dense, 1 microbatch, optimizer inside": ("dense", 1, True),
    "dense, 4 microbatches, optimizer outside": ("dense", 4, False),
    "moe, 1 microbatch, optimizer outside": ("moe", 1, False),
    "moe, 4 microbatches, optimizer inside": ("moe", 4, True),
    "mixed, 2 microbatches, optimizer inside": ("mixed", 2, True),
}
# Two cases have all kinds of layers, one or more microbatches, the optimizer inside or outside.
SHORT = ("moe, 1 microbatch, optimizer outside", "mixed, 2 microbatches, optimizer inside")
SOME = [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long) for kind in RUNS]


@pytest.mark.parametrize("kind", SOME)
def test_twenty_steps_are_bitwise_eager(device, kind):
    """Steps have dropout, jitter, clipping and a changing learning rate; validation between."""
    layers, microbatches, inside = RUNS[kind]
    options = dict(layers=layers, microbatches=microbatches, inside=inside)
    expected, _ = train(Run(device, graphed=False, **options), steps=20)
    run = Run(device, graphed=True, **options)
    found, _ = train(run, steps=20)
    found.assert_equal(expected)
    report = run.step.report()
    assert (report.state, report.captures, report.matched) == ("captured", 1, 17)
    assert report.eager_calls == {"warmup": 3}
    assert report.kernels is None or report.kernels > 50
    assert run.validate.report().matched == 5


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead of time", "after warm-up"])
@pytest.mark.long
def test_a_run_that_is_saved_and_resumed_is_the_uninterrupted_run(device, ahead):
    uninterrupted = Run(device, graphed=True)
    expected, _ = train(uninterrupted, steps=14)
    first = Run(device, graphed=True)
    train(first, steps=7, total=14)
    # At its end `train` draws one number more than the run that goes on.
    state = copy.deepcopy(first.checkpoint)
    first.step.release()
    torch.rand(10, device=device)
    second = Run(device, graphed=True, warmup_steps=1)
    second.load(state)
    if ahead:
        second.step.capture(next(batches(device, 1)))
        second.load_rng(state)
    found, _ = train(second, steps=7, first=7, total=14)
    tail = [
        v for v in expected.values if v[0].startswith(tuple(f"step {i} " for i in range(7, 14)))
    ]
    expected_tail = Trace(tail)
    Trace([v for v in found.values if v[0].startswith("step ")]).assert_equal(expected_tail)
    assert second.step.report().matched == (7 if ahead else 6)


def test_a_state_that_is_loaded_into_a_captured_run(device):
    """An error is raised by default; on request the step is captured again."""
    expected, _ = train(Run(device, graphed=False), steps=12)
    run = Run(device, graphed=True, on_mismatch="recapture")
    train(run, steps=6, total=12)
    state = copy.deepcopy(run.checkpoint)
    train(run, steps=3, first=6, total=12)  # will be forgotten
    run.load(state)
    found, _ = train(run, steps=6, first=6, total=12)
    names = tuple(f"step {i} " for i in range(6, 12))
    tail = Trace([v for v in expected.values if v[0].startswith(names)])
    Trace([v for v in found.values if v[0].startswith("step ")]).assert_equal(tail)
    assert run.step.report().captures == 2


def forward_backward_func(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    forward_only: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Megatron's function without pipelining: losses of all microbatches."""
    losses = []
    model, iterator = (model[0], data_iterator[0]) if isinstance(model, list) else (
        model, data_iterator,
    )  # fmt: skip
    for _ in range(num_microbatches):
        with torch.set_grad_enabled(not forward_only):
            output, loss_func = forward_step_func(iterator, model)
            loss, reduced = loss_func(output)
        if not forward_only:
            (loss / num_microbatches).backward()
        losses.append(reduced)
    return losses


def forward_step(iterator: Iterator[Any], model: nn.Module):
    tokens = next(iterator)["tokens"]
    return tokens, lambda tokens: ((loss := loss_of(model, tokens)[0]), {"lm loss": loss.detach()})


@pytest.mark.parametrize(
    "several",
    [
        pytest.param(False, id="iterator", marks=pytest.mark.long),
        pytest.param(True, id="list of iterators"),
    ],
)
def test_the_signature_of_megatron(device, several):
    traces = []
    for graphed in (False, True):
        model = tiny_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = None
        if graphed:
            schedule = GraphedForwardBackward(forward_backward_func, on_mismatch="error")
        function, trace = schedule or forward_backward_func, Trace()
        loader = StaticLoader(_rows(40), device, held=4)
        iterator = iter(loader)
        torch.manual_seed(3)
        for step in range(8):
            for forward_only in (False, True) if step % 2 else (False,):
                losses = function(
                    forward_step_func=forward_step,
                    data_iterator=[iterator] if several else iterator,
                    model=[model] if several else model,
                    num_microbatches=2,
                    seq_length=32,
                    forward_only=forward_only,
                )
                for number, each in enumerate(losses):
                    trace.note(f"step {step} {forward_only} {number}", each["lm loss"])
            optimizer.step()
            optimizer.zero_grad()
        trace.note_state(model, "end")
        traces.append(trace)
    traces[1].assert_equal(traces[0])
    reports = schedule.reports()
    assert (reports["training"].matched, reports["validation"].matched) == (5, 1)
    with pytest.raises(GraphError, match=r"3 leaves|num_microbatches|not known"):
        function(
            forward_step_func=forward_step, data_iterator=iterator, model=model,
            num_microbatches=3, seq_length=32,
        )  # fmt: skip
    with pytest.raises(ValueError, match="StaticLoader.*held=5"):
        function(
            forward_step_func=forward_step, data_iterator=iterator, model=model,
            num_microbatches=5, seq_length=32,
        )  # fmt: skip
    schedule.release()


def _rows(count: int) -> Iterator[dict[str, torch.Tensor]]:
    for batch in itertools.islice(batches("cpu", count), count):
        yield {"tokens": batch["tokens"][0]}


@pytest.mark.parametrize("zeroed", ["within", "between"])
@pytest.mark.parametrize("view", [False, True], ids=["gradients", "views"])
def test_gradients_that_are_kept_over_steps(device, zeroed, view):
    """An eager step makes new gradients, a graph writes to the same memory."""

    def train(graphed):
        torch.manual_seed(0)
        model, kept = torch.nn.Linear(4, 4).to(device), []

        def plain(x):
            if zeroed == "within":
                model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        step = FullIteration(plain, model=model) if graphed else plain
        for _ in range(7):
            step(torch.randn(3, 4).to(device))
            gradient = model.weight.grad
            kept.append(gradient[:2] if view else gradient)
            with torch.no_grad():
                model.weight -= 0.1 * gradient
            del gradient
            if zeroed == "between":
                model.zero_grad()
        return kept, step.report() if graphed else None

    expected, _ = train(False)
    told = pytest.warns(GraphWarning, match="gradients_held.*clone") if view else nullcontext()
    with told:
        found, report = train(True)
    assert all(map(torch.equal, found, expected))
    eager = {"warmup": 3, "gradients_held": 3} if view else {"warmup": 3}
    assert report.eager_calls == eager


@pytest.mark.parametrize("zeroed", ["within", "between"])
def test_gradients_that_nobody_keeps_are_not_moved(device, zeroed, monkeypatch):
    """The ``.grad`` of the last step is no holder, although it is a reference."""
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(buffer_lease, "_move_alone", moved.append)
    model = torch.nn.Linear(4, 4).to(device)

    def plain(x):
        if zeroed == "within":
            model.zero_grad()
        model(x).square().mean().backward()

    step = FullIteration(plain, model=model)
    for _ in range(7):
        step(torch.randn(3, 4).to(device))
        if zeroed == "between":
            model.zero_grad()
    assert step.report().matched == 4
    assert not moved


def test_the_storage_of_a_gradient_that_is_kept_does_not_change(device):
    """Python's object for a storage is a reference that the storage itself does not count."""
    model = torch.nn.Linear(4, 4).to(device)

    def plain(x):
        model.zero_grad()
        model(x).square().mean().backward()

    step = FullIteration(plain, model=model, audit_every=None)
    for _ in range(5):
        step(torch.randn(3, 4).to(device))
    kept, expected = model.weight.grad.untyped_storage(), model.weight.grad.clone()
    step(torch.randn(3, 4).to(device))
    assert torch.equal(torch.empty(0, device=device).set_(kept, 0, (4, 4)), expected)
    assert step.report().eager_calls == {"warmup": 3, "gradients_held": 1}
