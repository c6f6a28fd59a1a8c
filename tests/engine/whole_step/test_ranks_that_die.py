"""A rank is killed: the others end with an error, over gloo and over NCCL, and none hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ddp_scripts import TRAINING

# Ranks are forked after the slow imports, and end as interpreters do.
SCRIPT = """
    import contextlib, datetime, faulthandler, json, os, signal, sys, time
    import torch, torch.distributed as dist
    import torch._dynamo  # DistributedDataParallel does
    from moe_graphs.engine.whole_step.full_iteration import FullIteration

    backend, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def fork():
        children = []
        for rank in range(2):
            children.append(os.fork())
            if not children[-1]:
                return rank
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
        sys.exit()

    def say(what):  # with the time of day, as NCCL does
        print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)

    rank = fork()
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    faulthandler.dump_traceback_later(45)
    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    # Longer than a capture takes on one rank while another waits.
    patience = datetime.timedelta(seconds=15)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=patience)
"""
SCRIPT += TRAINING
SCRIPT += """
    options = {"model": model, "optimizer": optimizer, "stream": stream, "agree": True}
    step = FullIteration(train, **options)
    say("begins")
    for number in range(last + 4):
        if number == last:
            say(f"before step {number}: {step.report().matched} replayed")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        step(torch.randn(4, 8, device=device)).item()
    raise SystemExit(0)  # as if nothing had happened
"""
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]
# In the warm-up NCCL's watchdog ends a rank that waits. Before a replay ranks ask one another, as
# they have been told to, because the watchdog knows of no collectives in a graph.
LAST = {"in the warm-up": (2, 0), "between replays": (6, 3)}
# The watchdog ends a process after four such waits, whether anything is dumped or not: by default a
# minute.
QUICK = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}


@pytest.mark.parametrize("when", ["in the warm-up", "between replays"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long
def test_the_others_end_with_an_error(backend, when, tmp_path):
    last, replayed = LAST[when]
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, tmp_path / "script.py", backend, tmp_path, last]
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    began = time.strftime("%H:%M:%S")
    script = subprocess.Popen(list(map(str, command)), env={**os.environ, **QUICK}, **options)
    said = ""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            said = script.communicate(timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    errors = {rank: (tmp_path / rank).read_text() for rank in ("0", "1")}
    # The message has a text of its own, because pytest cuts other values short.
    story = f"{began} begins, {time.strftime('%H:%M:%S')} ends: {said or 'killed'}"
    story += "".join(f"\n--- rank {rank}\n{text[-6000:]}" for rank, text in errors.items())
    assert said, story
    survivor, killed = json.loads(said)
    assert killed == -signal.SIGKILL, story
    for text in errors.values():
        assert f"before step {last}: {replayed} replayed" in text, story
    if backend == "nccl" and when == "in the warm-up":
        assert survivor == -signal.SIGABRT, story
        assert "failure detected by watchdog" in errors["0"], story
    else:
        assert survivor != 0, story
        assert "RuntimeError" in errors["0"], story
    if backend == "gloo":
        assert survivor == 1, story
