"""The benchmark of activation stacks, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from distributed import run_distributed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def smoke(rank: int, world_size: int, out: str) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    options = ["--smoke", "--rounds", "1", "--steps", "1", "--out", out, "--commit", "c"]
    options += ["--model", "launch_bound", "--rows-factors", "2.0", "--stack-factor", "2.0"]
    importlib.import_module("activation_memory").main(options)


def test_a_line_per_contender(tmp_path):
    out = tmp_path / "lines.jsonl"
    run_distributed(smoke, 2, arguments=(str(out),))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    contenders = ["eager, all_to_all", "whole step", "whole step, stack"]
    contenders.append("whole step, stack, dispatched again")
    assert [line["contender"] for line in lines] == contenders
    for line in lines[1:]:
        assert line["state"] == "captured"
        assert line["first_steps_overflowed"] == 0
    for line in lines[2:]:
        assert line["bitwise"]
        ((used, room),) = [v for k, v in line["occupation"].items() if k.endswith("stack")]
        assert 0 < used <= room
