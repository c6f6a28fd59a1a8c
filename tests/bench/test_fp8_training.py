"""The benchmark of real runs in FP8: its lines on a CPU, and its message without TE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fp8_training


def lines(folder: Path, rows: str) -> list[dict]:
    text, out = folder / "text", folder / "lines.jsonl"
    text.mkdir()
    (text / "a.txt").write_text("Every token goes to two of four experts.\n" * 400)
    (text / "b.txt").write_text("A graph is captured once and replayed often.\n" * 400)
    train = f"--data {text} --batch-size 2 --sequence-length 64 --warmup-steps 2"
    fp8_training.main(
        [
            *("--preset", "tiny", "--steps", "2", "--compared-steps", "6", "--commit", "c"),
            *("--rows", rows, "--out", str(out), "--train", train),
        ]
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.full  # it trains twice, and writes samples: 20 seconds
def test_a_row_is_compared_and_trained(tmp_path):
    (ours,) = lines(tmp_path, "ours, bf16")
    assert ours["error"] is None
    assert all(ours[key] for key in fp8_training.FROM_COMPARE)
    assert ours["replayed"] > 0
    assert 0 < ours["held_out_bits_per_byte"] < 10
    assert ours["environment"]["commit"] == "c"


@pytest.mark.long
def test_a_row_that_fails_says_why(tmp_path):
    (theirs,) = lines(tmp_path, "TE, FP8 block")
    assert "CUDA" in theirs["error"]


def test_an_unknown_row_is_refused(capsys):
    with pytest.raises(SystemExit):
        fp8_training.main(["--rows", "ours, bf17"])
    assert "bf17" in capsys.readouterr().err


def test_the_table_of_the_readme():
    from peers_table import fp8_training as table
    from result_lines import Line

    def stored(contender, bits, equal=True, error=None):
        stamp = {"gpu": "a GPU", "commit": "abc", "date": "1", "torch": "2"}
        values = dict(benchmark="fp8_training", model="small", contender=contender, error=error)
        if error is None:
            values |= dict.fromkeys(fp8_training.FROM_COMPARE, True) | {"steps": 150}
            values |= {fp8_training.FROM_COMPARE[-1]: equal, "held_out_bits_per_byte": bits}
            values |= {"eager_step_ms": 9.0, "graphed_step_ms": 4.5, "tokens_per_second": 5e5}
        return Line(values | {"environment": stamp}, "lines.jsonl")

    lines = [stored("ours", 1.8), stored("TE", 1.9, equal=False), stored("FP8", 0, error="no CUDA")]
    text = table(lines, gpu="a GPU")
    assert "| ours | yes | 1.800 | 9.0 ms | 4.5 ms | 500 k |" in text
    assert "| TE | no | 1.900 | 9.0 ms | 4.5 ms | 500 k |" in text
    assert "Did not run: FP8: `no CUDA`." in text
