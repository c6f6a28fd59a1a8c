"""A capture leaves no trace: not when it succeeds, not when it fails, not ahead of time."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

import moe_graphs
from grids import by_turns
from moe_graphs import GraphConfig, GraphError, GraphWarning
from moe_graphs.engine.partial.capture import Recorder
from training_runs import DEVICES, Trace, loss_of, microbatches, tiny_model, train

pytestmark = pytest.mark.parametrize("device", DEVICES)
RECIPE = "attn,moe_router,moe_preprocess"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Trace:
    """Parameters, gradients, buffers, optimizer state and random numbers, by value."""
    trace = Trace()
    trace.note_state(model, "now")
    for name, parameter in model.named_parameters():
        trace.note(f"grad {name}", parameter.grad)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            trace.note(f"{key} {name}", torch.as_tensor(value))
    trace.note("cpu rng", torch.get_rng_state())
    if device == "cuda":
        trace.note("cuda rng", torch.cuda.get_rng_state())
    return trace


def test_capturing_changes_nothing(device, monkeypatch):
    model = tiny_model(device)
    model.layers[0].unused = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graphs = moe_graphs.graph(model, GraphConfig(RECIPE, warmup_steps=2))
    states, original = [], Recorder.record_forward

    def watched(*arguments):
        states.append(state_of(model, optimizer, device))
        expected = original(*arguments)
        states.append(state_of(model, optimizer, device))
        return expected

    monkeypatch.setattr(Recorder, "record_forward", watched)
    for batches in microbatches(device, 3):
        optimizer.zero_grad()
        with graphs.step():
            for tokens in batches:
                loss_of(model, tokens)[0].backward()
        optimizer.step()
    assert len(states) == 2 * graphs.report().captured == 4
    for before, after in zip(states[::2], states[1::2], strict=True):
        before.assert_equal(after)
    assert model.layers[0].unused.grad is None
    assert gc.isenabled()
    assert graphs.report().state == "captured"


def _raise(*arguments):
    raise OSError("disk on fire")


def _exhaust(device: torch.device):
    if device.type == "cuda":
        return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError("out of memory")


FAILURES = {
    "exception": (_raise, "OSError: disk on fire"),
    "out of memory": (_exhaust, "OutOfMemoryError"),
}


@pytest.mark.parametrize(
    ("where", "failure"), by_turns(["_capture_forward", "_record"], list(FAILURES))
)
def test_a_failed_capture_leaves_an_eager_model_as_if_nothing_had_happened(
    device, monkeypatch, where, failure
):
    fail, message = FAILURES[failure]
    if failure == "out of memory" and device == "cpu":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    expected_model = tiny_model(device)
    off = moe_graphs.graph(expected_model, GraphConfig(impl="none"))
    expected = train(expected_model, off, device, steps=5)

    model = tiny_model(device)
    graphs = moe_graphs.graph(model, GraphConfig(RECIPE, warmup_steps=2))
    original, calls = getattr(Recorder, where), []

    def failing(recorder: Recorder, slot, taken, *arguments):
        calls.append((taken.site if where == "_record" else taken).name)
        if len(calls) == 2:  # one scope has been captured by then
            # The capture fails inside the recorded block.
            backend = recorder.backend
            patched = _failing_record(backend.record, backend.device, fail)
            monkeypatch.setattr(backend, "record", patched)
        return original(recorder, slot, taken, *arguments)

    monkeypatch.setattr(Recorder, where, failing)
    with pytest.warns(GraphWarning) as said:
        train(model, graphs, device, steps=5).assert_equal(expected)
    (error,) = (each.message for each in said)
    direction = "backward" if where == "_record" else "forward"
    assert f"scope {calls[1]!r}: capture of its {direction} failed" in str(error)
    assert message in str(error)
    report = graphs.report()
    assert (report.state, report.captured, report.matched) == ("capture_failed", 0, 0)
    assert report.eager_calls.keys() == {"warmup", "capture_failed"}
    assert report.off_because == str(error)
    assert gc.isenabled()
    assert report.pool_bytes == 0


def _failing_record(record, device, fail):
    @contextlib.contextmanager
    def failing(pool):
        with record(pool) as graphs:
            yield graphs
            fail(device)

    return failing


def test_the_memory_of_released_and_of_failed_graphs_comes_back(device):
    if device == "cpu":
        pytest.skip("waits for a CUDA GPU: the CPU recorder has no memory pool")
    gc.collect()  # engines of other tests, whose workspaces would be kept for all
    model = tiny_model(device)
    off = moe_graphs.graph(model, GraphConfig(impl="none"))
    train(model, off, device, steps=2)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        graphs = moe_graphs.graph(model, GraphConfig("attn,moe,mlp", warmup_steps=1))
        train(model, graphs, device, steps=3)
        model.zero_grad()
        assert graphs.report().pool_bytes > 0
        graphs.release()
        assert graphs.report().pool_bytes == 0
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before


# ---- ahead of time


def steps_of(model, device, optimizer=None):
    data = iter(microbatches(device, 100, seed=3))

    def step():
        for tokens in next(data):
            loss_of(model, tokens)[0].backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_capture_ahead_of_time_changes_nothing_and_replays_from_the_first_step(
    device, with_optimizer
):
    model = tiny_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = state_of(model, optimizer, device)
    gradients = [p.grad for p in model.parameters()]
    step = steps_of(model, device, optimizer if with_optimizer else None)
    config = GraphConfig(RECIPE, warmup_steps=2, on_mismatch="error")
    graphs = moe_graphs.graph(model, config)
    graphs.capture(step, optimizer if with_optimizer else None)
    state_of(model, optimizer, device).assert_equal(before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))

    expected_model = tiny_model(device)
    expected_model.load_state_dict(model.state_dict())
    generator = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    optimizer.zero_grad()
    found = train(model, graphs, device, steps=3)
    torch.set_rng_state(generator[0])
    if device == "cuda":
        torch.cuda.set_rng_state(generator[1])
    off = moe_graphs.graph(expected_model, GraphConfig(impl="none"))
    found.assert_equal(train(expected_model, off, device, steps=3))
    assert graphs.report().matched == 2 * 3 * graphs.report().captured


def test_a_step_that_updates_parameters_needs_its_optimizer(device):
    model = tiny_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model, optimizer, device)
    with pytest.raises(GraphError, match="pass optimizer="):
        moe_graphs.graph(model, GraphConfig(RECIPE)).capture(steps_of(model, device, optimizer))
    state_of(model, optimizer, device).assert_equal(before)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_step_that_fails_ahead_of_time_leaves_the_model_as_it_was(device):
    model = tiny_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model, optimizer, device)
    with pytest.raises(OSError, match="disk on fire"):
        moe_graphs.graph(model, GraphConfig(RECIPE)).capture(_raise)
    state_of(model, optimizer, device).assert_equal(before)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_the_report_adds_up(device):
    model = tiny_model(device)
    graphs = moe_graphs.graph(model, GraphConfig("full", warmup_steps=1))
    assert graphs.report().to_dict()["state"] == "warmup"
    train(model, graphs, device, steps=3)
    report = graphs.report()
    assert report.captured == len(report.scopes) == 2
    assert report.matched == sum(s.matched for s in report.scopes) == 2 * 2 * 2
    assert report.static_bytes > sum(s.static_bytes for s in report.scopes) > 0
    assert all(s.kernels > 0 and s.boundary_bytes > 0 for s in report.scopes)
    assert (report.pool_bytes > 0) == (device == "cuda")
    assert report.capture_seconds > 0
    assert report.backend == {"cpu": "cpu recorder", "cuda": "cuda graphs"}[device]


def test_steps_do_not_nest(device):
    graphs = moe_graphs.graph(tiny_model(device), GraphConfig("attn"))
    with graphs.step(), pytest.raises(GraphError, match="does not nest"), graphs.step():
        pass
