"""Conversion of config.json to our configuration and back; names of fields that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_directories import CASES, LLAMA3, YARN, theirs
from moe_graphs.checkpoints.families import Family
from moe_graphs.checkpoints.hf_config import describes, hf_config, transformer_config
from moe_graphs.checkpoints.weight_names import pieces
from moe_graphs.layers import (
    Llama3Scaling,
    TransformerConfig,
    YarnScaling,
    deepseek_v3,
    llama3_8b,
    mixtral_8x7b,
    olmoe_1b_7b,
    qwen3_30b_a3b,
)
from moe_graphs.registry import FAMILIES

# The fields that matter, as they are published.
_COMMON = dict(hidden_act="silu", attention_dropout=0.0, tie_word_embeddings=False)
PUBLISHED = {
    mixtral_8x7b: dict(
        **_COMMON, model_type="mixtral", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2,
        num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8, rms_norm_eps=1e-5,
        rope_theta=1e6, router_aux_loss_coef=0.02, sliding_window=None, vocab_size=32000,
    ),
    qwen3_30b_a3b: dict(
        **_COMMON, model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1,
        head_dim=128, hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960,
        max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
        num_key_value_heads=4, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6,
        router_aux_loss_coef=0.001, sliding_window=None, use_sliding_window=False,
        vocab_size=151936,
    ),
    olmoe_1b_7b: dict(
        **_COMMON, model_type="olmoe", attention_bias=False, clip_qkv=None, hidden_size=2048,
        intermediate_size=1024, max_position_embeddings=4096, norm_topk_prob=False,
        num_attention_heads=16, num_experts=64, num_experts_per_tok=8, num_hidden_layers=16,
        num_key_value_heads=16, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
        router_aux_loss_coef=0.01, vocab_size=50304,
    ),
    llama3_8b: dict(
        **_COMMON, model_type="llama", attention_bias=False, hidden_size=4096,
        intermediate_size=14336, max_position_embeddings=8192, num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=500000.0, vocab_size=128256,
    ),
    deepseek_v3: dict(
        **_COMMON, model_type="deepseek_v3", attention_bias=False, aux_loss_alpha=0.001,
        first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432, kv_lora_rank=512,
        max_position_embeddings=163840, moe_intermediate_size=2048, moe_layer_freq=1, n_group=8,
        n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128,
        num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128,
        num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid",
        rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                          original_max_position_embeddings=4096, type="yarn"),
        topk_group=4, topk_method="noaux_tc", v_head_dim=128, vocab_size=129280,
    ),
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED, ids=lambda preset: preset.__name__)
def test_published_files_are_our_architectures(preset):
    assert describes(PUBLISHED[preset], preset())
    read, want = transformer_config(PUBLISHED[preset]), preset()
    if want.moe is not None:
        assert read.moe == replace(want.moe, z_loss_coef=0.0)
    assert read.rope_scaling == want.rope_scaling


@pytest.mark.parametrize("preset", PUBLISHED, ids=lambda preset: preset.__name__)
def test_there_and_back(preset):
    written = hf_config(preset())
    assert written["model_type"] == PUBLISHED[preset]["model_type"]
    assert describes(written, preset())
    again = transformer_config(written)
    assert hf_config(again) == written
    for name, value in PUBLISHED[preset].items():
        same = name == "rope_scaling" or written.get(name, value) == value
        # A model without dense layers has no use for this width.
        assert same or name == "intermediate_size", name


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_writes_describes_one_model(case):
    model = theirs(case)
    config = transformer_config(model.config.to_dict())
    assert describes(hf_config(config), config)
    assert config.num_layers == 2
    assert config.is_moe_layer(0) == (
        case in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3-plain")
    )


def test_rotary_scaling_of_both_spellings():
    values = PUBLISHED[llama3_8b]
    old = {**LLAMA3, "type": LLAMA3["rope_type"]}
    theta = old.pop("rope_theta")
    del old["rope_type"]
    want = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_sequence_length=32
    )
    for spelling in (
        dict(rope_theta=theta, rope_scaling=old),
        dict(rope_theta=None, rope_parameters=LLAMA3),
    ):
        config = transformer_config({**values, **spelling})
        assert (config.rope_theta, config.rope_scaling) == (500_000.0, want)
    yarn = transformer_config({**values, "rope_parameters": YARN})
    assert isinstance(yarn.rope_scaling, YarnScaling)
    assert yarn.rope_theta == 10_000.0


def test_rope_scaling_replaces_rope_parameters_as_in_transformers():
    """Model cards tell users to add ``rope_scaling`` to a file that has ``rope_parameters``."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    values = {**PUBLISHED[qwen3_30b_a3b], **both, "rope_scaling": scaling}
    del values["rope_theta"]
    config = transformer_config(values)
    want = YarnScaling(factor=4.0, original_max_sequence_length=16)
    assert (config.rope_scaling, config.rope_theta) == (want, 10_000.0)
    theirs_rope = pytest.importorskip("transformers").Qwen3MoeConfig(**values).rope_parameters
    assert theirs_rope == {**scaling, "rope_theta": config.rope_theta}
    without = transformer_config({**values, "rope_scaling": None})
    assert (without.rope_scaling, without.rope_theta) == (None, 500.0)


def test_the_length_of_the_tables_can_be_chosen():
    assert transformer_config(PUBLISHED[llama3_8b]).max_sequence_length == 8192
    config = transformer_config(PUBLISHED[llama3_8b], max_sequence_length=100)
    assert config.max_sequence_length == 100
    assert describes(PUBLISHED[llama3_8b], config)


REFUSED = [
    (llama3_8b, dict(model_type="gpt2"), "model_type='gpt2' is not known: load one of llama, mix"),
    (llama3_8b, dict(hidden_act="gelu"), "hidden_act='gelu', but our layers compute hidden_act='s"),
    (llama3_8b, dict(attention_bias=True), "attention_bias=True"),
    (llama3_8b, dict(mlp_bias=True), "mlp_bias=True"),
    (llama3_8b, dict(tie_word_embeddings=True), "tie_word_embeddings=True"),
    (llama3_8b, dict(hidden_size=None), "hidden_size is missing"),
    (llama3_8b, dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type has to be one of"),
    (llama3_8b, dict(rope_parameters=dict(full=LLAMA3)), "the same for all layers"),
    (llama3_8b, dict(rope_parameters={**YARN, "attention_factor": 2.0}), "attention_factor=2.0 of"),
    (llama3_8b, dict(rope_parameters={**YARN, "truncate": False}), "truncate=False of"),
    (llama3_8b, dict(rope_parameters={**YARN, "factor": None}), "factor is missing"),
    (llama3_8b, dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (mixtral_8x7b, dict(sliding_window=4096), "load it with max_sequence_length=4096"),
    (mixtral_8x7b, dict(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
    (qwen3_30b_a3b, dict(use_sliding_window=True), "use_sliding_window=True"),
    (olmoe_1b_7b, dict(clip_qkv=8.0), "clip_qkv=8.0"),
    (deepseek_v3, dict(num_key_value_heads=8), "num_key_value_heads=8"),
    (deepseek_v3, dict(scoring_func="softmax"), "scoring_func='softmax'"),
    (deepseek_v3, dict(topk_method="greedy"), "topk_method='greedy'"),
    (deepseek_v3, dict(moe_layer_freq=2), "moe_layer_freq=2"),
    (deepseek_v3, dict(n_shared_experts=None), "n_shared_experts is missing"),
    # Fields of another type.
    (llama3_8b, dict(model_type=["llama"]), r"model_type=\['llama'\] is not known"),
    (llama3_8b, dict(hidden_size="4096"), "hidden_size='4096' must be a whole number: correct it"),
    (llama3_8b, dict(hidden_size=0), "hidden_size=0 must be above 0"),
    (llama3_8b, dict(num_hidden_layers=2.5), "num_hidden_layers=2.5 must be a whole number"),
    (llama3_8b, dict(vocab_size=True), "vocab_size=True must be a whole number"),
    (llama3_8b, dict(rms_norm_eps="1e-5"), "rms_norm_eps='1e-5' must be a number"),
    (llama3_8b, dict(rope_scaling="yarn"), "rope_scaling='yarn' must be an object"),
    (
        llama3_8b,
        dict(rope_scaling={**YARN, "factor": "4"}),
        "factor='4' must be a number in rope_s",
    ),
    (qwen3_30b_a3b, dict(mlp_only_layers=3), "mlp_only_layers=3 must be a list of whole numbers"),
    (qwen3_30b_a3b, dict(mlp_only_layers=["3"]), r"mlp_only_layers=\['3'\] must be a list"),
    (qwen3_30b_a3b, dict(norm_topk_prob="no"), "norm_topk_prob='no' must be true or false"),
    (
        qwen3_30b_a3b,
        dict(num_experts="128", head_dim=[128]),
        r"(?=.*num_experts='128' must be a whole number)(?=.*head_dim=\[128\] must be a whole)",
    ),
]


@pytest.mark.parametrize(("preset", "change", "message"), REFUSED)
def test_what_our_layers_do_not_compute_is_refused(preset, change, message):
    with pytest.raises(ValueError, match=message):
        transformer_config({**PUBLISHED[preset], **change})


def test_a_window_as_long_as_the_sequences_is_none():
    values = {**PUBLISHED[mixtral_8x7b], "sliding_window": 4096}
    assert transformer_config(values, max_sequence_length=4096).max_sequence_length == 4096


MIXTRAL, DEEPSEEK = mixtral_8x7b(), deepseek_v3(num_layers=5)
NOT_WRITTEN = [
    (replace(MIXTRAL, moe=replace(MIXTRAL.moe, normalize_top_k=False)), "normalize_top_k=False"),
    (replace(MIXTRAL, moe=replace(MIXTRAL.moe, expert_bias=True)), "expert_bias=True"),
    (replace(MIXTRAL, moe=replace(MIXTRAL.moe, shared_ffn_hidden_size=8)), "shared_ffn_hidden_siz"),
    (replace(MIXTRAL, moe=replace(MIXTRAL.moe, scaling_factor=2.0)), "scaling_factor=2.0"),
    (replace(MIXTRAL, moe_layers=2, ffn_hidden_size=64), "ffn_hidden_size=64"),
    (replace(llama3_8b(), qk_norm="head"), "qk_norm='head'"),
    (replace(DEEPSEEK, moe_layers=2), "moe_layers"),
    (replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, aux_loss_coef=0.1)), "aux_loss_coef=0.1"),
]


@pytest.mark.parametrize(("config", "message"), NOT_WRITTEN)
def test_what_no_family_says_is_not_written(config: TransformerConfig, message: str):
    with pytest.raises(ValueError, match=f"{message}.*cannot be said in a config.json of"):
        hf_config(config)


def test_options_of_training_alone_are_left_out():
    config = replace(olmoe_1b_7b(), hidden_dropout=0.1)
    assert transformer_config(hf_config(config)).hidden_dropout == 0.0
    assert transformer_config(hf_config(config)).moe.z_loss_coef == 0.0


def test_a_place_in_a_config_json_is_not_imported():
    """Others write these files; a registry that takes places would import what they name."""
    place = "moe_graphs.checkpoints.families:LLAMA"
    with pytest.raises(ValueError, match="model_type='moe_graphs.*:LLAMA' is not known: load one"):
        transformer_config({**PUBLISHED[llama3_8b], "model_type": place})
    with pytest.raises(ValueError, match="family: 'lama' is unknown: .* mean 'llama'..$"):
        FAMILIES["lama"]
    with pytest.raises(ValueError, match="family: 'moe_graphs.*:LLAMA' is unknown: choose one"):
        FAMILIES[place]


def test_a_family_of_a_users_own_is_an_entry(monkeypatch):
    """Facts of the entry decide names of fields and tensors, and what is refused."""
    family = Family(
        architecture="OwnForCausalLM", qk_norm="head", experts=("my_experts",), window=True,
        block="my_block", products=("a", "b", "c"), required={"my_flag": False},
    )  # fmt: skip
    monkeypatch.setattr(FAMILIES, "_places", dict(FAMILIES._places))
    FAMILIES.add("own", family)
    values = {
        **PUBLISHED[qwen3_30b_a3b],
        "model_type": "own",
        "my_experts": 8,
        "num_hidden_layers": 1,
    }
    config = transformer_config(values)
    assert config.moe is not None
    assert (config.moe.num_experts, config.qk_norm) == (8, "head")
    names = {piece.theirs for piece in pieces(config, values)}
    assert {f"model.layers.0.my_block.experts.3.{name}.weight" for name in "abc"} <= names
    with pytest.raises(ValueError, match="my_flag=True"):
        transformer_config({**values, "my_flag": True})
    with pytest.raises(ValueError, match="sliding_window=7"):
        transformer_config({**values, "sliding_window": 7})
