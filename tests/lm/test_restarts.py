"""Workers that torchrun has started again: where they go on, and who they are."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch.distributed as dist

from lm_runs import advance, fresh_trainer, options, save_checkpoint
from moe_graphs.lm.fresh_store import fresh_store
from moe_graphs.lm.restarts import directories, mark_launch

PATIENCE = datetime.timedelta(seconds=20)


@pytest.fixture
def restartable(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")


def test_workers_go_on_from_what_their_own_launch_has_saved(tmp_path, restartable):
    out, agents = tmp_path / "run", ["launch one, host a", "launch one, host b"]
    out.mkdir()
    assert directories(out, None, "tiny", agents) == (out, None)
    mark_launch(out, agents)
    (out / "log.jsonl").write_text("a step without a checkpoint\n")
    # Ranks may have changed hosts, and a host may be gone.
    assert directories(out, None, "tiny", agents[1:]) == (out, None)
    assert not (out / "log.jsonl").exists()
    trainer = fresh_trainer(options())
    for step in (1, 2):
        advance(trainer, step)
        save_checkpoint(out, trainer)
    latest = out / "checkpoints" / "step_000002"
    assert directories(out, None, "tiny", agents[1:]) == (out, latest)
    # To another launch it is another run, which only --resume names.
    assert directories(out, None, "tiny", ["launch two, host a"]) == (out, None)


def test_without_restarts_nothing_is_noted_and_nothing_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    mark_launch(tmp_path, ["a"])
    assert list(tmp_path.iterdir()) == []
    assert directories(tmp_path, None, "tiny", ["a"]) == (tmp_path, None)


def test_restarts_need_a_directory(restartable):
    with pytest.raises(ValueError, match=r"out: torchrun may start the workers anew \(--max-rest"):
        directories(None, None, "tiny", ["a"])


def test_a_store_with_the_keys_of_processes_that_are_gone():
    """A second start finds the keys of the first start, to which rank 2 had not come."""
    store = dist.HashStore()
    store.set("ask 1", "a process that is gone")
    prefixes = []
    for value in ("first", "second"):
        found = start(store, 3)
        assert not any(each.check(["key"]) for each in found)
        found[0].set("key", value)
        assert [each.get("key") for each in found] == [value.encode()] * 3
        prefixes.append(found)
    assert prefixes[0][2].get("key") == b"first"


def start(store: dist.Store, size: int) -> list[dist.Store]:
    found: list = [None] * size

    def come(rank: int) -> None:
        found[rank] = fresh_store(store, rank, size, PATIENCE)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come in time"):
        fresh_store(dist.HashStore(), 0, 3, datetime.timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match="rank 0 did not come in time"):
        fresh_store(dist.HashStore(), 1, 3, datetime.timedelta(seconds=0.1))
