"""Data parallelism without FSDP2: every rank has all weights except other ranks' experts.

Weights stay at their addresses, so graphs of scopes are legal. Nothing is gathered or copied, so
small models run faster. Every rank needs memory for all weights but other ranks' experts.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_graphs.dispatch import make_dispatcher
from moe_graphs.layers.moe import moe_layers
from moe_graphs.parallel.expert_shards import make_global, shard_experts

Model = TypeVar("Model", bound=nn.Module)


def replicate(
    model: Model, mesh: DeviceMesh, *, dispatcher: str = "all_to_all", **dispatcher_options: Any
) -> Model:
    """Share the experts of every ``MoELayer`` in ``model`` over ``mesh``, in place.

    The model has all experts, and the same weights on every rank (from one seed). Weights of
    experts become DTensors with all experts: make the optimizer afterwards (torch's fused
    optimizers need the experts in a group of their own). Call ``sum_gradients`` after the last
    backward of a step.

    Args:
        mesh: one dimension, with the ranks that have batches of their own.
        dispatcher, dispatcher_options: arguments of ``make_dispatcher`` without its group.

    Raises:
        ValueError: a mesh of several dimensions, or experts that do not fit.
    """
    _check(mesh)
    for layer in moe_layers(model):
        options = {"group": mesh.get_group(), **dispatcher_options}
        shard_experts(layer, make_dispatcher(dispatcher, **options))
        make_global(layer.experts, mesh)
    return model


@torch.no_grad()
def sum_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a ``replicate``d model over the ranks, in place.

    The gradients are then those of the sum of the ranks' losses; for their mean, divide every loss
    by ``mesh.size()``. There is one all-reduce for each dtype, without the experts, whose gradients
    are sums already. A graph of a whole step can hold this call. The same parameters must have
    gradients on all ranks.

    Raises:
        ValueError: a mesh of several dimensions, or gradients on another mesh (FSDP2).
    """
    _check(mesh)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            if gradient.device_mesh != mesh:
                raise ValueError(
                    f"the gradient of {name} is on {gradient.device_mesh}, which is not the mesh "
                    f"of replicate(): FSDP2 sums its gradients itself"
                )
        elif gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_dtype.values():
        together = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(together, group=mesh.get_group())
        parts = together.split([gradient.numel() for gradient in alike])
        pairs = zip(parts, alike, strict=True)
        torch._foreach_copy_(alike, [part.view_as(gradient) for part, gradient in pairs])


def _check(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"a mesh of {mesh.ndim} dimensions: pass that of data-parallel ranks")
