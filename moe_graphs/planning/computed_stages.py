"""Memory of a microbatch in the stages of a layout, found by running them on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_graphs.kernels.availability import as_on_gpus
from moe_graphs.layers import LanguageModel, MoELayer, TransformerConfig
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.expert_shards import shard_experts
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.parallel.parallelize import share
from moe_graphs.planning.laid_out import as_rank
from moe_graphs.planning.microbatch_memory import (
    DropoutOfGPUs,
    MicrobatchMemory,
    microbatch_memory,
    without_memory,
)
from moe_graphs.planning.planned_step import PlannedStep
from moe_graphs.registry import DEGREES


def computed_stages(
    config: TransformerConfig,
    layout: ParallelConfig,
    step: PlannedStep,
    stages: Sequence[range],
) -> list[MicrobatchMemory]:
    """Memory of a microbatch in each stage, on one rank; equal stages are computed once.

    Args:
        stages: numbers of each stage's layers.

    Returns:
        Memory of each stage; ``received`` has the degrees' ``messages`` as keys.
    """
    model = LanguageModel(config, device="meta", dtype=step.held_dtype)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(as_rank(layout, 0))
        names = {} if mesh is None else _share(model, layout, step, mesh)
        stack.enter_context(FakeTensorMode())
        if step.on_gpus:
            stack.enter_context(as_on_gpus())
            stack.enter_context(DropoutOfGPUs())
        without_memory(model, "cpu")
        known: dict[tuple[bool, ...], MicrobatchMemory] = {}
        found = []
        for layers in stages:
            ends = layers.start == 0, layers.stop == config.num_layers
            kind = (*ends, *map(config.is_moe_layer, layers))
            if kind not in known:
                known[kind] = _named(_computed(model, layers, layout, step), names)
            found.append(known[kind])
        return found


def _computed(
    model: LanguageModel, layers: range, layout: ParallelConfig, step: PlannedStep
) -> MicrobatchMemory:
    cast_to = torch.bfloat16 if step.on_gpus else None
    size = step.sequences, step.sequence_length
    tokens_BS = torch.empty(size, dtype=torch.int64)
    if layout.pp == 1:
        return microbatch_memory(model, tokens_BS, cast_to)
    stage = ModelStage(model, layers, hidden_dtype=step.held_dtype, autocast=contextlib.nullcontext)
    hidden_BSD = torch.empty(
        *size, model.config.hidden_size, dtype=step.held_dtype, requires_grad=True
    )
    return microbatch_memory(stage, tokens_BS if layers.start == 0 else hidden_BSD, cast_to)


def _share(
    model: LanguageModel, layout: ParallelConfig, step: PlannedStep, mesh: DeviceMesh
) -> dict[str, str]:
    """Share ``model`` as ``parallelize`` does, without FSDP2 and with a stand-in dispatcher.

    Returns:
        The purpose of each process group, by the group's name.
    """
    share(model, layout, mesh)
    _make_plain(model)
    names = {
        str(mesh[name].get_group().group_name): DEGREES[name].messages
        for name, ranks in layout.degrees("messages").items()
        if ranks > 1
    }
    if layout.ep > 1:
        costs = step.dispatch_costs(model.config, layout.ep)
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                assert costs is not None
                shard_experts(layer, costs.stand_in)
    return names


def _named(memory: MicrobatchMemory, names: dict[str, str]) -> MicrobatchMemory:
    received = {names[group]: count for group, count in memory.received.items()}
    return replace(memory, received=received)


def _make_plain(model: nn.Module) -> None:
    """Replace DTensors by their local shards."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                own = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
                module.register_parameter(name, own)
