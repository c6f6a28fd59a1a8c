"""A language model, laid out over a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moe_graphs.dispatch import make_dispatcher
from moe_graphs.layers import GroupedExperts, LanguageModel, MoELayer
from moe_graphs.parallel.expert_shards import shard_experts
from moe_graphs.parallel.layout import ParallelConfig
from moe_graphs.parallel.mesh import expert_mesh


def parallelize(
    model: LanguageModel,
    config: ParallelConfig,
    mesh: DeviceMesh,
    *,
    dispatcher: str = "all_to_all",
    mixed_precision: MixedPrecisionPolicy | None = None,
    **dispatcher_options: Any,
) -> LanguageModel:
    """Shards ``model`` in place over ``mesh``, which ``make_mesh(config, ...)`` made.

    The model is one as for a single device: all experts, and the same weights on every rank (from
    one seed), or on the meta device. Parameters become DTensors of the whole model's shapes: make
    the optimizer afterwards. Gradients are those of the mean of the ranks' losses, of all ranks
    with batches of their own; the aux losses are each rank's own, and so their mean.

    Args:
        dispatcher, dispatcher_options: as of ``make_dispatcher``, its group excepted; without
            expert parallelism the model keeps its ``LocalDispatcher``.
        mixed_precision: of FSDP2; by default everything is in the dtype of the parameters.

    Raises:
        ValueError: a mesh or experts that do not fit the layout.
    """
    _check(model, config, mesh, dispatcher_options)
    policy = MixedPrecisionPolicy() if mixed_precision is None else mixed_precision
    reshard = config.reshard_after_forward
    if config.ep > 1:
        experts = expert_mesh(config, mesh)
        group = experts["ep"].get_group()
        shards = _shards(config, experts, "efsdp")
        for layer in _moe_layers(model):
            shard_experts(layer, make_dispatcher(dispatcher, group=group, **dispatcher_options))
            _make_global(layer.experts, experts["ep"])
            sharded = fully_shard(
                layer.experts, mesh=shards, mp_policy=policy, reshard_after_forward=reshard
            )
            _divide_by_all(sharded, shards, config)
    options: dict[str, Any] = {"mesh": _shards(config, mesh, "dp_shard"), "mp_policy": policy}
    fully_shard(model.embedding, reshard_after_forward=reshard, **options)
    for block in model.layers:
        fully_shard(block, reshard_after_forward=reshard, **options)
    # Needed again at once by the backward.
    fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return model


def _check(
    model: LanguageModel, config: ParallelConfig, mesh: DeviceMesh, options: dict[str, Any]
) -> None:
    names = mesh.mesh_dim_names or ()
    found = {name: mesh.size(number) for number, name in enumerate(names)}
    if any(getattr(config, name, None) != size for name, size in found.items()) or not found:
        raise ValueError(f"the mesh is {found or mesh} and the layout {config}: use make_mesh")
    if config.ep == 1 and options:
        raise ValueError(f"{', '.join(options)}: options of a dispatcher, which ep=1 does not use")
    if config.ep > 1 and not list(_moe_layers(model)):
        raise ValueError(f"ep={config.ep}: the model has no experts: pass ep=1")
    for layer in _moe_layers(model):
        if config.ep > 1 and not isinstance(layer.experts, GroupedExperts):
            kind = layer.config.experts
            raise ValueError(f"experts={kind!r} cannot be sharded over ep: take 'moe_graphs'")


def _moe_layers(model: LanguageModel) -> Iterator[MoELayer]:
    return (module for module in model.modules() if isinstance(module, MoELayer))


def _shards(config: ParallelConfig, mesh: DeviceMesh, dim: str) -> DeviceMesh:
    return mesh["dp_replicate", dim] if config.dp_replicate > 1 else mesh[dim]


def _make_global(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Local blocks as shards of weights that have all experts: what checkpoints and gradient norms
    go by."""
    for name, parameter in list(experts.named_parameters()):
        whole = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))


def _divide_by_all(experts: FSDPModule, shards: DeviceMesh, config: ParallelConfig) -> None:
    """Their gradients are sums over the ``ep`` ranks already, of which FSDP2 knows nothing: it
    would divide by its own ranks only."""
    experts.set_gradient_divide_factor(float(config.data_parallel))
    if shards.device_type == "cpu" and shards.size(shards.ndim - 1) > 1:
        # gloo has no sums that divide. With one rank it divides while it copies.
        experts.set_force_sum_reduction_for_comms(True)
