"""Runs on several ranks: the batch of one process, and checkpoints for any layout.

Everything that needs ranks is in one spawn of two; the test functions look at what came back.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from distributed import run_distributed
from lm_runs import advance, fresh_trainer, options, small_corpus
from moe_graphs.lm.checkpoint import find_checkpoint, save_checkpoint
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.run import RunOptions
from moe_graphs.lm.sharded_checkpoint import ShardedCheckpoints, read_model, resume
from moe_graphs.lm.sharded_state import (
    history_state,
    model_state,
    optimizer_state,
    share,
)
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers, check_equal, layout_of
from moe_graphs.parallel import ParallelConfig

LAYOUTS = {
    "shard": ParallelConfig(dp_shard=2),
    "replicate": ParallelConfig(dp_replicate=2),
    "experts": ParallelConfig(dp_shard=2, ep=2),
}
STEPS, SAVED = 6, 3
CPU = torch.device("cpu")


def without_chance(**changes) -> RunOptions:
    """Ranks draw random numbers of their own, so what is compared draws none."""
    given = options(steps=STEPS, microbatches=2, **changes)
    moe = dataclasses.replace(given.preset.model.moe, input_jitter=0.0, aux_loss_coef=0.0)
    model = dataclasses.replace(given.preset.model, hidden_dropout=0.0, moe=moe)
    return dataclasses.replace(given, preset=dataclasses.replace(given.preset, model=model))


def held_out() -> HeldOut:
    return HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)


def trainer_on(workers: Workers | None, **changes) -> Trainer:
    experts = workers is not None and workers.layout.ep > 1
    dispatcher = "all_to_all" if experts else "local"
    trainer = fresh_trainer(without_chance(workers=workers, dispatcher=dispatcher, **changes))
    if workers is not None:
        trainer.run_id = workers.gather(trainer.run_id)[0]
    return trainer


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What checkpoints hold of model, optimizer and history, of all ranks."""
    state = {
        **model_state(trainer),
        **optimizer_state(trainer),
        **history_state(trainer, trainer.step),
    }
    shares = {key: share(value) for key, value in state.items()}
    found = {
        key: torch.full(value.shape, -7, dtype=value.dtype).contiguous()
        for key, value in state.items()
    }
    workers = trainer.workers
    for of_rank in [shares] if workers is None else workers.gather(shares):
        for key, (where, part) in of_rank.items():
            found[key][where] = part
    return found


def work(rank: int, world_size: int, folder: Path, one_process: Path) -> dict:
    """On each layout: trains, saves in the middle; then resumes what others have saved."""
    found: dict = {}
    all_workers = {name: Workers.on(layout, CPU) for name, layout in LAYOUTS.items()}
    for name, workers in all_workers.items():
        trainer = trainer_on(workers)
        checkpoints = ShardedCheckpoints(folder / name, trainer)
        advance(trainer, SAVED)
        path = checkpoints.save()
        assert path.name == "step_000003"
        advance(trainer, STEPS)  # while it is written
        checkpoints.finish()
        line = trainer.log_line()
        found[name] = {
            "losses": trainer.history.loss.clone(),
            "norms": trainer.history.grad_norm.clone(),
            "nats": trainer.nats_per_token(held_out()),
            "state": whole_state(trainer),
            "line": str(line),
        }
    sources = {**{name: folder / name for name in LAYOUTS}, "one process": one_process}
    for source, where in sources.items():
        for name, workers in all_workers.items():
            trainer = trainer_on(workers)
            said = resume(find_checkpoint(where), trainer)
            resumed = whole_state(trainer)
            advance(trainer, STEPS)
            trainer.settle()
            found[source, name] = resumed, trainer.history.loss.clone(), said
    found["damaged"] = damaged(folder / "shard", all_workers["shard"])
    return found


def damaged(where: Path, workers: Workers) -> list[str]:
    path, said = find_checkpoint(where), []
    untouched = whole_state(trainer_on(workers))
    for name in ("__1_0.distcp", "manifest.json", "settings.json", ".metadata"):
        for content in (None, b"12"):
            before = (path / name).read_bytes()
            workers.gather(None)
            if workers.rank == 0:
                (path / name).unlink()
                if content is not None:
                    (path / name).write_bytes(before[:-1] + content[:1])
            workers.gather(None)
            trainer = trainer_on(workers)
            with pytest.raises(ValueError) as error:
                resume(path, trainer)
            said.append(str(error.value))
            workers.gather(None)
            assert trainer.step == 0
            assert not trainer.optimizer.state
            now = whole_state(trainer)
            assert all(torch.equal(now[key], untouched[key]) for key in untouched)
            if workers.rank == 0:
                (path / name).write_bytes(before)
            workers.gather(None)
    with pytest.raises(ValueError, match="steps is 6 on rank 0 and 7 on rank 1: same, please"):
        check_equal({"steps": 6 + workers.rank, "ep": 1}, "same, please")
    return said
