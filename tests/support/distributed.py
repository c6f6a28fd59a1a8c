"""Runs a function on several ranks of a process group, each in a process of its own."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Number of ranks of most tests; RANKS=4 pytest -m multigpu runs them on four GPUs.
RANKS = int(os.environ.get("RANKS", "2"))
# The server that ranks are forked from imports these modules once: a moment per rank instead of ten
# seconds. DistributedDataParallel and optimizers import dynamo.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "moe_graphs.engine.whole_step.full_iteration",
    "moe_graphs.lm.run",
    "moe_graphs.lm.checkpoint",
    "moe_graphs.parallel",
    "moe_graphs.pipelines",
    "moe_graphs.planning",
    "pytest",
]


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    backend: str = "gloo",
    *,
    arguments: tuple = (),
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Calls ``function(rank, world_size, *arguments)`` on every rank, in a fresh process each.

    The function has to be importable (module level), and with "nccl" each rank has the GPU of
    its number. The ranks meet over a file, so runs side by side do not collide.

    Returns:
        What the ranks returned, in order.

    Raises:
        RuntimeError: with the tracebacks of the ranks that failed; the others are stopped.
        TimeoutError: some rank neither returned nor failed in time; all are stopped.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            job = (function, rank, world_size, backend, store, arguments, timeout_seconds, sender)
            process = context.Process(target=_run_rank, args=job, daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, time.monotonic() + timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pipe.recv()
            except EOFError:
                succeeded, value = False, "the process died without a word\n"
            (results if succeeded else failures)[rank] = value
        if failures:
            # The others may now wait for a rank that is gone: what they say in a moment counts.
            deadline = min(deadline, time.monotonic() + 2.0)
    if failures:
        texts = (f"rank {rank}:\n{text}" for rank, text in sorted(failures.items()))
        raise RuntimeError("\n".join(texts))
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish in time")
    return [results[rank] for rank in sorted(results)]


def _run_rank(function, rank, world_size, backend, store, arguments, timeout, sender) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # captures collect garbage, and what was imported is none
    try:
        share_one_loop()
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = function(rank, world_size, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        sender.send((True, result))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def share_one_loop() -> None:
    """Give the sockets of all gloo groups of this process one common thread.

    By default each group has a thread of its own that wakes up a hundred times a second, also after
    the group is destroyed: with ten layouts of four ranks these threads take half of two cores.
    """
    gloo = dist.ProcessGroupGloo
    create, device = gloo.__init__, gloo.create_default_device()

    def create_on_device(
        self: Any, store: Any, rank: int, size: int, timeout: Any, **more: Any
    ) -> None:
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        for name, value in more.items():  # from torch 2.15 on
            setattr(options, name, value)
        create(self, store, rank, size, options)

    gloo.__init__ = create_on_device
