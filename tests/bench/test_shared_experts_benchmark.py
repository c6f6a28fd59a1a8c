"""The benchmarks of what runs on a side stream, on the CPU."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from distributed import run_distributed


def smoke(rank: int, world_size: int, benchmark: str, out: str) -> None:
    options = ["--smoke", "--rounds", "2", "--steps", "1", "--out", out, "--commit", "c"]
    importlib.import_module(benchmark).main(options)


@pytest.mark.long
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
    assert on["gate_difference"] == on["loss_difference"]  # the CPU has one order to add in
    assert min(off["step_ms"], on["step_ms"], on["speedup"]) > 0


def test_losses_that_are_not_the_same_are_an_error():
    difference = importlib.import_module("shared_experts").difference
    off = torch.tensor([[9.0, 8.0, 7.0], [9.0, 8.0, 7.5]])
    apart = off.clone()
    apart[0, 2], apart[1, 1] = 6.5, 8.25
    assert difference(off, off, lambda: apart) == 0.0
    assert difference(off, apart, None) == 0.5
    said = r"first in step 2: \[8.0, 8.0\] off and \[8.0, 8.25\] on, by rank; off, run again, is "
    with pytest.raises(RuntimeError, match=said + "the same"):
        difference(off, apart, lambda: off)
    with pytest.raises(RuntimeError, match=said + "not the same, either"):
        difference(off, apart, lambda: apart)
