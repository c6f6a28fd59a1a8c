"""Tensor parallelism over NCCL: training is that of one process, graphs are eager to the bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
from test_tensor_parallel import SCOPES, losses

from distributed import run_distributed
from moe_graphs.parallel import ParallelConfig, make_mesh
from parallel_runs import compare
from tensor_parallel_runs import compare_scopes, differences

pytestmark = pytest.mark.multigpu
TWO = ParallelConfig(tp=2)


def of_two(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"differences": differences("cuda", TWO, "dense")}
    found["norms"] = compare(rank, world_size, "cuda", [{"tp": 2}], 20)
    compare_scopes("cuda", TWO, SCOPES, 8)
    found["losses"] = losses(make_mesh(TWO, "cuda")["tp"].get_group(), "cuda")
    return found


def test_two_ranks():
    first, second = run_distributed(of_two, 2, "nccl", timeout_seconds=300)
    for found in (first, second):
        assert max(found["differences"].values()) < 1e-4, found["differences"]
        assert found["losses"].pop("whole") == found["losses"].pop("outside") == 0
        assert max(found["losses"].values()) < 1e-5
    assert first["norms"] == second["norms"]


def of_four(rank: int, world_size: int) -> tuple[list[dict[str, float]], list]:
    layouts: list[dict] = [{"dp_shard": 2}, {"dp_shard": 2, "ep": 2}, {"dp_replicate": 2}]
    also = {"tp": 2, "reshard_after_forward": False}
    steps = [{**each, "tp": 2} for each in layouts] + [layouts[0] | also]
    found = [differences("cuda", ParallelConfig(tp=2, dp_shard=2), "dense")]
    return found, compare(rank, world_size, "cuda", steps, 20)


@pytest.mark.skipif(os.environ.get("RANKS") != "4", reason="RANKS=4 has it")
def test_four_ranks_with_fsdp():
    first, *others = run_distributed(of_four, 4, "nccl", timeout_seconds=400)
    for found, norms in (first, *others):
        assert norms == first[1]
        assert all(max(layout.values()) < 1e-4 for layout in found), found
