"""Whole steps of sharded models: graphed is eager bit for bit, on gloo and the CPU recorder."""

from __future__ import annotations

import itertools

import pytest
import torch

import moe_graphs
from distributed import run_distributed
from full_iterations import batches, optimizer_of
from moe_graphs import CaptureError, FullIteration, GraphConfig, GraphError
from moe_graphs.parallel import ParallelConfig
from moe_graphs.training.device_step import DeviceStep
from parallel_runs import compare, laid_out, step_of
from training_runs import loss_of

OF_TWO = [{"dp_shard": 2, "mixed": True}, {"dp_shard": 2, "ep": 2, "reshard_after_forward": False}]
OF_FOUR = [{"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}]


@pytest.mark.parametrize("layouts", [OF_TWO, OF_FOUR], ids=["two ranks", "four ranks"])
def test_graphed_is_eager(layouts):
    ranks = layouts[0].get("dp_replicate", 1) * layouts[0]["dp_shard"]
    # The scaler grows behind the sixth step, which is a replay; of 20 steps on GPUs.
    first, *others = run_distributed(compare, ranks, arguments=("cpu", layouts, 8))
    assert others == [first] * (ranks - 1)  # all know the norm of the whole
    assert all(0 < norm < 10 for norms in first for norm in norms)


def go_wrong(rank: int, world_size: int) -> dict[str, str]:
    """Everything that a replay would not do as eager does it, each told by name."""
    model, _ = laid_out("cpu", ParallelConfig(dp_shard=world_size))
    optimizer = optimizer_of(model, "cpu")
    update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True)
    told = {}
    try:
        moe_graphs.graph(model, GraphConfig(scopes=["attn"]))
    except ValueError as error:
        told["scopes"] = str(error)

    def leaves_gradients(batch):
        loss = loss_of(model, batch["tokens"][0])[0]
        loss.backward()
        return loss.detach()

    given = list(batches("cpu", 8, 2, seed=rank))
    try:
        FullIteration(leaves_gradients, model=model, verify=False).capture(given[0])
    except CaptureError as error:
        told["gradients"] = str(error)
    optimizer.zero_grad()
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


def test_what_a_replay_would_not_do_is_refused():
    for told in run_distributed(go_wrong, 2):
        assert "reshard_after_forward=False, too" in told["scopes"]
        assert "FullIteration" in told["scopes"]
        assert "leaves embedding.weight.grad, a DTensor" in told["gradients"]
        assert "settings of fully_shard (set_requires_gradient_sync" in told["settings"]
        assert "hooks" in told["hooks"]


def evaluate_in_between(rank: int, world_size: int) -> list[list[float]]:
    """A forward without a backward leaves parameters gathered: replays must not leave them old."""
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


def test_evaluations_between_replays_see_the_new_parameters():
    for eager, graphed in run_distributed(evaluate_in_between, 2):
        assert graphed == eager
        assert all(a != b for a, b in itertools.pairwise(eager))
