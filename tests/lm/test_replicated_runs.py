"""``train --no-fsdp``: ranks with whole weights, which may share experts; scopes are legal."""

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
    SCOPES,
    fresh_trainer,
    options,
    resumed_from,
    saved_on_the_way,
    small_corpus,
    whole_state,
)
from moe_graphs import GraphConfig
from moe_graphs.config import FullIterationConfig
from moe_graphs.lm.compare import compare
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import deterministic
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig
from parallel_runs import told

STEPS, SAVED = 6, 3
CPU = torch.device("cpu")
WHOLE, SHARED = ParallelConfig(dp_shard=RANKS), ParallelConfig(dp_shard=RANKS, ep=RANKS)
WAYS = {
    "scopes": ("all_to_all", GraphConfig(SCOPES, warmup_steps=2)),
    "whole step": ("all_gather", FullIterationConfig(optimizer_in_graph=True, warmup_steps=2)),
}


def trainer_on(workers: Workers | None) -> Trainer:
    shares = workers is not None and workers.layout.ep > 1
    given = without_chance(workers=workers, dispatcher="all_to_all" if shares else "local")
    check_options(given)
    trainer = fresh_trainer(given)
    if workers is not None:
        trainer.run_id = workers.gather(trainer.run_id)[0]
    return trainer


def work(rank: int, world_size: int, folder: Path) -> None:
    found: dict[Any, Any] = {}
    shared, whole = (Workers.on(layout, CPU, fsdp=False) for layout in (SHARED, WHOLE))
    sharded = Workers.on(WHOLE, CPU)
    for name, workers in (("shared", shared), ("whole", whole)):
        trainer = trainer_on(workers)
        found[name, "saved"] = saved_on_the_way(trainer, folder / name, SAVED, STEPS)
        found[name] = trainer.history.loss.clone(), whole_state(trainer)
    for source, workers in (("shared", sharded), ("whole", shared)):
        found[source, "resumed"] = resumed_from(folder / source, trainer_on(workers), STEPS)
    found["described"] = shared.described()
    found["graphed"] = [graphed(shared, way) for way in WAYS]
    found["refused"] = refused(sharded, shared)
    torch.save(found, folder / f"{rank}.pt")  # tensors do not outlive their process in a pipe


def refused(sharded: Workers, shared: Workers) -> list[str]:
    scoped = options(graphed=True, workers=sharded)
    with_pipeline = dataclasses.replace(shared, layout=ParallelConfig(pp=2, dp_shard=RANKS // 2))
    grouped = dataclasses.replace(shared, layout=dataclasses.replace(SHARED, layers_per_group=2))
    mixed = options(workers=shared, dispatcher="all_to_all", mixed_precision=True)
    return [
        told(lambda: check_options(scoped)),
        told(lambda: check_options(options(workers=with_pipeline))),
        told(lambda: check_options(options(workers=grouped))),
        told(lambda: check_options(mixed)),
    ]


def graphed(workers: Workers, way: str) -> tuple[bool, ...]:
    """The result of ``train --compare``, with dropout and jitter."""
    dispatcher, config = WAYS[way]
    given = options(workers=workers, dispatcher=dispatcher, steps=6, microbatches=2)
    given = dataclasses.replace(given, graph_config=config, device=workers.device)
    check_options(given)
    found = compare(given, small_corpus(), QUIET)
    assert found.report.matched > 2
    return (
        found.losses_bitwise_equal,
        found.grad_norms_bitwise_equal,
        found.parameters_bitwise_equal,
    )


def graphed_on_gpus(rank: int, world_size: int) -> list[tuple[bool, ...]]:
    workers = Workers.on(SHARED, torch.device("cuda", rank), fsdp=False)
    with deterministic(True):
        return [graphed(workers, way) for way in WAYS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Trainer, list[dict[Any, Any]]]:
    """The folder, a process alone, and what the ranks have found."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = trainer_on(None)
    saved_on_the_way(trainer, folder / "one process", SAVED, STEPS)
    run_distributed(work, RANKS, arguments=(folder,))
    return folder, trainer, [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", ["shared", "whole"])
@pytest.mark.long
def test_ranks_train_as_one_process_does_and_go_on_elsewhere(runs, name):
    folder, one, ranks = runs
    now = whole_state(one)
    for found in ranks:
        losses, state = found[name]
        torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)
        assert state.keys() == now.keys()
        for key, value in now.items():
            torch.testing.assert_close(state[key], value, rtol=1e-3, atol=2e-4, msg=key)
        resumed, losses = found[name, "resumed"]
        assert all(torch.equal(v, found[name, "saved"][k]) for k, v in resumed.items())
        torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)
    state, losses = resumed_from(folder / name, trainer_on(None), STEPS)
    assert all(torch.equal(v, ranks[0][name, "saved"][k]) for k, v in state.items())
    torch.testing.assert_close(losses, one.history.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_graphed_is_eager_bit_for_bit_and_the_rest_is_refused(runs):
    for found in runs[2]:
        assert found["graphed"] == [(True, True, True)] * len(WAYS)
        assert found["described"].endswith(f"on {RANKS} ranks, without FSDP2")
        scoped, pipeline, groups, mixed = found["refused"]
        assert scoped.startswith("impl: scopes on several ranks")
        assert "use --no-fsdp" in scoped
        assert pipeline.startswith("2 things do not fit: no-fsdp: the layout is")
        assert "1f1b keeps 2 stages busy" in pipeline
        assert groups.startswith("2 things do not fit: layers_per_group: of FSDP2")
        assert "dispatcher: 'local' keeps tokens on their rank" in groups
        assert mixed.startswith("mixed_precision: it is FSDP2's")


@pytest.mark.multigpu
def test_graphed_is_eager_bit_for_bit_on_gpus():
    found = run_distributed(graphed_on_gpus, RANKS, "nccl", timeout_seconds=300)
    assert found == [[(True, True, True)] * len(WAYS)] * RANKS
