"""MegaBlocks' dMoE as ``MoELayer`` and back, on a stand-in for MegaBlocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from megablocks_stand_in import megablocks  # noqa: F401
from moe_graphs.dispatch import PaddedDispatcher
from moe_graphs.integrations.megablocks import from_megablocks, to_megablocks
from moe_graphs.layers import MoEConfig, MoELayer

OPTIONS = {
    "plain": {},
    "normalized": dict(moe_normalize_expert_weights=1),
    "shared": dict(shared_expert=True, shared_expert_hidden_size=24),
    "module": dict(activation_fn=nn.SiLU(), moe_jitter_eps=0.01, moe_zloss_weight=0.001),
    "losses": dict(num_layers=4, moe_loss_weight=0.2, moe_normalize_expert_weights=1.0),
}


def _dmoe(megablocks, **options):  # noqa: F811
    given = dict(
        hidden_size=16,
        ffn_hidden_size=32,
        moe_num_experts=4,
        moe_top_k=2,
        bias=False,
        activation_fn=functional.silu,
        mlp_type="glu",
        mlp_impl="grouped",
        fp16=False,
        device="cpu",
    )
    torch.manual_seed(0)
    return megablocks.dMoE(megablocks.Arguments(**{**given, **options}))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_dmoe_computes_the_same_as_ours_and_comes_back_bitwise(megablocks, options):  # noqa: F811
    layer = _dmoe(megablocks, **options).eval()
    random = torch.get_rng_state()
    ours = from_megablocks(layer)
    back = to_megablocks(ours)
    assert torch.equal(random, torch.get_rng_state())
    hidden = torch.randn(3, 5, 16)
    torch.testing.assert_close(ours(hidden).hidden, layer(hidden), rtol=1e-5, atol=1e-6)
    assert torch.equal(back(hidden), layer(hidden))
    state, found = layer.state_dict(), back.state_dict()
    assert list(state) == list(found)
    assert all(torch.equal(state[name], found[name]) for name in state)
    assert not back.training


def test_options_keep_their_meaning(megablocks):  # noqa: F811
    options = {**OPTIONS["losses"], **OPTIONS["shared"], **OPTIONS["module"]}
    layer = _dmoe(megablocks, **options)
    config = from_megablocks(layer).config
    assert config == MoEConfig(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=32,
        input_jitter=0.01,
        aux_loss_coef=0.05,
        z_loss_coef=0.001,
        shared_ffn_hidden_size=24,
    )
    again = to_megablocks(from_megablocks(layer)).experts.args
    kept = ("moe_normalize_expert_weights", "moe_jitter_eps", "moe_zloss_weight", "moe_top_k")
    assert {name: getattr(again, name) for name in kept} == {
        name: options.get(name, 2) for name in kept
    }
    assert (again.moe_loss_weight, again.num_layers) == (0.05, 1)
    assert again.shared_expert_hidden_size == 24


def test_experts_of_a_checkpoint_have_the_same_names(megablocks):  # noqa: F811
    layer = _dmoe(megablocks, fp16=False, bf16=True)
    ours = from_megablocks(layer, "megablocks")
    theirs = {name: each for name, each in layer.state_dict().items() if name.startswith("experts")}
    assert theirs
    found = ours.state_dict()
    assert all(torch.equal(found[name], each) for name, each in theirs.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bias=True), "bias=True: MoELayer does not compute it"),
        (dict(activation_fn=functional.gelu), r"activation_fn=.*gelu.* \(silu\)"),
        (dict(moe_normalize_expert_weights=2), r"moe_normalize_expert_weights=2 \(None or 1\)"),
        (dict(uniform_expert_assignment=True), "uniform_expert_assignment=True"),
        (dict(moe_expert_model_parallelism=True), "moe_expert_model_parallelism=True"),
        (dict(moe_jitter_eps=1.5), r"moe_jitter_eps=1.5 \(below 1\)"),
        (dict(bf16=True, shared_expert=True), r"'torch.bfloat16', 'torch.float32'.*one dtype"),
        (dict(shared_expert=True, shared_expert_weighted_sum=True), "shared_expert_weighted_sum"),
    ],
)
def test_what_ours_does_not_compute_is_refused(megablocks, options, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        from_megablocks(_dmoe(megablocks, **options))


def test_another_module_is_refused(megablocks):  # noqa: F811
    layer = _dmoe(megablocks)
    del layer.experts.mlp.v1
    for other in (layer, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r"is no megablocks.dMoE with mlp_type='glu'"):
            from_megablocks(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(score_function="sigmoid"), "score_function='sigmoid': megablocks' dMoE does not"),
        (dict(num_groups=2, top_k_groups=1), "num_groups=2"),
        (dict(scaling_factor=2.5), "scaling_factor=2.5"),
        (dict(expert_bias=True), "expert_bias=True"),
        (dict(shared_ffn_hidden_size=8, shared_gate=True), "shared_gate=True"),
    ],
)
def test_what_theirs_does_not_compute_is_refused(options, message):
    config = replace(MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8), **options)
    with pytest.raises(ValueError, match=message):
        to_megablocks(MoELayer(config, 8))


def test_another_dispatcher_and_dtype_are_refused(megablocks):  # noqa: F811
    config = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8)
    with pytest.raises(ValueError, match=r"dispatcher='padded' \('local'\)"):
        to_megablocks(MoELayer(config, 8, PaddedDispatcher()))
    with pytest.raises(ValueError, match=r"default dtype \(torch.float32\), not torch.float64"):
        to_megablocks(MoELayer(config, 8, dtype=torch.float64))
