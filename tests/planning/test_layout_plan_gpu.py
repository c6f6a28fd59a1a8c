"""Plans against what torch's allocator has given out at most, within five per cent."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import pytest
import torch

from distributed import run_distributed
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.run_presets import small
from moe_graphs.lm.settings import build_optimizer
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.layout_plan import plan_layout
from moe_graphs.planning.planned_step import PlannedStep
from moe_graphs.training.device_step import DeviceStep
from planned_layouts import laid_out

STEP = PlannedStep(sequences=16, sequence_length=1024)  # of a rank: some ten GiB
GATHERED = replace(STEP, dispatcher="all_gather")
IN_PARTS = replace(STEP, sequences=4, microbatches=4)
IN_TURN = replace(IN_PARTS, schedule="interleaved_1f1b", stages_per_rank=2)
OF_TWO = [
    ({"dp_shard": 2}, STEP),
    ({"dp_shard": 2, "reshard_after_forward": False}, STEP),
    ({"dp_replicate": 2}, STEP),
    ({"dp_shard": 2, "ep": 2}, STEP),
    ({"dp_shard": 2, "ep": 2}, GATHERED),
    ({"dp_shard": 2, "ep": 2}, replace(STEP, dispatcher="symmetric")),
    ({"tp": 2}, STEP),
    ({"cp": 2}, STEP),
    ({"pp": 2}, IN_PARTS),
    ({"pp": 2}, replace(IN_PARTS, schedule="gpipe")),
    ({"pp": 2}, IN_TURN),
]
OF_FOUR = [
    ({"dp_shard": 4, "ep": 2}, STEP),
    ({"dp_replicate": 2, "dp_shard": 2}, STEP),
    ({"dp_shard": 2, "tp": 2}, STEP),
    ({"dp_shard": 2, "cp": 2}, STEP),
    ({"pp": 4}, IN_PARTS),
    ({"pp": 2, "dp_shard": 2}, IN_PARTS),
    ({"pp": 2, "dp_shard": 2, "ep": 2}, replace(IN_TURN, dispatcher="all_gather")),
]


def most_allocated(device: str, degrees: dict, step: PlannedStep) -> int:
    """Of a third step, in bytes."""
    torch.manual_seed(0)
    preset, layout = small(), ParallelConfig(**degrees)
    gc.collect()  # the layout before this one
    before = torch.cuda.memory_allocated()
    model = LanguageModel(preset.model, device=device)
    laid = laid_out(model, device, layout, step)
    stages = {} if laid.pipeline is None else {"stage_group": laid.mesh["pp"].get_group()}
    optimizer = build_optimizer(model, preset.training)
    update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True, **stages)
    tokens_BS = torch.randint(256, laid.tokens, device=device)
    for number in range(3):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        laid.run(tokens_BS)
        update()
    return torch.cuda.max_memory_allocated() - before


def check(degrees: dict, step: PlannedStep, measured: list[int]) -> None:
    """By rank. Plans have balanced routing: of those with the same stages some get more rows, and
    others as many less."""
    layout = ParallelConfig(**degrees)
    plan = plan_layout(small().model, layout, step)
    alike = layout.world_size // layout.pp
    errors = []
    for number, rank in enumerate(plan.ranks):
        mean = sum(measured[number * alike : (number + 1) * alike]) / alike
        errors.append(rank.memory / mean - 1)
        of_what = f"{degrees} {step.dispatcher} {step.schedule}, rank {number} of pp"
        print(f"{of_what}: planned {rank.memory:,}, measured {mean:,.0f}: {errors[-1]:+.1%}")
    assert all(abs(error) < 0.05 for error in errors), (degrees, step, errors, plan)


def on_rank(rank: int, world_size: int, layouts: list) -> list[int]:
    return [most_allocated("cuda", *each) for each in layouts]


@pytest.mark.gpu
def test_one_gpu():
    check({}, STEP, [most_allocated("cuda", {}, STEP)])


@pytest.mark.multigpu
def test_several_gpus():
    ranks = 4 if os.environ.get("RANKS") == "4" else 2
    layouts = OF_FOUR if ranks == 4 else OF_TWO
    every = run_distributed(on_rank, ranks, "nccl", arguments=(layouts,), timeout_seconds=500)
    for (degrees, step), *measured in zip(layouts, *every, strict=True):
        check(degrees, step, measured)
