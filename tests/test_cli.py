"""The command as users type it: what it prints where, and how it ends."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from moe_graphs import __version__
from moe_graphs.cli import build_app
from moe_graphs.lm.checkpoint import read_model
from moe_graphs.terminal import print_json

SMALL = ["--preset", "tiny", "--device", "cpu", "--batch-size", "1"]
EAGER, WHOLE = ["--impl", "none"], ["--impl", "full_iteration", "--optimizer-in-graph"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["train", *map(str, arguments)])


def last_line(result: Result) -> dict:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.usefixtures("drawn")
def test_a_run_prints_its_lines_its_capture_and_its_result(text, tmp_path):
    result = invoke(*SMALL, "--data", text, "--steps", 6, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert "step:     6  loss: " in result.stdout
    assert "graphs: full_iteration, with the optimizer (the fastest way)" in result.stdout
    assert "warm-up: --warmup-steps 0, a tenth of --steps 6, in place of the" in result.stdout
    assert "captured step" in result.stdout
    assert "bits per byte after 6 steps" in result.stdout
    assert "xz -9e" in result.stdout
    assert (tmp_path / "run" / "checkpoints" / "step_000006" / "manifest.json").exists()
    assert (tmp_path / "run" / "train.png").exists()


def test_json_is_the_only_thing_on_stdout(text, tmp_path):
    result = invoke(*SMALL, "--data", text, "--steps", 5, "--out", tmp_path / "run", "--json")
    document = last_line(result)
    assert len(result.stdout.splitlines()) == 1
    assert document["steps"] == 5
    assert document["report"]["state"] == "captured"
    assert document["report"]["replayed"] + document["report"]["audited"] == 2
    assert document["dropped"] is None
    assert document["compressors"].keys() == {"zlib -9", "bz2 -9", "xz -9e"}
    assert "step:" in result.stderr


@pytest.mark.parametrize("dispatcher", ["local", "all_to_all", "all_gather"])
@pytest.mark.long
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
    assert (document["captured"], document["replayed"] + document["audited"]) == (1, 4)
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


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*each, marks=pytest.mark.long) for each in (([], EAGER), (EAGER, WHOLE))],
)
def test_resume_goes_on_bit_by_bit(text, tmp_path, before, after):
    whole, again = tmp_path / "whole", tmp_path / "again"
    common = [*SMALL, "--data", text, "--steps", 8, "--microbatches", 1]
    assert invoke(*common, "--out", whole, "--checkpoint-every", 4, *before).exit_code == 0
    middle = whole / "checkpoints" / "step_000004"
    result = invoke(*common, "--out", again, "--resume", middle, *after)
    assert result.exit_code == 0, result.stderr
    models = [read_model(p / "checkpoints/step_000008") for p in (whole, again)]
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
        (["--preset", "huge"], "preset: 'huge' is unknown: choose one of tiny, small"),
        (["--scopes", "atn"], "did you mean 'attn'"),
        (
            ["--impl", "none", "--scopes", "attn"],
            "--scopes: 'attn' with --impl none, which captures nothing",
        ),
        (["--impl", "none", "--compare"], "nothing to compare with"),
        (["--impl", "inductor"], "accepted are none, local, transformer_engine, full_iter"),
        (["--impl", "full_iteration", "--scopes", "attn"], "drop --scopes"),
        (["--impl", "local", "--optimizer-in-graph"], "use --impl full_iteration"),
        (["--scopes", "attn", "--optimizer-in-graph"], "--scopes makes no graph of a step"),
        ([*WHOLE, "--dispatcher", "all_to_all"], "reads sizes on the host: use --dispatcher loc"),
        (["--warmup-steps", "9", "--steps", "9"], "--warmup-steps 9 leaves none of --steps 9"),
        (["--dispatcher", "alltoall"], "is unknown: choose one of local"),
        (["--microbatches", "3"], "does not divide"),
        (["--label-smoothing", "1"], "--label-smoothing: 1.0 must be in [0, 1)"),
        (["--z-loss", "-1"], "--z-loss: -1.0 must be at least 0"),
        (["--stages-per-rank", "0"], "--stages-per-rank: 0 must be at least 1"),
        (["--nproc", "1", "--no-fsdp"], "--no-fsdp: one process has whole weights anyway"),
        (["--steps", "0"], "steps: 0 must be at least 1"),
        (["--resume", "nowhere"], "no checkpoint at nowhere"),
        (["--device", "tpu"], "device: 'tpu' is none of cpu, cuda, and cuda:0"),
        (["--device", "cpu:1"], "device: 'cpu:1' is none of"),
        (["--device", "cuda:x"], "device: 'cuda:x' is none of"),
        (["--device", ""], "device: '' is none of"),
        (["--preset", ""], "preset: '' is unknown: choose one of tiny, small"),
        (["--scopes", ""], "--scopes: '' names none: name scopes"),
        (["--seed", 2**64], "seed: 18446744073709551616 must be from -2**63 to 2**64 - 1"),
        (["--seed", -(10**30)], "seed: -1000000"),
        (["--ep", "2"], "ep (2) must divide dp_shard (1)"),
        (["--dp-shard", "2"], "dp_shard (2) = 2, and there is 1 rank"),
        (["--nproc", "2", "--dp-shard", "4"], "dp_shard (4) = 4, and there are 2 ranks"),
        (["--nproc", "0"], "nproc: 0 must be at least 1"),
        (["--timeout", "0"], "timeout: 0.0 seconds must be above 0"),
        (["--checkpoint-every", "-1"], "--checkpoint-every: -1 must not be negative"),
        (["--learning-rate", "nan"], "--learning-rate: nan must be at least 0 and finite"),
        (["--learning-rate", "inf"], "--learning-rate: inf must be"),
        (["--steps", 10**15], "out of memory: "),
        (["--data", "nowhere"], "data: nothing at nowhere"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
)
def test_bad_arguments_are_one_line_that_says_what_to_do(text, tmp_path, arguments, words):
    common = ["--preset", "tiny", "--device", "cpu", "--data", text, "--out", tmp_path / "run"]
    result = invoke(*common, *arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr


def test_an_error_names_all_options_that_do_not_fit(text, tmp_path):
    wrong = ["--impl", "none", "--scopes", "attn", "--optimizer-in-graph", "--mixed-precision"]
    wrong += ["--schedule", "gpipe"]
    result = invoke(*SMALL, "--data", text, "--out", tmp_path / "run", *wrong)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: 4 things do not fit: --scopes: 'attn'")
    for name in ("; --optimizer-in-graph: ", "; --schedule, --stages-per-rank: ", "; --mixed-prec"):
        assert name in line


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    common = ["--data", text, "--steps", 4, "--checkpoint-every", 2, *EAGER]
    assert invoke(*SMALL, *common, "--out", out).exit_code == 0
    return out


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_run_is_refused_where_another_run_lies(text, finished):
    """B1: its checkpoints had lower steps, were deleted at once, and --resume took the others."""
    before = contents(finished)
    common = [*SMALL, *EAGER, "--data", text, "--seed", 5, "--steps", 2, "--out", finished]
    result = invoke(*common, "--checkpoint-every", 1)
    assert result.exit_code == 1
    assert "holds another run (checkpoints/step_000004): give another --out" in result.stderr
    assert contents(finished) == before


@pytest.mark.parametrize("below", ["", "further/down"])
def test_an_out_that_is_a_file_is_a_line(text, tmp_path, below):
    (tmp_path / "file").touch()
    common = [*SMALL, *EAGER, "--data", text, "--json", "--steps", 2]
    result = invoke(*common, "--out", tmp_path / "file" / below)
    assert "cannot be made a directory" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert result.exit_code == 1


@pytest.mark.parametrize("part", ["__0_0.distcp", "manifest.json", "settings.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_checkpoint_that_is_not_whole_is_a_line(text, finished, tmp_path, part, damage):
    broken = shutil.copytree(finished, tmp_path / "broken")
    path = broken / "checkpoints" / "step_000004" / part
    path.write_bytes(path.read_bytes()[:100]) if damage == "truncated" else path.unlink()
    common = [*SMALL, *EAGER, "--data", text, "--json", "--out", tmp_path / "out", "--steps", 9]
    result = invoke(*common, "--resume", broken)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: --resume: {path} ")
    assert "take another checkpoint" in line
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_resuming_with_other_text_and_another_dispatcher_says_so(finished, tmp_path):
    other = tmp_path / "text"
    other.mkdir()
    for number in range(200):
        (other / f"{number}.txt").write_text(f"{number} other words in another file\n" * 9)
    changes = ["--data", other, "--dispatcher", "padded", "--steps", 5]
    common = [*SMALL, *EAGER, "--resume", finished, "--out", tmp_path / "out", "--json"]
    result = invoke(*common, *changes)
    document = last_line(result)
    assert document["resumed_from"].endswith("step_000004")
    assert [line.partition(":")[0] for line in document["differences"]] == [
        "steps",
        "text",
        "dispatcher",
    ]
    for line in document["differences"]:
        assert f"resumed with another setting: {line}" in result.stderr
    first, *_ = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert json.loads(first)["differences"] == document["differences"]


def test_a_comparison_resumes_nothing(text, finished):
    result = invoke(*SMALL, "--data", text, "--compare", "--resume", finished, "--json")
    assert "a comparison trains both from the seed" in result.stderr


def test_help_imports_no_torch():
    code = (
        "import sys\n"
        "from moe_graphs.cli import main\n"
        "for command in ([], ['train'], ['bench'], ['bench', 'gemm']):\n"
        "    sys.argv = ['moe-graphs', *command, '--help']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "for name in ('torch', 'numpy', 'triton', 'safetensors', 'matplotlib'):\n"
        "    assert name not in sys.modules, name\n"
    )
    wide = {**os.environ, "COLUMNS": "120"}  # at 80 the longest names are cut
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=wide)
    for word in ("train", "bench", "--optimizer-in-graph", "--scopes", "--budget"):
        assert word in done.stdout


def test_help_shows_the_defaults_that_its_texts_name():
    """Square brackets would be markup of rich, which prints nothing for them."""
    shown = CliRunner().invoke(build_app(), ["train", "--help"], env={"COLUMNS": "160"}).stdout
    assert "(default: the fastest that is legal, which the run prints)" in " ".join(
        word for word in shown.split() if word != "│"
    )
    assert shown.count("(default: ") > 10


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"moe-graphs {__version__}\n")


@pytest.mark.parametrize(
    ("words", "completed"),
    [("moe-graphs tr", "train"), ("moe-graphs train --optimizer-i", "--optimizer-in-graph")],
)
def test_a_shell_completes_commands_and_options(words, completed):
    """Ask for completions as bash does after ``moe-graphs --install-completion``."""
    code = "from moe_graphs.cli import main; import sys; sys.argv = ['moe-graphs']; main()"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "_MOE_GRAPHS_COMPLETE": "complete_bash", **asked},
        capture_output=True,
        text=True,
    )
    assert completed in done.stdout.split(), done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "moe_graphs", "--help"], capture_output=True, text=True, check=True
    )
    assert "--install-completion" in shown.stdout


def test_a_run_goes_on_from_its_own_model(finished, text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    made = tmp_path / "model"
    form = ("--format", "transformers")
    command = ["export", str(finished), "--out", str(made), *form]
    assert CliRunner().invoke(build_app(), command).exit_code == 0
    said = "h\u00e9llo\n w\u00f6rld \U0001f600\t"
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.encode(said).ids == list(said.encode())
    assert tokenizer.decode(list(said.encode())) == said
    run = ("--batch-size", 1, "--sequence-length", 256, "--steps", 1, "--data", text, *EAGER)
    assert invoke("--init", made, *run, "--out", tmp_path / "run").exit_code == 0
    before, after = (
        json.loads((folder / "summary.json").read_text()) for folder in (finished, tmp_path / "run")
    )
    bits = after["held_out_before"] / math.log(2)
    assert bits == pytest.approx(before["held_out_bits_per_byte"], rel=1e-4)
    command = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "x"), *form]
    result = CliRunner().invoke(build_app(), command)
    assert "its directory has model/, which is what transformers loads" in result.stderr


def test_an_export_that_cannot_be_written_is_a_line(finished, tmp_path):
    (tmp_path / "file").touch()
    for out in ("/proc/x", tmp_path / "file" / "below"):
        result = CliRunner().invoke(build_app(), ["export", str(finished), "--out", str(out)])
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: --out: {out} could not be written: ")
        assert line.endswith(": give another --out")
        assert "disk full" not in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "nowhere", "--out", "file"], "RUN: no checkpoint at nowhere"),
        (["export", "x", "--out", "y", "--format", "gguf"], "accepted are 'safetensors', 'transf"),
        (["profile", "--out", "a.txt", "--device", "cpu"], "--out: a.txt is no picture: end its"),
        (["profile", "--trace", "a.txt", "--device", "cpu"], "--trace: a.txt: end its name in"),
    ],
    ids=str,
)
def test_bad_arguments_of_other_commands_name_the_option(arguments, words):
    result = CliRunner().invoke(build_app(), list(map(str, arguments)))
    assert result.exit_code == 1
    assert words in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "option", ["--gpus", "--batch-size", "--microbatches", "--sequence-length"]
)
def test_sizes_of_a_plan_are_at_least_one(option):
    """Zero meant the default."""
    result = CliRunner().invoke(
        build_app(), ["plan", "--model", "tiny", "--gpus", "1", option, "0"]
    )
    assert result.exit_code == 2
    assert option in result.stderr


def test_a_plan_takes_the_preset_by_trains_word():
    """``--preset`` is ``--model``."""
    plans = [
        CliRunner().invoke(build_app(), ["plan", word, "tiny", "--gpus", "1", "--json"])
        for word in ("--model", "--preset")
    ]
    assert [plan.exit_code for plan in plans] == [0, 0]
    assert plans[0].stdout == plans[1].stdout


def test_a_reader_that_has_seen_enough_is_no_error():
    code = (
        "import os, typer\n"
        "from moe_graphs.terminal import errors_in_a_line, print_json\n"
        "def many():\n"
        "    with errors_in_a_line():\n"
        "        [print_json('x' * 99) for _ in range(9999)]\n"
        "typer.run(many)\n"
    )
    command = f"'{sys.executable}' -c \"{code}\" | head -1"
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert "error" not in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": float("nan"), 1: [float("-inf")]}, {"a": "nan", "1": ["-inf"]}),
        ({"a": (1.5, None, True, "text")}, {"a": [1.5, None, True, "text"]}),
    ],
)
def test_a_document_is_json_whatever_the_numbers(capsys, value, expected):
    print_json(value)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == expected


def test_the_commands_in_the_guide_are_commands(tmp_path, monkeypatch):
    config = tmp_path / "runs" / "tiny" / "config.toml"  # a file that a run leaves
    config.parent.mkdir(parents=True)
    config.touch()
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    lines = re.findall(r"^moe-graphs ([^#\n]*)", guide, re.MULTILINE)
    assert len(lines) > 3
    group = typer.main.get_command(build_app())
    for line in lines:
        name, *arguments = line.split()
        group.commands[name].make_context(name, arguments)


def test_several_ranks_are_started_by_torchrun(text, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke(*SMALL, "--data", text)
    assert result.exit_code == 1
    assert "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set: start several" in result.stderr
