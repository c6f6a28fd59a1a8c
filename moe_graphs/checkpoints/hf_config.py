"""Conversion of Hugging Face's config.json into our ``TransformerConfig``, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from moe_graphs.checkpoints.config_types import check_types
from moe_graphs.checkpoints.families import REQUIRED, Family, Values, family_name, needed
from moe_graphs.layers.model_config import LatentAttentionConfig, MoEConfig, TransformerConfig
from moe_graphs.layers.rope_scaling import Llama3Scaling, YarnScaling
from moe_graphs.registry import FAMILIES

# Options that act in training alone. config.json has no names for them; a loaded model has their
# defaults.
_TRAINING_ALONE = (
    "z_loss_coef",
    "input_jitter",
    "bias_update_rate",
    "experts",
    "precision",
    "recompute",
)


def transformer_config(
    values: Values, *, max_sequence_length: int | None = None
) -> TransformerConfig:
    """Read the model that a config.json describes.

    ``aux_loss_coef`` is ``router_aux_loss_coef``, whatever ``output_router_logits`` says: our loss
    is an output of its own (``ModelOutput.aux_loss``), and the caller adds it or not. Its value is
    not the value in transformers. transformers computes one loss from the tokens of all layers
    together, ``top_k`` times as large; ours is the sum of one loss per layer.

    Args:
        values: config.json as a dictionary, or ``config.to_dict()`` of transformers.
        max_sequence_length: positions of the rotary tables; default
            ``max_position_embeddings``.

    Raises:
        ValueError: ``model_type`` is unknown, or a field is missing, has another type, or asks for
            something that our layers do not compute; the message names it.
    """
    name = family_name(values)
    check_types(values)
    family = FAMILIES[name]
    length = max_sequence_length or needed(values, "max_position_embeddings")
    _check_required(values, family, length)
    moe = _read_moe(values, family) if family.experts else None
    flags = _read_moe_layers(values)
    theta, scaling = _read_rope(values, family)
    shape: dict[str, Any] = dict(num_kv_heads=values.get("num_key_value_heads"))
    shape |= dict(head_dim=values.get("head_dim"), qk_norm=family.qk_norm)
    if family.latent:
        shape = dict(latent=_read_latent(values))
    return TransformerConfig(
        hidden_size=needed(values, "hidden_size"),
        num_layers=needed(values, "num_hidden_layers"),
        num_heads=needed(values, "num_attention_heads"),
        vocab_size=needed(values, "vocab_size"),
        ffn_hidden_size=None if moe and all(flags) else needed(values, "intermediate_size"),
        max_sequence_length=length,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=values.get("rms_norm_eps", family.norm_eps),
        attention_dropout=values.get("attention_dropout") or 0.0,
        moe=moe,
        moe_layers="all" if moe is None or all(flags) else flags,
        **shape,
    )


def hf_config(config: TransformerConfig) -> dict[str, Any]:
    """Write a config.json of the family that computes what ``config`` says.

    ``hidden_dropout``, ``z_loss_coef``, ``input_jitter`` and ``bias_update_rate`` are left
    out, because they act in training alone.

    Raises:
        ValueError: no family computes this model; the message names a field that prevents it.
    """
    name = _family_of(config)
    family = FAMILIES[name]
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        **_written_rope(config),
        **REQUIRED,
        **family.required,
    }
    latent = config.latent
    values |= {"head_dim": config.head_size} if latent is None else _written_latent(latent)
    if config.moe is None:
        values["intermediate_size"] = config.ffn_hidden_size
    else:
        values |= _written_moe(config, config.moe, name)
    back = _canonical(transformer_config(values))
    _check_same(_canonical(config), back, name)
    return values


def describes(values: Values, config: TransformerConfig) -> bool:
    """Whether ``values`` is a config.json of ``config``, apart from options of training."""
    read = transformer_config(values, max_sequence_length=config.max_sequence_length)
    return _canonical(read) == _canonical(config)


def _check_required(values: Values, family: Family, length: int) -> None:
    for name, wanted in {**REQUIRED, **family.required}.items():
        given = values.get(name, wanted)
        if (given or None) != (wanted or None):
            raise ValueError(
                f"config.json: {name}={given!r}, but our layers compute {name}={wanted!r} only: "
                f"take another checkpoint, or train the model of transformers with "
                f"moe_graphs.integrations.transformers"
            )
    window = values.get("sliding_window")
    if family.window and window is not None and window < length:
        raise ValueError(
            f"config.json: sliding_window={window}, but our attention sees the whole sequence of "
            f"{length}: load it with max_sequence_length={window}, where that is the same"
        )


def _read_moe(values: Values, family: Family) -> MoEConfig:
    options = dict(family.moe)
    options.setdefault("normalize_top_k", bool(values.get("norm_topk_prob", family.grouped)))
    width = needed(values, family.expert_size)
    if family.grouped:
        groups = needed(values, "n_group")
        if groups > 1:
            options |= dict(num_groups=groups, top_k_groups=needed(values, "topk_group"))
        options["scaling_factor"] = needed(values, "routed_scaling_factor")
        options["shared_ffn_hidden_size"] = width * needed(values, "n_shared_experts")
    return MoEConfig(
        num_experts=needed(values, *family.experts),
        top_k=needed(values, "num_experts_per_tok"),
        ffn_hidden_size=width,
        aux_loss_coef=values.get("router_aux_loss_coef") or 0.0,
        **options,
    )


def _read_moe_layers(values: Values) -> tuple[bool, ...]:
    """One flag per layer, by the fields of all families: a field that is absent changes none."""
    dense = set(values.get("mlp_only_layers") or ())
    first, step = values.get("first_k_dense_replace") or 0, values.get("decoder_sparse_step") or 1
    layers = range(needed(values, "num_hidden_layers"))
    return tuple(i >= first and i not in dense and (i + 1) % step == 0 for i in layers)


def _read_latent(values: Values) -> LatentAttentionConfig:
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(
            f"config.json: num_key_value_heads={kv_heads}, but latent attention has as many as "
            f"num_attention_heads ({heads}): set them equal"
        )
    return LatentAttentionConfig(
        query_rank=values.get("q_lora_rank"),
        kv_rank=needed(values, "kv_lora_rank"),
        plain_head_dim=needed(values, "qk_nope_head_dim"),
        rope_head_dim=needed(values, "qk_rope_head_dim"),
        value_head_dim=needed(values, "v_head_dim"),
    )


def _read_rope(values: Values, family: Family) -> tuple[float, YarnScaling | Llama3Scaling | None]:
    """Base and scaling of the rotary positions.

    They are read from ``rope_scaling`` or, if that is empty, from ``rope_parameters``
    (transformers 5). transformers ignores ``rope_parameters`` if config.json has both.
    """
    rope = {
        "rope_theta": values.get("rope_theta") or family.rope_theta,
        "partial_rotary_factor": values.get("partial_rotary_factor"),
        **(values.get("rope_scaling") or values.get("rope_parameters") or {}),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    readers: dict[str, Callable[[Values], Any]] = {
        "default": lambda rope: None, "yarn": _read_yarn, "llama3": _read_llama3,
    }  # fmt: skip
    if kind not in readers or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"config.json: rope_parameters {rope} are not known: rope_type has to be one of "
            f"{', '.join(readers)}, and the same for all layers"
        )
    if rope["partial_rotary_factor"] not in (None, 1.0):
        raise ValueError(
            f"config.json: partial_rotary_factor={rope['partial_rotary_factor']}, but our "
            f"attention rotates whole heads: take another checkpoint"
        )
    return float(rope["rope_theta"]), readers[kind](rope)


def _read_yarn(rope: Values) -> YarnScaling:
    for name, wanted in (("attention_factor", None), ("truncate", True)):
        if rope.get(name, wanted) != wanted:
            raise ValueError(
                f"config.json: {name}={rope[name]} of rope_type 'yarn' is not computed by our "
                f"layers: leave it out"
            )
    return YarnScaling(
        factor=needed(rope, "factor"),
        original_max_sequence_length=needed(rope, "original_max_position_embeddings"),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        mscale=rope.get("mscale") or 0.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
    )


def _read_llama3(rope: Values) -> Llama3Scaling:
    return Llama3Scaling(
        factor=needed(rope, "factor"),
        low_freq_factor=needed(rope, "low_freq_factor"),
        high_freq_factor=needed(rope, "high_freq_factor"),
        original_max_sequence_length=needed(rope, "original_max_position_embeddings"),
    )


def _family_of(config: TransformerConfig) -> str:
    """The family that agrees with the model in most facts; the first facts weigh most."""

    def agrees(name: str) -> tuple[bool, ...]:
        family = FAMILIES[name]
        return (
            family.latent == (config.latent is not None),
            bool(family.experts) == (config.moe is not None),
            family.qk_norm == config.qk_norm,
        )

    return max(FAMILIES, key=agrees)


def _written_moe(config: TransformerConfig, moe: MoEConfig, name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    values: dict[str, Any] = {
        family.experts[0]: moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": config.ffn_hidden_size or moe.ffn_hidden_size,
        family.expert_size: moe.ffn_hidden_size,
    }
    dense = [i for i in range(config.num_layers) if not config.is_moe_layer(i)]
    if "normalize_top_k" not in family.moe:
        values["norm_topk_prob"] = moe.normalize_top_k
    if family.lists_dense_layers:
        values |= dict(mlp_only_layers=dense, decoder_sparse_step=1)
    if family.grouped:
        values |= dict(
            n_group=moe.num_groups or 1,
            topk_group=moe.top_k_groups or 1,
            routed_scaling_factor=moe.scaling_factor,
            n_shared_experts=moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
            first_k_dense_replace=len(dense),
        )
    else:
        values["router_aux_loss_coef"] = moe.aux_loss_coef
    return values


def _written_latent(latent: LatentAttentionConfig) -> dict[str, Any]:
    return dict(
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.plain_head_dim,
        qk_rope_head_dim=latent.rope_head_dim,
        v_head_dim=latent.value_head_dim,
        rope_interleave=True,
    )


def _written_rope(config: TransformerConfig) -> dict[str, Any]:
    """Fields for transformers 5 and for older versions; each ignores the fields of the other."""
    scaling = config.rope_scaling
    if scaling is None:
        kind: dict[str, Any] = {"rope_type": "default"}
    else:
        kind = {"rope_type": "yarn" if isinstance(scaling, YarnScaling) else "llama3"}
        kind |= {each.name: getattr(scaling, each.name) for each in fields(scaling)}
        kind["original_max_position_embeddings"] = kind.pop("original_max_sequence_length")
    return {
        "rope_parameters": {"rope_theta": config.rope_theta, **kind},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else kind,
    }


def _canonical(config: TransformerConfig) -> TransformerConfig:
    """The configuration in one spelling, with defaults for options of training and kernels."""
    flags = tuple(config.is_moe_layer(i) for i in range(config.num_layers))
    moe = config.moe
    if moe is not None:
        defaults: dict[str, Any] = {each.name: each.default for each in fields(moe)}
        moe = replace(moe, **{name: defaults[name] for name in _TRAINING_ALONE})
        if moe.num_groups == 1:
            moe = replace(moe, num_groups=None, top_k_groups=None)
    heads: dict[str, Any] = dict(num_kv_heads=config.kv_heads, head_dim=config.head_size)
    return replace(
        config,
        ffn_hidden_size=None if all(flags) else config.ffn_hidden_size,
        hidden_dropout=0.0,
        linear="torch",
        precision="weights",
        moe=moe if any(flags) else None,
        moe_layers=flags if any(flags) and not all(flags) else "all",
        **(heads if config.latent is None else {}),
    )


def _check_same(wanted: Any, read: Any, name: str) -> None:
    for each in fields(wanted):
        ours, theirs = getattr(wanted, each.name), getattr(read, each.name)
        if ours == theirs:
            continue
        if isinstance(ours, MoEConfig) and isinstance(theirs, MoEConfig):
            _check_same(ours, theirs, name)
        raise ValueError(
            f"{each.name}={ours!r} cannot be said in a config.json of {name!r}, which would be "
            f"read as {theirs!r}: only models that compute what a family of "
            f"{', '.join(FAMILIES)} does can be saved"
        )
