"""Workers of torchrun as users start them, and the end of a run when one is killed."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

from moe_graphs.cli import build_app
from moe_graphs.lm.checkpoint import read_model
from moe_graphs.lm.workers import DeviceWatch, Place, meeting

ROOT = Path(__file__).parents[2]
KILLED = ROOT / "tests" / "support" / "killed_worker.py"
COMMON = [
    *("train", "--device", "cpu", "--preset", "tiny", "--batch-size", 2, "--sequence-length", 32),
    *("--steps", 6, "--checkpoint-every", 2, "--timeout", 60),
]


def start(*arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True, **pipes)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def log_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_with_a_killed_worker_ends_as_one_that_was_not_interrupted(text, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    hosts = ["--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 1, "--monitor-interval", 0.1]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    options = [*COMMON, "--data", text, "--ep", 2]
    launchers = [
        start("torch.distributed.run", *hosts, *meeting, "--rdzv-id", "killed", KILLED, *options,
              "--out", killed)
        for _ in range(2)
    ]  # fmt: skip
    alone = start("moe_graphs", *options, "--nproc", 2, "--out", whole, "--json")
    said = [process.communicate(timeout=150)[0] for process in (alone, *launchers)]
    assert [process.returncode for process in (alone, *launchers)] == [0, 0, 0], "\n".join(said)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, killed)]
    for name in ("steps", "train_loss", "held_out_bits_per_byte", "samples"):
        assert summaries[0][name] == summaries[1][name], name
    assert summaries[0]["resumed_from"] is None
    assert summaries[1]["resumed_from"].endswith("step_000002")
    models = [read_model(run / "checkpoints" / "step_000006") for run in (whole, killed)]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    exported = tmp_path / "model.safetensors"
    command = ["export", str(killed), "--out", str(exported)]
    assert CliRunner().invoke(build_app(), command).exit_code == 0
    file = load_file(exported)
    assert file.keys() == models[0].keys()
    assert all(torch.equal(value, file[name]) for name, value in models[0].items())
    for run in (whole, killed):
        names = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert names == ["step_000004", "step_000006"]
    (resumed,) = [line for line in log_of(killed) if "resumed_from" in line]
    assert resumed["step"] == 2
    assert resumed["differences"] == []
    last = log_of(whole)[-1]
    assert last["ranks"] == 2
    assert last["tokens_per_second"] == pytest.approx(2 * last["tokens_per_second_per_rank"])
    assert json.loads(said[0].splitlines()[-1])["steps"] == 6
    both = "".join(said[1:])
    assert len(re.findall("error: rank", both)) <= 1, both
    assert 'Traceback (most recent call last):\n  File "/work' not in both


def test_all_groups_of_a_run_have_its_timeout(monkeypatch):
    """Groups of a mesh's dimensions have the timeout, too, not only the first group."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("the ranks did not meet"))
    before = vars(dist.constants).copy()
    with meeting(Place(0, 0, 1), False, 7.0):
        groups = [dist.group.WORLD, dist.new_group([0]), dist.new_group([0], backend="gloo")]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        found = {backend.options._timeout for backend in backends}
        watchdog = os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]
    assert found == {datetime.timedelta(seconds=7)}
    assert int(watchdog) * 4 == 10_000
    for name in dist.constants.__all__:
        assert getattr(dist.distributed_c10d, name) == before[name]


def workers_of(launcher: int) -> list[int]:
    """The launcher's processes that train."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if b"spawn_main" in command]


ON_BOTH = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=pytest.mark.multigpu)],
)


@contextlib.contextmanager
def training(text: Path, run: Path, device: str, *options: object) -> Iterator[tuple]:
    """Context with a run of two workers that has trained for some steps; killed at the end."""
    launcher = start(
        "moe_graphs", "train", "--preset", "tiny", "--batch-size", 2, "--sequence-length", 32,
        "--steps", 100_000, "--device", device, "--data", text, "--out", run, "--nproc", 2,
        *options,
    )  # fmt: skip
    log = run / "log.jsonl"
    try:
        until = time.monotonic() + 300  # beside fifty other tests
        while not (log.exists() and '"loss"' in log.read_text()):  # of twenty steps
            assert launcher.poll() is None, launcher.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)
        yield launcher, *workers_of(launcher.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


def has_ended(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return not status.exists() or "State:\tZ" in status.read_text()  # nobody has reaped it


@ON_BOTH
def test_a_worker_that_is_killed_while_graphs_replay_ends_the_run(text, tmp_path, device):
    """NCCL's watchdog does not know of collectives in a graph.

    The launcher, which has started the other workers, ends them.
    """
    whole = ("--impl", "full_iteration", "--optimizer-in-graph")
    with training(text, tmp_path / "run", device, *whole) as (launcher, first, last):
        os.kill(last, signal.SIGKILL)
        said = launcher.communicate(timeout=45)[0]  # workers have 30 s to end by themselves
        assert launcher.returncode == 1
        assert re.search("error: rank [01] was ended by SIGKILL|error: rank [01]: ", said), said
        assert has_ended(first)


@ON_BOTH
def test_a_worker_that_hangs_ends_the_run_behind_the_timeout(text, tmp_path, device):
    with training(text, tmp_path / "run", device, "--timeout", 10) as (launcher, first, last):
        os.kill(last, signal.SIGSTOP)
        until = time.monotonic() + 50  # NCCL's watchdog: ten seconds behind it
        while not has_ended(first) and time.monotonic() < until:
            time.sleep(0.1)
        ended = has_ended(first)
        os.kill(last, signal.SIGCONT)  # or its launcher waits 30 s before it kills it
        said = launcher.communicate(timeout=45)[0]
        assert ended, said
        assert launcher.returncode == 1
        words = {"cpu": "rank 0: another rank is gone, or did not come in time: .*Timed out",
                 "cuda": "rank 0.*(was ended by SIGABRT|or did not come in time)"}  # fmt: skip
        assert re.search(f"error: {words[device]}", said), said


def test_a_wait_for_the_gpu_has_a_limit():
    """A stand-in waits in place of a GPU whose neighbour hangs in a graph."""
    late = threading.Event()
    watch = DeviceWatch(0.3, late.set)
    with watch.waiting():
        assert not late.is_set()
    assert not late.wait(1.0)  # nothing waits any more
    with watch.waiting():
        assert late.wait(10.0)


@pytest.mark.long
def test_an_error_of_one_rank_is_said_once(text, tmp_path):
    """Each of two hosts has got another number of steps."""
    port = free_port()
    hosts = ["--nnodes", 2, "--nproc-per-node", 1, "--monitor-interval", 0.1]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    launchers = [
        start("torch.distributed.run", *hosts, *meeting, "-m", "moe_graphs", *COMMON, "--data",
              text, "--out", tmp_path / "run", "--steps", steps)
        for steps in (6, 8)
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[0] for process in launchers]
    assert all(process.returncode != 0 for process in launchers)
    errors = [line for each in said for line in each.splitlines() if "error: rank" in line]
    (error,) = errors
    assert re.search(r"steps is [68] on rank 0 and [68] on rank 1: start all of them", error)
    assert not (tmp_path / "run").exists()
