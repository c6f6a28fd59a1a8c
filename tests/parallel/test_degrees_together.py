"""Layouts that combine tp, cp and pp train as one process does, and to the bit as in graphs.

All tests with the same number of ranks share one spawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_pipeline_stages import LAYERS, compare_whole_steps, graphed

from distributed import RANKS, run_distributed
from moe_graphs.layers import LanguageModel
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize
from parallel_runs import compare, told
from staged_training import furthest, furthest_relative, train_divided, train_whole
from tensor_parallel_runs import compare_scopes, differences
from training_runs import tiny_model

BOUND = 5e-6  # relative to the largest number, in fp32; ranks sum in another order
SCOPES = "attn,mlp,moe_router,moe_preprocess"
TENSORS_AND_SEQUENCES: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2},
    {"tp": 2, "cp": 2, "ep": 2, "reshard_after_forward": False},
]
WITH_STAGES: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "schedule": "interleaved_1f1b", "stages": 2},
    {"cp": 2, "pp": 2},
    {"cp": 2, "pp": 2, "ep": 2, "schedule": "gpipe"},
]
# Layouts that run as graphs; test_pipeline_stages.py has four microbatches on two ranks.
GRAPHED: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "microbatches": 2},
    {"cp": 2, "pp": 2, "ep": 2, "microbatches": 2},
]
OF_EIGHT: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "dp_shard": 2, "ep": 2},
]


def with_stages(device: str, layouts: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Differences of losses, gradients, norms, parameters and biases from one process.

    They are relative on the CPU, and absolute on GPUs, which multiply in bf16.
    """
    found = []
    for layout in layouts:
        cp, data = layout.get("cp", 1), layout.get("dp_shard", 1)
        expected = train_whole(device, data, LAYERS, cp=cp)
        assert expected.norms[0] > 0.2  # so that clipping changes gradients
        seen = train_divided(device, layout, LAYERS)
        relative = furthest_relative(seen, expected)
        found.append(relative if device == "cpu" else {"furthest": furthest(seen, expected)})
    return found


def of_four(rank: int, world_size: int, device: str) -> dict[str, Any]:
    on_cpu = device == "cpu"
    layers, count = ("mixed", 2) if on_cpu else ("dense", 1)  # dense models cannot have ep
    layouts = [ParallelConfig(**layout) for layout in TENSORS_AND_SEQUENCES[:count]]
    alone = [differences(device, layout, layers) for layout in layouts]
    found: dict[str, Any] = {"alone": alone + with_stages(device, WITH_STAGES)}
    steps = 5 if on_cpu else 20
    found["norms"] = compare(rank, world_size, device, TENSORS_AND_SEQUENCES[-1:], steps)
    compare_scopes(device, ParallelConfig(tp=2, cp=2), [SCOPES], 5)
    for layout in GRAPHED:
        compare_whole_steps(rank, device, layout)
    found["graphed"] = graphed(rank, device, SCOPES, GRAPHED[0])
    found["refused"] = told(few_heads)
    return found


def few_heads() -> None:
    """Check the refusal if tp leaves one of two heads, which cp cannot share."""
    layout = ParallelConfig(tp=2, cp=2)
    config = replace(tiny_model("meta").config, num_heads=2, head_dim=8)
    model = LanguageModel(config, device="meta")
    before = list(model.parameters())
    try:
        parallelize(model, layout, make_mesh(layout, "cpu"))
    finally:
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def check(ranks: list[dict[str, Any]], bound: float) -> None:
    for found in ranks:
        for layout in found["alone"]:
            limit = 2e-2 if "furthest" in layout else bound
            assert not {name: far for name, far in layout.items() if not far < limit}
        assert found["norms"] == ranks[0]["norms"]
        assert found["graphed"]["replayed"] > 0
        assert found["graphed"]["eager"].keys() <= {"warmup", "output_held"}, found["graphed"]
        assert "2 ranks cannot share 1 heads (of 2, shared by tp 2)" in found["refused"]


@pytest.mark.long
def test_four_ranks():
    """Training on four ranks is that of one process, and graphs are eager bit for bit.

    The gradients of a step, the norms before clipping, and parameters and biases of three steps are
    compared in fp32; whole steps and scopes are compared with eager ones.
    """
    check(run_distributed(of_four, 4, arguments=("cpu",), timeout_seconds=300), BOUND)


def of_eight(rank: int, world_size: int) -> list[dict[str, float]]:
    compare_whole_steps(rank, "cpu", OF_EIGHT[0])
    return with_stages("cpu", OF_EIGHT)


@pytest.mark.full
def test_eight_ranks():
    for found in run_distributed(of_eight, 8, timeout_seconds=240):
        for layout in found:
            assert not {name: far for name, far in layout.items() if not far < BOUND}


@pytest.mark.multigpu
@pytest.mark.skipif(RANKS != 4, reason="RANKS=4 has it: two degrees of two are four GPUs")
def test_four_gpus():
    """Weights are in fp32, products in bf16, and ranks sum in another order."""
    check(run_distributed(of_four, 4, "nccl", arguments=("cuda",), timeout_seconds=600), 1e-4)
