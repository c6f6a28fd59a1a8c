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
from moe_graphs.lm.trainer import autocast_of, cross_entropy
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, vocabulary_group
from moe_graphs.planning.layout_plan import PlannedStep, plan_layout
from moe_graphs.training.device_step import DeviceStep

SEQUENCES, LENGTH = 16, 1024  # of a rank: some ten GiB
OF_TWO = [
    ({"dp_shard": 2}, "all_to_all"),
    ({"dp_shard": 2, "reshard_after_forward": False}, "all_to_all"),
    ({"dp_replicate": 2}, "all_to_all"),
    ({"dp_shard": 2, "ep": 2}, "all_to_all"),
    ({"dp_shard": 2, "ep": 2}, "all_gather"),
    ({"dp_shard": 2, "ep": 2}, "symmetric"),
    ({"tp": 2}, ""),
]
OF_FOUR = [
    ({"dp_shard": 4, "ep": 2}, "all_to_all"),
    ({"dp_replicate": 2, "dp_shard": 2}, ""),
    ({"dp_shard": 2, "tp": 2}, ""),
]


def most_allocated(device: str, degrees: dict, dispatcher: str) -> int:
    """Of a third step, in bytes."""
    torch.manual_seed(0)
    preset, layout = small(), ParallelConfig(**degrees)
    gc.collect()  # the layout before this one
    before = torch.cuda.memory_allocated()
    model = LanguageModel(preset.model, device=device)
    if layout.world_size > 1:
        options = {"dispatcher": dispatcher} if layout.ep > 1 else {}
        parallelize(model, layout, make_mesh(layout, "cuda"), **options)
    update = DeviceStep(build_optimizer(model, preset.training), clip_norm=1.0, set_to_none=True)
    tokens_BS = torch.randint(256, (SEQUENCES, LENGTH), device=device)
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        with autocast_of(torch.device(device)):
            output = model(tokens_BS)
        loss = cross_entropy(output.logits_BSV, tokens_BS, vocabulary_group(model))
        (loss + output.aux_loss).backward()
        update()
    return torch.cuda.max_memory_allocated() - before


def check(degrees: dict, dispatcher: str, measured: int) -> None:
    step = PlannedStep(sequences=SEQUENCES, sequence_length=LENGTH)
    if ParallelConfig(**degrees).ep > 1:
        step = replace(step, dispatcher=dispatcher)
    plan = plan_layout(small().model, ParallelConfig(**degrees), step)
    error = plan.memory / measured - 1
    print(f"{degrees} {dispatcher}: planned {plan.memory:,}, measured {measured:,}: {error:+.1%}")
    assert abs(error) < 0.05, (degrees, dispatcher, error, plan)


def on_rank(rank: int, world_size: int, layouts: list) -> list[int]:
    return [most_allocated("cuda", *each) for each in layouts]


@pytest.mark.gpu
def test_one_gpu():
    check({}, "", most_allocated("cuda", {}, ""))


@pytest.mark.multigpu
def test_several_gpus():
    ranks = 4 if os.environ.get("RANKS") == "4" else 2
    layouts = OF_FOUR if ranks == 4 else OF_TWO
    every = run_distributed(on_rank, ranks, "nccl", arguments=(layouts,), timeout_seconds=300)
    for each, measured in zip(layouts, zip(*every, strict=True), strict=True):
        # Plans have balanced routing: some ranks get more rows, and others as many less.
        check(*each, sum(measured) // ranks)
