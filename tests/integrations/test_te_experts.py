"""Transformer Engine's modules as parts of our layers, by a stand-in on the CPU.

Their own modules are tried on a GPU by ``test_te_parts.py``.

Shapes: B batch, S sequence, D model, F ffn, e experts, R rows.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import moe_graphs
import te_stand_in
from moe_graphs import GraphConfig
from moe_graphs.dispatch import PaddedDispatcher
from moe_graphs.engine.report import Report
from moe_graphs.integrations import transformer_engine as parts
from moe_graphs.layers import (
    GroupedExperts,
    LanguageModel,
    LatentAttentionConfig,
    MoEConfig,
    MoELayer,
    TransformerConfig,
)
from stand_in_experts import run_on_rows

D, F = 16, 32
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=F, shared_ffn_hidden_size=16)
THEIRS = replace(MOE, experts="transformer_engine")
CONFIG = TransformerConfig(
    hidden_size=D,
    num_layers=2,
    num_heads=2,
    ffn_hidden_size=F,
    vocab_size=32,
    max_sequence_length=16,
    moe=MOE,
    moe_layers=(False, True),
)
LATENT = LatentAttentionConfig(
    query_rank=16, kv_rank=16, plain_head_dim=8, rope_head_dim=8, value_head_dim=8
)


@pytest.fixture
def engine(monkeypatch):
    return te_stand_in.install(monkeypatch)


def offsets(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def results(layer: nn.Module, *inputs: torch.Tensor):
    rows = inputs[0].clone().requires_grad_()
    out = run_on_rows(layer, rows, *inputs[1:]) if len(inputs) > 1 else layer(rows).hidden
    out.square().sum().backward()
    return out, rows.grad


COUNTS = {
    "uneven": (5, 1, 17, 9),
    "empty experts": (0, 7, 0, 0),
    "fewer rows than experts": (0, 1, 0, 1),
    "no rows": (0, 0, 0, 0),
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_experts_equal_ours(engine, counts):
    torch.manual_seed(0)
    ours, theirs = (
        kind(4, D, F, dtype=torch.float64) for kind in (GroupedExperts, parts.TEExperts)
    )
    ours.init_weights(std=0.5, out_std=0.3)
    theirs.load_stacked_weights(*ours.stacked_weights())
    rows_RD = torch.randn(sum(counts), D, dtype=torch.float64)
    expected, found = (results(each, rows_RD, offsets(*counts)) for each in (ours, theirs))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)
    for module, ours_eXY in ((theirs.w1, ours.w1), (theirs.w2, ours.w2)):
        for index in range(4):
            gradient = getattr(module, f"weight{index}").grad
            torch.testing.assert_close(gradient, ours_eXY.grad[index].T)
    assert "pad" not in engine.calls


def test_fp8_pads_and_changes_no_more_than_rounding(engine):
    torch.manual_seed(0)
    experts = parts.TEExperts(4, D, F)
    experts.init_weights(std=0.5, out_std=0.3)
    rows_RD, ends = torch.randn(32, D), offsets(5, 0, 18, 9)
    exact, exact_gradient = results(experts, rows_RD, ends)
    with parts.fp8_autocast(parts.fp8_recipe("block")):
        rounded, gradient = results(experts, rows_RD, ends)
    assert engine.calls == ["enter", "pad", "exit"]
    assert rounded.shape == exact.shape
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.5 * exact.norm()  # by casts to 15 values
    assert (gradient - exact_gradient).norm() < 0.5 * exact_gradient.norm()


def test_one_read_from_the_device_per_forward(engine, monkeypatch):
    experts, reads = parts.TEExperts(4, D, F), []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or read(t))
    monkeypatch.setattr(torch.Tensor, "item", lambda t: pytest.fail("another read"))
    run_on_rows(experts, torch.randn(8, D), offsets(2, 2, 2, 2))
    assert reads == [(4,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_convert_bitwise_both_ways(engine, dtype):
    torch.manual_seed(1)
    ours, theirs = GroupedExperts(3, D, F, dtype=dtype), parts.TEExperts(3, D, F, dtype=dtype)
    w1_eD2F, w2_eFD = ours.stacked_weights()
    theirs.load_stacked_weights(w1_eD2F, w2_eFD)
    assert torch.equal(theirs.w1.weight2, w1_eD2F[2].T)
    back = GroupedExperts(3, D, F, dtype=dtype)
    back.load_stacked_weights(*theirs.stacked_weights())
    assert all(map(torch.equal, back.stacked_weights(), ours.stacked_weights()))


def test_a_model_begins_with_the_same_weights(engine):
    """The generator is left where ours leaves it; one rank's experts are the same, too."""
    found = []
    for config in (CONFIG, replace(CONFIG, linear="transformer_engine", moe=THEIRS)):
        torch.manual_seed(3)
        model = LanguageModel(config)
        moe = model.layers[1].moe
        some = type(moe.experts)(2, D, F, first_expert=1, num_experts=4)
        others = [p for n, p in model.named_parameters() if ".experts." not in n]
        stacked = (*moe.experts.stacked_weights(), *some.stacked_weights())
        found.append([*others, *stacked, torch.rand(3)])
    assert all(map(torch.equal, *found))


def test_meta_then_real(engine):
    config = replace(CONFIG, linear="transformer_engine", moe=THEIRS)
    model = LanguageModel(config, device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights()
    expected = LanguageModel(config)
    expected.load_state_dict(model.state_dict())
    tokens = torch.randint(32, (2, 8))
    assert torch.equal(model(tokens).logits_BSV, expected(tokens).logits_BSV)


@pytest.mark.parametrize("latent", [None, LATENT], ids=["attention", "latent attention"])
def test_projections_are_theirs_under_torchs_names(engine, latent):
    changes = {} if latent is None else {"latent": latent}
    model = LanguageModel(replace(CONFIG, linear="transformer_engine", **changes))
    plain = LanguageModel(replace(CONFIG, **changes))
    theirs = {n for n, m in model.named_modules() if isinstance(m, engine.Linear)}
    ours = {n for n, m in plain.named_modules() if isinstance(m, nn.Linear)}
    assert theirs == ours - {"head"}
    # Checkpoints go both ways, strictly.
    assert plain.state_dict().keys() == model.state_dict().keys()
    tokens = torch.randint(32, (2, 8))
    assert not torch.allclose(model(tokens).logits_BSV, plain(tokens).logits_BSV)
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(tokens).logits_BSV, plain(tokens).logits_BSV)
    with torch.no_grad():
        model.layers[0].attention.out.weight.mul_(2)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens).logits_BSV, plain(tokens).logits_BSV)


def test_a_copied_model_saves_and_loads_as_torchs(engine):
    model = copy.deepcopy(LanguageModel(replace(CONFIG, linear="transformer_engine")))
    plain = LanguageModel(CONFIG)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_state_that_torch_cannot_hold_is_not_dropped(engine):
    model = LanguageModel(replace(CONFIG, linear="transformer_engine"))
    with parts.fp8_autocast(parts.fp8_recipe("delayed")):
        model(torch.randint(32, (2, 8)))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*_extra_state"):
        LanguageModel(CONFIG).load_state_dict(model.state_dict())


def test_fp8_state_comes_and_goes(engine):
    def step(model, seed):
        torch.manual_seed(seed)
        with parts.fp8_autocast(recipe):
            logits = model(torch.randint(32, (2, 8))).logits_BSV
            logits.square().mean().backward()
        return logits

    def weights_of(model):
        return {n: v for n, v in model.state_dict().items() if "_extra_state" not in n}

    recipe = parts.fp8_recipe("delayed")
    autocast = lambda: parts.fp8_autocast(recipe)  # noqa: E731
    config = replace(CONFIG, linear="transformer_engine", moe=THEIRS)
    model, other = LanguageModel(config), LanguageModel(config)
    fresh = parts.fp8_state(model)
    for seed in range(3):
        step(model, seed)
    state = parts.fp8_state(model)
    assert not fresh
    assert {"layers.0.attention.qkv", "layers.1.moe.experts.w1"} <= state.keys()
    other.load_state_dict(weights_of(model))
    expected = step(model, 7)  # before another step, which updates all scales
    assert not torch.equal(step(other, 7), expected)
    parts.load_fp8_state(other, state, autocast)
    assert torch.equal(step(other, 7), expected)
    parts.load_fp8_state(other, fresh, autocast)
    begun = LanguageModel(config)
    begun.load_state_dict(weights_of(other))
    assert torch.equal(step(other, 8), step(begun, 8))


def losses(config: GraphConfig) -> tuple[list[torch.Tensor], Report]:
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIG, linear="transformer_engine", moe=THEIRS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs, found = moe_graphs.graph(model, config), []
    for _ in range(6):
        with graphs.step():
            loss = model(torch.randint(32, (2, 8))).logits_BSV.square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    report = graphs.report()
    graphs.release()
    return found, report


@pytest.mark.parametrize("scopes", ["attn", "moe_router", "attn,mlp,moe_router,moe_preprocess"])
def test_legal_scopes_replay_bitwise(engine, scopes):
    eager, _ = losses(GraphConfig(impl="none"))
    graphed, report = losses(GraphConfig(scopes, warmup_steps=2))
    assert all(map(torch.equal, eager, graphed))
    assert report.replayed
    assert set(report.eager_calls) <= {"warmup"}


@pytest.mark.parametrize("dispatcher", [None, PaddedDispatcher(capacity_factor=2.0)])
@pytest.mark.parametrize("scopes", ["moe", "full"])
def test_scopes_with_the_experts_are_refused(engine, scopes, dispatcher):
    model = LanguageModel(replace(CONFIG, moe=THEIRS), dispatcher)
    with pytest.raises(ValueError, match="numbers of rows from the host.*moe_router"):
        moe_graphs.graph(model, GraphConfig(scopes))


def test_unknown_kinds():
    with pytest.raises(ValueError, match="linear: 'te' is unknown: choose one of torch, transf"):
        replace(CONFIG, linear="te")
    with pytest.raises(ValueError, match="linear: 'te' is unknown"):
        MoELayer(MOE, D, linear="te")
    with pytest.raises(ValueError, match="'mx' is unknown: choose one of delayed, current, block"):
        parts.fp8_recipe("mx")


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="it is installed"
)
def test_without_it_says_what_to_install():
    LanguageModel(CONFIG)
    assert "transformer_engine" not in sys.modules
    with pytest.raises(ImportError, match=r'pip install "moe_graphs\[te\]"'):
        MoELayer(THEIRS, D)
    with pytest.raises(ImportError, match=r'pip install "moe_graphs\[te\]"'):
        LanguageModel(replace(CONFIG, linear="transformer_engine"))
