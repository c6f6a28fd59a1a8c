"""Output of ``moe-graphs bench gemm``: text, files and pictures, without measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from moe_graphs.cli import build_app

pytest.importorskip("triton")

from moe_graphs.bench import gemm


def records(cell: gemm.Cell) -> list[dict]:
    rows, experts, *_ = cell.size
    common = {"model": cell.model.name, "gemm": cell.gemm, "tokens": cell.tokens}
    common |= {"routing": cell.routing, "size": cell.size, "rows": rows / experts}
    job = gemm.Timed(lambda: torch.zeros(()), None, 1, 12.0, 1.7e-3)
    return [
        common | gemm.record(name, direction, job, [3.0, 1.0, 2.0], 4e6) | {"launches": 2}
        for name in ("dense", "torch", "ours")
        for direction in gemm.DIRECTIONS
    ]


def test_a_record_holds_percentiles_and_rate():
    first = records(gemm.cells(quick=True)[0])[0]
    assert first["us"] == [1.0, 2.0, 2.0]
    assert first["tflops"] == 2.0
    assert first["needs_sync"]
    assert not first["capturable"]


def test_the_table_has_every_contender_and_direction():
    cell = gemm.cells(quick=True)[0]
    console = Console(width=200, record=True)
    console.print(gemm.table(cell, records(cell)))
    text = console.export_text()
    assert "65536x128x2048x1536, 512 rows per expert" in text
    for word in ("dense", "torch", "ours", "fwd", "dgrad", "wgrad", "1.7e-03"):
        assert word in text


def test_the_plan_begins_with_uniform_routing_and_has_every_model():
    plan = gemm.cells(quick=False)
    assert {cell.model for cell in plan} == set(gemm.MODELS)
    assert {cell.routing for cell in plan[:22]} == {"uniform"}
    assert {cell.tokens for cell in plan} == {2048, 4096, 8192, 16384, 32768}
    assert len(set(plan)) == len(plan)


def test_the_picture(tmp_path):
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    found = [r for cell in gemm.cells(quick=True) for r in records(cell)]
    stamp = {"environment": {"gpu": "none"}}
    lines.write_text("\n".join(json.dumps(r | stamp) for r in found))
    done = CliRunner().invoke(
        build_app(), ["bench", "gemm", "--out", str(lines), "--plot", str(picture)]
    )
    assert done.exit_code == 0, done.output
    assert picture.stat().st_size > 10_000


def draw(lines: Path, *more: str) -> Result:
    command = ["bench", "gemm", "--out", str(lines), "--plot", str(lines) + ".png", *more]
    return CliRunner().invoke(build_app(), command)


def test_a_picture_with_json_is_json(tmp_path):
    lines = tmp_path / "lines.jsonl"
    stamp = {"environment": {"gpu": "none"}}
    lines.write_text("\n".join(json.dumps(r | stamp) for r in records(gemm.cells(quick=True)[0])))
    done = draw(lines, "--json")
    assert json.loads(done.stdout) == {"picture": f"{lines}.png"}


@pytest.mark.parametrize("content", ["{", '{"routing": "uniform"}', "[]", "\x00"])
def test_results_of_something_else_are_a_line(tmp_path, content):
    lines = tmp_path / "lines.jsonl"
    lines.write_text(content)
    done = draw(lines, "--json")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: --plot: {lines} has lines of something else")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", ["", '{"routing": "zipf"}'])
def test_a_picture_of_nothing_is_none(tmp_path, content):
    (tmp_path / "lines").write_text(content)
    done = draw(tmp_path / "lines")
    assert done.exit_code == 1
    assert "there are no results of uniform routing" in done.stderr
    assert not (tmp_path / "lines.png").exists()


def test_without_matplotlib_it_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "lines").touch()
    done = draw(tmp_path / "lines")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "matplotlib" in done.stderr


def test_rows_that_are_not_finite_are_json(tmp_path, monkeypatch):
    """A kernel that fails leaves such rows."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemm, "run", lambda *_, **__: iter([{"error": float("nan")}]))
    done = CliRunner().invoke(build_app(), ["bench", "gemm", "--json"])
    assert json.loads(done.stdout, parse_constant=pytest.fail) == {"rows": [{"error": "nan"}]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = CliRunner().invoke(build_app(), ["bench", "gemm"])
    assert done.exit_code == 1
    assert "CUDA" in done.output


def test_a_picture_needs_results(tmp_path):
    command = ["bench", "gemm", "--out", str(tmp_path / "none"), "--plot", "x.png"]
    done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 1
    assert "no results" in done.output
