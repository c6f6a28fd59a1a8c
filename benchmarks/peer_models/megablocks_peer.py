"""MegaBlocks' dMoE between our attention and norms.

Shapes: B sequences, S sequence length, D model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megablocks.layers.arguments import Arguments
from megablocks.layers.dmoe import dMoE
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.kernels import cross_entropy
from moe_graphs.layers import LanguageModel, TransformerConfig
from peer_models.cases import Case
from peer_models.peer import Decoder, DecoderLayer, Peer, version_of
from peer_models.weights import LayerWeights, assign, assign_linear


class MegaBlocksPeer(Peer):
    def loss(self, model: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return cross_entropy(model(tokens_BS).flatten(0, 1), targets_BS.flatten())


def build(
    case: Case,
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Peer:
    config = case.config
    made = Arguments(**_arguments(config), device=device)
    # Only the parts of our model that are not MoE are used; its experts' memory is never filled.
    ours = LanguageModel(config, device="meta", dtype=dtype)
    layers: list[nn.Module] = []
    for index, layer in enumerate(ours.layers):
        moe = dMoE(made)
        _fill(moe, LayerWeights.of(state, index, config))
        layers.append(DecoderLayer(layer.attention_norm, layer.attention, layer.mlp_norm, moe))
    model = Decoder(ours.embedding, layers, ours.norm, ours.head)
    _fill_dense(model, state, device)
    ours.rope.reset_tables()
    settings = {
        "megablocks": version_of("megablocks"), "mlp_impl": "grouped", "mlp_type": "glu",
        "memory_optimized_mlp": False, "around it": "moe_graphs' attention, norms, cross entropy",
    }  # fmt: skip
    return MegaBlocksPeer(model.train(), settings)


def _arguments(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return dict(
        hidden_size=config.hidden_size,
        ffn_hidden_size=moe.ffn_hidden_size,
        num_layers=config.num_layers,
        bias=False,
        return_bias=False,
        activation_fn=functional.silu,
        moe_num_experts=moe.num_experts,
        moe_top_k=moe.top_k,
        moe_normalize_expert_weights=1,
        moe_loss_weight=0.0,
        mlp_type="glu",
        mlp_impl="grouped",
        fp16=False,
        bf16=True,
    )


def _fill(moe: nn.Module, weights: LayerWeights) -> None:
    """MegaBlocks' weights are [E * F, D] each, experts below each other."""
    assign_linear(moe.router.layer, weights.router)
    assign(moe.experts.mlp.w1, weights.gate.flatten(0, 1))
    assign(moe.experts.mlp.v1, weights.up.flatten(0, 1))
    assign(moe.experts.mlp.w2, weights.down.transpose(1, 2).flatten(0, 1))


def _fill_dense(model: Decoder, state: Mapping[str, Tensor], device: torch.device) -> None:
    """Everything on the meta device gets memory, and its values by the names of our state."""
    for name, module in model.named_modules():
        if any(x.is_meta for x in [*module.parameters(recurse=False), *module.buffers(False)]):
            module.to_empty(device=device, recurse=False)
            for own, parameter in module.named_parameters(recurse=False):
                key = f"{name}.{own}".replace(".moe_norm.", ".mlp_norm.")
                assign(parameter, state[key])
