"""Plain torch as torchtitan writes it: `torch._grouped_mm` over rows sorted by their expert.

Shapes: B sequences, S sequence length, T tokens, D model, V vocabulary, H query heads, G kv heads,
Q head dim, E experts, F ffn, K top-k, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.layers import TransformerConfig
from peer_models.cases import Case
from peer_models.peer import Decoder, DecoderLayer, Peer
from peer_models.weights import LayerWeights, assign, assign_linear, assign_optional


class PlainAttention(nn.Module):
    cos_SQ: Tensor
    sin_SQ: Tensor

    def __init__(self, config: TransformerConfig, factory: dict[str, Any]) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_size
        self.head_size, self.grouped = size, config.kv_heads != config.num_heads
        self.query = nn.Linear(width, config.num_heads * size, bias=False, **factory)
        self.key = nn.Linear(width, config.kv_heads * size, bias=False, **factory)
        self.value = nn.Linear(width, config.kv_heads * size, bias=False, **factory)
        self.out = nn.Linear(config.num_heads * size, width, bias=False, **factory)
        normed = config.qk_norm == "head"
        self.query_norm = nn.RMSNorm(size, config.norm_eps, **factory) if normed else None
        self.key_norm = nn.RMSNorm(size, config.norm_eps, **factory) if normed else None
        positions = torch.arange(config.max_sequence_length, dtype=torch.float32)
        frequencies = config.rope_theta ** (-torch.arange(0, size, 2).float() / size)
        angles_SQ = torch.outer(positions, frequencies).repeat(1, 2).to(factory["device"])
        self.register_buffer("cos_SQ", angles_SQ.cos(), persistent=False)
        self.register_buffer("sin_SQ", angles_SQ.sin(), persistent=False)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        query, key, value = (
            projection(hidden_BSD).unflatten(-1, (-1, self.head_size))
            for projection in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = self._rotated(query), self._rotated(key)
        mixed_BHSQ = functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.out(mixed_BHSQ.transpose(1, 2).flatten(2))

    def _rotated(self, x_BSHQ: Tensor) -> Tensor:
        first, second = x_BSHQ.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        length = x_BSHQ.shape[1]
        cos, sin = self.cos_SQ[:length, None], self.sin_SQ[:length, None]
        return (x_BSHQ * cos + turned * sin).to(x_BSHQ.dtype)


class PlainMoE(nn.Module):
    """Scores after the experts, as torchtitan's Qwen3 has them."""

    def __init__(self, config: TransformerConfig, factory: dict[str, Any]) -> None:
        super().__init__()
        moe, width = config.moe, config.hidden_size
        assert moe is not None
        self.num_experts, self.top_k = moe.num_experts, moe.top_k
        self.router = nn.Linear(width, moe.num_experts, bias=False, **factory)
        shape = (moe.num_experts, moe.ffn_hidden_size, width)
        self.w1 = nn.Parameter(torch.empty(shape, **factory))
        self.w3 = nn.Parameter(torch.empty(shape, **factory))
        self.w2 = nn.Parameter(torch.empty((shape[0], width, shape[1]), **factory))

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        hidden_TD = hidden_BSD.flatten(0, 1)
        scores_TE = self.router(hidden_TD).float().softmax(dim=-1)
        weights_TK, experts_TK = scores_TE.topk(self.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        chosen = experts_TK.flatten()
        counts_E = torch.histc(chosen.float(), self.num_experts, min=0, max=self.num_experts)
        order_R = chosen.argsort(stable=True)
        tokens_RD = (order_R // self.top_k)[:, None].expand(-1, hidden_TD.shape[1])
        rows_RD = self._experts(hidden_TD.gather(0, tokens_RD), counts_E)
        rows_RD = (rows_RD.float() * weights_TK.flatten()[order_R, None]).to(rows_RD.dtype)
        output_TD = torch.zeros_like(hidden_TD).scatter_add(0, tokens_RD, rows_RD)
        return output_TD.view_as(hidden_BSD)

    def _experts(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        ends_E = counts_E.cumsum(0).to(torch.int32)
        gate_RF = torch._grouped_mm(rows_RD, self.w1.transpose(1, 2), offs=ends_E)
        up_RF = torch._grouped_mm(rows_RD, self.w3.transpose(1, 2), offs=ends_E)
        return torch._grouped_mm(
            functional.silu(gate_RF) * up_RF, self.w2.transpose(1, 2), offs=ends_E
        )


def float_cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


class PlainPeer(Peer):
    cross_entropy = staticmethod(float_cross_entropy)

    def loss(self, model: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return self.cross_entropy(model(tokens_BS), targets_BS)


def plain_model(
    config: TransformerConfig,
    state: Mapping[str, Tensor],
    factory: dict[str, Any],
    settings: Mapping[str, Any],
    moe: Callable[[LayerWeights], nn.Module] | None = None,
) -> PlainPeer:
    """A decoder in plain torch; ``moe`` builds another MoE block from a layer's weights."""
    layers = [_layer(LayerWeights.of(state, i, config), config, factory, moe)
              for i in range(config.num_layers)]  # fmt: skip
    embedding = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
    norm = nn.RMSNorm(config.hidden_size, config.norm_eps, **factory)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
    for module, name in ((embedding, "embedding"), (norm, "norm"), (head, "head")):
        assign_linear(module, state[f"{name}.weight"])
    return PlainPeer(Decoder(embedding, layers, norm, head), settings)


def build(
    case: Case,
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
) -> Peer:
    """``compiled``: each layer by itself and the loss, graph breaks allowed."""
    settings = {"experts": "torch._grouped_mm", "attention": "torch's SDPA", "compile": "none"}
    peer = plain_model(case.config, state, dict(device=device, dtype=dtype), settings)
    if compiled:
        peer.settings["compile"] = "torch.compile(fullgraph=False) of each layer, and of the loss"
        for layer in peer.model.layers:
            layer.compile(fullgraph=False)
        peer.cross_entropy = torch.compile(float_cross_entropy)
    return peer


def _layer(
    weights: LayerWeights,
    config: TransformerConfig,
    factory: dict[str, Any],
    moe: Callable[[LayerWeights], nn.Module] | None,
) -> nn.Module:
    attention = PlainAttention(config, factory)
    norms = [nn.RMSNorm(config.hidden_size, config.norm_eps, **factory) for _ in range(2)]
    assign_linear(norms[0], weights.attention_norm)
    assign_linear(norms[1], weights.mlp_norm)
    for name in ("query", "key", "value", "out"):
        assign_linear(getattr(attention, name), getattr(weights, name))
    assign_optional(attention.query_norm, weights.query_norm)
    assign_optional(attention.key_norm, weights.key_norm)
    block = _plain_moe(weights, config, factory) if moe is None else moe(weights)
    return DecoderLayer(norms[0], attention, norms[1], block)


def _plain_moe(
    weights: LayerWeights, config: TransformerConfig, factory: dict[str, Any]
) -> PlainMoE:
    moe = PlainMoE(config, factory)
    assign_linear(moe.router, weights.router)
    for parameter, value in (moe.w1, weights.gate), (moe.w3, weights.up), (moe.w2, weights.down):
        assign(parameter, value)
    return moe
