"""Packed attention and residual sums in norms: what they change, what they leave, what stays."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from moe_graphs.integrations.transformers import accelerate_model

pytest.importorskip("transformers", reason="needs the extra hf")
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from hf_families import implementation_of, loss_and_gradients, skip_unknown, tiny, tokens, trained

NEITHER = dict(graphs=False, qkv=False, residuals=False)
OWN_POSITIONS = torch.stack([torch.arange(16), torch.arange(16) // 2])


def made(family="llama", changes=None, **overrides):
    model = tiny(family, implementation_of(family), **overrides)
    if changes is not None:
        accelerate_model(model, **dict(graphs=False) | changes)
    return model


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens(), **inputs).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_close(found, expected, error=2e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-12)
        assert (found[name] - value).abs().max() <= error * scale, name


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def lines(model, **options):
    changes = accelerate_model(model, graphs=False, **options).changes
    return {change.part: change for change in changes}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "minimax_m2"])
def test_sums_in_norms_change_no_bit_and_packed_attention_rounds(family):
    skip_unknown(family)
    expected = loss_and_gradients(made(family, NEITHER), tokens())
    fused = made(family)
    assert lines(fused, qkv=False)["residual"].count == 2
    assert_equal(loss_and_gradients(fused, tokens()), expected)
    packed = made(family)
    assert lines(packed, residuals=False)["qkv"].count == 2
    assert_close(loss_and_gradients(packed, tokens()), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sums_in_norms_change_no_bit_on_a_gpu(family):
    runs = []
    for changes in (NEITHER, dict(qkv=False)):
        model = made(family, changes, moe_intermediate_size=64).to(torch.bfloat16).cuda()
        runs.append(loss_and_gradients(model, tokens("cuda")))
    assert_equal(*runs)


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", dict(attention_bias=True)), ("qwen3_moe", {})]
)
def test_positions_of_each_sequence_biases_and_frozen_weights(family, sizes):
    runs = []
    for changes in (NEITHER, {}):
        model = made(family, changes, **sizes)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(
                    parameter, std=0.02, generator=torch.Generator().manual_seed(len(name))
                )
            parameter.requires_grad_(not name.endswith("k_proj.weight"))
        mask = torch.ones(2, 16, dtype=torch.int64)
        runs.append(gradients(model, position_ids=OWN_POSITIONS, attention_mask=mask))
    assert_close(*runs)


def test_with_a_cache_it_writes_the_same_tokens():
    expected = made("qwen3_moe", NEITHER).eval().generate(tokens(), max_new_tokens=8)
    assert torch.equal(made("qwen3_moe", {}).eval().generate(tokens(), max_new_tokens=8), expected)


class Adapter(nn.Module):
    """In the place of a projection, as LoRA puts it there."""

    def __init__(self, base):
        super().__init__()
        self.base, self.added = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.added(x)


def test_replaced_children_and_hooks_count():
    """What is put in later as well: those modules run transformers' forward."""
    seen, runs = [], []
    for changes in (NEITHER, {}):
        model = made("qwen3_moe", changes)
        first, second = model.model.layers
        torch.manual_seed(0)
        first.self_attn.v_proj = Adapter(first.self_attn.v_proj)
        hooked = second.self_attn.q_proj, second.post_attention_layernorm, second.self_attn.k_norm
        for module in hooked:
            module.register_forward_hook(lambda m, given, out: seen.append(m) or 2 * out)
        first.input_layernorm.register_full_backward_hook(lambda m, *_: seen.append(m))
        runs.append(gradients(model))
        assert len(seen) == 4
        seen.clear()
    assert_close(*runs)
    model = made()
    model.model.layers[0].self_attn.q_proj = Adapter(model.model.layers[0].self_attn.q_proj)
    left = lines(model)["qkv"]
    assert not left.done
    assert "projections or norms" in left.note


def test_checkpointed_layers_are_the_same():
    model = made("qwen3_moe", {})
    expected = gradients(model)
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)()
    calls = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_equal(gradients(model), expected)
    assert len(calls) == 2


def test_autocast_has_the_error_that_it_had():
    exact, errors = made("qwen3_moe")(tokens()).logits, []
    for changes in (NEITHER, {}):
        with torch.autocast("cpu", torch.bfloat16):
            logits = made("qwen3_moe", changes)(tokens()).logits
        errors.append((logits - exact).norm())
    before, now = errors
    assert now <= 1.5 * before


def swapped(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs):
    """Mentions nothing that is unknown, and has keys and values the wrong way round."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    value = self.k_proj(hidden_states).view(shape).transpose(1, 2)
    key = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # noqa: F821
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(  # noqa: F821
        self.config._attn_implementation,
        eager_attention_forward,  # noqa: F821
    )
    mixed, weights = attend(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout,
        scaling=self.scaling,
        **kwargs,
    )
    return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1)), weights


def scaled(self, hidden_states, **kwargs):
    """Attention has twice the weight."""
    update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + 2 * update
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_what_computes_something_else_is_left_by_name(monkeypatch):
    forward = types.FunctionType(swapped.__code__, LlamaAttention.forward.__globals__)
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    model = made()
    expected, said = gradients(model, use_cache=False), lines(model)
    for part in ("qkv", "residual"):
        assert not said[part].done
        assert "computes something else" in said[part].note
    assert_close(gradients(model, use_cache=False), expected)


def test_defaults_of_torch_do_not_matter():
    model = made("qwen3_moe")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    before = torch.get_rng_state()
    try:
        said = lines(model, experts=False, norms=True)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert said["qkv"].done
    assert said["residual"].done


def test_undone_layers_are_transformers_own():
    model = made()
    before = [type(m) for m in model.modules()]
    accelerate_model(model, graphs=False).undo()
    assert [type(m) for m in model.modules()] == before
    assert not any("forward" in vars(m) for m in model.modules())


def change(model, index):
    attention, norm = (
        model.model.layers[0].self_attn,
        model.model.layers[0].post_attention_layernorm,
    )
    if index == 0:
        attention.scaling *= 2
    elif index == 1:
        norm.variance_epsilon = 0.5
    elif index == 2:
        norm.register_forward_hook(lambda m, given, out: 2 * out)
    else:
        attention.k_norm.variance_epsilon = 0.5


@pytest.mark.parametrize("index", range(4))
def test_graphs_see_what_their_python_reads(index):
    runs = []
    for graphs in (False, True):
        model = made("qwen3_moe")
        accelerated = accelerate_model(model, graphs=graphs)
        trained(model, accelerated.step)
        change(model, index)
        runs.append(trained(model, accelerated.step))
    assert accelerated.graphs.report().eager_calls
    assert all(map(torch.equal, *runs))
