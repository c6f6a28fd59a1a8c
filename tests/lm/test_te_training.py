"""The command ``moe-graphs train`` on Transformer Engine's modules, by a stand-in on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from typer.testing import CliRunner

import te_stand_in
from lm_runs import (
    QUIET,
    advance,
    fresh_trainer,
    on_transformer_engine,
    options,
    save_checkpoint,
    small_corpus,
)
from moe_graphs import GraphWarning
from moe_graphs.cli import build_app
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.integrations import transformer_engine as parts
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.checkpoint import load_checkpoint
from moe_graphs.lm.chosen_kernels import with_kernels
from moe_graphs.lm.options import ModelOptions
from moe_graphs.lm.run import RunOptions, run, with_graphs

THEIRS = "transformer_engine"
CUDA = torch.device("cuda")


@pytest.fixture
def engine(monkeypatch):
    return te_stand_in.install(monkeypatch)


def with_te(fp8: str = "none", *, experts: str = THEIRS, **changes) -> RunOptions:
    return on_transformer_engine(options(**changes), experts=experts, fp8=fp8)


def losses_of(given: RunOptions, steps: int = 6) -> torch.Tensor:
    trainer = fresh_trainer(given)
    with with_graphs(trainer, given.graph_config):
        advance(trainer, steps)
        if trainer.report() is not None:
            assert trainer.report().replayed
    return trainer.history.loss[:steps].clone()


def test_without_fp8_it_trains_as_torch_does(engine):
    torch.testing.assert_close(losses_of(with_te()), losses_of(options()))
    assert "enter" not in engine.calls


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_is_around_steps_and_not_around_evaluation(engine, recipe):
    given = with_te(recipe, microbatches=2)
    trainer = fresh_trainer(given)
    engine.calls.clear()
    advance(trainer, 2)
    paddings = ["pad"] * 2
    assert engine.calls == ["enter", *paddings, "exit"] * 2
    rounded = trainer.history.loss[:2]
    exact = losses_of(with_te(microbatches=2), 2)
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0)


@pytest.mark.parametrize(
    "config", [GraphConfig("attn,moe_router,moe_preprocess"), GraphConfig("attn", THEIRS)]
)
def test_scopes_without_fp8_are_bitwise(engine, config):
    eager = with_te()
    graphed = dataclasses.replace(eager, graph_config=config)
    assert torch.equal(losses_of(eager), losses_of(graphed))


def test_whole_steps_of_their_projections_are_bitwise(engine):
    given = dataclasses.replace(with_te(experts="moe_graphs"), graph_config=FullIterationConfig())
    assert torch.equal(losses_of(with_te(experts="moe_graphs")), losses_of(given))


GRAPHS = {
    "scopes": (GraphConfig("attn,mlp,moe_router,moe_preprocess"), THEIRS),
    "whole steps": (FullIterationConfig(), "moe_graphs"),
}


@pytest.mark.parametrize(("config", "experts"), GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.long
def test_graphs_in_fp8_are_bitwise_around_an_evaluation(engine, recipe, config, experts):
    found = []
    for graphs in (None, config):
        given = with_te(recipe, experts=experts, steps=10, microbatches=2)
        trainer = fresh_trainer(given)
        with with_graphs(trainer, graphs):
            advance(trainer, 7)
            trainer.bits_per_byte(_held_out(given))
            advance(trainer, 10)
            report = trainer.report()
        found.append([trainer.history.loss.clone(), *trainer.model.parameters()])
        found[-1] += [v for s in parts.fp8_state(trainer.model).values() for v in s.values()
                      if isinstance(v, torch.Tensor)]  # fmt: skip
    assert all(map(torch.equal, *found))
    assert report.replayed
    # The backward of these modules can be run only once, so the second microbatch is captured.
    assert set(report.eager_calls) <= {"warmup", "paused", "backward: not_captured"}


def test_whole_steps_with_their_experts_train_eagerly_by_name(engine):
    trainer = fresh_trainer(with_te())
    with with_graphs(trainer, FullIterationConfig()):
        with pytest.warns(GraphWarning, match="tolist"):
            advance(trainer, 6)
        assert trainer.report().state == "capture_failed"
    assert torch.equal(trainer.history.loss[:6], losses_of(with_te()))


@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
def test_resumed_runs_go_on_bitwise(engine, recipe, tmp_path):
    given = with_te(recipe)
    trainer = fresh_trainer(given)
    advance(trainer, 4)
    trainer.bits_per_byte(_held_out(given))
    path = save_checkpoint(tmp_path, trainer)
    advance(trainer, 8)
    resumed = fresh_trainer(given)
    assert not load_checkpoint(path, resumed)
    advance(resumed, 8)
    assert torch.equal(resumed.history.loss, trainer.history.loss)
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))


def test_a_trainer_goes_back_to_its_checkpoint(engine, tmp_path):
    trainer = fresh_trainer(with_te("delayed"))
    advance(trainer, 2)
    path = save_checkpoint(tmp_path, trainer)
    advance(trainer, 6)
    losses = trainer.history.loss[:6].clone()
    load_checkpoint(path, trainer)
    advance(trainer, 6)
    assert torch.equal(trainer.history.loss[:6], losses)


def test_checkpoints_of_torchs_projections_go_on_in_theirs(engine, tmp_path):
    plain = fresh_trainer(options())
    advance(plain, 2)
    path = save_checkpoint(tmp_path, plain)
    other = fresh_trainer(with_te("delayed", experts="moe_graphs"))
    differences = load_checkpoint(path, other)
    assert [line.partition(":")[0] for line in differences] == ["fp8", "model.linear"]
    assert all(map(torch.equal, plain.model.parameters(), other.model.parameters()))
    with pytest.raises(ValueError, match="holds another model.*experts.w1"):
        load_checkpoint(path, fresh_trainer(with_te()))
    advance(other, 4)
    back = fresh_trainer(options())
    path = save_checkpoint(tmp_path / "back", other)
    assert "fp8: delayed in the checkpoint, none now" in load_checkpoint(path, back)
    assert all(map(torch.equal, back.model.parameters(), other.model.parameters()))


def test_a_whole_run(engine, tmp_path):
    given = with_te("delayed", steps=8, out=tmp_path / "run", checkpoint_every=4)
    summary = run(given, small_corpus(), QUIET)
    assert summary.steps == 8
    resume = tmp_path / "run" / "checkpoints" / "step_000004"
    again = dataclasses.replace(given, resume=resume, out=tmp_path / "again")
    assert run(again, small_corpus(), QUIET).held_out_bits_per_byte == (
        summary.held_out_bits_per_byte
    )


def test_pretrained_weights_into_their_parts_and_back(engine, tmp_path):
    preset = options().preset
    moe = dataclasses.replace(preset.model.moe, input_jitter=0.0, expert_bias=False)
    config = dataclasses.replace(
        preset.model, moe=moe, moe_layers="all", qk_norm="head", hidden_dropout=0.0
    )
    ours = LanguageModel(config)
    ours.save_pretrained(tmp_path / "ours")
    kinds = {"linear": THEIRS, "experts": THEIRS}
    theirs = LanguageModel.from_pretrained(tmp_path / "ours", **kinds)
    assert theirs.config.moe.experts == theirs.config.linear == THEIRS
    tokens = torch.randint(256, (2, 8))
    torch.testing.assert_close(theirs(tokens).logits_BSV, ours(tokens).logits_BSV)
    theirs.save_pretrained(tmp_path / "theirs")
    back = LanguageModel.from_pretrained(tmp_path / "theirs")
    assert all(map(torch.equal, ours.parameters(), back.parameters()))
    theirs.use_experts("moe_graphs")
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


REFUSED = {
    "fp8 of nothing": (dict(fp8="block"), "nothing would compute in it: add --linear"),
    "unknown fp8": (
        dict(fp8="mxfp8", linear=THEIRS),
        "unknown: choose one of delayed, current, block",
    ),
    "unknown experts": (
        dict(experts="deepgemm"),
        "experts: 'deepgemm' is unknown: choose",
    ),
    "unknown linear": (
        dict(linear="te"),
        "linear: 'te' is unknown: choose one of torch, ",
    ),
    "no GPU, linear": (dict(linear=THEIRS), "needs a CUDA GPU, and this run is on cpu"),
    "no GPU, experts": (dict(experts=THEIRS), "needs a CUDA GPU, and this run is on cpu"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_starts(flags, message, tmp_path):
    given = [f"--{name}={value}" for name, value in flags.items()]
    out = tmp_path / "run"
    command = ["train", "--preset", "tiny", "--device", "cpu", "--out", str(out), *given]
    result = CliRunner().invoke(build_app(), command)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_experts_of_a_dense_model_are_refused():
    preset = options().preset
    dense = dataclasses.replace(preset.model, moe=None, moe_layers="all")
    with pytest.raises(ValueError, match="the model has none: drop --experts"):
        with_kernels(dataclasses.replace(preset, model=dense), ModelOptions(experts=THEIRS), CUDA)


def test_sizes_that_fp8_cannot_multiply(engine):
    given = with_te("block", experts="moe_graphs")
    model = dataclasses.replace(given.preset.model, hidden_size=24)
    with pytest.raises(ValueError, match=r"weights of layers.0.attention.qkv are \[72, 24\]"):
        fresh_trainer(
            dataclasses.replace(given, preset=dataclasses.replace(given.preset, model=model))
        )
    training = dataclasses.replace(given.preset.training, sequence_length=30, batch_size=1)
    with pytest.raises(ValueError, match="30 tokens in a microbatch: FP8 needs a multiple of 16"):
        fresh_trainer(
            dataclasses.replace(given, preset=dataclasses.replace(given.preset, training=training))
        )


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="it is installed"
)
def test_without_transformer_engine_it_says_what_to_install():
    with pytest.raises(ImportError, match=r'pip install "moe_graphs\[te\]"'):
        with_te()


def _held_out(given: RunOptions):
    from moe_graphs.lm.run import _held_out as held_out

    return held_out(given, small_corpus())
