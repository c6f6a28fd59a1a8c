"""SIGKILL at random moments of a run that saves a checkpoint after every step loses nothing.

More kills, by hand: `python tests/support/killed_runs.py FOLDER RANKS KILLS SEED`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "killed_runs.py"


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (1, 1),
        pytest.param(1, 5, marks=pytest.mark.long),
        pytest.param(2, 5, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_ends_as_one_that_was_never_stopped(tmp_path, ranks, kills):
    command = [sys.executable, "-W", "ignore", PROGRAM, tmp_path, ranks, kills, 7]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(list(map(str, command)), env=environment, timeout=1500, **pipes)
    assert done.returncode == 0, done.stdout
    whole, killed = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert len(whole["loss"]) == kills * 6 + 4
    assert whole["loss"].isfinite().all()
    assert all(torch.equal(value, killed[name]) for name, value in whole.items())
