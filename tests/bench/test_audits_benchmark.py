"""`benchmarks/audits.py` on the CPU, with tiny models."""

from __future__ import annotations

import json

import pytest

import audits


@pytest.mark.parametrize(
    "model", ["launch_bound", pytest.param("transformers", marks=pytest.mark.long)]
)
def test_every_way_leaves_a_line_with_and_without_audits(model, tmp_path):
    if model == "transformers":
        pytest.importorskip("peft")
    out = tmp_path / "lines.jsonl"
    given = ["--smoke", "--models", model, "--steps", "8", "--out", str(out), "--commit", "c"]
    assert audits.main(given) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2 * sum(case[0] == model for case in audits.CASES)
    for without, with_audits in zip(lines[::2], lines[1::2], strict=True):
        assert without["audited"] == 0
        assert with_audits["audited"] > 0
        assert with_audits["share"] > -1


def test_unknown_models_are_an_error(capsys):
    with pytest.raises(SystemExit):
        audits.main(["--models", "tiny"])
    assert "known are launch_bound" in capsys.readouterr().err
