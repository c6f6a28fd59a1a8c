"""The start of ``moe-graphs train``.

It runs on this process, as one of torchrun's workers, or on workers that it starts as torchrun
does.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Collection

import torch
import typer
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_graphs.lm.kept_settings import Kept, keep
from moe_graphs.lm.options import TrainOptions
from moe_graphs.lm.termination import EXIT_CODE, Terminated
from moe_graphs.lm.train_command import EXPECTED, train
from moe_graphs.lm.workers import Place, Workers, check_equal, layout_of, meeting
from moe_graphs.option_tree import flat
from moe_graphs.terminal import errors_in_a_line, make_console

_SAME = "start all of them with the same command"


def start(options: TrainOptions, given: Collection[str]) -> None:
    """Starts the command.

    Args:
        given: names of the options that the command line or its file gives.
    """
    kept = None
    nproc, timeout = options.ranks.nproc, options.ranks.timeout
    with errors_in_a_line():
        place = Place.of_environment()
        if not timeout > 0:
            raise ValueError(f"timeout: {timeout} seconds must be above 0")
        if nproc is not None:
            _check_workers(nproc, place)
        alone = place.world_size == 1
        ranks = nproc or place.world_size
        if alone and options.output.resume is not None:  # torchrun's workers look once they met
            kept = keep(options, given, ranks)
            options = kept.options
        if alone:
            layout_of(ranks, **options.layout)
        if not options.ranks.fsdp and ranks == 1:
            raise ValueError("no-fsdp: one process has whole weights anyway: drop it")
    if nproc is not None and nproc > 1:
        _launch(nproc, options, given, kept)
    elif alone:
        try:
            with errors_in_a_line(*EXPECTED):
                train(None, options, kept)
        except Terminated as end:
            make_console(stderr=options.output.json).print(str(end), markup=False)
            raise typer.Exit(EXIT_CODE) from end
    else:
        _work(options, given, None)


def _check_workers(nproc: int, place: Place) -> None:
    if nproc < 1:
        raise ValueError(f"nproc: {nproc} must be at least 1")
    if place.world_size > 1:
        raise ValueError(
            f"nproc: {nproc} under torchrun, which has started {place.world_size} workers: drop "
            f"one of the two"
        )


def _launch(nproc: int, options: TrainOptions, given: Collection[str], kept: Kept | None) -> None:
    """Starts workers on this host and waits for them. A worker that fails has said why."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # tracebacks of processes that ended
    try:
        elastic_launch(config, _work)(options, given, kept)
    except SignalException as error:  # the workers have said what they did
        raise typer.Exit(128 + error.sigval) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == EXIT_CODE:
            raise typer.Exit(EXIT_CODE) from error
        if failure.exitcode < 0:  # it could not say so itself
            console = make_console(stderr=True)
            console.print(f"error: rank {rank} was ended by {failure.signal_name()}", style="red")
        raise typer.Exit(1) from error


def _work(options: TrainOptions, given: Collection[str], kept: Kept | None) -> None:
    """Runs as one of the workers."""
    place, problem, end = Place.of_environment(), None, None
    if kept is None and options.output.resume is not None:
        try:
            kept = keep(options, given, place.world_size)
            options = kept.options
        except ValueError as error:
            problem = error
    on_gpu = options.numerics.device != "cpu" and torch.cuda.is_available()
    timeout = options.ranks.timeout
    with meeting(place, on_gpu, timeout, *EXPECTED):
        if problem is not None:
            raise problem
        versions = {"torch": torch.__version__, "on a GPU": on_gpu}
        check_equal({**flat(options), **versions}, _SAME)
        layout = layout_of(place.world_size, **options.layout)
        device = _device(options.numerics.device, place)
        try:
            workers = Workers.on(layout, device, timeout, fsdp=options.ranks.fsdp)
            train(workers, options, kept)
        except Terminated as terminated:
            end = terminated
    if end is not None:
        if place.rank == 0:
            make_console(stderr=options.output.json).print(str(end), markup=False)
        sys.exit(EXIT_CODE)


def _device(name: str | None, place: Place) -> torch.device:
    """The CPU, or the GPU of this rank."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"device: {name!r} on several ranks, each of which takes its own: drop it")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name is None and not count):
        return torch.device("cpu")
    if place.local_rank >= count:
        raise ValueError(
            f"device: there are {count} GPUs here, and more workers: lower --nproc-per-node, or "
            f"use --device cpu"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device
