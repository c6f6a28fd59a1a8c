"""Queues of jobs, one for each GPU."""

from __future__ import annotations

import json

import on_gpus


def test_queues_run_side_by_side(tmp_path, capsys):
    """Jobs of a queue run in order; each sees its GPU and the folder; late ones do not start."""
    seen = "echo $CUDA_VISIBLE_DEVICES >> $OUT/seen; exit 3"
    jobs = [{"name": "first", "command": seen}, {"name": "late", "command": "", "needs": 1e6}]
    queues = tmp_path / "queues.json"
    queues.write_text(json.dumps([jobs, [{"name": "other", "command": "pwd", "cwd": "/"}]]))
    assert on_gpus.main([str(queues), "--limit", "60", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "gpu 0, first: status 3" in said
    assert "gpu 0, late: not started" in said
    assert (tmp_path / "out" / "seen").read_text() == "0\n"
    assert (tmp_path / "out" / "other.log").read_text() == "/\n"
