"""Layers against fp64 oracles, and their stages against the whole.

Shapes: B batch, S sequence, T tokens, D model, F ffn, E experts, K top-k, H heads, Q head dim.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from kept_bytes import kept_bytes
from moe_graphs.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    LocalDispatcher,
    PaddedDispatcher,
)
from moe_graphs.layers import (
    Attention,
    GroupedExperts,
    LanguageModel,
    MoEConfig,
    MoELayer,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerConfig,
    TransformerLayer,
)
from moe_graphs.staged import Stop, resuming, run_until

MOE = MoEConfig(num_experts=6, top_k=2, ffn_hidden_size=5)
MOES = {
    "mixtral": MOE,
    "olmoe": replace(MOE, normalize_top_k=False, aux_loss_coef=0.01, z_loss_coef=0.001),
    "qwen2-moe": replace(MOE, shared_ffn_hidden_size=7, shared_gate=True),
    "deepseek-v3": replace(
        MOE,
        score_function="sigmoid",
        num_groups=3,
        top_k_groups=2,
        scaling_factor=2.5,
        expert_bias=True,
        shared_ffn_hidden_size=3,
    ),
}
CONFIG = TransformerConfig(
    hidden_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=12,
    vocab_size=17,
    max_sequence_length=16,
    moe=MOE,
)


def _randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights so large that a wrong term shows, and norms that are not all one."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def _swiglu_oracle(x, w1, w2):
    gate, up = (x @ w1).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ w2


def _moe_oracle(layer: MoELayer, hidden_TD: torch.Tensor) -> torch.Tensor:
    """Compute token by token, with the router's choice and weights (see test_router.py)."""
    routing = layer.router(hidden_TD)
    rows = []
    for token, hidden_D in enumerate(hidden_TD):
        total_D = torch.zeros_like(hidden_D)
        for k, expert in enumerate(routing.experts_TK[token].tolist()):
            w1, w2 = layer.experts.w1[expert], layer.experts.w2[expert]
            total_D = total_D + routing.weights_TK[token, k] * _swiglu_oracle(hidden_D, w1, w2)
        if layer.shared_expert is not None:
            w1, w2 = layer.shared_expert.w1.weight.t(), layer.shared_expert.w2.weight.t()
            shared_D = _swiglu_oracle(hidden_D, w1, w2)
            if layer.shared_gate is not None:
                shared_D = torch.sigmoid(layer.shared_gate.weight @ hidden_D) * shared_D
            total_D = total_D + shared_D
        rows.append(total_D)
    return torch.stack(rows)


class TestMoELayer:
    @pytest.mark.parametrize("name", MOES)
    @pytest.mark.parametrize(
        "dispatcher",
        [LocalDispatcher(), PaddedDispatcher(3.0), AllToAllDispatcher(), AllGatherDispatcher()],
        ids=repr,
    )
    def test_equals_a_loop_over_tokens(self, name, dispatcher):
        layer = _randomize(MoELayer(MOES[name], 8, dispatcher, dtype=torch.float64))
        hidden = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
        leaves = (hidden, *layer.parameters())
        output = layer(hidden)
        want = _moe_oracle(layer, hidden.reshape(-1, 8)).view_as(hidden)
        torch.testing.assert_close(output.hidden, want)
        grad = torch.randn_like(want)
        for actual, expected in zip(
            torch.autograd.grad(output.hidden, leaves, grad),
            torch.autograd.grad(want, leaves, grad),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected)

    @pytest.mark.parametrize("expert", [0, 5])
    def test_one_expert_takes_all(self, expert):
        config = replace(MOE, top_k=1, expert_bias=True, normalize_top_k=False)
        layer = _randomize(MoELayer(config, 8, dtype=torch.float64))
        layer.router.expert_bias[expert] = 10.0
        hidden = torch.randn(7, 8, dtype=torch.float64)
        output = layer(hidden)
        torch.testing.assert_close(output.hidden, _moe_oracle(layer, hidden))
        output.hidden.sum().backward()
        idle = [e for e in range(6) if e != expert]
        assert layer.experts.w1.grad[idle].eq(0).all()
        assert layer.experts.w2.grad[idle].eq(0).all()
        assert layer.router(hidden).tokens_per_expert_E[expert] == 7

    def test_losses_and_drops_are_handed_out(self):
        config = replace(MOE, aux_loss_coef=0.1)
        layer = _randomize(MoELayer(config, 8, PaddedDispatcher(0.5)))
        hidden = torch.randn(9, 8)
        output = layer(hidden)
        routing = layer.router(hidden)
        assert torch.equal(output.aux_loss, routing.aux_loss)
        capacity = math.ceil(9 * 2 / 6 * 0.5)
        dropped = (routing.tokens_per_expert_E - capacity).clamp(min=0).sum()
        assert output.dropped_tokens == dropped > 0

    def test_any_leading_shape(self):
        layer = _randomize(MoELayer(MOE, 8))
        hidden = torch.randn(2, 3, 4, 8)
        assert torch.equal(layer(hidden).hidden.view(-1, 8), layer(hidden.view(-1, 8)).hidden)

    def test_autocast_moves_and_computes_rows_in_bf16(self):
        layer = _randomize(MoELayer(MOE, 8))
        hidden = torch.randn(40, 8, requires_grad=True)
        want = layer(hidden)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            prepared = layer.preprocess(layer.route(hidden))
            got = layer(hidden)
        assert prepared.plan.tokens.dtype == torch.bfloat16
        assert prepared.plan.weights_TK.dtype == torch.float32
        error = (got.hidden - want.hidden).norm() / want.hidden.norm()
        assert error < 0.02
        got.hidden.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in layer.parameters())

    def test_experts_are_drawn_alike_whatever_share_a_rank_holds(self):
        torch.manual_seed(0)
        whole = GroupedExperts(6, 8, 5)
        after = torch.rand(1)
        for first in (0, 2, 4):
            torch.manual_seed(0)
            part = GroupedExperts(2, 8, 5, first_expert=first, num_experts=6)
            assert torch.equal(part.w1, whole.w1[first : first + 2])
            assert torch.equal(part.w2, whole.w2[first : first + 2])
            assert torch.equal(torch.rand(1), after)


class TestRope:
    def test_equals_complex_rotation(self):
        rope = RotaryEmbedding(6, 10, theta=100.0)
        x = torch.randn(2, 7, 3, 6)
        z = torch.complex(*x.double().chunk(2, -1))
        for position in range(7):
            for i in range(3):
                angle = position * 100.0 ** (-2 * i / 6)
                z[:, position, :, i] *= complex(math.cos(angle), math.sin(angle))
        torch.testing.assert_close(
            rope(x).double(), torch.cat([z.real, z.imag], -1), rtol=1e-5, atol=1e-6
        )

    def test_gradcheck(self):
        rope = RotaryEmbedding(6, 10)
        rope.double()
        x = torch.randn(2, 4, 3, 6, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(rope, x)

    def test_scores_depend_on_distance_only(self):
        rope = RotaryEmbedding(8, 32)
        query, key = torch.randn(8).expand(1, 32, 1, 8), torch.randn(8).expand(1, 32, 1, 8)
        scores = rope(query)[0, :, 0] @ rope(key)[0, :, 0].t()
        torch.testing.assert_close(scores[5, 3], scores[31, 29], rtol=1e-4, atol=1e-5)

    def test_tables_are_exact_far_out(self):
        rope = RotaryEmbedding(4, 200_000)
        assert rope.cos_SQ[199_999, 0].item() == pytest.approx(math.cos(199_999), abs=1e-6)

    def test_too_long_a_sequence_is_refused(self):
        with pytest.raises(ValueError, match="raise it in the configuration"):
            RotaryEmbedding(4, 8)(torch.randn(1, 9, 1, 4))

    def test_tables_are_shared_and_not_saved(self):
        model = LanguageModel(CONFIG)
        assert all(layer.attention.rope is model.rope for layer in model.layers)
        assert not [name for name in model.state_dict() if "rope" in name]


def _attention_oracle(attention: Attention, hidden_BSD: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute head by head and position by position."""
    heads, groups, size = attention.num_heads, attention.kv_heads, attention.head_dim
    query, key, value = (hidden_BSD @ attention.qkv.weight.t()).split(attention.sizes, -1)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    if attention.qk_norm == "full":
        query = norm(query, attention.query_norm.weight)
        key = norm(key, attention.key_norm.weight)
    query, key, value = (x.unflatten(-1, (-1, size)) for x in (query, key, value))
    if attention.qk_norm == "head":
        query = norm(query, attention.query_norm.weight)
        key = norm(key, attention.key_norm.weight)
    query, key = attention.rope(query), attention.rope(key)
    mixed = torch.zeros_like(query)
    for head in range(heads):
        group = head // (heads // groups)
        for position in range(hidden_BSD.shape[1]):
            seen = key[:, : position + 1, group]
            scores = (seen @ query[:, position, head].unsqueeze(-1)).squeeze(-1) / size**0.5
            weights = scores.softmax(-1).unsqueeze(1)
            mixed[:, position, head] = (weights @ value[:, : position + 1, group]).squeeze(1)
    return mixed.flatten(2) @ attention.out.weight.t()


class TestAttention:
    @pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    def test_equals_a_loop_over_heads_and_positions(self, qk_norm, kv_heads):
        config = replace(CONFIG, qk_norm=qk_norm, num_kv_heads=kv_heads, head_dim=6)
        rope = RotaryEmbedding(6, 16)
        attention = _randomize(Attention(config, rope, dtype=torch.float64))
        hidden = torch.randn(2, 9, 8, dtype=torch.float64)
        want = _attention_oracle(attention, hidden, config.norm_eps)
        torch.testing.assert_close(attention(hidden), want)

    def test_dropout_only_in_training(self):
        rope = RotaryEmbedding(2, 16)
        attention = _randomize(Attention(replace(CONFIG, attention_dropout=0.5), rope))
        hidden = torch.randn(1, 9, 8)
        assert not torch.equal(attention(hidden), attention(hidden))
        attention.eval()
        assert torch.equal(attention(hidden), attention(hidden))


def test_rms_norm():
    norm = _randomize(RMSNorm(8, eps=0.1, dtype=torch.float64))
    x = torch.randn(3, 8, dtype=torch.float64)
    want = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want)
    assert norm.float()(x.bfloat16()).dtype == torch.bfloat16


def test_experts_that_are_recomputed_keep_their_tokens_alone():
    hidden, kept = torch.randn(7, 8, requires_grad=True), []
    for recompute in ("none", "experts"):
        layer = _randomize(MoELayer(replace(MOE, recompute=recompute), 8))
        kept.append(kept_bytes(lambda layer=layer: layer(hidden), layer.parameters()))
    assert kept[0] - kept[1] == hidden.element_size() * 7 * 2 * 2 * MOE.ffn_hidden_size


def test_swiglu_mlp():
    mlp = _randomize(SwiGLU(8, 5, dtype=torch.float64))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), _swiglu_oracle(x, mlp.w1.weight.t(), mlp.w2.weight.t()))


class TestTransformerLayer:
    def test_dense_is_two_residual_updates(self):
        layer = _randomize(TransformerLayer(replace(CONFIG, moe=None), 0, dtype=torch.float64))
        hidden = torch.randn(2, 5, 8, dtype=torch.float64)
        middle = hidden + layer.attention(layer.attention_norm(hidden))
        output = layer(hidden)
        assert torch.equal(output.hidden_BSD, middle + layer.mlp(layer.mlp_norm(middle)))
        assert not layer.is_moe
        assert output.aux_loss is None
        assert output.dropped_tokens is None

    def test_moe_is_two_residual_updates(self):
        layer = _randomize(TransformerLayer(CONFIG, 0, dtype=torch.float64))
        hidden = torch.randn(2, 5, 8, dtype=torch.float64)
        middle = hidden + layer.attention(layer.attention_norm(hidden))
        update = layer.moe(layer.mlp_norm(middle))
        assert torch.equal(layer(hidden).hidden_BSD, middle + update.hidden)
        assert layer.is_moe

    @pytest.mark.parametrize("moe", [None, *MOES.values()], ids=["dense", *MOES])
    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_cut_before_any_stage_and_resumed_is_the_same_bits(self, moe, dropout):
        config = replace(CONFIG, moe=moe, hidden_dropout=dropout, attention_dropout=dropout)
        layer = _randomize(TransformerLayer(config, 0))
        hidden = torch.randn(2, 5, 8, requires_grad=True)
        leaves = (hidden, *layer.parameters())
        grad = torch.randn_like(hidden)

        def backward(output):
            loss = (output.hidden_BSD * grad).sum()
            if output.aux_loss is not None:
                loss = loss + output.aux_loss
            return torch.autograd.grad(loss, leaves)

        torch.manual_seed(1)
        want = layer(hidden)
        want_grads = backward(want)
        for stage in layer.stages()[1:]:
            torch.manual_seed(1)
            _, boundary = run_until(Stop(layer, stage.name), lambda: layer(hidden))
            with resuming(boundary):
                got = layer(hidden)
            assert torch.equal(got.hidden_BSD, want.hidden_BSD), stage.name
            assert all(map(torch.equal, backward(got), want_grads)), stage.name

    def test_stages_have_the_names_of_the_scopes(self):
        names = [stage.name for stage in TransformerLayer(CONFIG, 0).stages()]
        assert names == ["attn", "moe_router", "moe_preprocess", "moe_experts"]
        names = [stage.name for stage in TransformerLayer(replace(CONFIG, moe=None), 0).stages()]
        assert names == ["attn", "mlp"]
        names = [stage.name for stage in MoELayer(MOE, 8).stages()]
        assert names == ["moe_router", "moe_preprocess", "moe_experts"]

    def test_hidden_dropout_only_in_training(self):
        layer = _randomize(TransformerLayer(replace(CONFIG, hidden_dropout=0.5), 0))
        hidden = torch.randn(1, 9, 8)
        assert not torch.equal(layer(hidden).hidden_BSD, layer(hidden).hidden_BSD)
        layer.eval()
        assert torch.equal(layer(hidden).hidden_BSD, layer(hidden).hidden_BSD)


@pytest.mark.parametrize("name", MOES)
def test_bf16_block_is_as_good_as_its_rounding(name):
    """The whole layer in bf16 differs from fp64 by a few units of bf16's last place."""
    layer = _randomize(MoELayer(MOES[name], 8, dtype=torch.bfloat16))
    exact = MoELayer(MOES[name], 8, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    hidden = torch.randn(64, 8).bfloat16()
    got, want = layer(hidden).hidden.double(), exact(hidden.double()).hidden
    assert functional.mse_loss(got, want).sqrt() < 0.02 * want.std()
