"""``--attention-within-documents``: a run on packed text learns from each document by itself."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from distributed import RANKS, run_distributed
from grids import by_turns
from lm_runs import SCOPES, advance, fresh_trainer, options, small_corpus
from moe_graphs.cli import build_app
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import RunOptions, with_graphs
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig

STEPS = 7
WAYS = {
    "scopes": GraphConfig(SCOPES, warmup_steps=2, audit_every=2, on_audit="error"),
    "whole steps": FullIterationConfig(
        optimizer_in_graph=True, warmup_steps=2, audit_every=2, on_audit="error"
    ),
}


def chosen(*, chance: bool = False, within: bool = True, **changes: Any) -> RunOptions:
    """Options of a run; without ``chance`` nothing in it is random."""
    given = options(steps=STEPS, attention_within_documents=within, **changes)
    model = given.preset.model
    if not chance:
        assert model.moe is not None
        moe = dataclasses.replace(model.moe, input_jitter=0.0)
        model = dataclasses.replace(model, hidden_dropout=0.0, moe=moe)
    return dataclasses.replace(given, preset=dataclasses.replace(given.preset, model=model))


def held_out() -> HeldOut:
    return HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)


def summed_by_document(trainer: Trainer, inputs_BS, targets_BS) -> float:
    """The sum of the losses of all targets, a call of the model for each document."""
    total = 0.0
    separator = trainer.batches.documents.separator
    for inputs, targets in zip(inputs_BS, targets_BS, strict=True):
        begins = (inputs == separator).nonzero().flatten().tolist()
        ends = [*begins, len(inputs)]
        for begin, end in zip([0, *begins], ends, strict=True):
            if end > begin:
                logits = trainer.model(inputs[None, begin:end]).logits_BSV[0]
                total += cross_entropy(logits, targets[begin:end], reduction="sum").item()
    return total


def test_losses_are_those_of_each_document_by_itself():
    trainer, across = (fresh_trainer(chosen(within=within)) for within in (True, False))
    windows = trainer.batches.batch(0).long()
    found = (windows[:, :-1] == trainer.batches.documents.separator).sum(1)
    assert len(found.unique()) > 1  # rows of different numbers of documents
    with torch.no_grad():
        expected = summed_by_document(trainer, windows[:, :-1], windows[:, 1:])
        of_text = held_out()
        held = summed_by_document(trainer, of_text.inputs_NS, of_text.targets_NS)
    counted = int((of_text.targets_NS >= 0).sum())
    assert trainer.nats_per_token(of_text) == pytest.approx(held / counted, rel=1e-5)
    for each in (trainer, across):
        advance(each, 1)
    assert trainer.history.loss[0].item() == pytest.approx(expected / windows[:, 1:].numel())
    assert across.history.loss[0].item() != trainer.history.loss[0].item()


@pytest.mark.parametrize(("way", "microbatches"), by_turns(list(WAYS), [2, 1]))
def test_graphs_serve_any_number_of_documents_bit_for_bit(way, microbatches):
    given = chosen(chance=True, microbatches=microbatches)
    eager = fresh_trainer(given)
    advance(eager, STEPS)
    graphed = fresh_trainer(given)
    with with_graphs(graphed, WAYS[way]):
        advance(graphed, 4)
        graphed.nats_per_token(held_out())
        advance(graphed, STEPS)
        report = graphed.report()
    assert report.eager_calls.keys() - {"paused"} == {"warmup"}
    assert report.audits_passed == report.audited > 0
    assert torch.equal(eager.history.loss, graphed.history.loss)
    assert torch.equal(eager.history.grad_norm, graphed.history.grad_norm)
    for one, other in zip(eager.model.parameters(), graphed.model.parameters(), strict=True):
        assert torch.equal(one, other)


LAYOUTS = {
    "shard": ParallelConfig(dp_shard=RANKS),
    "tensors": ParallelConfig(dp_shard=RANKS // 2, tp=2),
}


def work(rank: int, world_size: int, folder) -> None:
    found = {}
    for name, layout in LAYOUTS.items():
        workers = Workers.on(layout, torch.device("cpu"))
        trainer = fresh_trainer(chosen(workers=workers))
        with with_graphs(trainer, WAYS["whole steps"]):
            advance(trainer, STEPS)
        trainer.settle()
        found[name] = trainer.history.loss.clone()
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.long
def test_ranks_that_have_whole_rows_train_as_one_process(tmp_path):
    alone = fresh_trainer(chosen())
    advance(alone, STEPS)
    run_distributed(work, RANKS, arguments=(tmp_path,), timeout_seconds=60.0 * RANKS)
    for losses in torch.load(tmp_path / "0.pt").values():
        torch.testing.assert_close(losses, alone.history.loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("degree", ["pp", "cp"])
def test_ranks_that_do_not_know_their_documents_are_refused(degree):
    layout = ParallelConfig(**{degree: 2})
    workers: Any = SimpleNamespace(
        layout=layout, fsdp=True, count=2, described=lambda: f"{degree} 2"
    )
    with pytest.raises(ValueError, match=f"attention_within_documents: with {degree} a rank"):
        check_options(chosen(workers=workers, microbatches=2))


def test_the_command_trains_samples_and_resumes(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.py").write_text(f"def f_{number}(x):\n    return x * {number}\n")
    given = ["train", "--preset", "tiny", "--device", "cpu", "--data", text, "--batch-size", 2,
             "--sequence-length", 32, "--steps", 4, "--checkpoint-every", 2, "--impl", "none",
             "--attention-within-documents", "--out", tmp_path / "run"]  # fmt: skip
    done = CliRunner().invoke(build_app(), [*map(str, given)])
    assert done.exit_code == 0, done.stderr
    assert "attention: within documents" in done.stdout
    assert "attention_within_documents = true" in (tmp_path / "run" / "config.toml").read_text()
    checkpoint, again = tmp_path / "run" / "checkpoints" / "step_000002", tmp_path / "again"
    resumed = ["train", "--resume", checkpoint, "--out", again]
    done = CliRunner().invoke(build_app(), [*map(str, resumed)])
    assert done.exit_code == 0, done.stderr
    summaries = [json.loads((p / "summary.json").read_text()) for p in (tmp_path / "run", again)]
    assert summaries[0]["held_out_bits_per_byte"] == summaries[1]["held_out_bits_per_byte"]
