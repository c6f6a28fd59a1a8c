"""`benchmarks/continued_runs.py` without its runs, which a GPU makes."""

from __future__ import annotations

import json

import continued_runs


def test_lines_and_a_picture(tmp_path, monkeypatch):
    given, ran = {}, []

    def trained(options, contender, out, arguments):
        given[contender] = arguments
        curve = [[100, 1.0, 2.0], [150, 1.5, 1.9]]
        begin = [[0, 0.0, 3.0]] if "--init" in arguments else []
        return {"contender": contender, "held_out_curve": [*begin, *curve], "seconds": 1.5,
                "train_curve": [[10, 0.1, 1.4]], "held_out_bits_per_byte": 1.9}  # fmt: skip

    monkeypatch.setattr(continued_runs, "_trained", trained)
    monkeypatch.setattr(continued_runs, "_run", lambda command, end: ran.append(command))
    out = tmp_path / "lines.jsonl"
    assert continued_runs.main(["--out", str(out), "--commit", "c"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["contender"] for line in lines] == list(given)
    assert all(line["environment"]["commit"] == "c" for line in lines)
    assert out.with_suffix(".png").stat().st_size > 1000
    first, seed, own = given.values()
    assert "--data" not in first
    (export,) = ran
    made = export[export.index("--out") + 1]
    assert own[own.index("--init") + 1] == made
    assert own[2:] == seed[2:]  # nothing but the begin differs
