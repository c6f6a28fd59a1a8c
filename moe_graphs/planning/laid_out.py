"""A rank of a layout as ``pipeline_stages`` and ``parallelize`` make it, on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_graphs.kernels.local_part import local_part
from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.parallel import ParallelConfig, Pipeline, make_mesh, parallelize, pipeline_stages
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.pipelines.formats import from_torch
from moe_graphs.pipelines.schedule import Schedule
from moe_graphs.planning.planned_step import OptimizerCosts, PlannedStep
from moe_graphs.planning.step_memory import Action
from moe_graphs.planning.weights_around import Part, fsdp_parts, groups_of
from moe_graphs.planning.wire_bytes import ShardedWeights

_SHARD_DIMS = ("dp_shard_cp", "efsdp")
_KINDS = ("F", "B", "UNSHARD", "RESHARD")


@dataclass(frozen=True)
class LaidOutStage:
    """A stage of a laid-out rank.

    Attributes:
        layers: numbers of the stage's layers in the model.
        weights: weights that FSDP2 shards, by name.
        groups: the result of ``groups_of``.
        parts: weights that FSDP2 gathers together, in the order of the forward.
    """

    layers: range
    weights: dict[str, ShardedWeights]
    groups: dict[str, int]
    parts: list[Part]


@dataclass(frozen=True)
class LaidOutRank:
    """The first of the ranks with the same stages.

    Attributes:
        held: the result of ``held_between_steps``.
        update: bytes of the rank's optimizer.
        padding: share of the rank's parameters beyond an equal division, from 0 to 1.
    """

    stages: list[LaidOutStage]
    held: dict[str, int]
    update: OptimizerCosts
    padding: float


def lay_out(
    config: TransformerConfig, layout: ParallelConfig, step: PlannedStep, stage_rank: int
) -> LaidOutRank:
    """Lay out rank ``stage_rank`` of "pp" that is rank 0 in all other dimensions.

    Raises:
        ValueError: a layout that the model cannot have.
    """
    model = LanguageModel(config, device="meta", dtype=step.dtype)
    with as_rank(layout, stage_rank) as mesh:
        stages: list[LanguageModel | ModelStage] = [model]
        if layout.pp > 1:
            stages = [*divided(model, layout, step, mesh)]
        if mesh is not None:
            options = {"dispatcher": step.dispatcher} if layout.ep > 1 else {}
            policy = step.policy if step.mixed_precision else None
            for stage in stages:
                parallelize(stage, layout, mesh, mixed_precision=policy, **options)
        found = []
        for stage in stages:
            weights = _sharded(stage, layout)
            numbers = [int(name) for name, _ in stage.layers.named_children()]
            groups = groups_of(stage, layout.layers_per_group)
            parts = fsdp_parts(stage, weights, groups, *step.on_the_wire)
            layers = range(numbers[0], numbers[-1] + 1)
            found.append(LaidOutStage(layers, weights, groups, parts))
        update = step.optimizer(model)
        held = held_between_steps(model, update)
        padding = max(0.0, 1 - _equal_share(model) / held["parameters"])
        return LaidOutRank(found, held, update, padding)


def divided(
    model: LanguageModel, layout: ParallelConfig, step: PlannedStep, mesh: Any
) -> list[ModelStage]:
    return pipeline_stages(
        model,
        layout,
        mesh,
        stages_per_rank=step.stages_per_rank,
        hidden_dtype=step.held_dtype,
    )


def schedule_of(
    config: TransformerConfig, layout: ParallelConfig, step: PlannedStep
) -> tuple[Schedule, list[list[Action]]]:
    """Schedule of torch with the actions of every rank of a pipeline.

    Returns:
        The schedule, and each rank's forwards, backwards, gathers and frees in their order.

    Raises:
        ValueError: as in ``Pipeline``.
    """
    model = LanguageModel(config, device="meta", dtype=step.dtype)
    with as_rank(layout, 0) as mesh:
        assert mesh is not None
        pipeline = Pipeline(
            divided(model, layout, step, mesh),
            mesh,
            microbatches=step.microbatches,
            microbatch_shape=(step.sequences, step.sequence_length),
            schedule=step.schedule,
        )
        orders = getattr(pipeline.schedule, "pipeline_order_with_comms", None)
        orders = orders or pipeline.schedule.pipeline_order
    actions = []
    for rank in range(layout.pp):
        said = [action for action in orders[rank] if action is not None]
        kinds = [(action.computation_type.value, action.stage_index) for action in said]
        actions.append([(kind, index // layout.pp) for kind, index in kinds if kind in _KINDS])
    return from_torch(pipeline.schedule), actions


def idle_share(schedule: Schedule) -> float:
    """Share of all ranks' time in which they wait, from 0 to 1.

    A backward is taken to last as long as two forwards, a message no time.
    """
    timeline = schedule.timeline()
    length = max(spans[-1].end for spans in timeline)
    busy = sum(span.end - span.start for spans in timeline for span in spans)
    return 1 - busy / (length * len(timeline))


def held_between_steps(model: nn.Module, update: OptimizerCosts) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients, buffers and optimizer state.

    Gradients have the dtype of their parameter.
    """
    parameters = list(model.parameters())
    return {
        "parameters": sum(local_part(p).nbytes for p in parameters),
        "gradients": sum(local_part(p).nbytes for p in parameters if p.requires_grad),
        "optimizer": update.states,
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
    }


@contextlib.contextmanager
def as_rank(layout: ParallelConfig, stage_rank: int) -> Iterator[DeviceMesh | None]:
    """Context with a mesh over a fake process group, whose other ranks do not exist.

    Collectives neither move data nor wait. The mesh is None for one rank.

    Raises:
        ValueError: this process is in a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if layout.world_size == 1:
        yield None
        return
    if dist.is_initialized():
        raise ValueError("plan: this process is a rank of a process group: plan in another one")
    ranks = layout.world_size
    rank = stage_rank * (ranks // layout.pp)  # "pp" is the outermost dimension
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield make_mesh(layout, "cpu")
    finally:
        dist.destroy_process_group()


def _equal_share(model: nn.Module) -> float:
    """Bytes of the parameters if every shard of a parameter had the same size."""
    total = 0.0
    for parameter in model.parameters():
        ranks = 1
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
            ranks = prod(mesh.size(dim) for dim, each in placements if not each.is_replicate())
        total += parameter.numel() * parameter.dtype.itemsize / ranks
    return total


def _sharded(
    model: LanguageModel | ModelStage, layout: ParallelConfig
) -> dict[str, ShardedWeights]:
    """Weights that FSDP2 shards, by name; empty with tensor parallelism alone."""
    # `parallelize` keeps norm and head gathered, because the backward begins with them.
    ends = [part for part in (model.norm, model.head) if part is not None]
    stay = {id(p) for part in ends for p in part.parameters()}
    found = {}
    for name, parameter in model.named_parameters():
        dims = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
        if not set(dims or ()) & {"dp_replicate", *_SHARD_DIMS}:
            continue
        assert isinstance(parameter, DTensor)
        local, mesh, ranks, replicas = parameter.to_local(), parameter.device_mesh, 1, 1
        for dim, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
            size = mesh[dim].size()
            if placement.is_replicate():
                replicas *= size
            elif dim in _SHARD_DIMS:
                ranks *= size
        regathered = layout.reshard_after_forward and id(parameter) not in stay
        found[name] = ShardedWeights(local.numel(), ranks, replicas, regathered)
    return found
