"""A language model, laid out over a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from moe_graphs.dispatch import make_dispatcher
from moe_graphs.layers import GroupedExperts, HeadExchange, LanguageModel
from moe_graphs.layers.moe import moe_layers
from moe_graphs.parallel.context_parallel import divide_sequences
from moe_graphs.parallel.expert_shards import make_global, shard_experts
from moe_graphs.parallel.layout import ParallelConfig
from moe_graphs.parallel.mesh import expert_mesh, shard_mesh
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.parallel.tensor_parallel import check_tensor_parallel, share_tensors

Model = TypeVar("Model", bound=LanguageModel | ModelStage)
MIXED_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""What ``--mixed-precision`` is: weights are gathered in bf16 and computed with in it."""


def parallelize(
    model: Model,
    config: ParallelConfig,
    mesh: DeviceMesh,
    *,
    dispatcher: str = "all_to_all",
    mixed_precision: MixedPrecisionPolicy | None = None,
    **dispatcher_options: Any,
) -> Model:
    """Shards ``model`` in place over ``mesh``, which ``make_mesh(config, ...)`` made; or a stage of
    a pipeline (``pipeline_stages``), which with one data-parallel rank is left as it is.

    The model is one as for a single device: all experts, and the same weights on every rank (from
    one seed), or on the meta device. Parameters become DTensors of the whole model's shapes: make
    the optimizer afterwards. Gradients are those of the mean of the ranks' losses, of all ranks
    with tokens of their own (with ``cp`` each a mean over its part of the sequences); the aux
    losses are each rank's own, and so their mean.

    Ranks of ``tp`` take the same batches and draw the same random numbers: seed them alike (then
    attention's dropout has the same pattern for the heads of each). They share heads, feed-forward
    networks, shared experts and the vocabulary (``share_tensors``): logits have the columns of this
    rank, see ``vocabulary_cross_entropy``. Norms, routers and routed experts are on all of them.
    With ``tp`` alone nothing is sharded by FSDP2, and what is on all ranks is no DTensor.

    Args:
        dispatcher, dispatcher_options: as of ``make_dispatcher``, its group excepted; without
            expert parallelism the model keeps its ``LocalDispatcher``.
        mixed_precision: of FSDP2, such as ``MIXED_PRECISION``; by default everything is in the
            dtype of the parameters.

    Raises:
        ValueError: a mesh, heads, sizes or experts that do not fit the layout.
    """
    _check(model, config, mesh, mixed_precision, dispatcher_options)
    _check_stage(model, config, mixed_precision)
    policy = MixedPrecisionPolicy() if mixed_precision is None else mixed_precision
    reshard = config.reshard_after_forward
    if config.cp > 1:
        divide_sequences(model, HeadExchange.over(mesh["cp"].get_group()))
    mesh = shard_mesh(mesh)
    if config.tp > 1:
        share_tensors(model, mesh["tp"])
    # Nothing to shard: so addresses stay, and scopes can be graphs.
    if config.with_tokens == 1 and (config.tp > 1 or isinstance(model, ModelStage)):
        return model
    if config.ep > 1:
        experts = expert_mesh(config, mesh)
        group = experts["ep"].get_group()
        shards = _shards(config, experts, "efsdp")
        for layer in moe_layers(model):
            shard_experts(layer, make_dispatcher(dispatcher, group=group, **dispatcher_options))
            make_global(layer.experts, experts["ep"])
        for blocks in _groups(model, config):
            together: list[nn.Module] = [
                layer.experts for block in blocks for layer in moe_layers(block)
            ]
            if together:
                fully_shard(together, mesh=shards, mp_policy=policy, reshard_after_forward=reshard)
                _divide_by_all(together[0], shards, config)
    options: dict[str, Any] = {"mesh": _shards(config, mesh, "dp_shard_cp"), "mp_policy": policy}
    if model.embedding is not None:
        fully_shard(model.embedding, reshard_after_forward=reshard, **options)
    for blocks in _groups(model, config):
        fully_shard(blocks, reshard_after_forward=reshard, **options)
    if model.norm is not None and model.head is not None:
        # Needed again at once by the backward.
        fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    if isinstance(model, ModelStage):
        # It has no weights of its own, and the weight of aux losses is not to be rounded.
        options["mp_policy"] = replace(policy, cast_forward_inputs=False)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return model


def free_gathered(model: nn.Module) -> None:
    """Frees what FSDP2 has gathered and kept, as after a forward without a backward: so that the
    next forward gathers parameters that were changed in between. Only between steps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check(
    model: LanguageModel | ModelStage,
    config: ParallelConfig,
    mesh: DeviceMesh,
    mixed_precision: MixedPrecisionPolicy | None,
    options: dict[str, Any],
) -> None:
    names = mesh.mesh_dim_names or ()
    found = {name: mesh.size(number) for number, name in enumerate(names)}
    if any(getattr(config, name, None) != size for name, size in found.items()) or not found:
        raise ValueError(f"the mesh is {found or mesh} and the layout {config}: use make_mesh")
    check_tensor_parallel(model.config, config.tp)
    HeadExchange(0, config.cp).check_heads(model.config.num_heads // config.tp)
    if mixed_precision is not None and config.tp > 1 and config.with_tokens == 1:
        raise ValueError("mixed_precision: of FSDP2, which shards nothing here: use autocast")
    if config.ep == 1 and options:
        raise ValueError(f"{', '.join(options)}: options of a dispatcher, which ep=1 does not use")
    has_experts = model.config.moe is not None and any(
        map(model.config.is_moe_layer, range(model.config.num_layers))
    )  # of the whole model, also for a stage
    if config.ep > 1 and not has_experts:
        raise ValueError(f"ep={config.ep}: the model has no experts: pass ep=1")
    for layer in moe_layers(model):
        if config.ep > 1 and not isinstance(layer.experts, GroupedExperts):
            kind = layer.config.experts
            raise ValueError(f"experts={kind!r} cannot be sharded over ep: take 'moe_graphs'")


def _check_stage(
    model: nn.Module, config: ParallelConfig, mixed_precision: MixedPrecisionPolicy | None
) -> None:
    if (config.pp > 1) != isinstance(model, ModelStage):
        raise ValueError(
            f"pp={config.pp} and a {type(model).__name__}: with pp, divide the model by "
            f"pipeline_stages(model, config, mesh) and pass its stages; without, the model"
        )
    if mixed_precision is not None and config.pp > 1 and config.with_tokens == 1:
        raise ValueError(
            "mixed_precision: it is FSDP2's, which needs dp_shard, dp_replicate or cp above 1: "
            "pass pipeline_stages(autocast=...)"
        )


def _groups(model: LanguageModel | ModelStage, config: ParallelConfig) -> list[list[nn.Module]]:
    """Layers that are gathered and reduced together."""
    layers, size = list(model.layers), config.layers_per_group
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _shards(config: ParallelConfig, mesh: DeviceMesh, dim: str) -> DeviceMesh:
    return mesh["dp_replicate", dim] if config.dp_replicate > 1 else mesh[dim]


def _divide_by_all(experts: nn.Module, shards: DeviceMesh, config: ParallelConfig) -> None:
    """Their gradients are sums over the ``ep`` ranks already, of which FSDP2 knows nothing: it
    would divide by its own ranks only. What is said of one of a group is said of all."""
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(config.with_tokens))
    if shards.device_type == "cpu" and shards.size(shards.ndim - 1) > 1:
        # gloo has no sums that divide. With one rank it divides while it copies.
        experts.set_force_sum_reduction_for_comms(True)
