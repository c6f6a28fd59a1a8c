"""Latent attention and scaled rotary tables against loops by hand, and graphs bit by bit."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.layers import (
    LanguageModel,
    LatentAttention,
    LatentAttentionConfig,
    Llama3Scaling,
    RotaryEmbedding,
    YarnScaling,
    deepseek_v3,
)
from training_runs import DEVICES, SEQUENCE, VOCABULARY, Trace, train

YARN = YarnScaling(factor=40.0, original_max_sequence_length=16, mscale=1.0, mscale_all_dim=0.5)
LATENT = LatentAttentionConfig(
    query_rank=12, kv_rank=10, plain_head_dim=8, rope_head_dim=8, value_head_dim=6
)
SMALL = deepseek_v3(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    ffn_hidden_size=48,
    vocab_size=VOCABULARY,
    max_sequence_length=SEQUENCE,
    rope_scaling=YARN,
    latent=LATENT,
    attention_dropout=0.1,
    moe=replace(
        deepseek_v3().moe,
        num_experts=8,
        top_k=2,
        num_groups=4,
        top_k_groups=2,
        ffn_hidden_size=16,
        shared_ffn_hidden_size=16,
    ),
    moe_layers=(False, True),
)


def _by_hand(attention: LatentAttention, hidden_BSD: torch.Tensor) -> torch.Tensor:
    """Compute head by head and position by position, with a rope key that all heads share."""

    def norm(x, module):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

    query, kv, rope_key = (hidden_BSD @ attention.down.weight.T).split(attention.down_sizes, -1)
    query = hidden_BSD if attention.query_norm is None else norm(query, attention.query_norm)
    query = (query @ attention.query_up.weight.T).unflatten(-1, (4, 16))
    kv = (norm(kv, attention.kv_norm) @ attention.kv_up.weight.T).unflatten(-1, (4, 14))
    rope_query = attention.rope(query[..., 8:])
    rope_key = attention.rope(rope_key.unsqueeze(2))[:, :, 0]
    magnitude = 0.1 * 0.5 * math.log(40.0) + 1
    mixed = torch.zeros(*hidden_BSD.shape[:2], 4, 6, dtype=hidden_BSD.dtype)
    for head in range(4):
        for position in range(hidden_BSD.shape[1]):
            plain = query[:, position, None, head, :8] * kv[:, : position + 1, head, :8]
            turned = rope_query[:, position, None, head] * rope_key[:, : position + 1]
            scores = (plain.sum(-1) + turned.sum(-1)) * magnitude**2 / 4
            weights = scores.softmax(-1).unsqueeze(-1)
            mixed[:, position, head] = (weights * kv[:, : position + 1, head, 8:]).sum(1)
    return mixed.flatten(2) @ attention.out.weight.T


@pytest.mark.parametrize("query_rank", [12, None])
def test_equals_a_loop_over_heads_and_positions(query_rank):
    torch.manual_seed(0)
    config = replace(SMALL, latent=replace(LATENT, query_rank=query_rank), attention_dropout=0.0)
    attention = LatentAttention(config, RotaryEmbedding.of(config), dtype=torch.float64)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(attention(hidden), _by_hand(attention, hidden))


def test_yarn_by_hand():
    """The ramp goes from pair 0 to pair ceil(4 ln(16 / 2 pi) / ln(10000)) = 1.

    Here Q = 8, theta = 10000 and there are 16 positions: the first pair turns 2.5 times, all others
    less than once.
    """
    config = replace(SMALL, max_sequence_length=4)
    rope = RotaryEmbedding.of(config)
    factor = (0.1 * math.log(40.0) + 1) / (0.05 * math.log(40.0) + 1)
    for pair in range(4):
        frequency = 10_000.0 ** (-pair / 4) / (1 if pair == 0 else 40)
        for position in range(4):
            want = factor * math.cos(position * frequency), factor * math.sin(position * frequency)
            got = rope.cos_SQ[position, pair].item(), rope.sin_SQ[position, pair].item()
            assert got == pytest.approx(want, abs=1e-6)


def test_doubled_tables_are_the_tables_twice():
    """The doubled tables, made once for all positions, equal doubling in a forward bit for bit."""
    doubled = RotaryEmbedding.of(SMALL)
    plain = RotaryEmbedding(8, SEQUENCE, SMALL.rope_theta, scaling=YARN)
    for length in (1, SEQUENCE):
        pairs = zip(plain.tables(length), doubled.tables(length), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        for half, table in zip(plain.tables(length), doubled.doubled_tables(length), strict=True):
            assert torch.equal(torch.cat((half, half), dim=-1)[None], table)
    with pytest.raises(ValueError, match="doubled=True"):
        plain.doubled_tables(1)
    with pytest.raises(ValueError, match="raise it in the configuration"):
        doubled.doubled_tables(SEQUENCE + 1)


def test_llama3_by_hand():
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_sequence_length=100
    )
    turns = torch.tensor([5.0, 4.0, 2.5, 1.0, 0.5], dtype=torch.float64)
    frequency = turns / 100 * 2 * math.pi
    want = frequency * torch.tensor([1, 1, 0.5 + 0.5 / 8, 1 / 8, 1 / 8])
    torch.testing.assert_close(scaling.scaled(frequency, 10_000.0), want)


@functools.cache
def _trained(device: str, config: GraphConfig) -> tuple[Trace, int]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = LanguageModel(SMALL, device=device, dtype=dtype)
    graphs = moe_graphs.graph(model, config)
    trace, captured = train(model, graphs, device, steps=5), graphs.report().captured
    graphs.release()
    return trace, captured


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scopes", ["attn", "attn,moe_router,moe_preprocess", "full"])
def test_graphed_training_is_bitwise_eager_training(device, scopes):
    trace, captured = _trained(device, GraphConfig(scopes, warmup_steps=2, on_mismatch="error"))
    eager, _ = _trained(device, GraphConfig("attn", warmup_steps=99))
    trace.assert_equal(eager)
    assert captured == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(head_dim=8), "latent attention has its own: leave them out"),
        (dict(qk_norm="head"), "latent attention has its own"),
        (dict(num_kv_heads=2), "latent attention has its own"),
    ],
)
def test_sizes_of_two_kinds_of_attention_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(LATENT, rope_head_dim=7), "rope_head_dim must be even"),
        (lambda: replace(LATENT, kv_rank=0), "kv_rank must be positive"),
        (lambda: replace(LATENT, query_rank=0), "query_rank must be positive"),
        (lambda: replace(YARN, factor=0.0), "factor must be positive"),
        (
            lambda: Llama3Scaling(
                factor=8.0,
                low_freq_factor=4.0,
                high_freq_factor=4.0,
                original_max_sequence_length=1,
            ),
            r"high_freq_factor \(4.0\) must be above",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_flops_count_both_head_sizes():
    model = LanguageModel(SMALL, device="meta")
    attention = 6 * 2 * 4 * (16 + 6)
    assert model.flops_per_token(10) - model.flops_per_token(9) == attention
