"""The benchmark of steps on several ranks, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from distributed import run_distributed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def smoke(rank: int, world_size: int, out: str) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    options = ["--smoke", "--rounds", "2", "--steps", "2", "--out", out, "--commit", "c"]
    importlib.import_module("parallel_steps").main(options)


def test_a_line_per_contender(tmp_path):
    out = tmp_path / "lines.jsonl"
    run_distributed(smoke, 2, arguments=(str(out),))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["model"], line["contender"]) for line in lines] == [
        ("dense", "eager"), ("dense", "whole step"), ("dense", "eager"), ("dense", "whole step"),
        ("moe", "eager, all_to_all"), ("moe", "eager, all_gather"),
        ("moe", "whole step, all_gather"),
    ]  # fmt: skip
    for line in lines:
        assert len(line["step_ms_of_turns"]) == 2
        assert line["step_ms"] > 0
        if line["contender"] == "whole step":
            assert (line["state"], line["loss_difference"]) == ("captured", 0.0)
    assert lines[-1]["state"] == "captured"
    assert lines[-1]["loss_difference"] < 1e-5
