"""Parallel layouts: one device mesh, and models sharded over it by torch.distributed."""

from moe_graphs.parallel.expert_shards import shard_experts
from moe_graphs.parallel.layout import ParallelConfig
from moe_graphs.parallel.mesh import data_mesh, expert_mesh, make_mesh
from moe_graphs.parallel.parallelize import parallelize

__all__ = [
    "ParallelConfig",
    "data_mesh",
    "expert_mesh",
    "make_mesh",
    "parallelize",
    "shard_experts",
]
