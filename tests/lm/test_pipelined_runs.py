"""Training runs on the ranks of a pipeline, compared with one process.

Their checkpoints and graphs are tested as well. Everything that needs ranks is in one spawn.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import run_distributed
from lm_runs import advance, fresh_trainer, options, save_checkpoint, small_corpus
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.checkpoint import Checkpoints, load_checkpoint
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import RunOptions, with_graphs
from moe_graphs.lm.run_directory import find_checkpoint
from moe_graphs.lm.run_state import model_state, optimizer_state
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig

STEPS, SAVED = 6, 3
CPU = torch.device("cpu")
GRAPHS = {
    "scopes": GraphConfig("attn,mlp,moe_router,moe_preprocess", warmup_steps=2),
    "whole steps": FullIterationConfig(optimizer_in_graph=True, warmup_steps=2),
    "whole steps, update outside": FullIterationConfig(warmup_steps=2),
}


def chosen(*, chance: bool = False, microbatches: int = 2, **changes: Any) -> RunOptions:
    """Options of a run.

    With ``chance`` ranks draw random numbers of their own, so a process alone draws others.
    """
    given = options(steps=STEPS, microbatches=microbatches, **changes)
    model = given.preset.model
    if not chance:
        moe = dataclasses.replace(model.moe, input_jitter=0.0)
        model = dataclasses.replace(model, hidden_dropout=0.0, moe=moe)
    rule = {"label_smoothing": 0.1, "z_loss": 1e-2}
    training = dataclasses.replace(given.preset.training, batch_size=8, **rule)
    preset = dataclasses.replace(given.preset, model=model, training=training)
    return dataclasses.replace(given, preset=preset)


def trainer_on(workers: Workers | None, **changes: Any) -> Trainer:
    trainer = fresh_trainer(chosen(workers=workers, **changes))
    if workers is not None:
        trainer.run_id = workers.gather(trainer.run_id)[0]
    return trainer


def held_out() -> HeldOut:
    return HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The state of this rank's stages."""
    state = {**model_state(trainer), **optimizer_state(trainer)}
    return {name: value.clone() for name, value in state.items()}


def work(rank: int, world_size: int, folder: Path) -> None:
    workers = Workers.on(ParallelConfig(pp=2), CPU)
    trainer = trainer_on(workers)
    checkpoints = Checkpoints(folder / "pipeline", trainer)
    advance(trainer, SAVED)
    checkpoints.save()
    advance(trainer, STEPS)
    checkpoints.finish()
    line = trainer.log_line()
    found: dict[str, Any] = {
        "nats": trainer.nats_per_token(held_out()),
        "losses": trainer.history.loss.clone(),
        "norms": trainer.history.grad_norm.clone(),
        "state": state_of(trainer),
        "line": (line.tflops / line.tokens_per_second, trainer.whole.num_parameters()),
    }
    for source in ("pipeline", "one process"):
        resumed = trainer_on(workers)
        said = load_checkpoint(find_checkpoint(folder / source), resumed)
        at_once = state_of(resumed)
        advance(resumed, STEPS)
        resumed.settle()
        found[source] = at_once, resumed.history.loss.clone(), said
    found["graphed"] = {name: graphed(workers, graphs) for name, graphs in GRAPHS.items()}
    found["eager"] = graphed(workers, None)
    torch.save(found, folder / f"{rank}.pt")  # tensors do not outlive their process in a pipe


def graphed(workers: Workers, graphs: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The result of a graphed run, with dropout and jitter, and an evaluation in between."""
    trainer = trainer_on(workers, chance=True, microbatches=4)
    with with_graphs(trainer, graphs):
        advance(trainer, STEPS - 1)
        trainer.nats_per_token(held_out())
        advance(trainer, STEPS)
        report = trainer.report()
    trainer.settle()
    losses, norms = trainer.history.loss.clone(), trainer.history.grad_norm.clone()
    return losses, norms, 0 if report is None else report.matched


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Trainer, list[dict[str, Any]]]:
    """The folder, a process alone, and what the ranks have found."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = trainer_on(None)
    advance(trainer, SAVED)
    save_checkpoint(folder / "one process", trainer)
    advance(trainer, STEPS)
    run_distributed(work, 2, arguments=(folder,))
    return folder, trainer, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_pipeline_trains_as_one_process(runs):
    """Loss, norm and held-out loss are the same, also the aux loss, which every rank knows."""
    _, alone, ranks = runs
    line = alone.log_line()
    for found in ranks:
        close(found["losses"], alone.history.loss)
        close(found["norms"], alone.history.grad_norm)
        assert found["nats"] == pytest.approx(alone.nats_per_token(held_out()), rel=1e-5)
        flops, parameters = found["line"]
        assert flops == pytest.approx(line.tflops / line.tokens_per_second)
        assert parameters == alone.model.num_parameters()
        for name, value in found["state"].items():
            if name.startswith("model."):
                expected = alone.model.state_dict()[name.removeprefix("model.")]
                torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)
    names = [set(found["state"]) for found in ranks]
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(state_of(alone))


@pytest.mark.long
def test_checkpoints_go_there_and_back(runs):
    folder, alone, ranks = runs
    resumed = trainer_on(None)
    said = load_checkpoint(find_checkpoint(folder / "pipeline"), resumed)
    assert any(line.startswith("layout: pp 2 on 2 ranks in the checkpoint") for line in said)
    whole = state_of(resumed)
    again = trainer_on(None)
    load_checkpoint(find_checkpoint(folder / "one process"), again)
    expected = state_of(again)
    for found in ranks:
        at_once, losses, _ = found["pipeline"]
        assert at_once.keys() < whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in at_once.items())
        assert torch.equal(losses, found["losses"])  # it is the run that went on
        at_once, losses, said = found["one process"]
        assert all(torch.equal(value, expected[name]) for name, value in at_once.items())
        close(losses, alone.history.loss)
        assert any("drawn anew for 2 now" in line for line in said)
    advance(resumed, STEPS)
    close(resumed.history.loss, alone.history.loss)


@pytest.mark.long
def test_graphed_runs_are_eager_bit_for_bit(runs):
    for found in runs[2]:
        losses, norms, _ = found["eager"]
        assert len(set(losses.tolist())) == STEPS
        for name, (graphed_losses, graphed_norms, replayed) in found["graphed"].items():
            assert torch.equal(graphed_losses, losses), name
            assert torch.equal(graphed_norms, norms), name
            assert replayed >= STEPS - 2, name  # all after the warm-up


@dataclasses.dataclass(frozen=True)
class _Layout:
    layout: ParallelConfig
    fsdp: bool = True


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ({"pp": 4}, {}, "2 layer.s. cannot be divided into 4 stages"),
        ({"pp": 2}, {"microbatches": 1}, "1f1b keeps 2 stages busy"),
        ({"pp": 2}, {"schedule": "gpipe", "stages_per_rank": 2}, "run by 'interleaved_1f1b'"),
        ({"dp_shard": 2}, {"schedule": "gpipe"}, "of a pipeline: add --pp"),
        ({"pp": 2, "dp_shard": 2}, {"graph_config": GraphConfig("attn")}, "scopes on several"),
        (
            {"pp": 2, "dp_shard": 2},
            {"graph_config": FullIterationConfig()},
            "add --optimizer-in-graph",
        ),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused_before_it_starts(layout, changes, words):
    given = dict(changes)
    config = given.pop("graph_config", None)
    microbatches = given.pop("microbatches", 4)
    workers: Any = _Layout(ParallelConfig(**layout))
    asked = chosen(microbatches=microbatches, workers=workers, **given)
    if microbatches == 4 and layout.get("pp") == 4:
        assert asked.preset.model.num_layers == 2
    with pytest.raises(ValueError, match=words):
        check_options(dataclasses.replace(asked, graph_config=config))
