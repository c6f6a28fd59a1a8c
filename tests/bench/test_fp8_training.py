"""The benchmark of real runs in FP8: what it measures on a CPU, and says where TE is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import fp8_training


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    out = tmp_path_factory.mktemp("fp8") / "lines.jsonl"
    text = tmp_path_factory.mktemp("text")
    (text / "a.txt").write_text("Every token goes to two of four experts.\n" * 400)
    (text / "b.txt").write_text("A graph is captured once and replayed often.\n" * 400)
    train = f"--data {text} --batch-size 2 --sequence-length 64 --warmup-steps 2"
    fp8_training.main(
        [
            *("--preset", "tiny", "--steps", "2", "--compared-steps", "6", "--commit", "c"),
            *("--rows", "ours, bf16; TE, FP8 block", "--out", str(out), "--train", train),
        ]
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_row_is_compared_and_trained(lines):
    ours = lines[0]
    assert ours["error"] is None
    assert all(ours[key] for key in fp8_training.FROM_COMPARE)
    assert ours["replayed"] > 0
    assert 0 < ours["held_out_bits_per_byte"] < 10
    assert ours["environment"]["commit"] == "c"


def test_a_row_that_fails_says_why(lines):
    assert "CUDA" in lines[1]["error"]


def test_an_unknown_row_is_refused(capsys):
    with pytest.raises(SystemExit):
        fp8_training.main(["--rows", "ours, bf17"])
    assert "bf17" in capsys.readouterr().err
