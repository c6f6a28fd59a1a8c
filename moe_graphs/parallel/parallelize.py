"""Layout of a language model over a device mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from moe_graphs.dispatch import make_dispatcher
from moe_graphs.layers import GroupedExperts, LanguageModel
from moe_graphs.layers.moe import moe_layers
from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.degrees import check_degrees
from moe_graphs.parallel.expert_shards import make_global, shard_experts
from moe_graphs.parallel.mesh import expert_mesh, shard_mesh
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.registry import DEGREES

Model = TypeVar("Model", bound=LanguageModel | ModelStage)
MIXED_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Policy of ``--mixed-precision``: weights are gathered, and computed with, in bf16."""


def parallelize(
    model: Model,
    config: ParallelConfig,
    mesh: DeviceMesh,
    *,
    dispatcher: str = "all_to_all",
    mixed_precision: MixedPrecisionPolicy | None = None,
    **dispatcher_options: Any,
) -> Model:
    """Shard a model, or a stage of a pipeline (``pipeline_stages``), over ``mesh``, in place.

    The model is built as for a single device: with all experts and the same weights on every rank
    (from one seed), or on the meta device. Parameters become DTensors of the whole model's shapes:
    make the optimizer afterwards. Gradients are those of the mean loss over all ranks with tokens
    of their own; with ``cp`` a rank's loss is the mean over its part of the sequences. Each rank
    computes aux losses from its own tokens, and the gradients are those of the mean aux loss. With
    one data-parallel rank, a stage stays as it is.

    Ranks of ``tp`` take the same batches and draw the same random numbers, so seed them alike (then
    attention's dropout has the same pattern for the heads of each rank). They share heads,
    feed-forward networks, shared experts and the vocabulary (``apply_tensor_parallel``); a rank's
    logits have its columns of the vocabulary, see ``vocabulary_cross_entropy``. Every rank of
    ``tp`` has all norms, routers and routed experts. With ``tp`` alone FSDP2 shards nothing, and
    tensors that all ranks have are no DTensors.

    Args:
        mesh: the result of ``make_mesh(config, ...)``.
        dispatcher, dispatcher_options: arguments of ``make_dispatcher`` without its group. Without
            expert parallelism the model keeps its ``LocalDispatcher``.
        mixed_precision: FSDP2's policy, such as ``MIXED_PRECISION``; by default the model computes
            in the dtype of the parameters.

    Raises:
        ValueError: a mesh, heads, sizes or experts that do not fit the layout.
    """
    _check(model, config, mesh, mixed_precision, dispatcher_options)
    _check_stage(model, config, mixed_precision)
    policy = MixedPrecisionPolicy() if mixed_precision is None else mixed_precision
    reshard = config.reshard_after_forward
    mesh = share(model, config, mesh)
    # With nothing to shard, the addresses stay, and scopes can be graphs.
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
                # A cast of inputs would round the routing weights; tokens come from a layer that
                # computes in the dtype of the policy.
                exact = replace(policy, cast_forward_inputs=False)
                fully_shard(together, mesh=shards, mp_policy=exact, reshard_after_forward=reshard)
                _divide_by_all(together[0], shards, config)
    if reshard:
        for layer in moe_layers(model):
            layer.experts.keeps_codes = False
    options: dict[str, Any] = {"mesh": _shards(config, mesh, "dp_shard_cp"), "mp_policy": policy}
    if model.embedding is not None:
        fully_shard(model.embedding, reshard_after_forward=reshard, **options)
    for blocks in _groups(model, config):
        fully_shard(blocks, reshard_after_forward=reshard, **options)
    if model.norm is not None and model.head is not None:
        # The backward needs the head at once again.
        fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    if isinstance(model, ModelStage):
        # A cast of inputs would round the weight of aux losses; a stage's own weights need none.
        options["mp_policy"] = replace(policy, cast_forward_inputs=False)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return model


def share(
    model: LanguageModel | ModelStage, config: ParallelConfig, mesh: DeviceMesh
) -> DeviceMesh:
    """Divide by all degrees but experts and FSDP2's; return the mesh that FSDP2 shards on."""
    shards = shard_mesh(mesh)
    for name, ranks in config.degrees("is_factor").items():
        if ranks > 1:  # DTensors have to be on the mesh of FSDP2
            has_it = name in (shards.mesh_dim_names or ())
            DEGREES[name].share(model, (shards if has_it else mesh)[name])
    return shards


def free_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered and kept; call it between steps only.

    A forward without a backward leaves gathered weights. After this call the next forward gathers
    anew and sees parameters that were changed in between.
    """
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
    check_degrees(config, model.config)
    if mixed_precision is not None and config.tp > 1 and config.with_tokens == 1:
        raise ValueError("mixed_precision: of FSDP2, which shards nothing here: use autocast")
    if config.ep == 1 and options:
        raise ValueError(f"{', '.join(options)}: options of a dispatcher, which ep=1 does not use")
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
    """Groups of layers that FSDP2 gathers and reduces together."""
    layers, size = list(model.layers), config.layers_per_group
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _shards(config: ParallelConfig, mesh: DeviceMesh, dim: str) -> DeviceMesh:
    return mesh["dp_replicate", dim] if config.dp_replicate > 1 else mesh[dim]


def _divide_by_all(experts: nn.Module, shards: DeviceMesh, config: ParallelConfig) -> None:
    """Make FSDP2 divide the experts' gradients by all ranks with tokens of their own.

    The gradients are sums over the ``ep`` ranks already. FSDP2 does not know that and would divide
    by the ranks of its own mesh only. The setting of one module holds for its whole group.
    """
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(config.with_tokens))
    if shards.device_type == "cpu" and shards.size(shards.ndim - 1) > 1:
        # gloo has no reduction that divides. With one rank FSDP2 divides while it copies.
        experts.set_force_sum_reduction_for_comms(True)
