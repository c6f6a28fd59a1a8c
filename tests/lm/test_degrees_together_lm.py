"""Runs whose ranks share tensors, sequences and layers together, compared with one process.

Their checkpoints and graphs are tested as well. Everything that needs ranks is in one spawn.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_several_ranks import held_out, without_chance

from distributed import run_distributed
from lm_runs import (
    QUIET,
    SCOPES,
    fresh_trainer,
    options,
    resumed_from,
    saved_on_the_way,
    small_corpus,
    whole_state,
)
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.compare import compare
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import RunOptions
from moe_graphs.lm.sample import continue_tokens
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.context_parallel import whole_sequences

STEPS, SAVED = 5, 3
CPU = torch.device("cpu")
LAYOUTS = {
    "tp, cp": ParallelConfig(tp=2, cp=2),
    "tp, pp": ParallelConfig(tp=2, pp=2),
    "cp, pp": ParallelConfig(cp=2, pp=2),
    "cp": ParallelConfig(dp_shard=2, cp=2),
}
ON_OTHERS = [("tp, pp", "cp"), ("cp", "tp, cp"), ("one process", "tp, pp"), ("tp, cp", "cp, pp")]
WHOLE = FullIterationConfig(optimizer_in_graph=True, warmup_steps=2)
COMPARED = [
    ("tp, cp", WHOLE),
    ("tp, pp", WHOLE),
    ("tp, pp", GraphConfig(SCOPES, warmup_steps=2)),
    ("cp, pp", WHOLE),
]


def of_four_heads(given: RunOptions, steps: int = STEPS) -> RunOptions:
    preset = given.preset
    model = dataclasses.replace(preset.model, num_heads=4)
    training = dataclasses.replace(preset.training, steps=steps)
    return dataclasses.replace(
        given, preset=dataclasses.replace(preset, model=model, training=training)
    )


def trainer_on(workers: Workers | None) -> Trainer:
    trainer = fresh_trainer(of_four_heads(without_chance(workers=workers)))
    if workers is not None:
        trainer.run_id = workers.gather(trainer.run_id)[0]
    return trainer


def written_by(trainer: Trainer) -> Any:
    """The likeliest tokens, of a model that was just trained."""
    with whole_sequences(trainer.model):
        return continue_tokens(trainer.model, [1, 2, 3], 4, (0.0,), seed=0)


def work(rank: int, world_size: int, folder: Path) -> None:
    """Trains on each layout and saves in the middle, then resumes what others have saved."""
    found: dict[Any, Any] = {}
    all_workers = {name: Workers.on(layout, CPU) for name, layout in LAYOUTS.items()}
    for name, workers in all_workers.items():
        trainer = trainer_on(workers)
        found[name, "saved"] = saved_on_the_way(trainer, folder / name, SAVED, STEPS)
        found[name] = {
            "losses": trainer.history.loss.clone(),
            "norms": trainer.history.grad_norm.clone(),
            "nats": trainer.nats_per_token(held_out()),
            "state": whole_state(trainer),
            "written": None if trainer.pipeline is not None else written_by(trainer),
        }
    for source, name in ON_OTHERS:
        found[source, name] = resumed_from(folder / source, trainer_on(all_workers[name]), STEPS)
    found["compared"] = [compared(all_workers[name], graphs) for name, graphs in COMPARED]
    torch.save(found, folder / f"{rank}.pt")  # tensors do not outlive their process in a pipe


def compared(workers: Workers, graphs: Any) -> dict[str, Any]:
    """The result of ``train --compare``, with dropout, jitter and aux losses."""
    given = of_four_heads(options(microbatches=2, workers=workers), steps=7)
    given = dataclasses.replace(given, graph_config=graphs)
    check_options(given)
    found = compare(given, small_corpus(), QUIET)
    return {
        "equal": (
            found.losses_bitwise_equal,
            found.grad_norms_bitwise_equal,
            found.parameters_bitwise_equal,
        ),
        "losses": len(set(found.graphed.losses)),
        "replayed": found.report.matched,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Trainer, dict[str, Any], list[dict[Any, Any]]]:
    """The folder, a process alone, its state when it was saved, and what the ranks have found."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = trainer_on(None)
    saved = saved_on_the_way(trainer, folder / "one process", SAVED, STEPS)
    run_distributed(work, 4, arguments=(folder,), timeout_seconds=300)
    return folder, trainer, saved, [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_train_as_one_process_does(runs, layout):
    _, one, _, ranks = runs
    now, written = whole_state(one), written_by(one)
    for of_rank in ranks:
        found = of_rank[layout]
        torch.testing.assert_close(found["losses"], one.history.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["norms"], one.history.grad_norm, rtol=1e-4, atol=1e-5)
        assert found["nats"] == pytest.approx(one.nats_per_token(held_out()), rel=1e-5)
        assert found["state"].keys() == now.keys()
        for key, value in now.items():
            torch.testing.assert_close(found["state"][key], value, rtol=1e-3, atol=2e-4, msg=key)
        assert "pp" in layout or found["written"] == written


@pytest.mark.long
@pytest.mark.parametrize(("source", "layout"), ON_OTHERS)
def test_a_checkpoint_is_resumed_on_another_layout(runs, source, layout):
    _, one, saved, ranks = runs
    for of_rank in ranks:
        resumed, losses = of_rank[source, layout]
        wanted = saved if source == "one process" else of_rank[source, "saved"]
        assert resumed.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[key]) for key, value in resumed.items())
        torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("source", LAYOUTS)
def test_one_process_goes_on_from_a_checkpoint_of_four(runs, source):
    folder, one, _, ranks = runs
    state, losses = resumed_from(folder / source, trainer_on(None), STEPS)
    wanted = ranks[0][source, "saved"]
    assert all(torch.equal(value, wanted[key]) for key, value in state.items())
    torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_graphed_runs_are_eager_bit_for_bit(runs):
    for of_rank in runs[3]:
        for found in of_rank["compared"]:
            assert found["equal"] == (True, True, True)
            assert found["losses"] == 7
            assert found["replayed"] >= 4


@pytest.mark.parametrize(
    ("layout", "config", "words"),
    [
        ({"tp": 2, "cp": 4}, None, r"tokens and 2 heads \(of 4, shared by tp 2\) equally"),
        ({"tp": 2, "cp": 2}, GraphConfig(SCOPES), "scopes on several ranks"),
        ({"cp": 2, "pp": 2}, GraphConfig(SCOPES), "scopes .* share by --tp and --pp alone"),
        ({"tp": 2, "pp": 2}, FullIterationConfig(), "add --optimizer-in-graph"),
    ],
)
def test_what_is_refused_by_name(layout, config, words):
    workers: Any = SimpleNamespace(layout=ParallelConfig(**layout), fsdp=True)
    given = of_four_heads(options(microbatches=2, workers=workers))
    with pytest.raises(ValueError, match=words):
        check_options(dataclasses.replace(given, graph_config=config))
