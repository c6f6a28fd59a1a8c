"""Runs on several ranks: the batch of one process, and checkpoints for any layout.

Everything that needs ranks is in one spawn; the test functions look at what came back. RANKS=4 has
experts that FSDP2 shards further.
"""

from __future__ import annotations

import dataclasses
import re
import resource
from pathlib import Path

import pytest
import torch

from distributed import RANKS, run_distributed
from lm_runs import (
    QUIET,
    advance,
    fresh_trainer,
    options,
    save_checkpoint,
    small_corpus,
    whole_state,
)
from moe_graphs.config import FullIterationConfig
from moe_graphs.lm.checkpoint import Checkpoints, load_checkpoint, model_of, read_model
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import RunOptions, run, with_graphs
from moe_graphs.lm.run_directory import find_checkpoint
from moe_graphs.lm.sample import sample_text
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers, check_equal, layout_of
from moe_graphs.parallel import ParallelConfig

LAYOUTS = {
    "shard": ParallelConfig(dp_shard=RANKS),
    "replicate": ParallelConfig(dp_replicate=RANKS),
    "experts": ParallelConfig(dp_shard=RANKS, ep=RANKS),
    "context": ParallelConfig(dp_shard=RANKS // 2, cp=2),
    "tensors": ParallelConfig(dp_shard=RANKS // 2, tp=2),
}
if RANKS == 4:
    LAYOUTS |= {
        "experts twice": ParallelConfig(dp_shard=4, ep=2),
        "experts replicated": ParallelConfig(dp_replicate=2, dp_shard=2, ep=2),
    }
STEPS, SAVED = 6, 3
CPU = torch.device("cpu")


def all_described() -> dict[str, str]:
    """The layouts as logs and checkpoints say them."""
    found = {
        "shard": f"dp_shard {RANKS}",
        "replicate": f"dp_replicate {RANKS}",
        "experts": f"dp_shard {RANKS}, ep {RANKS}",
        "context": "cp 2" if RANKS == 2 else f"dp_shard {RANKS // 2}, cp 2",
        "tensors": "tp 2" if RANKS == 2 else f"dp_shard {RANKS // 2}, tp 2",
        "experts twice": "dp_shard 4, ep 2",
        "experts replicated": "dp_replicate 2, dp_shard 2, ep 2",
    }
    return {name: f"{degrees} on {RANKS} ranks" for name, degrees in found.items()}


def without_chance(**changes) -> RunOptions:
    """Options without random numbers: ranks draw their own, so compared runs must draw none."""
    given = options(steps=STEPS, microbatches=2, **changes)
    moe = dataclasses.replace(given.preset.model.moe, input_jitter=0.0, aux_loss_coef=0.0)
    model = dataclasses.replace(given.preset.model, hidden_dropout=0.0, moe=moe)
    training = dataclasses.replace(given.preset.training, batch_size=8)
    preset = dataclasses.replace(given.preset, model=model, training=training)
    return dataclasses.replace(given, preset=preset)


def held_out() -> HeldOut:
    return HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)


def trainer_on(workers: Workers | None, **changes) -> Trainer:
    experts = workers is not None and workers.layout.ep > 1
    dispatcher = "all_to_all" if experts else "local"
    trainer = fresh_trainer(without_chance(workers=workers, dispatcher=dispatcher, **changes))
    if workers is not None:
        trainer.run_id = workers.gather(trainer.run_id)[0]
    return trainer


def work(rank: int, world_size: int, folder: Path, one_process: Path) -> None:
    """Trains on each layout and saves in the middle, then resumes what others have saved."""
    found: dict = {}
    all_workers = {name: Workers.on(layout, CPU) for name, layout in LAYOUTS.items()}
    for name, workers in all_workers.items():
        trainer = trainer_on(workers)
        checkpoints = Checkpoints(folder / name, trainer)
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
            said = load_checkpoint(find_checkpoint(where), trainer)
            resumed = whole_state(trainer)
            advance(trainer, STEPS)
            trainer.settle()
            found[source, name] = resumed, trainer.history.loss.clone(), said
    graphs = FullIterationConfig(optimizer_in_graph=True)
    found["evaluated"] = [evaluated(all_workers["shard"], each) for each in (None, graphs)]
    found["by chance"] = by_chance(folder / "chance", all_workers["shard"])
    found["run"] = run_on_parts(folder / "run", all_workers["context"])
    found["disk full"] = disk_full(folder / "shard", all_workers["shard"])
    found["damaged"] = damaged(folder / "shard", all_workers["shard"])
    torch.save(found, folder / f"{rank}.pt")  # tensors do not outlive their process in a pipe


def by_chance(folder: Path, workers: Workers) -> list[torch.Tensor]:
    """Losses of a run with dropout and jitter on this rank, and of one resumed from it."""
    given = options(steps=STEPS, workers=workers)
    whole, again = fresh_trainer(given), fresh_trainer(given)
    whole.run_id = workers.gather(whole.run_id)[0]
    checkpoints = Checkpoints(folder, whole)
    advance(whole, SAVED)
    checkpoints.save()
    advance(whole, STEPS)
    checkpoints.finish()
    torch.rand(7)
    load_checkpoint(find_checkpoint(folder), again)
    advance(again, STEPS)
    return [whole.history.loss[SAVED:].clone(), again.history.loss[SAVED:].clone()]


def evaluated(workers: Workers, config: FullIterationConfig | None) -> list[float]:
    """Held-out losses between steps: graphed steps run no Python of FSDP2."""
    trainer, nats = trainer_on(workers), []
    with with_graphs(trainer, config):
        for step in (1, 4, 5, STEPS):
            advance(trainer, step)
            nats.append(trainer.nats_per_token(held_out()))
    return nats


def run_on_parts(out: Path, workers: Workers) -> list:
    """A whole run: its held-out loss and samples, and those of one process with its weights.

    It also checks the errors for batches that the ranks cannot share.
    """
    given = without_chance(workers=workers, out=out)
    summary, said = run(given, small_corpus(), QUIET), []
    for length, heads in ((31, 2), (32, 1)):
        preset = given.preset
        training = dataclasses.replace(preset.training, sequence_length=length)
        model = dataclasses.replace(preset.model, num_heads=heads)
        other = dataclasses.replace(preset, training=training, model=model)
        with pytest.raises(ValueError, match="cp: 2 ranks cannot share") as error:
            check_options(dataclasses.replace(given, preset=other))
        said.append(str(error.value))
    alone = trainer_on(None)
    alone.model = model_of(find_checkpoint(out), given.preset.model, None)
    length, seed = given.preset.model.max_sequence_length, alone.settings.seed
    samples = sample_text(alone.model, small_corpus(), length=length, seed=seed)
    nats = alone.nats_per_token(held_out())
    return [summary.held_out_nats_per_token, nats, str(summary.samples), str(samples), said]


def disk_full(folder: Path, workers: Workers) -> str:
    """A file that may not grow, on one rank, fails like one on a full disk."""
    trainer = trainer_on(workers)
    load_checkpoint(find_checkpoint(folder), trainer)
    advance(trainer, SAVED + 1)
    checkpoints = Checkpoints(folder, trainer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if workers.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    checkpoints.save()
    with pytest.raises(OSError, match="step_000004 could not be written") as error:
        checkpoints.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    workers.gather(None)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000003"]
    return str(error.value)


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
            with pytest.raises(ValueError, match="resume: ") as error:
                load_checkpoint(path, trainer)
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


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> tuple[Path, Trainer, dict[str, torch.Tensor]]:
    """A run, its checkpoint in the middle, and its state there."""
    folder = tmp_path_factory.mktemp("one")
    trainer = trainer_on(None)
    advance(trainer, SAVED)
    save_checkpoint(folder, trainer)
    saved = {key: value.clone() for key, value in whole_state(trainer).items()}
    advance(trainer, STEPS)
    return folder, trainer, saved


@pytest.fixture(scope="module")
def several(one_process, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("several")
    given = (folder, one_process[0])
    run_distributed(work, RANKS, arguments=given, timeout_seconds=60.0 * RANKS)
    first, *others = (torch.load(folder / f"{rank}.pt") for rank in range(RANKS))
    for other in others:  # ranks agree to the bit
        for name in LAYOUTS:
            assert torch.equal(first[name]["losses"], other[name]["losses"])
            assert torch.equal(first[name]["norms"], other[name]["norms"])
            assert first[name]["nats"] == other[name]["nats"]
    return folder, first


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_ranks_train_as_one_process_does(one_process, several, layout):
    _, one, _ = one_process
    found = several[1][layout]
    torch.testing.assert_close(found["losses"], one.history.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["norms"], one.history.grad_norm, rtol=1e-4, atol=1e-5)
    assert found["nats"] == pytest.approx(one.nats_per_token(held_out()), rel=1e-5)
    now = whole_state(one)
    assert found["state"].keys() == now.keys()
    for key, value in now.items():
        torch.testing.assert_close(found["state"][key], value, rtol=1e-3, atol=2e-4, msg=key)
    assert re.search(r"tps: [\d,]+ .* tps_per_rank: [\d,]+$", found["line"])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", [*LAYOUTS, "one process"])
def test_a_checkpoint_is_resumed_on_any_layout(one_process, several, source, layout):
    resumed, losses, said = several[1][source, layout]
    wanted = one_process[2] if source == "one process" else several[1][source, source][0]
    assert all(torch.equal(value, wanted[key]) for key, value in resumed.items())
    torch.testing.assert_close(losses, one_process[1].history.loss, rtol=1e-5, atol=1e-5)
    if source == layout:
        assert said == []
        assert torch.equal(losses, several[1][layout]["losses"])
    elif source == "one process":
        found = all_described()[layout]
        assert f"layout: nothing known in the checkpoint, {found} now" in said
        assert f"random numbers: of 1 ranks in the checkpoint, drawn anew for {RANKS} now" in said


@pytest.mark.long
@pytest.mark.parametrize("source", LAYOUTS)
def test_one_process_goes_on_from_a_checkpoint_of_several(one_process, several, source):
    path = find_checkpoint(several[0] / source)
    trainer = trainer_on(None)
    said = load_checkpoint(path, trainer)
    assert f"random numbers: of {RANKS} ranks in the checkpoint, drawn anew for 1 now" in said
    wanted = several[1][source, source][0]
    now = whole_state(trainer)
    assert all(torch.equal(value, wanted[key]) for key, value in now.items())
    advance(trainer, STEPS)
    torch.testing.assert_close(
        trainer.history.loss, one_process[1].history.loss, rtol=1e-5, atol=1e-5
    )
    rebuilt = model_of(path, trainer.model.config, None)
    tokens = torch.arange(64).view(2, 32)
    fresh = trainer_on(None)
    load_checkpoint(path, fresh)
    with torch.no_grad():
        logits = [each.eval()(tokens).logits_BSV for each in (rebuilt, fresh.model)]
    assert torch.equal(*logits)
    model = read_model(path)
    assert model.keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(model[name], wanted[f"model.{name}"]) for name in model)


@pytest.mark.long
def test_evaluation_between_replays_is_that_between_eager_steps(several):
    eager, graphed = several[1]["evaluated"]
    assert graphed == eager
    assert len(set(eager)) == len(eager)


@pytest.mark.long
def test_a_run_on_parts_of_sequences_samples_and_evaluates_whole_ones(several):
    nats, alone, samples, samples_alone, said = several[1]["run"]
    assert nats == pytest.approx(alone, rel=1e-5)
    assert samples == samples_alone
    assert "sequences of 31 tokens and 2 heads equally" in said[0]
    assert "sequences of 32 tokens and 1 heads equally" in said[1]


@pytest.mark.long
def test_random_numbers_of_every_rank_go_on(several):
    of_ranks = [torch.load(several[0] / f"{rank}.pt")["by chance"] for rank in range(RANKS)]
    for whole, again in of_ranks:
        assert torch.equal(whole, again)
    assert not torch.equal(of_ranks[0][0], of_ranks[1][0])


@pytest.mark.long
def test_a_disk_that_is_full_on_one_rank_is_said_on_all(several):
    assert re.search(
        "step_000004 could not be written: (is the disk full|File too)", several[1]["disk full"]
    )
    assert "Traceback" not in several[1]["disk full"]


@pytest.mark.long
def test_missing_and_damaged_shards_are_refused_before_anything_is_loaded(several):
    names = ["__1_0.distcp", "manifest.json", "settings.json", ".metadata"]
    for name, said in zip(names, zip(*[iter(several[1]["damaged"])] * 2, strict=True), strict=True):
        missing, changed = said
        assert re.match(rf"resume: .*step_000003/{re.escape(name)} is missing", missing)
        assert re.match(rf"resume: .*{re.escape(name)} (is damaged|cannot be read)", changed)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"dp_shard": 2}, r"dp_shard \(2\) = 2, and there are 4 ranks"),
        ({"dp_replicate": 3}, r"dp_replicate \(3\) \* dp_shard \(1\) = 3, and there are 4 ranks"),
        ({"dp_replicate": 4, "dp_shard": 4}, r"= 16, and there are 4 ranks"),
        ({"ep": 3}, r"ep \(3\) must divide dp_shard \(4\)"),
        ({"dp_shard": 0}, r"= 0, and there are 4 ranks"),
    ],
)
def test_degrees_that_are_not_the_ranks_are_refused(degrees, words):
    with pytest.raises(ValueError, match=words):
        layout_of(4, **degrees)


def test_what_is_left_of_the_ranks_is_sharded():
    assert layout_of(4, dp_replicate=2, ep=2) == ParallelConfig(dp_replicate=2, dp_shard=2, ep=2)
    assert layout_of(1) == ParallelConfig()
    grouped = layout_of(4, layers_per_group=3)
    assert grouped == ParallelConfig(dp_shard=4, layers_per_group=3)
    assert layout_of(4, dp_shard=4, layers_per_group=3) == grouped
