"""Residual sums in norms: what they change, what they leave, what stays."""

from __future__ import annotations

import contextlib

import pytest
import torch

from moe_graphs import GraphWarning
from moe_graphs.integrations.transformers import accelerate_model

pytest.importorskip("transformers", reason="needs the extra hf")
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_families import implementation_of, loss_and_gradients, skip_unknown, tiny, tokens, trained

APART = dict(graphs=False, residuals=False)


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
def test_sums_in_norms_change_no_bit(family):
    skip_unknown(family)
    expected = loss_and_gradients(made(family, APART), tokens())
    fused = made(family)
    assert lines(fused)["residual"].count == 2
    assert_equal(loss_and_gradients(fused, tokens()), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sums_in_norms_change_no_bit_on_a_gpu(family):
    runs = []
    for changes in (APART, {}):
        model = made(family, changes, moe_intermediate_size=64).to(torch.bfloat16).cuda()
        runs.append(loss_and_gradients(model, tokens("cuda")))
    assert_equal(*runs)


def test_hooks_on_norms_count():
    """Hooks that are put in later count as well: such layers run transformers' forward."""
    seen, runs = [], []
    for changes in (APART, {}):
        model = made("qwen3_moe", changes)
        first, second = model.model.layers
        second.post_attention_layernorm.register_forward_hook(
            lambda m, given, out: seen.append(m) or 2 * out
        )
        first.input_layernorm.register_full_backward_hook(lambda m, *_: seen.append(m))
        runs.append(gradients(model))
        assert len(seen) == 2
        seen.clear()
    assert_equal(*runs)


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
    for changes in (APART, {}):
        with torch.autocast("cpu", torch.bfloat16):
            logits = made("qwen3_moe", changes)(tokens()).logits
        errors.append((logits - exact).norm())
    before, now = errors
    assert now <= 1.5 * before


def scaled(self, hidden_states, **kwargs):
    """Attention has twice the weight."""
    update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + 2 * update
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_what_computes_something_else_is_left_by_name(monkeypatch):
    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    model = made()
    expected, said = gradients(model), lines(model)
    assert not said["residual"].done
    assert "computes something else" in said["residual"].note
    assert_close(gradients(model), expected)


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
    assert said["residual"].done


def test_undone_layers_are_transformers_own():
    model = made()
    before = [type(m) for m in model.modules()]
    accelerate_model(model, graphs=False).undo()
    assert [type(m) for m in model.modules()] == before
    assert not any("forward" in vars(m) for m in model.modules())


def change(model, index):
    layer = model.model.layers[0]
    if index == 0:
        layer.post_attention_layernorm.variance_epsilon = 0.5
    elif index == 1:
        layer.post_attention_layernorm.register_forward_hook(lambda m, given, out: 2 * out)
    else:
        layer.self_attn.k_norm.variance_epsilon = 0.5


@pytest.mark.parametrize("index", range(3))
def test_graphs_see_what_their_python_reads(index):
    runs = []
    for graphs in (False, True):
        model = made("qwen3_moe")
        accelerated = accelerate_model(model, graphs=graphs)
        trained(model, accelerated.step)
        change(model, index)
        warns = pytest.warns(GraphWarning, match="ran eagerly 3 times")
        with warns if graphs else contextlib.nullcontext():
            runs.append(trained(model, accelerated.step))
    assert accelerated.graphs.report().eager_calls
    assert all(map(torch.equal, *runs))
