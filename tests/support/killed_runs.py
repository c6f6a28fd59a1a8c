"""A run that is killed at random moments, again and again, and goes on from its last checkpoint.

    python tests/support/killed_runs.py FOLDER RANKS KILLS SEED

It writes the losses and the state of the killed run, and those of a run that was never stopped, to
``FOLDER/killed.pt`` and ``FOLDER/whole.pt``. Runs are forked, so that a start takes no time, and
save a checkpoint after every step.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from lm_runs import fresh_trainer, options, whole_state
from moe_graphs.lm.checkpoint import Checkpoints, load_checkpoint
from moe_graphs.lm.run_directory import find_checkpoint
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig

AHEAD = 6  # steps that a run takes until its kill, at most
_numbers = itertools.count()


def trainer_of(rank: int, ranks: int, store: Path, steps: int) -> Trainer:
    if ranks == 1:
        return fresh_trainer(options(steps=steps))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    workers = Workers.on(ParallelConfig(dp_shard=ranks, ep=ranks), torch.device("cpu"))
    trainer = fresh_trainer(options(steps=steps, workers=workers, dispatcher="all_to_all"))
    trainer.run_id = workers.gather(trainer.run_id)[0]
    return trainer


def train(trainer: Trainer, out: Path, *, to_the_end: bool) -> None:
    """Goes on from the last checkpoint, and waits for the kill if it is not to reach the end."""
    if last_step(out):
        assert load_checkpoint(find_checkpoint(out), trainer) == []
    checkpoints = Checkpoints(out, trainer)
    steps = trainer.settings.steps
    last = steps if to_the_end else min(trainer.step + AHEAD, steps)
    while trainer.step < last:
        trainer.train_step()
        checkpoints.save()
    checkpoints.finish()
    if not to_the_end:
        signal.pause()
    trainer.settle()
    found = {"loss": trainer.history.loss, "norm": trainer.history.grad_norm}
    found |= whole_state(trainer)
    if trainer.workers is None or trainer.workers.rank == 0:
        torch.save(found, out.with_suffix(".pt"))


def start(out: Path, ranks: int, steps: int, *, to_the_end: bool) -> list[int]:
    """Forks the ranks; returns their process ids."""
    store, found = out.with_name(f"store-{next(_numbers)}"), []
    for rank in range(ranks):
        child = os.fork()
        if child:
            found.append(child)
            continue
        try:
            train(trainer_of(rank, ranks, store, steps), out, to_the_end=to_the_end)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return found


def last_step(out: Path) -> int:
    names = [path.name for path in (out / "checkpoints").glob("step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def kill(out: Path, ranks: int, steps: int, chance: random.Random) -> None:
    """Starts a run and kills its ranks one after the other, at a random moment."""
    children, before = start(out, ranks, steps, to_the_end=False), last_step(out)
    until, late = before + chance.randrange(AHEAD), time.monotonic() + 300
    while last_step(out) < until:
        assert time.monotonic() < late, "the run makes no checkpoints"
        for child in children:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a rank has ended by itself"
        time.sleep(0.001)
    # Before its first checkpoint a run also builds and loads its model, which takes longer.
    time.sleep(chance.uniform(0, 0.04 if until > before else 0.4))
    for child in chance.sample(children, ranks):
        os.kill(child, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.02))
    for child in children:
        os.waitpid(child, 0)
    assert last_step(out) >= until, "a checkpoint is lost"


def main() -> None:
    folder, (ranks, kills, seed) = Path(sys.argv[1]), map(int, sys.argv[2:])
    steps, chance = kills * AHEAD + 4, random.Random(seed)
    for _ in range(kills):
        kill(folder / "killed", ranks, steps, chance)
    for name in ("killed", "whole"):
        for child in start(folder / name, ranks, steps, to_the_end=True):
            assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
