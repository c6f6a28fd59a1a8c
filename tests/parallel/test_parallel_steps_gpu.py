"""Whole steps of sharded models over NCCL: graphed is eager bit for bit."""

from __future__ import annotations

import os

import pytest
from test_layouts import compare_with_one_process

from distributed import run_distributed
from parallel_runs import compare, keep_losses_and_evaluate

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


def test_losses_kept_and_evaluations_between_replays():
    for eager, graphed in run_distributed(
        keep_losses_and_evaluate, 2, "nccl", arguments=("cuda",), timeout_seconds=240
    ):
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
