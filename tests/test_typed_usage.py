"""``typed_usage`` is what mypy checks in ``make lint``: here it runs."""

from __future__ import annotations

import pytest

import typed_usage


@pytest.mark.parametrize(
    "usage",
    [
        typed_usage.scopes,
        typed_usage.layers,
        typed_usage.kernels_with_two_results,
        typed_usage.dispatcher,
        typed_usage.own_stages,
        typed_usage.whole_step,
        typed_usage.callables,
        typed_usage.schedules,
        typed_usage.chosen_experts,
    ],
)
def test_what_a_checker_sees_runs(usage):
    usage()


def test_what_a_checker_sees_of_checkpoints_runs(tmp_path):
    typed_usage.checkpoints(tmp_path)


def test_what_a_checker_sees_of_hugging_face_runs():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, vocab_size=32)
    heads = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = transformers.Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)
    typed_usage.hugging_face(transformers.AutoModelForCausalLM.from_config(config))
