"""The training loop: what a step depends on, what checkpoints hold, what graphs keep."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from lm_runs import QUIET, advance, fresh_trainer, options, save_checkpoint, small_corpus
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.errors import NonFiniteError
from moe_graphs.lm.checkpoint import load_checkpoint
from moe_graphs.lm.compare import compare
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.metrics import compressed_bits_per_byte
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.picture import draw_losses
from moe_graphs.lm.run import (
    Progress,
    run,
    with_graphs,
)
from moe_graphs.lm.trainer import Trainer, TrainingDiverged

FULL = {"without": FullIterationConfig(), "with": FullIterationConfig(optimizer_in_graph=True)}


def assert_same(left: Trainer, right: Trainer) -> None:
    assert torch.equal(left.history.loss, right.history.loss)
    assert torch.equal(left.history.grad_norm, right.history.grad_norm)
    states = left.model.state_dict(), right.model.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_graphed_run_is_the_eager_run(microbatches):
    eager, graphed = (
        options(graphed=flag, steps=8, microbatches=microbatches) for flag in (False, True)
    )
    # The trainers run one after the other, because both draw from the CPU's only generator.
    trainers = []
    for given in (eager, graphed):
        trainer = fresh_trainer(given)
        with with_graphs(trainer, given.graph_config):
            advance(trainer, 8)
            report = trainer.graphs.report() if trainer.graphs else None
        trainers.append(trainer)
    assert report.captured > 0
    assert report.matched == report.captured * 5 * microbatches
    assert_same(*trainers)
    assert trainers[0].history.loss[-1] < trainers[0].history.loss[0]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("config", FULL.values(), ids=FULL)
def test_a_run_of_whole_steps_is_the_eager_run(config, microbatches):
    given = options(steps=9, microbatches=microbatches)
    held_out = HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)
    eager = fresh_trainer(given)
    advance(eager, 9)
    graphed = fresh_trainer(given)
    with with_graphs(graphed, config):
        advance(graphed, 6)
        graphed.bits_per_byte(held_out)  # in eval mode, between replays
        advance(graphed, 9)
        report = graphed.report()
    assert (report.captures, report.matched) == (1, 6)
    assert report.eager_calls == {"warmup": 3}
    assert_same(eager, graphed)
    assert graphed.report() is None


def check_resumed(folder, given, config, saved_at):
    """Checks a resumed run of 12 steps.

    Returns the uninterrupted run, and the checkpoint that it has saved.
    """
    whole = fresh_trainer(given)
    with with_graphs(whole, config):
        advance(whole, saved_at)
        path = save_checkpoint(folder, whole)
        advance(whole, 12)
    fresh = fresh_trainer(given)
    load_checkpoint(path, fresh)
    with with_graphs(fresh, config):
        advance(fresh, 12)
    assert_same(whole, fresh)
    return whole, path


@pytest.mark.parametrize("config", FULL.values(), ids=FULL)
@pytest.mark.long
def test_whole_steps_are_resumed_bit_by_bit(tmp_path, config):
    """A trainer resumes that captures afterwards, and one that has captured before."""
    given = options(steps=12)
    whole, path = check_resumed(tmp_path, given, config, saved_at=5)
    captured = fresh_trainer(given)
    with with_graphs(captured, config):
        advance(captured, 7)
        load_checkpoint(path, captured)
        advance(captured, 12)
        assert captured.report().captures == 1
    assert torch.equal(whole.history.loss[5:], captured.history.loss[5:])
    assert_same(whole, captured)


@pytest.mark.parametrize(("before", "after"), [(False, False), (True, True), (False, True)])
def test_a_resumed_run_is_the_uninterrupted_run(tmp_path, before, after):
    whole = fresh_trainer(options(before))
    with with_graphs(whole, options(before).graph_config):
        advance(whole, 8)
    first = fresh_trainer(options(before))
    with with_graphs(first, options(before).graph_config):
        advance(first, 4)
        path = save_checkpoint(tmp_path, first)
    torch.manual_seed(1234)
    second = fresh_trainer(options(after))
    torch.rand(17)
    assert load_checkpoint(path, second) == []
    with with_graphs(second, options(after).graph_config):
        advance(second, 8)
    assert_same(whole, second)


def test_microbatches_divide_the_gradient_not_the_result():
    whole, halves = fresh_trainer(options()), fresh_trainer(options(microbatches=2))
    tokens = whole.batches.batch(0).long()
    norms = []
    for trainer in (whole, halves):
        # Evaluation mode leaves out what differs on purpose: dropout and jitter draw per call, and
        # balance is per microbatch.
        trainer.model.eval()
        trainer.forward_backward(tokens)
        norms.append([p.grad for name, p in trainer.model.named_parameters() if "head" in name])
    for left, right in zip(*norms, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="microbatches: 3 does not divide"):
        options(microbatches=3)


def test_the_learning_rate_rises_and_falls():
    settings = TrainSettings(
        steps=100, batch_size=1, sequence_length=1, learning_rate=1.0, warmup_steps=10
    )
    rates = [settings.learning_rate_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_the_log_line_is_the_fields_and_reads_the_run(tmp_path):
    trainer = fresh_trainer(options(dispatcher="padded"))
    advance(trainer, 3)
    line = trainer.log_line()
    assert line.step == 3
    assert line.loss == trainer.history.loss[2].item()
    assert line.tokens_per_second > 0
    assert line.mfu is None
    assert line.dropped == trainer.history.dropped[:3].sum().item()
    text = str(line)
    for field in ("step:", "loss:", "grad_norm:", "memory:", "tps:", "tflops:", "mfu: -"):
        assert field in text
    assert f"dropped: {line.dropped:,}" in text
    assert line.max_over_mean >= 1
    assert f"max/mean load: {line.max_over_mean:.2f}  unused experts: {line.unused_experts}" in text
    advance(trainer, 4)
    assert trainer.log_line().dropped == trainer.history.dropped[3].item()
    local = fresh_trainer(options())
    advance(local, 1)
    assert "dropped" not in str(local.log_line())


def test_bits_per_byte_of_an_untrained_model_and_of_windows():
    trainer = fresh_trainer(options())
    torch.nn.init.zeros_(trainer.model.head.weight)
    held_out = HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)
    trainer.model.train()
    before = torch.get_rng_state()
    assert trainer.bits_per_byte(held_out) == pytest.approx(8.0)
    assert trainer.model.training
    assert torch.equal(before, torch.get_rng_state())


def test_compressors_are_given_the_same_bytes_as_one_stream():
    content = bytes(range(256)) * 64
    bits = compressed_bits_per_byte(content)
    assert list(bits) == ["zlib -9", "bz2 -9", "xz -9e"]
    assert all(0 < value < 1 for value in bits.values())
    noise = torch.randint(256, (1 << 14,), dtype=torch.uint8).numpy().tobytes()
    assert all(7.9 < value < 8.5 for value in compressed_bits_per_byte(noise).values())


def test_a_run_leaves_its_results_behind(tmp_path):
    notes: list[str] = []
    given = options(graphed=True, out=tmp_path / "run", checkpoint_every=4)
    summary = run(given, small_corpus(), Progress(line=lambda line: None, note=notes.append))
    found = {str(path.relative_to(given.out)) for path in given.out.rglob("*") if path.is_file()}
    assert {"log.jsonl", "summary.json", "checkpoints/step_000008/manifest.json"} <= found
    assert len((given.out / "log.jsonl").read_text().splitlines()) == 2
    assert summary.to_dict()["report"]["captured"] > 0
    assert math.isfinite(summary.held_out_bits_per_byte)
    assert any(note.startswith("held out") for note in notes)


@pytest.mark.parametrize(("every", "evaluations"), [(None, 1), (3, 2)])
def test_an_option_says_how_often_a_run_evaluates(tmp_path, every, evaluations):
    notes: list[str] = []
    given = options(out=tmp_path / "run", evaluate_every=every, save=False)
    run(given, small_corpus(), Progress(line=lambda line: None, note=notes.append))
    assert sum(note.startswith("held out") for note in notes) == evaluations  # of eight steps


def test_a_picture_is_drawn_or_its_absence_is_explained(tmp_path, monkeypatch):
    arguments = {
        "title": "a test",
        "train_nats": [float("nan")] + [3.0 / (n + 1) for n in range(40)],
        "held_out_bits": [(10, 3.0), (40, 2.0)],
        "compressors": {"zlib -9": 2.0, "xz -9e": 1.5},
    }
    pytest.importorskip("matplotlib")
    assert draw_losses(tmp_path / "a.png", **arguments) is None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "not installed" in draw_losses(tmp_path / "b.png", **arguments)
    assert not Path(tmp_path / "b.png").exists()


def test_compare_runs_both_from_the_same_seed():
    result = compare(options(graphed=True, steps=8), small_corpus(), QUIET)
    assert result.losses_bitwise_equal
    assert result.grad_norms_bitwise_equal
    assert result.parameters_bitwise_equal
    assert result.first_difference is None
    assert result.report.replayed > 0
    assert result.eager.timed_steps == result.graphed.timed_steps == 3
    with pytest.raises(ValueError, match="steps: 5 leaves none"):
        compare(options(graphed=True, steps=5), small_corpus(), QUIET)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(options(steps=8), small_corpus(), QUIET)


def test_a_diverged_run_stops_and_says_so(tmp_path):
    given = options(out=tmp_path, save=False)
    training = dataclasses.replace(given.preset.training, learning_rate=float("inf"))
    given = dataclasses.replace(given, preset=dataclasses.replace(given.preset, training=training))
    with pytest.raises(TrainingDiverged, match="training diverged"):
        run(given, small_corpus(), QUIET)


@pytest.mark.parametrize("config", [None, GraphConfig("attn"), *FULL.values()])
def test_a_diverged_run_names_the_operation_on_request(tmp_path, config):
    given = options(out=tmp_path, save=False, find_nan=True)
    training = dataclasses.replace(given.preset.training, learning_rate=float("inf"))
    given = dataclasses.replace(
        given,
        preset=dataclasses.replace(given.preset, training=training),
        graph_config=config,
    )
    with pytest.raises(NonFiniteError, match="the first NaN") as raised:
        run(given, small_corpus(), QUIET)
    assert raised.value.operation.phase == "update"


def test_a_run_that_diverges_in_its_last_update_says_so(tmp_path, monkeypatch):
    """All losses were finite, but the summary would hold NaN, which is no JSON."""
    given = options(out=tmp_path, save=False, steps=1)
    monkeypatch.setattr(Trainer, "bits_per_byte", lambda self, held_out: math.nan)
    with pytest.raises(TrainingDiverged, match="nan bits per byte of held-out text after step 1"):
        run(given, small_corpus(), QUIET)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("config", FULL.values(), ids=FULL)
def test_a_run_of_whole_steps_on_the_gpu_is_the_eager_run(config):
    given = options(steps=12, microbatches=2)
    given = dataclasses.replace(given, device=torch.device("cuda"), graph_config=config)
    result = compare(given, small_corpus(), QUIET)
    assert result.losses_bitwise_equal
    assert result.grad_norms_bitwise_equal
    assert result.parameters_bitwise_equal
    assert result.report.matched == 9


@pytest.mark.gpu
@pytest.mark.parametrize("config", FULL.values(), ids=FULL)
def test_whole_steps_are_resumed_on_the_gpu(tmp_path, config):
    given = dataclasses.replace(options(steps=12), device=torch.device("cuda"))
    check_resumed(tmp_path, given, config, saved_at=6)


@pytest.mark.gpu
def test_a_graphed_run_on_the_gpu_is_the_eager_run():
    given = dataclasses.replace(
        options(graphed=True, steps=12, microbatches=2), device=torch.device("cuda")
    )
    result = compare(given, small_corpus(), QUIET)
    assert result.losses_bitwise_equal
    assert result.parameters_bitwise_equal
    assert result.report.replayed > 0
