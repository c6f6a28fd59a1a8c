"""The families of Hugging Face's models that are among our layers, by their ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json of one ``model_type`` says, and what it leaves unsaid.

    Attributes:
        architecture: the class in transformers.
        experts: how the number of experts is called; the first name is the one written.
        expert_size: how the width of an expert is called.
        moe: options of the router that the family has and config.json does not name.
        required: fields that have to be as given here if they are there: our layers compute
            nothing else. Also what is written.
    """

    architecture: str
    qk_norm: Literal["none", "head", "full"] = "none"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    experts: tuple[str, ...] = ()
    expert_size: str = "moe_intermediate_size"
    moe: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", required={"mlp_bias": False}),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        rope_theta=1e6,
        norm_eps=1e-5,
        experts=("num_local_experts", "num_experts"),
        expert_size="intermediate_size",
        moe={"normalize_top_k": True},
        # transformers' jitter reaches the experts, ours the router alone.
        required={"router_jitter_noise": 0.0},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm="head",
        experts=("num_experts", "num_local_experts"),
        required={"use_sliding_window": False},
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        qk_norm="full",
        norm_eps=1e-5,
        experts=("num_experts", "num_local_experts"),
        expert_size="intermediate_size",
        required={"clip_qkv": None},
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        experts=("n_routed_experts", "num_local_experts"),
        moe={"score_function": "sigmoid", "expert_bias": True},
        required={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
}
REQUIRED = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}


def family_name(values: Values) -> str:
    """``model_type``.

    Raises:
        ValueError: it is none of those known here.
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={name!r} is not known: load one of {', '.join(FAMILIES)}, or "
            f"train the model of transformers with moe_graphs.integrations.transformers"
        )
    return name


def needed(values: Values, *names: str) -> Any:
    """The first of the fields that is there and not null."""
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ValueError(f"config.json: {names[0]} is missing: add it, the model depends on it")
