"""Check of the types of config.json's fields, before any field is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INTEGERS = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "intermediate_size", "moe_intermediate_size",
    "max_position_embeddings", "num_experts", "num_local_experts", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace",
    "decoder_sparse_step", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "sliding_window", "original_max_position_embeddings"
]  # fmt: skip
_NUMBERS = [
    "rms_norm_eps", "rope_theta", "partial_rotary_factor", "attention_dropout",
    "router_aux_loss_coef", "routed_scaling_factor", "factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"
]  # fmt: skip
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(_INTEGERS, ("a whole number", (int,))),
    **dict.fromkeys(_NUMBERS, ("a number", (int, float))),
    "norm_topk_prob": ("true or false", (bool,)),
    "mlp_only_layers": ("a list of whole numbers", (list, tuple)),
    "rope_parameters": ("an object", (Mapping,)),
    "rope_scaling": ("an object", (Mapping,)),
}
_NOT_NEGATIVE = {"n_shared_experts", "first_k_dense_replace", "router_aux_loss_coef"}
_NOT_NEGATIVE |= {"attention_dropout", "mscale", "mscale_all_dim"}
_NOT_NEGATIVE |= {"decoder_sparse_step", "sliding_window"}


def check_types(values: Mapping[str, Any]) -> None:
    """Check that every field that our layers read is absent, null, or of its type.

    Raises:
        ValueError: some fields are not; the message names all of them.
    """
    problems = _problems(values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), Mapping):
            problems += [f"{problem} in {name}" for problem in _problems(values[name])]
    if problems:
        raise ValueError(f"config.json: {'; '.join(problems)}: correct it, or download it again")


def _problems(values: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in values.items():
        if name not in _KINDS or value is None:
            continue
        kind, types = _KINDS[name]
        of_type = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if isinstance(value, (list, tuple)):
            of_type = of_type and all(type(each) is int for each in value)
        if not of_type:
            found.append(f"{name}={value!r} must be {kind}")
        elif name in (*_INTEGERS, *_NUMBERS):
            if name in _NOT_NEGATIVE and not value >= 0:
                found.append(f"{name}={value!r} must not be negative")
            elif name not in _NOT_NEGATIVE and not value > 0:
                found.append(f"{name}={value!r} must be above 0")
    return found
