"""Positions of a rank's rows in fused weights, for shards of any size."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import Replicate, Shard

from fake_ranks import as_rank, lay_out
from moe_graphs.layers import LanguageModel
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.tensor_parallel import global_fqn
from moe_graphs.parallel.whole_rows import runs_of
from training_runs import tiny_model

WHOLE = torch.arange(24.0)[:, None] * torch.ones(1, 3)


def of_rank(parts: tuple[int, ...], ranks: int, shards: int, rank: int, shard: int):
    """A stand-in for the DTensor: queries, keys and values of a rank, and FSDP2's shard of them."""
    own = torch.cat([part.chunk(ranks)[rank] for part in WHOLE.split(parts)])
    chunks = own.chunk(shards)
    local = chunks[shard] if shard < len(chunks) else own[:0]
    mesh = SimpleNamespace(
        mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
        size=(2, shards, ranks).__getitem__,
        get_coordinate=lambda: (1, shard, rank),
    )
    placements = (Replicate(), Shard(0), Shard(0))
    return SimpleNamespace(device_mesh=mesh, placements=placements, to_local=lambda: local)


@pytest.mark.parametrize("parts", [(12, 6, 6), (12, 12), (24,), (16, 4, 4)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shards", [1, 2, 5, 7, 13])
def test_the_runs_of_all_ranks_are_the_whole_weight(parts, ranks, shards):
    found, held = torch.full_like(WHOLE, torch.nan), 0
    for rank in range(ranks):
        for shard in range(shards):
            tensor = of_rank(parts, ranks, shards, rank, shard)
            runs = runs_of(tensor, parts)
            assert sum(len(run.rows) for run in runs) == len(tensor.to_local())
            assert all(len(run.rows) for run in runs)
            for run in runs:
                assert run.chunk.offsets == (run.first, 0)
                assert run.chunk.sizes == run.rows.shape
                found[run.first : run.first + len(run.rows)] = run.rows
                held += len(run.rows)
    assert held == len(WHOLE)
    assert torch.equal(found, WHOLE)


def four_heads() -> LanguageModel:
    return LanguageModel(dataclasses.replace(tiny_model("meta").config, num_kv_heads=4))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_ranks_are_not_loaded_as_those_of_others_without_our_planner(ranks, tmp_path):
    """The loading is refused for weights and for optimizer states, by name."""
    with as_rank(0, 4):
        saved = lay_out(four_heads(), ParallelConfig(tp=4), "cpu")
        optimizer = torch.optim.AdamW(saved.parameters())
        for parameter in saved.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        weights, states = get_state_dict(saved, optimizer)
        both = {"model": weights, "optimizer": states}
        checkpoint.save(both, checkpoint_id=tmp_path, no_dist=True)
    of_layer = [name for name in states["state"] if name.startswith("layers.0.attention.qkv.")]
    assert of_layer == ["layers.0.attention.qkv.weight_of_4_ranks"]
    assert global_fqn(of_layer[0]) == "layers.0.attention.qkv.weight"
    with as_rank(0, ranks):
        other = four_heads()
        if ranks > 1:
            lay_out(other, ParallelConfig(tp=ranks), "cpu")
        key = next(name for name in other.state_dict() if ".qkv." in name)
        with pytest.raises(CheckpointException, match=f"Missing key.*model.{key}"):
            checkpoint.load({"model": other.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
