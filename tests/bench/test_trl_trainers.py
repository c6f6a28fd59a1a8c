"""`benchmarks/trl_trainers.py` on the CPU, with a tiny model."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("trl", reason="needs the extra trl")
import trl_trainers


@pytest.mark.long
def test_both_contenders_leave_a_line(tmp_path):
    out = tmp_path / "lines.jsonl"
    given = ["--smoke", "--trainers", "sft", "--steps", "24", "--out", str(out), "--commit", "c"]
    assert trl_trainers.main(given) == 0
    plain, graphed = [json.loads(line) for line in out.read_text().splitlines()]
    assert plain["error"] is None
    assert graphed["share"] >= 0.95
    assert graphed["lengths"]["chosen"]
    assert plain["losses"] == pytest.approx(graphed["losses"], abs=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["grpo", "grpo_static"])
def test_grpo_leaves_its_sizes_and_its_time_of_generation(tmp_path, trainer):
    out = tmp_path / "lines.jsonl"
    given = ["--smoke", "--trainers", trainer, "--contenders", "GraphCallback", "--steps", "24"]
    assert trl_trainers.main([*given, "--out", str(out), "--commit", "c"]) == 0
    line = json.loads(out.read_text())
    assert line["share"] >= 0.95
    assert 0 < line["generation_ms"] < line["step_ms"]
    assert line["sizes"] == {"num_hidden_layers": 2, "max_completion_length": 16}


def test_unknown_trainers_are_an_error(capsys):
    with pytest.raises(SystemExit):
        trl_trainers.main(["--trainers", "ppo"])
    assert "known are sft, dpo, grpo, grpo_static" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        trl_trainers.main(["--contenders", "graphs"])
    assert "known are as it comes, GraphCallback" in capsys.readouterr().err


def test_a_run_needs_more_steps_than_do_not_count(capsys):
    with pytest.raises(SystemExit):
        trl_trainers.main(["--steps", "20"])
    assert "more than 20" in capsys.readouterr().err
