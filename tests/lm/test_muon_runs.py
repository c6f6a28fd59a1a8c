"""Runs with ``--optimizer muon`` on several ranks, compared with one process.

Their checkpoints and graphs are tested as well. Everything that needs ranks is in one spawn.
RANKS=4 has two degrees at a time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_ranks import without_chance

from distributed import RANKS, run_distributed
from lm_runs import (
    QUIET,
    fresh_trainer,
    options,
    resumed_from,
    saved_on_the_way,
    small_corpus,
    whole_state,
)
from moe_graphs.config import FullIterationConfig
from moe_graphs.lm.compare import compare
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import RunOptions, deterministic
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.optim import Muon
from moe_graphs.parallel import ParallelConfig

STEPS, SAVED = 4, 2
CPU = torch.device("cpu")
HALF = RANKS // 2
LAYOUTS = {
    "shard": ParallelConfig(dp_shard=2, cp=HALF),
    "replicate": ParallelConfig(dp_replicate=2, dp_shard=HALF),
    "experts": ParallelConfig(dp_shard=2, dp_replicate=HALF, ep=2),
    "pipeline": ParallelConfig(pp=2, dp_shard=HALF),
}
ON_OTHERS = [
    ("shard", "experts"), ("experts", "pipeline"), ("pipeline", "shard"),
    ("replicate", "replicate"), *(("one process", name) for name in LAYOUTS),
]  # fmt: skip
WHOLE = FullIterationConfig(optimizer_in_graph=True, warmup_steps=2)


def by_muon(given: RunOptions, steps: int = STEPS) -> RunOptions:
    training = dataclasses.replace(given.preset.training, optimizer="muon", steps=steps)
    return dataclasses.replace(given, preset=dataclasses.replace(given.preset, training=training))


def dispatcher(workers: Workers | None, of_experts: str) -> str:
    return of_experts if workers is not None and workers.layout.ep > 1 else "local"


def trainer_on(workers: Workers | None) -> Trainer:
    given = without_chance(workers=workers, dispatcher=dispatcher(workers, "all_to_all"))
    check_options(by_muon(given))
    trainer = fresh_trainer(by_muon(given))
    assert type(trainer.optimizer) is Muon
    if workers is not None:
        trainer.run_id = workers.gather(trainer.run_id)[0]
    return trainer


def work(rank: int, world_size: int, folder: Path) -> None:
    found: dict[Any, Any] = {}
    all_workers = {name: Workers.on(layout, CPU) for name, layout in LAYOUTS.items()}
    for name, workers in all_workers.items():
        trainer = trainer_on(workers)
        found[name, "saved"] = saved_on_the_way(trainer, folder / name, SAVED, STEPS)
        found[name] = trainer.history.loss.clone(), whole_state(trainer)
    for source, name in ON_OTHERS:
        found[source, name] = resumed_from(folder / source, trainer_on(all_workers[name]), STEPS)
    found["graphed"] = {name: graphed(all_workers[name]) for name in ("shard", "experts")}
    torch.save(found, folder / f"{rank}.pt")  # tensors do not outlive their process in a pipe


def graphed(workers: Workers) -> tuple[bool, ...]:
    """The result of ``train --compare``, with dropout and jitter."""
    given = options(workers=workers, dispatcher=dispatcher(workers, "all_gather"))
    given = dataclasses.replace(by_muon(given, steps=6), graph_config=WHOLE, device=workers.device)
    check_options(given)
    found = compare(given, small_corpus(), QUIET)
    assert found.report.matched > 2
    return (
        found.losses_bitwise_equal,
        found.grad_norms_bitwise_equal,
        found.parameters_bitwise_equal,
    )


def graphed_on_gpus(rank: int, world_size: int) -> list[tuple[bool, ...]]:
    layouts = (LAYOUTS[name] for name in ("shard", "replicate", "experts"))
    with deterministic(True):
        return [graphed(Workers.on(layout, torch.device("cuda", rank))) for layout in layouts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Trainer, dict[str, Any], list[dict[Any, Any]]]:
    """The folder, a process alone, its state when it was saved, and what the ranks have found."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = trainer_on(None)
    saved = saved_on_the_way(trainer, folder / "one process", SAVED, STEPS)
    run_distributed(work, RANKS, arguments=(folder,))
    return folder, trainer, saved, [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_one_process_does(runs, layout):
    """Each tensor is within a thousandth of its norm; four steps move it by 2 to 16 hundredths.

    The order of the ranks' sums changes the last bits of gradients. Newton-Schulz computes in bf16,
    which may round such an element to the next number. Which element, and whether by more than a
    limit per element, depends on the CPU.
    """
    _, one, _, ranks = runs
    now = whole_state(one)
    for found in ranks:
        losses, state = found[layout]
        torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)
        assert state.keys() == now.keys()
        for key, value in now.items():
            distance = torch.linalg.vector_norm((state[key] - value).double())
            assert distance <= 1e-3 * torch.linalg.vector_norm(value.double()), key


@pytest.mark.long
@pytest.mark.parametrize(("source", "layout"), ON_OTHERS)
def test_checkpoints_are_resumed_on_any_layout(runs, source, layout):
    _, one, saved, ranks = runs
    for found in ranks:
        resumed, losses = found[source, layout]
        wanted = saved if source == "one process" else found[source, "saved"]
        assert resumed.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[key]) for key, value in resumed.items())
        torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)
        if source == layout:
            assert torch.equal(losses, found[layout][0])


@pytest.mark.long
def test_one_process_goes_on_from_that_of_several(runs):
    folder, one, _, ranks = runs
    state, losses = resumed_from(folder / "shard", trainer_on(None), STEPS)
    wanted = ranks[0]["shard", "saved"]
    assert all(torch.equal(value, wanted[key]) for key, value in state.items())
    torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_graphed_runs_are_eager_bit_for_bit(runs):
    for found in runs[3]:
        assert found["graphed"] == dict.fromkeys(("shard", "experts"), (True, True, True))


@pytest.mark.multigpu
def test_graphed_runs_are_eager_bit_for_bit_on_gpus():
    found = run_distributed(graphed_on_gpus, RANKS, "nccl", timeout_seconds=300)
    assert found == [[(True, True, True)] * 3] * RANKS
