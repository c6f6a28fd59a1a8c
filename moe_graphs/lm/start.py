"""How ``moe-graphs train`` becomes a run: on this process, as one of torchrun's workers, or on
workers that it starts as torchrun does."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

import torch
import typer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_graphs.lm import train_command
from moe_graphs.lm.workers import Place, Workers, check_equal, layout_of, meeting
from moe_graphs.terminal import errors_in_a_line, make_console

_SAME = "start all of them with the same command"


def start(
    *,
    nproc: int | None,
    timeout: float,
    fsdp: bool,
    dp_replicate: int | None,
    dp_shard: int | None,
    tp: int | None,
    cp: int | None,
    ep: int | None,
    pp: int | None,
    layers_per_group: int | None,
    **options: Any,
) -> None:
    """The options of the command line, under the names they have there."""
    degrees = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "cp": cp, "ep": ep,
               "pp": pp, "layers_per_group": layers_per_group}  # fmt: skip
    with errors_in_a_line():
        place = Place.of_environment()
        if not timeout > 0:
            raise ValueError(f"timeout: {timeout} seconds must be above 0")
        if nproc is not None:
            _check_workers(nproc, place)
            layout_of(nproc, **degrees)
        elif place.world_size == 1:
            layout_of(1, **degrees)
        if not fsdp and (nproc or place.world_size) == 1:
            raise ValueError("no-fsdp: one process has whole weights anyway: drop it")
    if nproc is not None and nproc > 1:
        _launch(nproc, degrees, timeout, fsdp, options)
    elif nproc == 1 or place.world_size == 1:
        with errors_in_a_line(*train_command.EXPECTED):
            train_command.train(None, **options)
    else:
        _work(degrees, timeout, fsdp, options)


def _check_workers(nproc: int, place: Place) -> None:
    if nproc < 1:
        raise ValueError(f"nproc: {nproc} must be at least 1")
    if place.world_size > 1:
        raise ValueError(
            f"nproc: {nproc} under torchrun, which has started {place.world_size} workers: drop "
            f"one of the two"
        )


def _launch(
    nproc: int, degrees: dict[str, int | None], timeout: float, fsdp: bool, options: Any
) -> None:
    """Waits for workers of this host. One that fails has said why."""
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
        elastic_launch(config, _work)(degrees, timeout, fsdp, options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            console = make_console(stderr=True)
            console.print(f"error: rank {rank} was ended by {failure.signal_name()}", style="red")
        raise typer.Exit(1) from error


def _work(
    degrees: dict[str, int | None], timeout: float, fsdp: bool, options: dict[str, Any]
) -> None:
    """As one of the workers."""
    place = Place.of_environment()
    on_gpu = options["device"] != "cpu" and torch.cuda.is_available()
    with meeting(place, on_gpu, timeout, *train_command.EXPECTED):
        versions = {"torch": torch.__version__, "on a GPU": on_gpu}
        check_equal({**options, **degrees, **versions, "fsdp": fsdp}, _SAME)
        layout = layout_of(place.world_size, **degrees)
        device = _device(options["device"], place)
        train_command.train(Workers.on(layout, device, timeout, fsdp=fsdp), **options)


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
