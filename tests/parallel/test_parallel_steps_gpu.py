"""Whole steps of sharded models over NCCL: graphed is eager bit for bit."""

from __future__ import annotations

import os

import pytest
import torch
from test_layouts import compare_with_one_process

from distributed import run_distributed
from full_iterations import batches, optimizer_of
from moe_graphs import FullIteration
from moe_graphs.parallel import ParallelConfig
from moe_graphs.training.device_step import DeviceStep
from parallel_runs import compare, laid_out, step_of
from training_runs import loss_of

pytestmark = pytest.mark.multigpu
OF_TWO = [
    {"dp_shard": 2, "reshard_after_forward": True},
    {"dp_shard": 2, "reshard_after_forward": False},
    {"dp_replicate": 2},
    {"dp_shard": 2, "ep": 2, "mixed": True},
]
OF_FOUR = [
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 4, "ep": 2, "reshard_after_forward": False},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
]


def layouts_and_ranks() -> list:
    four = os.environ.get("RANKS") == "4"
    return [(OF_TWO, 2), *([(OF_FOUR, 4)] if four else [])]


@pytest.mark.parametrize(("layouts", "ranks"), layouts_and_ranks())
def test_graphed_is_eager(layouts, ranks):
    """Twenty steps have two microbatches, dropout, clipping, a scaler and an expert bias."""
    first, *others = run_distributed(
        compare, ranks, "nccl", arguments=("cuda", layouts, 20), timeout_seconds=300
    )
    assert all(0 < norm < 100 for norms in first for norm in norms)
    for norms in others:
        assert norms == first


def keep_losses_and_evaluate(rank: int, world_size: int) -> list[list[float]]:
    """Keep losses of eager steps alive, and evaluate between steps.

    The losses belong to the default stream, whose gradient accumulators a capture must not meet.
    Evaluations leave parameters gathered.
    """
    seen = []
    for graphed in (False, True):
        model, _ = laid_out("cuda", ParallelConfig(dp_shard=world_size), dropout=0.0)
        optimizer = optimizer_of(model, "cuda")
        update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True)
        step = step_of(model, update)
        if graphed:
            options = {"model": model, "optimizer": optimizer, "state": [update]}
            step = FullIteration(step, on_mismatch="error", warmup_steps=1, **options)
        losses, held = [], []
        for index, batch in enumerate(batches("cuda", 6, 2, seed=rank)):
            if index == 0:
                held.append(loss_of(model, batch["tokens"][0])[0])
                held[0].backward(retain_graph=False)
                optimizer.zero_grad()
            losses.append(_evaluated(model, batch))
            step(batch)
            losses.append(_evaluated(model, batch))
        seen.append(losses)
        if graphed:
            assert step.report().matched == 5, step.report()
            step.release()
    return seen


def _evaluated(model, batch) -> float:
    with torch.no_grad():
        return loss_of(model, batch["tokens"][0])[0].item()


def test_losses_kept_and_evaluations_between_replays():
    for eager, graphed in run_distributed(keep_losses_and_evaluate, 2, "nccl", timeout_seconds=240):
        assert graphed == eager
        assert len(set(eager)) > 6  # losses change, so training goes on


def test_training_is_that_of_one_process_on_the_whole_batch():
    """Weights are in fp32, products in bf16, and ranks sum in another order."""
    layouts = [{"dp_shard": 2}, {"dp_shard": 2, "ep": 2}]
    arguments = (layouts, "cuda")
    for found in run_distributed(compare_with_one_process, 2, "nccl", arguments=arguments):
        for norm, parameter in found:
            assert norm < 2e-2
            assert parameter < 2e-2
