"""Published architectures, in their published sizes; any field can be overridden.

``mixtral_8x7b(num_layers=2)`` is two of its layers at full width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_graphs.layers.model_config import LatentAttentionConfig, MoEConfig, TransformerConfig
from moe_graphs.layers.rope_scaling import Llama3Scaling, YarnScaling


def mixtral_8x7b(**overrides: Any) -> TransformerConfig:
    """Mixtral 8x7B (arXiv 2401.04088): 46.7 B parameters, 12.9 B active."""
    config = TransformerConfig(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=32_000,
        max_sequence_length=32_768,
        rope_theta=1e6,
        norm_eps=1e-5,
        moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=14_336, aux_loss_coef=0.02),
    )
    return replace(config, **overrides)


def qwen3_30b_a3b(**overrides: Any) -> TransformerConfig:
    """Qwen3-30B-A3B (arXiv 2505.09388): 30.5 B parameters, 3.3 B active."""
    config = TransformerConfig(
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_936,
        max_sequence_length=40_960,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm="head",
        moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768, aux_loss_coef=1e-3),
    )
    return replace(config, **overrides)


def qwen3_235b_a22b(**overrides: Any) -> TransformerConfig:
    """Qwen3-235B-A22B (arXiv 2505.09388, and its config.json): 235 B parameters, 22 B active."""
    config = TransformerConfig(
        hidden_size=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_936,
        max_sequence_length=40_960,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm="head",
        moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=1536, aux_loss_coef=1e-3),
    )
    return replace(config, **overrides)


def olmoe_1b_7b(**overrides: Any) -> TransformerConfig:
    """OLMoE-1B-7B (arXiv 2409.02060): 6.9 B parameters, 1.3 B active."""
    config = TransformerConfig(
        hidden_size=2048,
        num_layers=16,
        num_heads=16,
        vocab_size=50_304,
        max_sequence_length=4096,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        qk_norm="full",
        moe=MoEConfig(
            num_experts=64,
            top_k=8,
            ffn_hidden_size=1024,
            normalize_top_k=False,
            aux_loss_coef=0.01,
            z_loss_coef=0.001,
        ),
    )
    return replace(config, **overrides)


def deepseek_v3_moe(**overrides: Any) -> MoEConfig:
    """The MoE layer of DeepSeek-V3 (arXiv 2412.19437), to be used with hidden_size 7168."""
    config = MoEConfig(
        num_experts=256,
        top_k=8,
        ffn_hidden_size=2048,
        score_function="sigmoid",
        num_groups=8,
        top_k_groups=4,
        scaling_factor=2.5,
        expert_bias=True,
        bias_update_rate=1e-3,
        shared_ffn_hidden_size=2048,
    )
    return replace(config, **overrides)


def deepseek_v3(**overrides: Any) -> TransformerConfig:
    """DeepSeek-V3 (arXiv 2412.19437): 671 B parameters, 37 B active.

    The head that predicts the token after the next one is left out. The first three layers are
    dense, also in ``deepseek_v3(num_layers=5)``.
    """
    num_layers = overrides.get("num_layers", 61)
    config = TransformerConfig(
        hidden_size=7168,
        num_layers=num_layers,
        num_heads=128,
        ffn_hidden_size=18_432,
        vocab_size=129_280,
        max_sequence_length=163_840,
        rope_theta=10_000.0,
        rope_scaling=YarnScaling(
            factor=40.0, original_max_sequence_length=4096, mscale=1.0, mscale_all_dim=1.0
        ),
        norm_eps=1e-6,
        latent=LatentAttentionConfig(
            query_rank=1536, kv_rank=512, plain_head_dim=128, rope_head_dim=64, value_head_dim=128
        ),
        moe=deepseek_v3_moe(),
        moe_layers=tuple(index >= 3 for index in range(num_layers)),
    )
    return replace(config, **overrides)


def llama3_8b(**overrides: Any) -> TransformerConfig:
    """Llama 3 8B (arXiv 2407.21783), dense: 8.0 B parameters."""
    config = TransformerConfig(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14_336,
        vocab_size=128_256,
        max_sequence_length=8192,
        rope_theta=500_000.0,
        norm_eps=1e-5,
    )
    return replace(config, **overrides)


def llama3_1_405b(**overrides: Any) -> TransformerConfig:
    """Llama 3.1 405B (arXiv 2407.21783, and its config.json), dense: 405.9 B parameters."""
    config = TransformerConfig(
        hidden_size=16_384,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        ffn_hidden_size=53_248,
        vocab_size=128_256,
        max_sequence_length=131_072,
        rope_theta=500_000.0,
        rope_scaling=Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_sequence_length=8192,
        ),
        norm_eps=1e-5,
    )
    return replace(config, **overrides)
