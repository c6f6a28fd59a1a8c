"""Expert parallelism of one layer: another dispatcher, and the experts that it keeps here.

Shapes: D model, F ffn, e experts of this rank.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe_graphs.dispatch import Dispatcher
from moe_graphs.layers import MoELayer, TransformerConfig
from moe_graphs.layers.expert_backends import build_experts
from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.degrees import Degree


class ExpertParallel(Degree):
    """Ranks that share experts. Their number of bytes is the dispatcher's (``costs``)."""

    is_factor = False

    @classmethod
    def check(
        cls, layout: ParallelConfig, model: TransformerConfig, sequence_length: int | None = None
    ) -> None:
        if model.moe is None or not any(map(model.is_moe_layer, range(model.num_layers))):
            raise ValueError(f"ep: {layout.ep} ranks and a model that has no experts: pass ep=1")
        if model.moe.num_experts % layout.ep:
            experts = f"{model.moe.num_experts} experts"
            raise ValueError(f"ep: {layout.ep} ranks cannot share {experts}: choose a divisor")


@torch.no_grad()
def shard_experts(layer: MoELayer, dispatcher: Dispatcher) -> MoELayer:
    """Give ``layer`` the dispatcher, and keep only its local experts, in place.

    Call this function before FSDP, an optimizer or graphs are made. The layer has all experts, with
    the same weights on every rank (drawn from one seed), or is on the meta device. Gradients of
    experts are sums over the ranks of the dispatcher's group: divide them like other gradients.

    Raises:
        ValueError: the layer has only some of the experts, or cannot have this dispatcher.
    """
    config, before = layer.config, layer.experts
    if len(before.local_experts) != config.num_experts:
        raise ValueError(
            f"the layer has experts {before.local_experts} of {config.num_experts}: build it with "
            f"all of them (dispatcher LocalDispatcher), on every rank from the same seed"
        )
    local = dispatcher.local_experts(config.num_experts)
    w1_eD2F, w2_eFD = (weight[local.start : local.stop] for weight in before.stacked_weights())
    (size,) = layer.router.weight.shape[1:]
    after = build_experts(config, size, local, device=w1_eD2F.device, dtype=w1_eD2F.dtype)
    layer.use_dispatcher(dispatcher, after)
    if not w1_eD2F.is_meta:
        after.load_stacked_weights(w1_eD2F, w2_eFD)
    return layer


def make_global(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Make local experts shards of weights with all experts (DTensors).

    Checkpoints and gradient norms need the global shapes.

    Args:
        mesh: one dimension, with the ranks that share the experts.
    """
    for name, parameter in list(experts.named_parameters()):
        whole = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
