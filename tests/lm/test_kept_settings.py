"""``--resume`` keeps the settings of its run that the command line does not give anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from moe_graphs.cli import build_app
from moe_graphs.lm.checkpoint import read_model
from moe_graphs.lm.kept_settings import Kept, keep, recorded
from moe_graphs.lm.options import TrainOptions
from moe_graphs.option_tree import flat, tree_of

OWN = ["--batch-size", 2, "--sequence-length", 32, "--learning-rate", 1e-2, "--warmup-steps", 1,
       "--optimizer", "muon", "--seed", 7, "--dtype", "bfloat16", "--dispatcher", "padded",
       "--microbatches", 2]  # fmt: skip


def train(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["train", *map(str, arguments)])


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for number in range(90):
        (folder / f"{number}.py").write_text(f"def f_{number}(x):\n    return x * {number}\n" * 3)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Path]:
    """The text and the run of six steps, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("run")
    text, out = write_text(folder / "text"), folder / "run"
    asked = ["--preset", "tiny", "--data", text, "--steps", 6, "--checkpoint-every", 3, *OWN]
    done = train(*asked, "--impl", "none", "--device", "cpu", "--out", out)
    assert done.exit_code == 0, done.stderr
    return text, out


def test_a_resumed_run_keeps_all_of_its_settings_and_goes_on_bitwise(run, tmp_path):
    text, out = run
    done = train("--resume", out / "checkpoints" / "step_000003", "--out", tmp_path / "again")
    assert done.exit_code == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("resume: ")]
    assert line.endswith("; changed: nothing")
    for words in ("--preset tiny", f"--data {text}", "--steps 6", "--seed 7", "--impl none",
                  "--optimizer muon", "--dtype bfloat16", "--dispatcher padded",
                  "--learning-rate 0.01", "--warmup-steps 1", "--checkpoint-every 3"):  # fmt: skip
        assert words in line, words
    summaries = [json.loads((p / "summary.json").read_text()) for p in (out, tmp_path / "again")]
    assert summaries[1]["differences"] == []
    for name in ("steps", "train_loss", "held_out_bits_per_byte"):
        assert summaries[0][name] == summaries[1][name]
    models = [
        read_model(path / "checkpoints" / "step_000006") for path in (out, tmp_path / "again")
    ]
    assert all((models[0][name] == models[1][name]).all() for name in models[0])


def test_the_file_that_a_run_leaves_repeats_it_bitwise(run, tmp_path):
    """A file counts as named: with ``--resume`` it replaces what the run would keep."""
    _, out = run
    done = train("--config", out / "config.toml", "--device", "cpu", "--out", tmp_path / "again")
    assert done.exit_code == 0, done.stderr
    paths = [folder / "checkpoints" / "step_000006" for folder in (out, tmp_path / "again")]
    models = [read_model(path) for path in paths]
    assert all((models[0][name] == models[1][name]).all() for name in models[0])
    assert (tmp_path / "again" / "config.toml").read_text() == (out / "config.toml").read_text()
    seed = tmp_path / "seed.toml"
    seed.write_text("[training]\nseed = 8\nsteps = 9\n")
    more = ["--resume", out, "--config", seed, "--steps", 7, "--out", tmp_path / "more"]
    done = train(*more)
    assert done.exit_code == 0, done.stderr
    assert "changed: --seed 8 (was 7), --steps 7 (was 6)\n" in done.stdout


def test_settings_that_are_given_anew_are_changed_and_said(run, tmp_path):
    done = train("--resume", run[1], "--steps", 7, "--seed", 8, "--out", tmp_path / "again")
    assert done.exit_code == 0, done.stderr
    assert "changed: --seed 8 (was 7), --steps 7 (was 6)\n" in done.stdout
    again = json.loads((tmp_path / "again" / "checkpoints/step_000007/settings.json").read_text())
    assert (again["steps"], again["seed"], again["batch_size"]) == (7, 8, 2)


def test_another_text_than_the_runs_is_refused_unless_it_is_asked_for(tmp_path):
    text, out = write_text(tmp_path / "text"), tmp_path / "run"
    common = ["--impl", "none", "--device", "cpu", *OWN, "--steps", 2]
    assert train("--data", text, *common, "--out", out).exit_code == 0
    (text / "1.py").write_text("def another(x):\n    return x - 1\n" * 9)
    refused = train("--resume", out, "--steps", 3, "--out", tmp_path / "refused")
    assert refused.exit_code == 1
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: --data: the run was trained on another text")
    assert "give --data by name" in error
    assert not (tmp_path / "refused").exists()
    asked = train("--resume", out, "--steps", 3, "--data", text, "--out", tmp_path / "asked")
    assert asked.exit_code == 0, asked.stderr
    assert "resumed with another setting: text: " in asked.stdout


def kept(folder: Path, then: list, ranks: int, now: list, ranks_now: int) -> Kept:
    """The options of a command that goes on with what another one has written."""
    values, _ = options_of(then)
    settings = {"run": "a", "options": recorded(tree_of(TrainOptions, values), ranks)}
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    values, given = options_of([*now, "--resume", folder])
    return keep(tree_of(TrainOptions, values), given, ranks_now)


def options_of(arguments: list) -> tuple[dict[str, Any], set[str]]:
    command: Any = typer.main.get_command(build_app()).commands["train"]
    context = command.make_context("train", [str(each) for each in arguments])
    sources = {name: context.get_parameter_source(name).name for name in context.params}
    given = {name for name, source in sources.items() if source == "COMMANDLINE"}
    return {name: value for name, value in context.params.items() if name != "config"}, given


def test_every_option_is_kept_or_is_of_one_start(tmp_path):
    then = ["--no-save", "--ema", 0.9, "--stochastic-rounding", "--no-deterministic", "--fp8",
            "block", "--init", tmp_path, "--tokenizer", tmp_path, "--scopes", "attn"]  # fmt: skip
    found = kept(tmp_path / "c", then, 1, ["--out", tmp_path / "out"], 1)
    wanted = {**options_of(then)[0], "out": tmp_path / "out", "resume": tmp_path / "c"}
    assert flat(found.options) == wanted
    for words in ("--no-save", "--ema 0.9", "--stochastic-rounding", "--no-deterministic"):
        assert words in found.said


def test_a_way_that_is_named_anew_replaces_the_runs_way(tmp_path):
    found = kept(tmp_path, ["--scopes", "attn"], 1, ["--impl", "none"], 1)
    assert (found.options.graphs.impl, found.options.graphs.scopes) == ("none", None)
    assert "changed: --impl none (was None), --scopes by default (was attn)" in found.said


def test_a_layout_is_kept_on_as_many_ranks_and_chosen_anew_on_others(tmp_path):
    then = ["--ep", 2, "--dispatcher", "all_gather", "--mixed-precision", "--impl", "none"]
    same = flat(kept(tmp_path, then, 2, [], 2).options)
    assert (same["ep"], same["dispatcher"], same["mixed_precision"]) == (2, "all_gather", True)
    other = kept(tmp_path, then, 2, [], 1)
    values = flat(other.options)
    assert (values["ep"], values["dispatcher"]) == (None, None)
    assert (values["mixed_precision"], values["impl"]) == (False, "none")
    assert "--ep by default (was 2)" in other.said
    assert "ranks 1 (was 2)" in other.said
    anew = flat(kept(tmp_path, then, 2, ["--tp", 2], 2).options)
    assert (anew["tp"], anew["ep"], anew["dispatcher"]) == (2, None, None)
