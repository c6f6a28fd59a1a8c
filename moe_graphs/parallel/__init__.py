"""Parallel layouts: one device mesh, and models sharded over it by torch.distributed.

A user needs these names. All others are imported from their modules.
"""

from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.mesh import make_mesh
from moe_graphs.parallel.parallelize import parallelize
from moe_graphs.parallel.pipeline import Pipeline, pipeline_stages
from moe_graphs.parallel.replicated import replicate
from moe_graphs.parallel.sharded_init import load_pretrained_sharded
from moe_graphs.parallel.vocabulary import vocabulary_cross_entropy

__all__ = [
    "ParallelConfig",
    "Pipeline",
    "load_pretrained_sharded",
    "make_mesh",
    "parallelize",
    "pipeline_stages",
    "replicate",
    "vocabulary_cross_entropy",
]
