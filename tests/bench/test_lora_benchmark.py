"""`benchmarks/lora.py` on the CPU, with a tiny model."""

from __future__ import annotations

import json

import pytest

import lora

pytest.importorskip("peft")
pytest.importorskip("transformers")


@pytest.mark.long
@pytest.mark.parametrize("row", lora.SIZES)
def test_every_contender_leaves_a_line(row, tmp_path):
    out = tmp_path / "lines.jsonl"
    given = ["--smoke", "--rows", row, "--out", str(out), "--commit", "c"]
    assert lora.main(given) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [(row, *run) for run in lora.SIZES[row].runs]
    assert [(line["row"], line["contender"], line["checkpointing"]) for line in lines] == expected
    assert all(line["error"] is None and line["tokens_per_second"] > 0 for line in lines)
    for line in lines:
        assert (line["contender"] == lora.GRAPHS) == ("graphs" in line)
        if "graphs" in line:
            assert line["graphs"]["matched"] > 0
            assert line["graphs"]["eager_calls"].keys() == {"warmup"}


def test_unknown_rows_are_an_error(capsys):
    with pytest.raises(SystemExit):
        lora.main(["--rows", "attention_1m"])
    assert "attention_1m: known are attention_16k" in capsys.readouterr().err


def test_other_losses_are_an_error():
    right = {"error": None, "losses": [2.0, 1.9], "step_ms": 10.0}
    assert lora.compared(right | {"step_ms": 5.0}, right)["speedup"] == 2.0
    assert "apart" in lora.compared(right | {"losses": [2.0, 1.5]}, right)["error"]
    failed = {"error": "out of memory"}
    assert lora.compared(right, failed) is right
    assert lora.compared(failed, right) is failed
