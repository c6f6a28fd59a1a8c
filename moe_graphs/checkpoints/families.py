"""Families of Hugging Face's models that our layers compute, by their ``model_type``.

All that reading and writing know of a family is here. A family of your own is an entry of
``registry.FAMILIES`` that your program adds (``FAMILIES.add("own", Family(...))``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_graphs.registry import FAMILIES

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of one ``model_type``: names of fields in config.json, and values it does not name.

    Attributes:
        architecture: the name of the class in transformers.
        qk_norm: the norm of queries and keys, as in ``TransformerConfig``.
        rope_theta, norm_eps: values where config.json has none.
        experts: names of the field with the number of experts; the first name is written.
        expert_size: name of the field with the width of an expert.
        moe: options of ``MoEConfig`` that the family has and config.json does not name.
        latent: whether attention is latent (MLA).
        grouped: whether experts are chosen by groups and scaled, beside shared experts, and all
            layers but the first ones have experts (DeepSeek-V3).
        lists_dense_layers: whether config.json lists the layers without experts.
        window: whether attention sees a window if config.json has ``sliding_window``.
        later_tokens: whether files may have layers that predict the token after the next.
        block, products: the name of the layer with experts, and those of an expert's products
            (gate, up, down), where a file has a tensor for each expert.
        required: fields that must have the value given here if config.json has them, because our
            layers compute nothing else. A config.json that we write has these fields, too.
    """

    architecture: str
    qk_norm: Literal["none", "head", "full"] = "none"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    experts: tuple[str, ...] = ()
    expert_size: str = "moe_intermediate_size"
    moe: Mapping[str, Any] = field(default_factory=dict)
    latent: bool = False
    grouped: bool = False
    lists_dense_layers: bool = False
    window: bool = False
    later_tokens: bool = False
    block: str = "mlp"
    products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    required: Mapping[str, Any] = field(default_factory=dict)


LLAMA = Family(architecture="LlamaForCausalLM", required={"mlp_bias": False})
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    rope_theta=1e6,
    norm_eps=1e-5,
    experts=("num_local_experts", "num_experts"),
    expert_size="intermediate_size",
    moe={"normalize_top_k": True},
    window=True,
    block="block_sparse_moe",
    products=("w1", "w3", "w2"),
    # The jitter of transformers reaches the experts; our jitter reaches the router alone.
    required={"router_jitter_noise": 0.0},
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    qk_norm="head",
    experts=("num_experts", "num_local_experts"),
    lists_dense_layers=True,
    required={"use_sliding_window": False},
)
OLMOE = Family(
    architecture="OlmoeForCausalLM",
    qk_norm="full",
    norm_eps=1e-5,
    experts=("num_experts", "num_local_experts"),
    expert_size="intermediate_size",
    required={"clip_qkv": None},
)
DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    experts=("n_routed_experts", "num_local_experts"),
    moe={"score_function": "sigmoid", "expert_bias": True},
    latent=True,
    grouped=True,
    later_tokens=True,
    required={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
)
REQUIRED = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}


def family_name(values: Values) -> str:
    """Return ``model_type``.

    Raises:
        ValueError: no family has this name.
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={name!r} is not known: load one of {', '.join(FAMILIES)}, or "
            f"train the model of transformers with moe_graphs.integrations.transformers"
        )
    return name


def needed(values: Values, *names: str) -> Any:
    """Return the first of the fields that is there and not null.

    Raises:
        ValueError: no field is.
    """
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ValueError(f"config.json: {names[0]} is missing: add it, the model depends on it")
