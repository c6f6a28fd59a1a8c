"""Layers that FSDP2 gathers together: fewer groups, with the numbers of one group per layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distributed import run_distributed
from moe_graphs.engine.whole_step.fsdp import Sharding
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.layout_plan import PlannedStep, plan_layout
from parallel_runs import laid_out, train
from training_runs import tiny_model

STEPS, LAYERS = 5, {"layers": "mixed", "count": 4}
OF_TWO = [({"dp_shard": 2}, 3), ({"dp_shard": 2, "ep": 2, "reshard_after_forward": False}, 2)]
OF_FOUR = [({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 2)]


def _groups(config: ParallelConfig) -> int:
    return len(Sharding(laid_out("cpu", config, **LAYERS)[0]).groups)


def _same_numbers(rank: int, world_size: int, device: str, cases: list) -> list[tuple[int, int]]:
    """Compare whole steps, first eager and then graphed, with eager ones of one group per layer."""
    counts = []
    for degrees, size in cases:
        single = ParallelConfig(**degrees)
        grouped = replace(single, layers_per_group=size)
        expected = train(rank, device, single, False, STEPS, **LAYERS)
        train(rank, device, grouped, True, STEPS, **LAYERS).assert_equal(expected)
        if device == "cpu":
            counts.append((_groups(single), _groups(grouped)))
    return counts


@pytest.mark.long
@pytest.mark.parametrize("cases", [OF_TWO, OF_FOUR], ids=["two ranks", "four ranks"])
def test_numbers_are_those_of_one_group_a_layer(cases):
    """The model has four layers, two of them with experts; a group of three leaves one layer."""
    ranks = ParallelConfig(**cases[0][0]).world_size
    for found in run_distributed(_same_numbers, ranks, arguments=("cpu", cases)):
        # Two more groups have the embedding, and norm and head.
        counts = {(): (6, 4), ("ep",): (8, 6)}
        assert found == [counts[("ep",) if "ep" in degrees else ()] for degrees, _ in cases]


@pytest.mark.multigpu
def test_numbers_are_those_of_one_group_a_layer_over_nccl():
    run_distributed(_same_numbers, 2, "nccl", arguments=("cuda", OF_TWO), timeout_seconds=300)


def _saved(rank: int, world_size: int) -> bool:
    """Whether names, shapes and shards of a checkpoint are those of one group per layer."""
    single = ParallelConfig(dp_shard=2, ep=2)
    models = [
        laid_out("cpu", c, **LAYERS)[0] for c in (single, replace(single, layers_per_group=4))
    ]
    first, second = (
        {name: (value.shape, getattr(value, "placements", None)) for name, value in state.items()}
        for state in (model.state_dict() for model in models)
    )
    return list(first.items()) == list(second.items())


def test_checkpoints_are_the_same():
    assert run_distributed(_saved, 2) == [True, True]


def test_plans_count_the_layers_that_are_gathered_at_once():
    step = PlannedStep(sequences=2, sequence_length=32, on_gpus=False)
    config = tiny_model("cpu", "moe", count=4).config
    plans = [
        plan_layout(config, ParallelConfig(dp_shard=2, layers_per_group=size), step)
        for size in (1, 2)
    ]
    single, grouped = (plan.most.estimated for plan in plans)
    for name in ("gathered weights", "gradients before their reduction"):
        assert 1.5 * single[name] < grouped[name] <= 2 * single[name]
    assert plans[0].most.wire == plans[1].most.wire
