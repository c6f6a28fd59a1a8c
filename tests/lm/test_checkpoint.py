"""Checkpoints: whole, of one run, and those of others are never touched."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lm_runs import QUIET, SCOPES, advance, fresh_trainer, options, save_checkpoint, small_corpus
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.checkpoint import checkpoints_of, load_checkpoint
from moe_graphs.lm.data import Corpus
from moe_graphs.lm.run import build_batches, build_trainer, run, with_graphs
from moe_graphs.lm.run_directory import SETTINGS, find_checkpoint, open_log


def contents_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of one process, as anybody's program reads them."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {key: torch.empty(kept.size, dtype=kept.properties.dtype)
             for key, kept in metadata.items()}  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def test_graphs_leave_no_trace_in_a_checkpoint(tmp_path):
    contents = []
    for graphed in (False, True):
        trainer = fresh_trainer(options(graphed))
        with with_graphs(trainer, options(graphed).graph_config):
            advance(trainer, 6)
            contents.append(contents_of(save_checkpoint(tmp_path / str(graphed), trainer)))
    eager, graphed = contents
    assert eager.keys() == graphed.keys()
    assert {"model.embedding.weight", "optimizer.embedding.weight.exp_avg"} < eager.keys()
    assert all(torch.equal(value, graphed[name]) for name, value in eager.items())


@pytest.mark.parametrize("config", [GraphConfig(SCOPES), FullIterationConfig()])
def test_a_checkpoint_says_what_audits_have_found(config, tmp_path):
    trainer = fresh_trainer(options())
    advance(trainer, 2)  # steps before the graphs count, too
    with with_graphs(trainer, config):
        advance(trainer, 7)
        trainer.audit_soon()
        advance(trainer, 8)
        saved = save_checkpoint(tmp_path, trainer)
        report = trainer.report()
    found = json.loads((saved / SETTINGS).read_text())["audits"]
    assert found["last_audited_step"] == 8
    assert found["passed"] == found["audited"] == report.audited > 0
    assert found["seconds"] > 0
    assert found["skipped"] == {}
    again = fresh_trainer(options())
    assert load_checkpoint(saved, again) == []  # an eager run has no audits, which is no difference


def test_only_the_last_checkpoints_are_kept_and_the_latest_is_found(tmp_path):
    trainer = fresh_trainer(options())
    for step in (1, 2, 3):
        advance(trainer, step)
        save_checkpoint(tmp_path, trainer, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003"]
    assert find_checkpoint(tmp_path).name == "step_000003"
    assert find_checkpoint(tmp_path / "checkpoints" / "step_000002").name == "step_000002"
    with pytest.raises(ValueError, match="no checkpoint at"):
        find_checkpoint(tmp_path / "elsewhere")


def test_files_and_names_are_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    """A power failure after the rename leaves a whole checkpoint."""
    trainer, events = fresh_trainer(options()), []
    advance(trainer, 1)
    fsync, rename = os.fsync, Path.rename

    def noting_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noting_rename(path: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    path = save_checkpoint(tmp_path, trainer)
    partial, folder = path.with_name("partial"), path.parent
    *before, after = events  # DCP renames its table of contents, too
    assert before.pop() == "renamed"
    names = [each for each in before if each != "renamed"]
    assert {partial, *(partial / file.name for file in path.iterdir())} <= set(names)
    assert after == folder


def test_a_run_that_fails_leaves_the_checkpoint_that_was_begun(tmp_path):
    trainer = fresh_trainer(options())
    advance(trainer, 2)
    with pytest.raises(RuntimeError, match="on purpose"):
        with checkpoints_of(tmp_path, trainer) as save:
            path = save()
            raise RuntimeError("on purpose")
    assert find_checkpoint(tmp_path) == path
    assert load_checkpoint(path, fresh_trainer(options())) == []


def test_resuming_with_another_setting_says_so_and_with_another_model_fails(tmp_path):
    trainer = fresh_trainer(options())
    advance(trainer, 2)
    path = save_checkpoint(tmp_path, trainer)
    longer = fresh_trainer(options(steps=12))
    assert load_checkpoint(path, longer) == ["steps: 8 in the checkpoint, 12 now"]
    given = options()
    wider = dataclasses.replace(given.preset.model, hidden_size=32)
    other = dataclasses.replace(given, preset=dataclasses.replace(given.preset, model=wider))
    with pytest.raises(ValueError, match="holds another model"):
        load_checkpoint(path, fresh_trainer(other))
    with pytest.raises(ValueError, match="beyond the 1 steps"):
        load_checkpoint(path, fresh_trainer(options(steps=1)))


def other_run(directory: Path) -> Path:
    """A checkpoint of a run of its own."""
    trainer = fresh_trainer(options())
    advance(trainer, 6)
    return save_checkpoint(directory, trainer)


def files(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_checkpoints_of_another_run_are_never_deleted(tmp_path):
    """Lower steps of a new run were deleted at once, and resuming took the older run."""
    other_run(tmp_path)
    before = files(tmp_path)
    new = fresh_trainer(options(steps=9))
    for step in (2, 6, 8):
        advance(new, step)
        with pytest.raises(ValueError, match="step_000006 is of another run: save in another"):
            save_checkpoint(tmp_path, new)
    assert files(tmp_path) == before


@pytest.mark.parametrize("save", [True, False])
def test_a_new_run_is_refused_where_another_run_lies(tmp_path, save):
    given = options(out=tmp_path / "run", save=save)
    run(given, small_corpus(), QUIET)
    before = files(given.out)
    found = "checkpoints/step_000008" if save else "log.jsonl"
    for more in ({}, {"resume": other_run(tmp_path / "other")}):
        with pytest.raises(ValueError, match=rf"out: .* holds another run \({found}\): give"):
            run(dataclasses.replace(given, **more), small_corpus(), QUIET)
    assert files(given.out) == before


def test_two_runs_that_found_a_directory_empty_do_not_share_it(tmp_path):
    given = options(out=tmp_path, steps=2)
    with open_log(tmp_path):
        with pytest.raises(ValueError, match="another run writes to .* at this moment"):
            run(given, small_corpus(), QUIET)
    assert files(tmp_path) == {"log.jsonl": b""}
    run(given, small_corpus(), QUIET)  # a run that ended before its first line left nothing


def test_a_run_goes_on_in_its_own_directory_from_its_latest_checkpoint_only(tmp_path):
    given = options(out=tmp_path, checkpoint_every=2, steps=6)
    run(given, small_corpus(), QUIET)
    folder = tmp_path / "checkpoints"
    (folder / "step_000004-kept").mkdir()
    before = files(tmp_path)
    with pytest.raises(ValueError, match="holds step_000006, later than the step_000004 to go on"):
        resume = dataclasses.replace(given, resume=folder / "step_000004")
        run(resume, small_corpus(), QUIET)
    assert files(tmp_path) == before
    longer = options(out=tmp_path, checkpoint_every=2, steps=12, resume=find_checkpoint(tmp_path))
    summary = run(longer, small_corpus(), QUIET)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step_000004-kept", "step_000010", "step_000012"]
    assert summary.differences == ("steps: 6 in the checkpoint, 12 now",)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (resumed,) = [record for record in records if "resumed_from" in record]
    assert resumed["step"] == 6
    assert resumed["differences"] == list(summary.differences)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["resumed_from"].endswith("step_000006")
    assert written["differences"] == list(summary.differences)


def test_a_directory_that_is_nobodys_is_no_reason_to_stop(tmp_path):
    other_run(tmp_path)
    broken = tmp_path / "checkpoints" / "step_000004"
    broken.mkdir()
    trainer = fresh_trainer(options(steps=9))
    load_checkpoint(find_checkpoint(tmp_path), trainer)
    for step in (7, 8):
        advance(trainer, step)
        save_checkpoint(tmp_path, trainer)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000004", "step_000007", "step_000008"]


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(tmp_path):
    path = tmp_path / "checkpoints" / "step_000004"
    path.mkdir(parents=True)
    for part in ("model.safetensors", "training.pt", "settings.json"):
        (path / part).touch()
    for where in (tmp_path, path):
        with pytest.raises(ValueError, match=r"^resume: .*step_000004 has the format .*\(training"):
            find_checkpoint(where)


def test_a_directory_of_somebody_else_is_refused(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"weight": torch.zeros(3)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    path = find_checkpoint(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"^resume: .*theirs/manifest.json is missing"):
        load_checkpoint(path, fresh_trainer(options()))


def test_resuming_does_not_choose_between_runs(tmp_path):
    path = other_run(tmp_path)
    later = tmp_path / "checkpoints" / "step_000007"
    shutil.copytree(other_run(tmp_path / "other"), later)
    with pytest.raises(ValueError, match="several runs: give one of step_000006, step_000007"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(path) == path
    (later / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"step_000007/settings.json is missing"):
        load_checkpoint(find_checkpoint(tmp_path), fresh_trainer(options()))


def other_corpus() -> Corpus:
    corpus = small_corpus()
    return dataclasses.replace(corpus, train=(*corpus.train, b"one more\n"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dispatcher": "padded"}, "dispatcher: local in the checkpoint, padded now"),
        ({"corpus": other_corpus()}, r"text: 60 documents, sha256 \w+ in .*, 61 documents, sha256"),
        ({"hidden_dropout": 0.0}, "model.hidden_dropout: 0.1 in the checkpoint, 0.0 now"),
        ({"top_k": 1}, "model.moe.top_k: 2 in the checkpoint, 1 now"),
    ],
)
def test_resuming_with_other_text_dispatcher_or_model_says_so(tmp_path, change, line):
    path = other_run(tmp_path)
    given, corpus = options(), change.pop("corpus", small_corpus())
    model = given.preset.model
    if "hidden_dropout" in change:
        model = dataclasses.replace(model, **change)
    if "top_k" in change:
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, **change))
    preset = dataclasses.replace(given.preset, model=model)
    dispatcher = change.get("dispatcher", "local")
    given = dataclasses.replace(given, preset=preset, dispatcher=dispatcher)
    trainer = build_trainer(given, build_batches(given, corpus))
    (difference,) = load_checkpoint(path, trainer)
    assert re.match(line, difference)


PARTS = ["__0_0.distcp", ".metadata", "settings.json", "manifest.json"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "something else"])
def test_a_checkpoint_that_is_not_whole_is_named_and_changes_nothing(tmp_path, part, damage):
    path = other_run(tmp_path)
    content = (path / part).read_bytes()
    if damage == "missing":
        (path / part).unlink()
    else:
        kept = {"truncated": content[:-200], "empty": b"", "something else": b"[1, 2]"}[damage]
        (path / part).write_bytes(kept)
    assert find_checkpoint(path) == path
    trainer, untouched = fresh_trainer(options()), fresh_trainer(options())
    words = rf"resume: .*step_000006/{re.escape(part)} (is missing|is damaged|cannot be read)"
    with pytest.raises(ValueError, match=words):
        load_checkpoint(path, trainer)
    assert trainer.step == 0
    states = trainer.model.state_dict(), untouched.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not trainer.optimizer.state


def test_a_disk_that_is_full_leaves_the_checkpoints_before(tmp_path):
    """A file that may not grow fails like one on a full disk."""
    path = other_run(tmp_path)
    trainer = fresh_trainer(options(steps=9))
    load_checkpoint(path, trainer)
    advance(trainer, 8)
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="step_000008 could not be written"):
            save_checkpoint(tmp_path, trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == before
