"""The benchmarks of what runs on a side stream, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from distributed import run_distributed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def smoke(rank: int, world_size: int, benchmark: str, out: str) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    options = ["--smoke", "--rounds", "2", "--steps", "1", "--out", out, "--commit", "c"]
    importlib.import_module(benchmark).main(options)


@pytest.mark.parametrize(
    ("benchmark", "contenders", "rounding"),
    [
        ("shared_experts", ("one stream", "side stream"), 0.0),
        ("overlap_halves", ("uncut", "two halves"), 1e-2),
    ],
)
def test_a_line_off_and_a_line_on(tmp_path, benchmark, contenders, rounding):
    out = tmp_path / "lines.jsonl"
    run_distributed(smoke, 2, arguments=(benchmark, str(out)))
    off, on = (json.loads(line) for line in out.read_text().splitlines())
    assert (off["contender"], on["contender"]) == contenders
    assert off["benchmark"] == on["benchmark"] == benchmark
    assert off["state"] == on["state"] == "captured"
    assert abs(on["loss_difference"]) <= rounding
    assert min(off["step_ms"], on["step_ms"], on["speedup"]) > 0
