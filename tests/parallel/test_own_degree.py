"""A degree of a user's own: a class in the registry and a field, known to meshes, checks, plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distributed import run_distributed
from moe_graphs.layers import LanguageModel, LatentAttentionConfig
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize
from moe_graphs.parallel.degrees import check_degrees
from moe_graphs.parallel.mesh import data_mesh, loss_mesh
from moe_graphs.planning.layout_plan import plan_layout
from moe_graphs.planning.planned_step import PlannedStep
from moe_graphs.registry import DEGREES
from own_parts import OwnLayout, Twins
from planned_layouts import MOE

ON_CPU = PlannedStep(sequences=2, sequence_length=32, on_gpus=False)


@pytest.fixture
def twins(monkeypatch) -> None:
    monkeypatch.setattr(DEGREES, "_places", {**DEGREES._places, "twins": "own_parts:Twins"})


def test_every_degree_is_a_field():
    assert set(ParallelConfig().degrees()) == set(DEGREES)
    assert "twins" not in ParallelConfig().degrees()


def test_it_multiplies_ranks_and_not_batches(twins):
    layout = OwnLayout(twins=2, dp_shard=2, cp=2)
    found = (layout.world_size, layout.data_parallel, layout.with_tokens)
    assert found == (8, 2, 4)
    latent = LatentAttentionConfig(
        query_rank=8, kv_rank=8, plain_head_dim=8, rope_head_dim=8, value_head_dim=8
    )
    with pytest.raises(ValueError, match="twins: no latent attention"):
        check_degrees(layout, replace(MOE, latent=latent, qk_norm="none", num_kv_heads=None))
    check_degrees(OwnLayout(dp_shard=2), MOE)


def test_a_plan_is_that_of_one_rank(twins):
    before = Twins.divided
    plan = plan_layout(MOE, OwnLayout(twins=2), ON_CPU)
    assert Twins.divided > before
    assert plan.most.exact == plan_layout(MOE, ParallelConfig(), ON_CPU).most.exact
    assert not any(plan.most.wire.values())


def work(rank: int, world_size: int) -> list[object]:
    DEGREES.add("twins", Twins)
    layout = OwnLayout(twins=2)
    mesh = make_mesh(layout, "cpu")
    model = parallelize(LanguageModel(MOE), layout, mesh)
    assert sum(p.numel() for p in model.parameters()) > 0
    return [mesh.mesh_dim_names, Twins.divided, data_mesh(mesh).size(), loss_mesh(mesh).size()]


def test_two_ranks_are_a_dimension_of_the_mesh():
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "twins")
    for found in run_distributed(work, 2):
        assert found == [names, 1, 1, 1]
