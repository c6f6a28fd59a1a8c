"""The benchmark of activation stacks, on the CPU."""

from __future__ import annotations

import importlib
import json

import pytest

from distributed import run_distributed


def smoke(rank: int, world_size: int, out: str) -> None:
    options = ["--smoke", "--rounds", "1", "--steps", "1", "--out", out, "--commit", "c"]
    options += ["--model", "launch_bound", "--rows-factors", "worst", "1.75"]
    importlib.import_module("activation_memory").main([*options, "--stack-factor", "2.0"])


@pytest.mark.long
def test_a_line_per_contender(tmp_path):
    out = tmp_path / "lines.jsonl"
    run_distributed(smoke, 2, arguments=(str(out),))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ways = ("whole step", "whole step, stack")
    expected = [("eager, all_to_all", None), *((way, f) for f in (None, 1.75) for way in ways)]
    assert [(line["contender"], line["rows_factor"]) for line in lines] == expected
    for line in lines[1:]:
        assert line["state"] == "captured"
        assert line["eager_calls"] == {"warmup": 3}
        assert line["replayed"] == 3 + 1 + 1
        assert line["first_steps_overflowed"] == 0
    for line in (lines[2], lines[4]):
        assert line["bitwise"]
        ((used, room),) = [v for k, v in line["occupation"].items() if k.endswith("stack")]
        assert 0 < used <= room
    rows = table(lines).splitlines()[2:7]
    assert [row.count(" | ") for row in rows] == [6] * 5
    assert all(" of 6 |" in row for row in rows)
    assert [("worst case" in row, "activation stack" in row) for row in rows[1:]] == [
        (True, False), (True, True), (False, False), (False, True)
    ]  # fmt: skip


def table(lines: list[dict]) -> str:
    """As if they were measured on GPUs, which have memory."""
    parallel_tables = importlib.import_module("parallel_tables")
    result_lines = importlib.import_module("result_lines")
    given = []
    for line in lines:
        stamp = line["environment"] | {"gpu": result_lines.H200}
        factor = {"rows_factor": line["rows_factor"] and 1.5}
        memory = {"training_gib": 1.0, "peak_gib": 2.0}
        given.append(result_lines.Line(line | factor | memory | {"environment": stamp}, "x.jsonl"))
    return parallel_tables.activation_memory(given)
