"""Pipelines: divided training is that of one process, and graphed scopes are eager bit for bit.

All tests with the same number of ranks share one spawn.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from distributed import RANKS, run_distributed
from moe_graphs import GraphConfig
from moe_graphs.parallel import ParallelConfig, Pipeline, make_mesh, parallelize, pipeline_stages
from moe_graphs.parallel.pipeline import layers_of_stages
from parallel_runs import told
from staged_training import (
    cross_entropy,
    furthest,
    train_divided,
    train_graphed,
    train_in_whole_steps,
    train_whole,
)
from training_runs import tiny_model

LAYERS, WHOLE, GRAPHED_STEPS = 4, 2, 6
OF_TWO: list[dict[str, Any]] = [
    {"pp": 2},
    {"pp": 2, "schedule": "gpipe", "whole_logits": True},
    {"pp": 2, "schedule": "interleaved_1f1b", "stages": 2},
]
# All layers have experts, since otherwise some rank's stages would have none.
GRAPHED = [
    ("attn,mlp,moe_router,moe_preprocess", OF_TWO[0]),
    ("attn,moe", {**OF_TWO[2], "kind": "moe"}),
]
OF_FOUR: list[dict[str, Any]] = [
    {"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "interleaved_1f1b", "stages": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "dp_replicate": 2, "reshard_after_forward": False},
]


def differences(rank: int, device: str, layouts: list[dict[str, Any]]) -> list[float]:
    """Differences from one process, for layouts with the same number of data-parallel ranks."""
    expected = train_whole(device, dist.get_world_size() // layouts[0]["pp"], LAYERS)
    assert expected.norms[0] > 0.2  # so that clipping changes gradients
    return [furthest(train_divided(device, layout, LAYERS), expected) for layout in layouts]


def graphed(rank: int, device: str, scopes: str, layout: dict[str, Any]) -> dict[str, Any]:
    eager = GraphConfig(impl="none")
    expected, _ = train_graphed(rank, device, layout, LAYERS, eager, GRAPHED_STEPS)
    config = GraphConfig(scopes, warmup_steps=2)
    trace, report = train_graphed(rank, device, layout, LAYERS, config, GRAPHED_STEPS)
    trace.assert_equal(expected)
    return {"replayed": report.matched, "eager": dict(report.eager_calls), "slots": report.slots}


def compare_whole_steps(rank: int, device: str, layout: dict[str, Any]) -> None:
    eager = train_in_whole_steps(rank, device, layout, WHOLE, False, GRAPHED_STEPS)
    train_in_whole_steps(rank, device, layout, WHOLE, True, GRAPHED_STEPS).assert_equal(eager)


def refused(rank: int) -> dict[str, str]:
    config = ParallelConfig(pp=2)
    mesh = make_mesh(config, "cpu")
    model = tiny_model("cpu", "mixed", count=2)
    found = {
        "layers": told(lambda: pipeline_stages(model, config, mesh, stages_per_rank=2)),
        "whole": told(lambda: parallelize(model, config, mesh)),
    }
    (stage,) = pipeline_stages(model, config, mesh)
    found["twice"] = told(lambda: pipeline_stages(model, config, mesh))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found["policy"] = told(lambda: parallelize(stage, config, mesh, mixed_precision=policy))
    for name, schedule, stages, microbatches in (
        ("few", "1f1b", 1, 1),
        ("interleaved few", "interleaved_1f1b", 2, 1),
        ("rounds", "interleaved_1f1b", 2, 5),
        ("one stage", "interleaved_1f1b", 1, 4),
        ("two stages", "1f1b", 2, 4),
        ("unknown", "zigzag", 1, 4),
    ):
        options = {"microbatches": microbatches, "microbatch_shape": (1, 8), "schedule": schedule}
        found[name] = told(
            lambda stages=stages, options=options: Pipeline(
                [stage] * stages, mesh, cross_entropy, **options
            )
        )
    names = [name for name, _ in model.named_parameters()]
    kept = {name for name, _ in tiny_model("cpu", "mixed", count=2).named_parameters()}
    assert set(names) < kept
    found["names"] = " ".join(sorted({name.split(".")[0] for name in names}))
    return found


def work(rank: int, world_size: int, device: str) -> dict[str, Any]:
    if world_size == 4:
        compare_whole_steps(rank, device, {"pp": 2, "dp_shard": 2, "ep": 2})
        return {"differences": differences(rank, device, OF_FOUR)}
    compare_whole_steps(rank, device, OF_TWO[0])
    found: dict[str, Any] = {
        "differences": differences(rank, device, OF_TWO),
        "graphed": [graphed(rank, device, *given) for given in GRAPHED],
    }
    return found if device == "cuda" else {**found, "refused": refused(rank)}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_distributed(work, 2, arguments=("cpu",))


def check_graphed(ranks: list[dict[str, Any]]) -> None:
    for number in range(2):
        slots = [found["graphed"][number]["slots"] for found in ranks]
        assert all(found["graphed"][number]["replayed"] > 0 for found in ranks)
        # 1F1B has 2 microbatches in flight on the first rank and 1 on the last.
        if number == 0:
            assert [max(each) for each in slots] == [2, 1]
        for found in ranks:
            reasons = found["graphed"][number]["eager"]
            assert reasons.keys() <= {"warmup", "output_held"}, reasons


@pytest.mark.long
def test_divided_training_is_that_of_one_process(two):
    """Losses, norms, gradients of a step, and parameters and biases of three agree in fp32."""
    for found in two:
        assert all(difference < 1e-5 for difference in found["differences"]), found["differences"]


@pytest.mark.long
def test_graphed_scopes_are_eager(two):
    check_graphed(two)


@pytest.mark.long
def test_misuse_is_told_on_every_rank(two):
    for rank, found in enumerate(two):
        told = found["refused"]
        assert "2 layer(s) cannot be divided into 4 stages" in told["layers"]
        assert "divide the model by pipeline_stages" in told["whole"]
        assert "divided into stages already" in told["twice"]
        assert "mixed_precision: it is FSDP2's" in told["policy"]
        assert "at least as many microbatches, got 1" in told["few"]
        assert "in rounds of at least pp=2, got 1" in told["interleaved few"]
        assert "choose a multiple of 2" in told["rounds"]
        assert "several stages are run by 'interleaved_1f1b'" in told["one stage"]
        assert "several stages are run by 'interleaved_1f1b'" in told["two stages"]
        assert "not one of 1f1b, gpipe, interleaved_1f1b" in told["unknown"]
        assert told["names"] == ["embedding layers", "head layers norm"][rank]


@pytest.mark.long
def test_four_ranks_are_one_process():
    for found in run_distributed(work, 4, arguments=("cpu",)):
        assert all(difference < 1e-5 for difference in found["differences"]), found["differences"]


@pytest.mark.multigpu
@pytest.mark.parametrize("count", [2, *([4] if RANKS == 4 else [])])
def test_on_gpus(count):
    """Weights are in fp32, products in bf16, and ranks sum in another order."""
    ranks = run_distributed(work, count, "nccl", arguments=("cuda",), timeout_seconds=300)
    if count == 2:
        check_graphed(ranks)
    for found in ranks:
        assert all(difference < 2e-2 for difference in found["differences"]), found["differences"]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (8, 2, [4, 4]),
        (94, 4, [23, 24, 24, 23]),
        (126, 8, [15, 16, 16, 16, 16, 16, 16, 15]),
        (5, 4, [1, 1, 2, 1]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_layers_are_divided_as_embedding_and_head_were_layers(layers, stages, sizes):
    parts = layers_of_stages(layers, stages)
    assert [len(part) for part in parts] == sizes
    assert [number for part in parts for number in part] == list(range(layers))
