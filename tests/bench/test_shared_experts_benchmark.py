"""The benchmark of shared experts on a side stream, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from distributed import run_distributed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def smoke(rank: int, world_size: int, out: str) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    options = ["--smoke", "--rounds", "2", "--steps", "1", "--out", out, "--commit", "c"]
    importlib.import_module("shared_experts").main(options)


def test_a_line_off_and_a_line_on(tmp_path):
    out = tmp_path / "lines.jsonl"
    run_distributed(smoke, 2, arguments=(str(out),))
    off, on = (json.loads(line) for line in out.read_text().splitlines())
    assert (off["contender"], on["contender"]) == ("one stream", "side stream")
    assert off["benchmark"] == on["benchmark"] == "shared_experts"
    assert off["state"] == on["state"] == "captured"
    assert on["loss_difference"] == 0.0
    assert min(off["step_ms"], on["step_ms"], on["speedup"]) > 0
