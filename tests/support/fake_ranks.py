"""A rank of a fake process group, whose other ranks do not exist: no collective waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_graphs.layers import LanguageModel
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, pipeline_stages


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # in which another rank's mesh would be found


def lay_out(model: LanguageModel, config: ParallelConfig, device: str) -> LanguageModel:
    """Lay out a model as a rank has it, also as stages of a pipeline."""
    mesh = make_mesh(config, device)
    options = {"dispatcher": "all_gather"} if config.ep > 1 else {}
    if config.pp == 1:
        return parallelize(model, config, mesh, **options)
    for stage in pipeline_stages(model, config, mesh):
        parallelize(stage, config, mesh, **options)
    return model
