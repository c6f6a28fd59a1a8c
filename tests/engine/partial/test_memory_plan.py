"""Memory of a capture, predicted before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import GraphConfig, GraphError, GraphWarning
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.partial.plan import (
    CallMemory,
    ChunkMemory,
    MemoryPlan,
    Plan,
    PlannedChunk,
    memory_plan,
)
from moe_graphs.engine.tracing import Trace
from training_runs import DEVICES, loss_of, microbatches, tiny_model

KIB = 1024


def call(name: str, **sizes: int) -> CallMemory:
    values = dict(inputs=0, linked=0, outputs=0, saved=0, forward=0, backward=0, gradients=0)
    return CallMemory(scope=name, **(values | sizes))


def test_a_pool_holds_what_is_kept_and_the_largest_temporaries():
    first = call("a", outputs=1, saved=10, forward=12, backward=30)
    second = call("b", outputs=2, saved=20, forward=21, backward=5)
    # Forwards: 12, 10 + 21. Backwards: 30 + 5, then 30 - 18 + 30.
    assert ChunkMemory((first, second), 1, split=False).pool() == 42
    # With later weight gradients nothing is freed between backwards.
    assert ChunkMemory((first, second), 1, split=True).pool() == 60


def test_weights_gradients_in_place_stay_in_the_pool():
    first = call("a", outputs=1, saved=10, forward=12, backward=30, weights=7)
    second = call("b", outputs=2, saved=20, forward=21, backward=25, weights=20)
    # Backwards: 30 + 25, then 30 - 18 + 20 + 30.
    assert ChunkMemory((first, second), 1, split=False).pool() == 62
    plan = Plan((PlannedChunk((0, 1), slots=1),))
    measured = {0: first, 1: second}
    assert memory_plan(plan, measured, False, copied=()).pool_bytes == 62
    assert memory_plan(plan, measured, False, copied=("b",)).pool_bytes == 55
    assert memory_plan(plan, measured, False).pool_bytes == 55
    two_slots = Plan((PlannedChunk((0, 1), slots=2),))
    assert memory_plan(two_slots, measured, False).pool_bytes == 2 * 55
    # Forwards: 10 + 21 in each; backwards by turns: 30.
    shared = memory_plan(two_slots, measured, False, copied=())
    assert (shared.backwards, shared.pool_bytes) == (30, 2 * 31 + 30)
    assert "backwards, by turns 30 B" in str(shared)


def test_totals_and_table():
    chunk = ChunkMemory((call("layers.0", inputs=KIB, saved=2**21, forward=2**21),), 3, False)
    plan = MemoryPlan((chunk,), gradients=2**20)
    assert plan.pool_bytes == 3 * 2**21
    assert plan.total_bytes == 3 * (2**21 + KIB) + 2**20
    assert plan.to_dict()["total_bytes"] == plan.total_bytes
    lines = str(plan).splitlines()
    assert lines[0].split() == [
        "scope",
        "inputs",
        "linked",
        "outputs",
        "saved",
        "forward",
        "backward",
    ]
    assert lines[1].split()[:3] == ["layers.0", "1.0", "KiB"]
    assert lines[1].count("2.0 MiB") == 2
    assert lines[2].startswith("chunk 0: microbatches in flight 3, each with a pool of 2.0 MiB")
    assert lines[3].startswith("incoming gradients 1.0 MiB; total 7.0 MiB, sharing saves ")


@pytest.mark.parametrize("device", DEVICES)
def test_the_meter_counts_what_is_alive_and_the_peak(device):
    x = torch.zeros(256, device=device)
    meter = backend_for([x]).meter()
    with meter, Trace(x.device, [x]):  # it is told of the operations of trial runs
        y = x + 1
        z = (y * 2).sum()
        y.mul_(3)
        v = y.view(16, 16)
    scalar = z.nbytes if device == "cpu" else 512  # the allocator's smallest block
    assert meter.alive() == y.nbytes + scalar
    assert meter.peak() >= 2 * y.nbytes + scalar
    assert v.shape == (16, 16)


@pytest.mark.parametrize("device", DEVICES)
def test_known_sizes(device):
    width, rows = 16, 8
    model = nn.Sequential(nn.Linear(width, width), nn.Sigmoid()).to(device)
    graphs = moe_graphs.graph(model, GraphConfig(["[01]"], warmup_steps=2))
    with pytest.raises(GraphError, match="no step was observed"):
        graphs.plan()
    x = torch.randn(rows, width, device=device)
    reserved = []
    for _ in range(2):
        with graphs.step():
            model(x).sum().backward()
        plan = graphs.plan()
        reserved.append(graphs.report().pool_bytes)
    assert reserved[0] == 0  # the plan was there before the capture
    linear, sigmoid = plan.chunks[0].calls
    size = x.nbytes
    assert (linear.inputs, linear.linked, linear.outputs, linear.gradients) == (size, 0, size, size)
    assert (sigmoid.inputs, sigmoid.linked, sigmoid.outputs) == (0, size, size)
    assert linear.saved >= size  # its output; its input is an input
    assert plan.gradients == size
    assert graphs.report().predicted_pool_bytes == plan.pool_bytes > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("warmup_steps", [1, 2])
def test_a_limit_is_refused_with_the_table_and_training_goes_on(device, warmup_steps):
    model = tiny_model(device)
    config = GraphConfig("attn,moe,mlp", warmup_steps=warmup_steps, memory_limit=1000)
    graphs = moe_graphs.graph(model, config)
    data = [tokens for (tokens, _) in microbatches(device, 2)]
    with pytest.warns(GraphWarning, match=r"memory_limit is 1,000.*\n *scope +inputs"):
        with graphs.step():
            loss_of(model, data[0])[0].backward()
    assert graphs.report().state == "capture_failed"
    with graphs.step():
        loss_of(model, data[1])[0].backward()


@pytest.mark.gpu
def test_predicted_and_measured_on_a_gpu():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(4))
    ).cuda()
    graphs = moe_graphs.graph(model, GraphConfig(["[0-3]"], warmup_steps=1))
    x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    for _ in range(2):  # warm-up, capture
        with graphs.step():
            losses = [model(x).square().mean() for _ in range(2)]
            for loss in losses:
                loss.backward()
    report = graphs.report()
    assert report.slots == (2,)
    assert 0.95 < report.pool_bytes / report.predicted_pool_bytes < 1.15, report
