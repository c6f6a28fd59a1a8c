"""`benchmarks/lora.py` on the CPU, with a tiny model."""

from __future__ import annotations

import json

import pytest

import lora

pytest.importorskip("peft")
pytest.importorskip("transformers")


@pytest.mark.long
def test_every_contender_leaves_a_line(tmp_path):
    out = tmp_path / "lines.jsonl"
    assert lora.main(["--smoke", "--out", str(out), "--commit", "c"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["contender"], line["tokens"]) for line in lines] == [
        (lora.AS_IT_COMES, 128),
        (lora.ACCELERATED, 128),
        (lora.AS_IT_COMES, 16),
        (lora.ACCELERATED, 16),
        (lora.GRAPHS, 16),
    ]
    assert all(line["error"] is None and line["tokens_per_second"] > 0 for line in lines)
    assert lines[-1]["graphs"]["replayed"] > 0


def test_other_losses_are_an_error():
    right = {"error": None, "losses": [2.0, 1.9], "step_ms": 10.0}
    assert lora.compared(right | {"step_ms": 5.0}, right)["speedup"] == 2.0
    assert "apart" in lora.compared(right | {"losses": [2.0, 1.5]}, right)["error"]
    failed = {"error": "out of memory"}
    assert lora.compared(right, failed) is right
    assert lora.compared(failed, right) is failed
