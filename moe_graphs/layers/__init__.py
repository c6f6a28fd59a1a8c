"""Modules written as stages: attention, router, experts, layers, model, and their configuration."""

from moe_graphs.layers.architectures import (
    deepseek_v3,
    deepseek_v3_moe,
    llama3_1_405b,
    llama3_8b,
    mixtral_8x7b,
    olmoe_1b_7b,
    qwen3_30b_a3b,
    qwen3_235b_a22b,
)
from moe_graphs.layers.attention import Attention
from moe_graphs.layers.experts import GroupedExperts
from moe_graphs.layers.head_exchange import HeadExchange
from moe_graphs.layers.latent_attention import LatentAttention
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.layers.model import LanguageModel, ModelLoss, ModelOutput
from moe_graphs.layers.model_config import LatentAttentionConfig, MoEConfig, TransformerConfig
from moe_graphs.layers.moe import MoELayer, MoEOutput
from moe_graphs.layers.norm import RMSNorm
from moe_graphs.layers.rope import RotaryEmbedding
from moe_graphs.layers.rope_scaling import Llama3Scaling, YarnScaling
from moe_graphs.layers.router import Routing, TopKRouter
from moe_graphs.layers.transformer import LayerOutput, TransformerLayer
from moe_graphs.weight_codes import unchanged_weights

__all__ = [
    "Attention",
    "GroupedExperts",
    "HeadExchange",
    "LanguageModel",
    "LatentAttention",
    "LatentAttentionConfig",
    "LayerOutput",
    "Llama3Scaling",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "ModelLoss",
    "ModelOutput",
    "RMSNorm",
    "RotaryEmbedding",
    "Routing",
    "SwiGLU",
    "TopKRouter",
    "TransformerConfig",
    "TransformerLayer",
    "YarnScaling",
    "deepseek_v3",
    "deepseek_v3_moe",
    "llama3_1_405b",
    "llama3_8b",
    "mixtral_8x7b",
    "olmoe_1b_7b",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "unchanged_weights",
]
