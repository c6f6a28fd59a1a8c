"""``moe-graphs bench gemm``: what it prints, writes and draws, without measuring anything."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

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
