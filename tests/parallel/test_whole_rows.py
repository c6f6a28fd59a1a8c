"""Where the rows of fused weights lie that ranks share, for shards of any size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from moe_graphs.parallel import runs_of

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
