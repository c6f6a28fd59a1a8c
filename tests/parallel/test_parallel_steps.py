"""Whole steps of sharded models: graphed equals eager bit for bit, by gloo and the CPU recorder."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

import moe_graphs
from distributed import run_distributed
from full_iterations import batches, optimizer_of
from moe_graphs import FullIteration, GraphConfig, GraphError
from moe_graphs.parallel import ParallelConfig
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_norm import local_part
from parallel_runs import compare, keep_losses_and_evaluate, laid_out, local_state, step_of
from training_runs import Trace, loss_of

OF_TWO = [{"dp_shard": 2, "mixed": True}, {"dp_shard": 2, "ep": 2, "reshard_after_forward": False}]
OF_FOUR = [{"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}]


@pytest.mark.long
@pytest.mark.parametrize("layouts", [OF_TWO, OF_FOUR], ids=["two ranks", "four ranks"])
def test_graphed_is_eager(layouts):
    ranks = layouts[0].get("dp_replicate", 1) * layouts[0]["dp_shard"]
    first, *others = run_distributed(compare, ranks, arguments=("cpu", layouts, 20))
    assert others == [first] * (ranks - 1)  # all ranks know the whole norm
    assert all(0 < norm < 10 for norms in first for norm in norms)


def go_wrong(rank: int, world_size: int) -> dict[str, str]:
    """Messages of all cases that a replay would not do as eager does, by name."""
    model, _ = laid_out("cpu", ParallelConfig(dp_shard=world_size))
    optimizer = optimizer_of(model, "cpu")
    update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True)
    told = {}
    try:
        moe_graphs.graph(model, GraphConfig(scopes=["attn"]))
    except ValueError as error:
        told["scopes"] = str(error)
    given = list(batches("cpu", 8, 2, seed=rank))
    options = {"model": model, "optimizer": optimizer, "state": [update], "verify": False}
    step = FullIteration(step_of(model, update), on_mismatch="error", warmup_steps=1, **options)
    step(given[1])
    step(given[2])
    model.set_requires_gradient_sync(False)
    try:
        step(given[3])
    except GraphError as error:
        told["settings"] = str(error)
    model.set_requires_gradient_sync(True)
    model.register_forward_hook(lambda *args: None)
    try:
        step(given[4])
    except GraphError as error:
        told["hooks"] = str(error)
    return told


@pytest.mark.long
def test_what_a_replay_would_not_do_is_refused():
    for told in run_distributed(go_wrong, 2):
        assert "reshard_after_forward=False, too" in told["scopes"]
        assert "FullIteration" in told["scopes"]
        assert "settings of fully_shard (set_requires_gradient_sync" in told["settings"]
        assert "hooks" in told["hooks"]


def leave_gradients(world_size: int, graphed: bool) -> Trace:
    """Leave gradients to an update outside of the steps.

    The first of two steps makes the gradients, the second adds to them. The gradients of each
    update are kept, because the next step must not write to their memory.
    """
    model, _ = laid_out("cpu", ParallelConfig(dp_shard=world_size))
    optimizer = optimizer_of(model, "cpu")

    def train(batch, drop):
        if drop:
            optimizer.zero_grad()
        loss = loss_of(model, batch["tokens"][0])[0]
        loss.backward()
        return loss.detach()

    steps = [functools.partial(train, drop=drop) for drop in (True, False)]
    if graphed:
        options = {"model": model, "on_mismatch": "error", "warmup_steps": 1}
        steps = [FullIteration(step, **options) for step in steps]
    torch.manual_seed(0)
    trace, kept = Trace(), []
    for index, batch in enumerate(batches("cpu", 8, seed=dist.get_rank())):
        trace.note(f"loss {index}", steps[index % 2](batch))
        if index % 2:
            kept += [parameter.grad for parameter in model.parameters()]
            optimizer.step()
    for gradient in kept:
        trace.note("gradient", local_part(gradient))
    for name, tensor in local_state(model):
        trace.note(name, tensor)
    return trace


def evaluate_in_between(rank: int, world_size: int) -> list[list[float]]:
    """Evaluate between replays: a forward without a backward leaves parameters gathered.

    Replays must not leave these gathered parameters old. Gradients may leave a graph as well.
    """
    leave_gradients(world_size, True).assert_equal(leave_gradients(world_size, False))
    seen = []
    for graphed in (False, True):
        model, _ = laid_out("cpu", ParallelConfig(dp_shard=world_size), dropout=0.0)
        optimizer = optimizer_of(model, "cpu")
        update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True)
        step = step_of(model, update)
        if graphed:
            options = {"model": model, "optimizer": optimizer, "state": [update]}
            step = FullIteration(step, on_mismatch="error", warmup_steps=1, **options)
        losses = []
        for batch in batches("cpu", 6, 2, seed=rank):
            losses.append(_evaluated(model, batch))
            step(batch)
            losses.append(_evaluated(model, batch))
        seen.append(losses)
    return seen


def _evaluated(model, batch) -> float:
    with torch.no_grad():
        return loss_of(model, batch["tokens"][0])[0].item()


@pytest.mark.long
def test_evaluations_between_replays_see_the_new_parameters():
    """The ranks themselves compare the gradients between replays."""
    for eager, graphed in run_distributed(evaluate_in_between, 2):
        assert graphed == eager
        assert all(a != b for a, b in itertools.pairwise(eager))


@pytest.mark.long
def test_losses_kept_and_evaluations_between_steps():
    """An evaluation leaves FSDP2 in another state than a step; audits run from the captured one."""
    found = run_distributed(keep_losses_and_evaluate, 2, "gloo", arguments=("cpu",))
    for eager, graphed in found:
        assert graphed == eager
