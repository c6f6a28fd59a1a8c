"""`benchmarks/audits.py` on the CPU, with tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import audits


def in_this_process(file: str, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    return {"error": None} | audits.measure(*json.loads(arguments[0]))


@pytest.mark.parametrize(
    ("model", "here"),
    [
        ("launch_bound", True),
        pytest.param("launch_bound", False, marks=pytest.mark.long),
        pytest.param("transformers", False, marks=pytest.mark.long),
    ],
)
def test_every_way_leaves_a_line_with_and_without_audits(model, here, tmp_path, monkeypatch):
    if model == "transformers":
        pytest.importorskip("peft")
    if here:  # four processes import for longer than they compute
        monkeypatch.setattr(audits, "in_own_process", in_this_process)
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
