"""The command as users type it: what it prints where, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from moe_graphs.cli import build_app

SMALL = ["--preset", "tiny", "--device", "cpu", "--batch-size", "1"]
EAGER, WHOLE = ["--impl", "none"], ["--impl", "full_iteration", "--optimizer-in-graph"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(90):
        (folder / f"{number}.py").write_text(f"def f_{number}(x):\n    return x * {number}\n" * 3)
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["train", *map(str, arguments)])


def last_line(result: Result) -> dict:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_run_prints_its_lines_its_capture_and_its_result(text, tmp_path):
    result = invoke(*SMALL, "--data", text, "--steps", 6, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert "step:     6  loss: " in result.stdout
    assert "captured scopes" in result.stdout
    assert "layers.1" in result.stdout
    assert "bits per byte after 6 steps" in result.stdout
    assert "xz -9e" in result.stdout
    assert (tmp_path / "run" / "checkpoints" / "step_000006" / "model.safetensors").exists()
    assert (tmp_path / "run" / "train.png").exists()


def test_json_is_the_only_thing_on_stdout(text, tmp_path):
    result = invoke(*SMALL, "--data", text, "--steps", 5, "--out", tmp_path / "run", "--json")
    document = last_line(result)
    assert len(result.stdout.splitlines()) == 1
    assert document["steps"] == 5
    assert document["report"]["captured"] > 0
    assert document["dropped"] is None
    assert document["compressors"].keys() == {"zlib -9", "bz2 -9", "xz -9e"}
    assert "step:" in result.stderr


@pytest.mark.parametrize("dispatcher", ["local", "all_to_all"])
def test_compare_reports_both_sides(text, dispatcher):
    arguments = ["--steps", 8, "--dispatcher", dispatcher, "--compare", "--json"]
    result = invoke(*SMALL, "--data", text, *arguments)
    document = last_line(result)
    assert document["losses_bitwise_equal"] is True
    assert document["parameters_bitwise_equal"] is True
    for side in ("eager", "graphed"):
        assert document[side]["step_ms"] > 0
        assert document[side]["reserved_bytes"] > 0
        assert "resident" in document[side]["memory_kind"]
        assert len(document[side]["losses"]) == 8
    assert document["captured"] > 0
    assert document["replayed"] > 0
    assert document["eager_calls"]["warmup"] > 0
    assert "bitwise equal over 8 steps" in result.stderr


def test_whole_steps_are_compared_with_eager(text):
    result = invoke(*SMALL, "--data", text, "--steps", 7, "--compare", "--json", *WHOLE)
    document = last_line(result)
    assert document["losses_bitwise_equal"] is True
    assert document["grad_norms_bitwise_equal"] is True
    assert document["parameters_bitwise_equal"] is True
    assert (document["captured"], document["replayed"]) == (1, 4)
    assert document["report"]["state"] == "captured"
    assert document["report"]["eager_calls"] == {"warmup": 3}
    assert "full_iteration, with the optimizer" in result.stderr
    assert "captured step" in result.stderr


def test_dropped_tokens_are_in_the_line_and_in_the_document(text, tmp_path):
    arguments = ["--steps", 4, "--dispatcher", "padded", "--out", tmp_path / "run", "--json"]
    result = invoke(*SMALL, "--data", text, *arguments)
    document = last_line(result)
    assert document["dropped"] > 0
    assert f"dropped: {document['dropped']:,}" in result.stderr


@pytest.mark.parametrize(("before", "after"), [([], EAGER), (EAGER, WHOLE)])
def test_resume_goes_on_bit_by_bit(text, tmp_path, before, after):
    whole, again = tmp_path / "whole", tmp_path / "again"
    common = [*SMALL, "--data", text, "--steps", 8, "--microbatches", 1]
    assert invoke(*common, "--out", whole, "--checkpoint-every", 4, *before).exit_code == 0
    middle = whole / "checkpoints" / "step_000004"
    result = invoke(*common, "--out", again, "--resume", middle, *after)
    assert result.exit_code == 0, result.stderr
    models = [load_file(p / "checkpoints/step_000008/model.safetensors") for p in (whole, again)]
    assert models[0].keys() == models[1].keys()
    assert all((models[0][name] == models[1][name]).all() for name in models[0])
    summaries = [json.loads((p / "summary.json").read_text()) for p in (whole, again)]
    assert summaries[0]["held_out_bits_per_byte"] == summaries[1]["held_out_bits_per_byte"]


def test_a_new_run_gets_a_directory_of_its_own(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        common = ["--data", text, "--steps", 1, "--impl", "none", "--no-save"]
        assert invoke(*SMALL, *common).exit_code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["tiny", "tiny-2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "huge"], "'huge' is not one of tiny, small"),
        (["--scopes", "atn"], "did you mean 'attn'"),
        (["--impl", "none", "--scopes", "attn"], "impl='none' captures nothing"),
        (["--impl", "none", "--compare"], "nothing to compare with"),
        (["--impl", "transformer_engine"], "not available in this version"),
        (["--impl", "full_iteration", "--scopes", "attn"], "drop --scopes"),
        (["--optimizer-in-graph"], "use --impl full_iteration"),
        ([*WHOLE, "--dispatcher", "all_to_all"], "capture of the step failed"),
        (["--dispatcher", "alltoall"], "choose one of local, padded, all_to_all"),
        (["--microbatches", "3"], "does not divide"),
        (["--steps", "0"], "steps: 0 must be at least 1"),
        (["--resume", "nowhere"], "no checkpoint at nowhere"),
    ],
)
def test_bad_arguments_are_one_line_that_says_what_to_do(text, tmp_path, arguments, words):
    common = ["--preset", "tiny", "--device", "cpu", "--data", text, "--out", tmp_path / "run"]
    result = invoke(*common, *arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr


def test_the_command_runs_on_one_process(text, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke(*SMALL, "--data", text)
    assert result.exit_code == 1
    assert "without torchrun" in result.stderr
