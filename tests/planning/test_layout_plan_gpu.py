"""Plans against the peak of torch's allocator, within five per cent.

PLANS_OUT=FILE appends a line of JSON for every rank of a pipeline, and for every other layout.

Neither the allocator nor plans count CUDA's context and NCCL's buffers. The allocator counts
cuBLAS' workspaces, some tens of MiB, which are made and measured in the first layout alone.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import PRELOADED, run_distributed
from moe_graphs.bench import environment
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.optimizers import build_optimizer
from moe_graphs.lm.run_presets import small
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.layout_plan import LayoutPlan, plan_layout
from moe_graphs.planning.planned_step import PlannedStep
from moe_graphs.training.device_step import DeviceStep
from planned_layouts import laid_out

STEP = PlannedStep(sequences=16, sequence_length=1024)  # some ten GiB per rank
GATHERED = replace(STEP, dispatcher="all_gather")
MIXED = replace(STEP, mixed_precision=True)
IN_PARTS = replace(STEP, sequences=4, microbatches=4)
IN_TURN = replace(IN_PARTS, schedule="interleaved_1f1b", stages_per_rank=2)
OF_TWO = [
    ({"dp_shard": 2}, STEP),
    ({"dp_shard": 2, "reshard_after_forward": False}, STEP),
    ({"dp_shard": 2, "layers_per_group": 3}, STEP),
    ({"dp_shard": 2}, MIXED),
    ({"dp_replicate": 2}, STEP),
    ({"dp_shard": 2, "ep": 2}, STEP),
    ({"dp_shard": 2, "ep": 2}, GATHERED),
    ({"dp_shard": 2, "ep": 2}, replace(STEP, dispatcher="symmetric")),
    ({"tp": 2}, STEP),
    ({"cp": 2}, STEP),
    ({"cp": 2, "ep": 2}, GATHERED),
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
    """Peak bytes of the allocator in a third step."""
    torch.manual_seed(0)
    preset, layout = small(), ParallelConfig(**degrees)
    gc.collect()  # frees the layout before this one
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


def planned(layout_and_step: tuple[dict, PlannedStep]) -> LayoutPlan:
    degrees, step = layout_and_step
    return plan_layout(small().model, ParallelConfig(**degrees), step)


def lines_of(
    degrees: dict, step: PlannedStep, plan: LayoutPlan, measured: list[int]
) -> list[dict[str, Any]]:
    """Lines that compare a plan with the ``measured`` bytes of each rank.

    Plans have balanced routing. In reality some of the ranks with the same stages get more rows and
    others fewer.
    """
    alike = ParallelConfig(**degrees).world_size // len(plan.ranks)
    lines = []
    for number, rank in enumerate(plan.ranks):
        found = measured[number * alike : (number + 1) * alike]
        error = rank.memory / (sum(found) / alike) - 1
        lines.append({
            "model": "small", "layout": degrees, "dispatcher": step.dispatcher,
            "mixed_precision": step.mixed_precision, "schedule": step.schedule,
            "tokens": step.tokens, "microbatches": step.microbatches, "rank_of_pp": number,
            "planned_bytes": rank.memory, "measured_bytes": found, "relative_error": error,
        })  # fmt: skip
    return lines


def check(lines: list[dict[str, Any]]) -> None:
    """Print and keep all lines, then check them."""
    stamp = {"benchmark": "plans", "environment": environment.stamp(os.environ.get("COMMIT"))}
    text = "".join(json.dumps(line | stamp) + "\n" for line in lines)
    if out := os.environ.get("PLANS_OUT"):
        with Path(out).open("a") as file:
            file.write(text)
    for line in lines:
        measured = ", ".join(f"{each:,}" for each in line["measured_bytes"])
        of_what = f"{line['layout']} {line['dispatcher']} {line['schedule']}"
        print(f"{of_what}, rank {line['rank_of_pp']} of pp: planned {line['planned_bytes']:,}, "
              f"measured {measured}: {line['relative_error']:+.1%}")  # fmt: skip
    assert [line for line in lines if abs(line["relative_error"]) >= 0.05] == []


def on_rank(rank: int, world_size: int, layouts: list) -> list[int]:
    return [most_allocated("cuda", *each) for each in layouts]


@pytest.mark.gpu
def test_one_gpu():
    check(lines_of({}, STEP, planned(({}, STEP)), [most_allocated("cuda", {}, STEP)]))


@pytest.mark.multigpu
def test_several_gpus():
    """Ranks run all layouts in one process group while other processes make the plans."""
    ranks = 4 if os.environ.get("RANKS") == "4" else 2
    layouts = OF_FOUR if ranks == 4 else OF_TWO
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(4, mp_context=context) as pool:
        plans = pool.map(planned, layouts)
        every = run_distributed(on_rank, ranks, "nccl", arguments=(layouts,), timeout_seconds=500)
        measured = zip(layouts, plans, zip(*every, strict=True), strict=True)
        check([line for each, plan, m in measured for line in lines_of(*each, plan, list(m))])
