"""Parallel layouts: one device mesh, and models sharded over it by torch.distributed."""

from moe_graphs.parallel.context_parallel import (
    apply_context_parallel,
    part_of_sequences,
    whole_sequences,
)
from moe_graphs.parallel.expert_shards import shard_experts
from moe_graphs.parallel.layout import ParallelConfig
from moe_graphs.parallel.mesh import data_mesh, expert_mesh, loss_mesh, make_mesh, shard_mesh
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.parallel.own_part import shares
from moe_graphs.parallel.parallelize import MIXED_PRECISION, free_gathered, parallelize
from moe_graphs.parallel.pipeline import (
    SCHEDULES,
    Pipeline,
    check_schedule,
    layers_of_stages,
    pipeline_stages,
)
from moe_graphs.parallel.replicated import replicate, sum_gradients
from moe_graphs.parallel.sharded_init import init_weights_sharded, load_pretrained_sharded
from moe_graphs.parallel.tensor_parallel import (
    apply_tensor_parallel,
    check_tensor_parallel,
    fused_rows,
    global_fqn,
)
from moe_graphs.parallel.vocabulary import (
    vocabulary_cross_entropy,
    vocabulary_group,
    whole_vocabulary,
)
from moe_graphs.parallel.whole_rows import (
    PartsByName,
    Run,
    WholeRowsLoadPlanner,
    WholeRowsSavePlanner,
    runs_of,
)

__all__ = [
    "MIXED_PRECISION",
    "SCHEDULES",
    "ModelStage",
    "ParallelConfig",
    "PartsByName",
    "Pipeline",
    "Run",
    "WholeRowsLoadPlanner",
    "WholeRowsSavePlanner",
    "apply_context_parallel",
    "apply_tensor_parallel",
    "check_schedule",
    "check_tensor_parallel",
    "data_mesh",
    "expert_mesh",
    "free_gathered",
    "fused_rows",
    "global_fqn",
    "init_weights_sharded",
    "layers_of_stages",
    "load_pretrained_sharded",
    "loss_mesh",
    "make_mesh",
    "parallelize",
    "part_of_sequences",
    "pipeline_stages",
    "replicate",
    "runs_of",
    "shard_experts",
    "shard_mesh",
    "shares",
    "sum_gradients",
    "vocabulary_cross_entropy",
    "vocabulary_group",
    "whole_sequences",
    "whole_vocabulary",
]
