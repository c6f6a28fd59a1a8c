"""Transformer Engine: its attention, its router, permutation and grouped linear layers.

Shapes: B sequences, S sequence length, T tokens, D model, V vocabulary, Q head dim, E experts,
F ffn, K top-k, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.nn import functional
from transformer_engine.common import recipe
from transformer_engine.pytorch.attention import RotaryPositionEmbedding
from transformer_engine.pytorch.router import fused_topk_with_score_function

from moe_graphs.layers import TransformerConfig
from peer_models.cases import Case
from peer_models.peer import Decoder, DecoderLayer, Peer, version_of
from peer_models.weights import LayerWeights, assign, assign_linear, assign_optional

RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
}


class TEAttention(nn.Module):
    """`te.MultiheadAttention` with the norm before it and the rotary angles beside it."""

    angles_S11Q: Tensor

    def __init__(self, config: TransformerConfig, weights: LayerWeights, layer_number: int) -> None:
        super().__init__()
        normed = config.qk_norm == "head"
        self.heads = te.MultiheadAttention(
            config.hidden_size,
            config.num_heads,
            kv_channels=config.head_size,
            attention_dropout=0.0,
            layernorm_epsilon=config.norm_eps,
            layer_number=layer_number,
            attn_mask_type="causal",
            num_gqa_groups=config.kv_heads,
            params_dtype=weights.router.dtype,
            input_layernorm=True,
            fuse_qkv_params=True,
            bias=False,
            normalization="RMSNorm",
            qkv_format="bshd",
            qk_norm_type="RMSNorm" if normed else None,
            qk_norm_eps=config.norm_eps,
            qk_norm_before_rope=normed,
        )
        assign(self.heads.layernorm_qkv.layer_norm_weight, weights.attention_norm)
        assign_linear(self.heads.layernorm_qkv, weights.interleaved_qkv(config))
        assign_linear(self.heads.proj, weights.out)
        assign_optional(self.heads.q_norm, weights.query_norm)
        assign_optional(self.heads.k_norm, weights.key_norm)
        angles = RotaryPositionEmbedding(config.head_size, rotary_base=config.rope_theta)
        angles_S11Q = angles(config.max_sequence_length)
        self.register_buffer("angles_S11Q", angles_S11Q, persistent=False)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return self.heads(hidden_BSD, rotary_pos_emb=self.angles_S11Q)


def weighted_swiglu(rows_RF: Tensor, weights_R: Tensor) -> Tensor:
    gate, up = rows_RF.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up * weights_R[:, None]).to(rows_RF.dtype)


compiled_swiglu = torch.compile(weighted_swiglu)  # as Megatron does it


class TEMoE(nn.Module):
    """Router logits in fp32, weights applied within the SwiGLU, as Megatron does both."""

    def __init__(self, config: TransformerConfig, weights: LayerWeights, quantized: bool) -> None:
        super().__init__()
        moe, width = config.moe, config.hidden_size
        assert moe is not None
        self.top_k = moe.top_k
        factory: dict[str, Any] = dict(bias=False, params_dtype=weights.router.dtype)
        self.router = nn.Parameter(weights.router.clone())
        self.up = te.GroupedLinear(moe.num_experts, width, 2 * moe.ffn_hidden_size, **factory)
        self.down = te.GroupedLinear(moe.num_experts, moe.ffn_hidden_size, width, **factory)
        self.swiglu = compiled_swiglu if weights.router.is_cuda else weighted_swiglu
        self.pad = te.Fp8Padding(moe.num_experts) if quantized else None
        self.unpad = te.Fp8Unpadding(moe.num_experts) if quantized else None
        for expert in range(moe.num_experts):
            both = torch.cat((weights.gate[expert], weights.up[expert]))
            assign(self.up.get_parameter(f"weight{expert}"), both)
            assign(self.down.get_parameter(f"weight{expert}"), weights.down[expert])

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        hidden_TD = hidden_BSD.flatten(0, 1)
        logits_TE = functional.linear(hidden_TD.float(), self.router.float())
        weights_TE, chosen_TE = fused_topk_with_score_function(
            logits_TE, self.top_k, False, None, None, None, "softmax", None
        )
        rows_RD, weights_R, row_map = te.moe_permute_with_probs(
            hidden_TD, weights_TE, chosen_TE, num_out_tokens=hidden_TD.shape[0] * self.top_k
        )
        rows_RD = self._experts(rows_RD, weights_R, chosen_TE.sum(dim=0).tolist())
        output_TD = te.moe_unpermute(rows_RD, row_map, restore_shape=hidden_TD.shape)
        return output_TD.view_as(hidden_BSD)

    def _experts(self, rows_RD: Tensor, weights_R: Tensor, counts: list[int]) -> Tensor:
        padded = counts
        if self.pad is not None:
            rows_RD, padded = self.pad(rows_RD, counts)
            weights_R = self.pad(weights_R[:, None], counts)[0][:, 0]
        rows_RF = self.swiglu(self.up(rows_RD, padded), weights_R)
        rows_RD = self.down(rows_RF, padded)
        return rows_RD if self.unpad is None else self.unpad(rows_RD, counts)


class TEDecoder(Decoder):
    """FP8, if a recipe is given, within the layers; embedding and output stay bf16."""

    recipe: Any = None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        hidden_BSD = self.embedding(tokens_BS)
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            for layer in self.layers:
                hidden_BSD = layer(hidden_BSD)
        return self.head(self.norm(hidden_BSD))


class TEPeer(Peer):
    def __init__(self, model: nn.Module, settings: Mapping[str, Any], case: Case,
                 captures: bool) -> None:  # fmt: skip
        super().__init__(model, settings)
        self.case, self.captures = case, captures

    def loss(self, model: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return te.parallel_cross_entropy(model(tokens_BS), targets_BS.contiguous()).mean()

    def capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Attention of all layers, by Transformer Engine's own function."""
        attentions = [layer.attention for layer in self.model.layers]
        config = self.case.config
        shape = (self.case.batch_size, config.max_sequence_length, config.hidden_size)
        embedding = self.model.embedding.weight
        samples = [
            torch.randn(shape, device=embedding.device, dtype=embedding.dtype, requires_grad=True)
            for _ in attentions
        ]
        te.make_graphed_callables(
            tuple(attentions),
            tuple((sample,) for sample in samples),
            enabled=self.model.recipe is not None,
            recipe=self.model.recipe,
        )
        optimizer.zero_grad(set_to_none=True)


def build(
    case: Case,
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    fp8: str | None = None,
    graphs: bool = False,
) -> Peer:
    config, factory = case.config, dict(device=device, dtype=dtype)
    layers = [
        _layer(LayerWeights.of(state, index, config), index, config, fp8 is not None)
        for index in range(config.num_layers)
    ]
    embedding = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
    norm = te.RMSNorm(config.hidden_size, eps=config.norm_eps, params_dtype=dtype)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
    for module, name in ((embedding, "embedding"), (norm, "norm"), (head, "head")):
        assign_linear(module, state[f"{name}.weight"])
    model = TEDecoder(embedding, layers, norm, head)
    model.recipe = RECIPES[fp8]() if fp8 else None
    settings = {
        "transformer_engine": version_of("transformer_engine"), "fp8": fp8 or "none",
        "graphs": "te.make_graphed_callables of the attention" if graphs else "none",
        "experts": "GroupedLinear, counts read by the host", "activation": "torch.compile",
        "router": "fused_topk_with_score_function, logits in fp32",
        "permutation": "moe_permute_with_probs",
    }  # fmt: skip
    return TEPeer(model.train(), settings, case, graphs)


def _layer(
    weights: LayerWeights, index: int, config: TransformerConfig, quantized: bool
) -> DecoderLayer:
    dtype = weights.router.dtype
    norm = te.RMSNorm(config.hidden_size, eps=config.norm_eps, params_dtype=dtype)
    assign_linear(norm, weights.mlp_norm)
    attention = TEAttention(config, weights, index + 1)  # with the norm before it
    return DecoderLayer(nn.Identity(), attention, norm, TEMoE(config, weights, quantized))
