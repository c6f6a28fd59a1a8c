"""The end of a run at SIGTERM: after a step, the same one on all ranks, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from moe_graphs.lm.workers import Workers

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code that a shell sees of a process that SIGTERM has ended."""


class Terminated(Exception):
    """SIGTERM has ended the run after a step, and its checkpoint is written."""

    def __init__(self, step: int, out: Path, *, saved: bool) -> None:
        self.step, self.out, self.saved = step, out, saved

    def __str__(self) -> str:
        if not self.saved:
            return f"SIGTERM: ended after step {self.step}, without a checkpoint (--no-save)"
        return (
            f"SIGTERM: ended after step {self.step}; its checkpoint is written: go on with "
            f"--resume {self.out} --out {self.out}"
        )


class Termination:
    """The question after every step: has some rank received SIGTERM?

    Ranks exchange the answer while the next step runs, so that no step waits for it. Therefore
    several ranks end one step later than one process does.
    """

    def __init__(self, workers: Workers | None) -> None:
        self._workers = workers
        self._received = False
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        self._received = True

    def is_due(self) -> bool:
        """Whether the run ends here. All ranks ask after every step, and get one answer."""
        if self._workers is None:
            return self._received
        agreed = self.finish()
        flag = torch.tensor(int(self._received))
        group = self._workers.on_hosts
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        self._exchange = flag, work
        return agreed

    def finish(self) -> bool:
        """Waits for the exchange that is on its way, and returns its answer."""
        if self._exchange is None:
            return False
        (flag, work), self._exchange = self._exchange, None
        work.wait()
        return bool(flag)


@contextlib.contextmanager
def termination(workers: Workers | None) -> Iterator[Termination]:
    """Context in which SIGTERM is noted and ends nothing by itself."""
    found = Termination(workers)
    if threading.current_thread() is not threading.main_thread():  # it alone may handle signals
        yield found
        found.finish()
        return
    before = signal.signal(signal.SIGTERM, found.note)
    try:
        yield found
        found.finish()
    finally:
        signal.signal(signal.SIGTERM, before)
