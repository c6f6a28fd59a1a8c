"""A run that gets SIGTERM ends after a step with a checkpoint, from which it goes on bitwise."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moe_graphs.cli import build_app
from moe_graphs.lm.checkpoint import read_model

ROOT = Path(__file__).parents[2]
STEPS = 100
COMMON = ["--device", "cpu", "--preset", "tiny", "--batch-size", 2, "--sequence-length", 32,
          "--steps", STEPS, "--impl", "none"]  # fmt: skip


def start(*arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "moe_graphs", "train", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)


def finished(*arguments: object) -> str:
    """A whole run in this process, which has imported all. Ranks are processes and print there."""
    if "--nproc" in arguments:
        process = start(*arguments)
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
        return said
    done = CliRunner().invoke(build_app(), ["train", *map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def terminated_here(run: Path, *arguments: object) -> tuple[int, str]:
    """Run and signal in this process, where SIGTERM does nothing outside of the run."""

    def send() -> None:
        until = time.monotonic() + 250
        while not has_logged(run) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        sender = threading.Thread(target=send)
        sender.start()
        command = ["train", *map(str, arguments), "--out", str(run)]
        done = CliRunner().invoke(build_app(), command)
        sender.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    return done.exit_code, done.output


def has_logged(run: Path) -> bool:
    log = run / "log.jsonl"
    return log.exists() and '"loss"' in log.read_text()


def terminated(run: Path, *arguments: object) -> tuple[int, str]:
    """Starts a run and sends SIGTERM after a logged step; returns its code and its output."""
    process = start(*arguments, "--out", run)
    until = time.monotonic() + 250
    try:
        while not has_logged(run):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    return process.returncode, said


def check_goes_on_bitwise(
    text: Path,
    folder: Path,
    *layout: object,
    end: Callable[..., tuple[int, str]] = terminated,
) -> None:
    """Ends a run by SIGTERM, resumes it, and compares it with one that was not interrupted."""
    whole, ended = folder / "whole", folder / "ended"
    code, said = end(ended, *COMMON, "--data", text, *layout)
    assert code == 128 + signal.SIGTERM, said
    (line,) = [line for line in said.splitlines() if line.startswith("SIGTERM: ")]
    step = int(re.search(r"ended after step (\d+); its checkpoint is written", line)[1])
    assert 20 <= step < STEPS
    assert line.endswith(f"go on with --resume {ended} --out {ended}")
    assert "Traceback" not in said
    names = [path.name for path in (ended / "checkpoints").iterdir()]
    assert names == [f"step_{step:06d}"]
    nproc = layout[:2]
    assert "changed: nothing" in finished("--resume", ended, "--out", ended, *nproc)
    finished(*COMMON, "--data", text, *layout, "--out", whole)
    last = f"checkpoints/step_{STEPS:06d}"
    models = [read_model(run / last) for run in (whole, ended)]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    losses = [
        json.loads((run / "summary.json").read_text())["train_loss"] for run in (whole, ended)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("end", [terminated_here, pytest.param(terminated, marks=pytest.mark.long)])
def test_a_terminated_run_goes_on_as_one_that_was_not_interrupted(text, tmp_path, end):
    check_goes_on_bitwise(text, tmp_path, end=end)


@pytest.mark.long
def test_terminated_ranks_end_at_one_step_and_go_on_bitwise(text, tmp_path):
    check_goes_on_bitwise(text, tmp_path, "--nproc", 2, "--ep", 2)


def test_a_terminated_run_that_saves_nothing_says_so(text, tmp_path):
    run = tmp_path / "run"
    code, said = terminated_here(run, *COMMON, "--data", text, "--no-save")
    assert code == 128 + signal.SIGTERM
    assert "without a checkpoint (--no-save)" in said
    assert not (run / "checkpoints").exists()
