"""The processes of a run that torchrun has started: how they meet, share a batch, and end.

B sequences, S sequence length, N windows.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from moe_graphs.lm.fresh_store import fresh_store
from moe_graphs.parallel import ParallelConfig, make_mesh
from moe_graphs.parallel.context_parallel import part_of_sequences
from moe_graphs.parallel.mesh import data_mesh, loss_mesh
from moe_graphs.registry import DEGREES
from moe_graphs.terminal import error_line

_A_MOMENT = datetime.timedelta(seconds=5)
_FAILURES = "moe_graphs: how many ranks have failed"  # the key in the store
# Words in gloo's errors if another rank is the cause; these errors have no class of their own.
_OF_OTHERS = ("onnection", "Timed out waiting")
_GONE = "another rank is gone, or did not come in time"
# After the timeout NCCL's watchdog waits four times as long before it ends a rank, so that all
# ranks can write their flight recorders (a second or two). With torch's own 15 s that is a minute.
_DUMP_WAIT, _DUMP_MILLISECONDS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "2500"


@dataclass(frozen=True)
class Place:
    """The place of this process among the workers, by torchrun's environment variables.

    Attributes:
        local_rank: rank on this host.
    """

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def of_environment(cls) -> Place:
        """Reads the environment; without torchrun this is a process alone.

        Raises:
            ValueError: if there are several processes and torchrun has not started this one.
        """
        size = os.environ.get("WORLD_SIZE", "1")
        if size == "1":
            return cls(0, 0, 1)
        names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {size} and {', '.join(missing)} not set: start several ranks by "
                f"torchrun -m moe_graphs train, or by moe-graphs train --nproc"
            )
        return cls(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(size))


def agent() -> str:
    """A text that differs for different launches of torchrun on this host: its name and process."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{name} {socket.gethostname()} {parent} {began}"


@dataclass(frozen=True)
class Workers:
    """All ranks of a run, laid out on a mesh. All ranks call a method that has collectives.

    Attributes:
        on_hosts: a gloo group of all ranks, for values that travel between hosts.
        agents: per rank, the launch of torchrun that has started it.
        fsdp: whether FSDP2 shards weights. If not, all ranks have whole weights, but share experts
            (``replicate``).
        watch: limits the waits for this rank's GPU; None on CPUs, where gloo has the limit.
    """

    layout: ParallelConfig
    mesh: DeviceMesh
    device: torch.device
    on_hosts: dist.ProcessGroup
    agents: tuple[str, ...] = ()
    fsdp: bool = True
    watch: DeviceWatch | None = None

    @classmethod
    def on(
        cls,
        layout: ParallelConfig,
        device: torch.device,
        seconds: float = 600.0,
        *,
        fsdp: bool = True,
    ) -> Workers:
        """Makes workers on the initialised process group. ``seconds`` is as in ``meeting``."""
        mesh = make_mesh(layout, device.type)
        on_hosts = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))
        watch = DeviceWatch(seconds, partial(_late, seconds)) if device.type == "cuda" else None
        workers = cls(layout, mesh, device, on_hosts, fsdp=fsdp, watch=watch)
        return replace(workers, agents=tuple(workers.gather(agent())))

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Context around reads that wait for the GPU, and so for the other ranks."""
        return contextlib.nullcontext() if self.watch is None else self.watch.waiting()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def count(self) -> int:
        return dist.get_world_size()

    @cached_property
    def data(self) -> DeviceMesh:
        """The ranks with batches of their own."""
        return data_mesh(self.mesh)

    @cached_property
    def loss(self) -> DeviceMesh:
        """The ranks with tokens of their own."""
        return loss_mesh(self.mesh)

    def part_of(self, windows_BS: Tensor, microbatches: int) -> Tensor:
        """The rows of this rank: its share of every microbatch of one process.

        All ranks together see the batch of one process, in its order. With context parallelism a
        rank gets its part of these sequences, and the last target of a part is the first input of
        the next one.
        """
        ranks, rank = self.data.size(), self.data.get_local_rank()
        shares = [part.chunk(ranks)[rank] for part in windows_BS.chunk(microbatches)]
        return part_of_sequences(torch.cat(shares), self._sharing, overlap=1)

    def held_out_part(
        self, inputs_NS: Tensor, targets_NS: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        """The windows of this rank, or with context parallelism its part of them.

        Every rank gets as many windows, in whole batches of ``rows``: windows that do not count
        fill them up.
        """
        ranks, rank = self.data.size(), self.data.get_local_rank()
        missing = -len(inputs_NS) % (ranks * rows)
        inputs_NS = torch.nn.functional.pad(inputs_NS, (0, 0, 0, missing))
        targets_NS = torch.nn.functional.pad(targets_NS, (0, 0, 0, missing), value=-100)
        pair = inputs_NS[rank::ranks], targets_NS[rank::ranks]
        inputs_NS, targets_NS = (part_of_sequences(each, self._sharing) for each in pair)
        return inputs_NS, targets_NS

    @cached_property
    def _sharing(self) -> dist.ProcessGroup:
        """Ranks that share the sequences of this one."""
        return self.mesh["cp"].get_group()

    @property
    def group(self) -> dist.ProcessGroup:
        """Group of the ranks with tokens of their own, to sum over."""
        return self.loss.get_group()

    @property
    def stage_group(self) -> dist.ProcessGroup:
        """Group of the ranks of a pipeline that compute the same batches."""
        return self.mesh["pp"].get_group()

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the ranks that have tokens of their own; in a pipeline over the stages, too."""
        values = values.clone()
        dist.all_reduce(values, group=self.group)
        if self.layout.pp > 1:
            dist.all_reduce(values, group=self.stage_group)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """Means over the ranks that have tokens of their own, of values that only one stage has."""
        return self.sum(values) / self.loss.size()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order. Any value that can be pickled is allowed."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.on_hosts)
        return found

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Calls a function on rank 0; all ranks return its result, or raise its error."""
        value = error = None
        if self.rank == 0:
            try:
                value = function()
            except Exception as raised:
                error = raised
        value, error = self.gather((value, error))[0]
        if error is not None:
            raise error
        return value

    def seed(self, seed: int, step: int = 0) -> None:
        """Seeds this rank's random numbers, which no other rank or step shares."""
        number = self.mesh["pp"].get_local_rank() * self.loss.size() + self.loss.get_local_rank()
        # A string seeds by its hash.
        drawn = random.Random(f"{seed} {number} {step}").getrandbits(63)
        torch.manual_seed(drawn)

    def described(self) -> str:
        """The degrees above 1 and the number of ranks, in words."""
        found = {k: v for k, v in asdict(self.layout).items() if v is not True and v != 1}
        degrees = ", ".join(f"{name} {degree}" for name, degree in found.items())
        return f"{degrees} on {self.count} ranks{'' if self.fsdp else ', without FSDP2'}"


def check_equal(values: Mapping[str, Any], remedy: str) -> None:
    """Checks that all ranks of the process group have the same values. All of them call it.

    Raises:
        ValueError: on every rank, with the first differences of the first rank that has others.
    """
    here = {name: str(value) for name, value in values.items()}
    every: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, here)
    first, nothing = every[0], "not given"
    for rank, there in enumerate(every):
        names = [name for name in {**first, **there} if first.get(name) != there.get(name)]
        if names:
            what = "; ".join(
                f"{name} is {first.get(name, nothing)} on rank 0 and {there.get(name, nothing)} on "
                f"rank {rank}"
                for name in names[:5]
            )
            raise ValueError(f"the ranks do not agree: {what}: {remedy}")


def is_first(workers: Workers | None) -> bool:
    """Whether this process speaks for all."""
    return workers is None or workers.rank == 0


def on_first(workers: Workers | None, function: Callable[[], Any]) -> Any:
    """Calls ``Workers.on_first``, or the function itself in a process alone."""
    return function() if workers is None else workers.on_first(function)


def layout_of(world_size: int, **given: Any) -> ParallelConfig:
    """The layout of these degrees; ``dp_shard`` takes what is left.

    Raises:
        ValueError: if the product of the degrees is not the number of ranks, or if they do not fit.
    """
    factors = {name: n for name, n in given.items() if name in DEGREES and DEGREES[name].is_factor}
    others = math.prod(max(degree, 1) for degree in factors.values())
    factors.setdefault("dp_shard", max(1, world_size // others))
    product = math.prod(factors.values())
    # This check comes first, because the layout would say that ep does not fit.
    if product != world_size:
        found = " * ".join(f"{name} ({n})" for name, n in sorted(factors.items()))
        raise ValueError(
            f"{found} = {product}, and there {_are(world_size)}: their product must be the number "
            f"of ranks (torchrun --nproc-per-node, or --nproc); ep is taken out of dp_shard * cp"
        )
    return ParallelConfig(**{**given, **factors})


def _are(world_size: int) -> str:
    return "is 1 rank" if world_size == 1 else f"are {world_size} ranks"


@contextlib.contextmanager
def meeting(
    place: Place, on_gpu: bool, seconds: float, *expected: type[Exception]
) -> Iterator[None]:
    """Context with the process group of torchrun's workers.

    A rank that fails ends at once, and only its error is printed; an error that is ``expected`` is
    printed in one line. Errors that others get then (closed connections) are a consequence. So
    nothing waits for a group that is broken.

    Args:
        seconds: time after which a rank gives up to wait for the others, also in groups that are
            made in the context. NCCL's watchdog then ends the process ten seconds later, if the
            environment has no other ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``.
    """
    patience = datetime.timedelta(seconds=seconds)
    os.environ.setdefault(_DUMP_WAIT, _DUMP_MILLISECONDS)
    store, rank, size = next(iter(rendezvous("env://", timeout=patience)))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        store = fresh_store(store, rank, size, patience)
        with _patience_of_groups(patience):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=patience
            )
            yield
        dist.destroy_process_group()
    except BaseException as error:
        _report(error, store, place, expected)
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads that write a checkpoint, and communicators, would wait for ranks that are gone.
        os._exit(1)


def _late(seconds: float) -> None:
    """Ends this rank, whose GPU waits for another one in a graph."""
    print(
        f"error: rank {dist.get_rank()}: {_GONE}: its collectives in a graph did not end within "
        f"{seconds:g} s",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


class DeviceWatch:
    """Thread that ends this process if it waits too long for its GPU.

    NCCL's watchdog does not know of collectives in a graph. A rank whose neighbour hangs waits for
    its replays for ever, so the host's own wait has to have a limit.

    Args:
        seconds: the longest wait within ``waiting``.
        give_up: called once after a longer one, in the thread.
    """

    def __init__(self, seconds: float, give_up: Callable[[], object]) -> None:
        self._seconds, self._give_up = seconds, give_up
        self._until: float | None = None
        threading.Thread(target=self._watch, name="moe_graphs device watch", daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context around reads that wait for the GPU."""
        self._until = time.monotonic() + self._seconds
        try:
            yield
        finally:
            self._until = None

    def _watch(self) -> None:
        while (until := self._until) is None or time.monotonic() < until:
            time.sleep(min(1.0, self._seconds / 10))
        self._give_up()


@contextlib.contextmanager
def _patience_of_groups(patience: datetime.timedelta) -> Iterator[None]:
    """Context in which new groups get this timeout, if they are given none.

    torch would wait half an hour in the groups of a mesh's dimensions, whatever timeout the first
    group was given.
    """
    c10d = dist.distributed_c10d
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(c10d, name) for name in names}
    vars(c10d).update(dict.fromkeys(names, patience))
    try:
        yield
    finally:
        vars(c10d).update(before)


def _report(
    error: BaseException, store: Store, place: Place, expected: tuple[type[Exception], ...]
) -> None:
    """Prints the error on standard error, if this rank is the first that failed."""
    if isinstance(error, KeyboardInterrupt):
        return
    try:
        store.set_timeout(_A_MOMENT)
        if store.add(_FAILURES, 1) > 1:
            return
    except RuntimeError:  # the host of the store is gone, and has said why
        return
    if isinstance(error, expected):
        line = error_line(error)
        print(f"error: rank {place.rank}: {line}", file=sys.stderr)
    elif isinstance(error, dist.DistError) or any(map(str(error).__contains__, _OF_OTHERS)):
        line = " ".join(str(error).split())
        print(
            f"error: rank {place.rank}: {_GONE}: {line}",
            file=sys.stderr,
        )
    else:
        print(f"error: rank {place.rank}:\n{''.join(traceback.format_exception(error))}",
              file=sys.stderr)  # fmt: skip
