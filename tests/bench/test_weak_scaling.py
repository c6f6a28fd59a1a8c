"""Tables and the picture of several GPUs, from lines such as `parallel_steps.py` writes."""

from __future__ import annotations

import json

import pytest

import parallel_tables
import plot_weak_scaling
import result_lines
import weak_scaling


def row(model: str, contender: str, ms: float, ranks: int = 2, day: int = 1, **more) -> dict:
    stamp = {"gpu": "NVIDIA H200", "commit": "c", "date": f"2026-01-0{day}", "torch": "2"}
    stamp |= {"driver": "1", "triton": "3", "cuda": "13", "python": "3"}
    return {
        "benchmark": "parallel_steps", "model": model, "contender": contender, "ranks": ranks,
        "tokens_per_rank": 1000, "step_ms": ms, "environment": stamp, **more,
    }  # fmt: skip


ALONE, SHARED = "whole step, alone", "whole step, symmetric"
ROWS = [
    row("moe", SHARED, 12.5, day=2),
    row("moe", SHARED, 99.0, day=1),
    row("moe", ALONE, 10.0, ranks=1),
    row("moe", SHARED, 20.0, ranks=4),
    row("moe", f"{SHARED}, our AdamW", 11.0),
    row("moe", "attn,moe, symmetric", 9.0),
    row("moe", f"{SHARED}, 1.25", 1.0, error="out of memory"),
    row("gpu_bound", ALONE, 50.0, ranks=1, tokens_per_rank=500),
    row("gpu_bound", SHARED, 40.0),
    row("dense", "whole step", 1.0),
]


def test_weak_scaling():
    """The newest line of a way counts; it is compared with its own optimizer and as many tokens."""
    lines = [result_lines.Line(each, "f.jsonl") for each in ROWS]
    found = weak_scaling.points(lines)
    assert list(found) == ["moe", "gpu_bound"]
    shown = [
        (each.ranks, each.way, each.tokens_per_second, each.efficiency) for each in found["moe"]
    ]
    assert shown == [
        (1, "all experts", 1e5, 1.0),
        (2, "symmetric", 8e4, 0.8),
        (2, "symmetric, our AdamW", pytest.approx(1e6 / 11), None),
        (4, "symmetric", 5e4, 0.5),
    ]
    assert [each.efficiency for each in found["gpu_bound"]] == [1.0, None]
    table = weak_scaling.weak_scaling(lines)
    assert "| 4 | symmetric | 20.0 ms | 50,000 | 0.50 |" in table
    assert "| 2 | symmetric, our AdamW | 11.0 ms | 90,909 | - |" in table


def test_the_picture(tmp_path):
    results = tmp_path / "parallel_steps_here.jsonl"
    results.write_text("\n".join(map(json.dumps, ROWS)))
    plot_weak_scaling.main([str(results)])
    assert (tmp_path / "weak_scaling_here.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no line is a whole step"):
        plot_weak_scaling.draw([])


def test_communication():
    traced = {"benchmark": "parallel_steps_traced", "reshard_after_forward": True}
    rows = [
        row("dense", name, ms, traced_ms=ms, communication_ms=talk, exposed_ms=exposed, **traced)
        for name, ms, talk, exposed in (("eager", 61.0, 8.0, 6.0), ("whole step", 4.0, 2.0, 0.5))
    ]
    make = parallel_tables.communication
    table = make([result_lines.Line(each, "f.jsonl") for each in rows])
    where = "dense, `reshard_after_forward=True`"
    assert f"| {where} | eager | 61.00 ms | 8.00 ms | 6.00 ms | 25% |" in table
    assert f"| {where} | whole step | 4.00 ms | 2.00 ms | 0.50 ms | 75% |" in table
    assert "Not measured yet" in make([result_lines.Line(each, "f") for each in ROWS])
