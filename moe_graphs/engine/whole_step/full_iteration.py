"""A whole training or validation step as one graph.

    def train_step(batch):
        loss = model(batch["tokens"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = FullIteration(train_step, model=model, optimizer=optimizer)
    for batch in StaticLoader(loader, device):
        loss = step(batch)          # eager three times, captured at the fourth, then replayed
        scheduler.step()            # lr is a tensor, changed in place

The function is recorded as it is: whatever it does with gradients and optimizer, a replay does.
For validation wrap a second function; both may be called in any order.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from moe_graphs.config import ON_CAPTURE_ERROR, ON_MISMATCH, check_option
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.backends.backend import Resources
from moe_graphs.engine.guards import torch_state
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.ranks import Ranks
from moe_graphs.engine.report import FallbackWarning, PrintedReport, occupancy_of
from moe_graphs.engine.tensors import Mismatch, owned
from moe_graphs.engine.verify import warn
from moe_graphs.engine.whole_step import fsdp
from moe_graphs.engine.whole_step.capture_step import record_step
from moe_graphs.engine.whole_step.optimizers import check_capturable_flags
from moe_graphs.engine.whole_step.recorded_step import RecordedStep, StepDefinition
from moe_graphs.errors import CaptureError, GraphError
from moe_graphs.portable_launches import portable_launches

_NAME = "full iteration"
BatchT = TypeVar("BatchT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class FullIterationReport(PrintedReport):
    """Report of a whole step; ``print`` shows a table, ``explain()`` what its columns mean.

    Attributes:
    state: "warmup", "captured", "capture_failed", "differs_from_eager" or "released".
    eager_calls: reason -> number of calls that ran eagerly.
    details: reason -> what the last such call differed in, and what to do.
    kernels: in the graph (ops on the CPU recorder); None if not captured or not countable.
    static_bytes: inputs, outputs and gradients that the graph reads and writes in place.
    pool_bytes: device memory held by the graph; 0 on the CPU.
    capture_seconds: of all captures together.
    refused: why it is not replayed, though it was captured, or None.
    not_reproducible: whether eager steps differ from one another, so that replays cannot be equal.
    not_guarded: what the step's Python can have read and nobody compares.
    occupancy: as ``engine.report.occupancy_of`` the model: rows that were asked for, and there.
    portable_launches: as in ``engine.report.Report``.
    off_because: why there is no graph, after a capture that failed.
    """

    backend: str
    state: str
    captures: int
    replayed: int
    eager_calls: dict[str, int]
    kernels: int | None
    static_bytes: int
    pool_bytes: int
    capture_seconds: float
    refused: str | None = None
    not_reproducible: bool = False
    not_guarded: tuple[str, ...] = ()
    occupancy: dict[str, tuple[int, int]] = field(default_factory=dict)
    portable_launches: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    off_because: str | None = None


class FullIteration(Generic[BatchT, ResultT]):
    """Calls ``step(batch)``, from the ``warmup_steps + 1``-th call on by replaying one graph.

    Outputs are copies of your own, without autograd history. Gradients: ``.grad`` is set to the
    graph's memory after each replay; a tensor that you have kept from there gets memory of its own
    before the next one writes again, and while you hold a view of it calls run eagerly.
    ``zero_grad()`` in any form, inside or outside the step, is right. If the step was captured
    without ``.grad``, a call that finds one is a mismatch, since the graph would not add to it.

    Ranks that communicate in the step (DDP, FSDP2, dispatchers, collectives of its own) must make
    the same calls; a capture succeeds on all or on none, and with another ``on_mismatch`` than
    "eager" ranks agree before each call that it matches.

    Args:
        step: takes one pytree (tensors on the model's device, constants) and returns one: forward
            and backward of all microbatches, the optimizer's update if it is to be in the graph.
        model: the module, or several of them (pipeline stages).
        optimizer: the one that ``step`` updates with, if it does.
        state: what else ``step`` changes or reads: scaler, averages, tensors, a ``DeviceStep``.
        generators: what ``step`` draws random numbers from, besides the default ones.
        on_mismatch: what a call does that differs from the captured one (shapes, keys, constants,
            flags, hyperparameters, addresses): run eagerly, counted in ``report()`` ("eager"; the
            third one of a reason is a ``GraphWarning``), raise ``GraphError`` ("error"), or
            capture again ("recapture").
        on_capture_error: what a call does whose capture fails: warn, run eagerly as all later ones
            ("eager"), or raise ``CaptureError`` ("error"). ``capture(batch)`` raises in any case.
        agree: ranks agree before each call with "eager", too: all replay it or none does, for steps
            that communicate in another order where they run eagerly.
        verify: compare the first replay bit for bit with an eager step from the same state.
        stream: the one to capture on; with DDP, the one that it was built on.

    Raises:
        ValueError: for arguments that do not fit.
    """

    def __init__(
        self,
        step: Callable[[BatchT], ResultT],
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        state: Sequence[Any] = (),
        generators: Sequence[torch.Generator] = (),
        warmup_steps: int = 3,
        on_mismatch: str = "eager",
        on_capture_error: str = "eager",
        agree: bool = False,
        verify: bool = True,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        check_option("on_mismatch", on_mismatch, ON_MISMATCH)
        check_option("on_capture_error", on_capture_error, ON_CAPTURE_ERROR)
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps: got {warmup_steps}, must be at least 1")
        if not isinstance(model, nn.Module):
            model = nn.ModuleList(model)
        if optimizer is not None:
            check_capturable_flags(optimizer)
        backend = backend_for((*model.parameters(), *model.buffers()), generators, stream)
        self._definition = StepDefinition(step, model, optimizer, tuple(state), backend)
        self._has_stream = stream is not None
        self._ranks = Ranks(model)
        self._warmup_steps, self._on_mismatch = warmup_steps, on_mismatch
        self._on_capture_error = on_capture_error
        self._off_because: str | None = None
        self._agrees = agree or on_mismatch != "eager"
        self._verify = verify
        self._reads: AccessedNames | None = None
        self._refused: str | None = None
        self._not_reproducible = False
        self.state = "warmup"
        self._captures = self._replayed = 0
        self._misses = FallbackWarning()
        self._eager_calls: Counter[str] = Counter()
        self._capture_seconds = 0.0
        self._resources = Resources[RecordedStep](backend)
        self._finalizer = weakref.finalize(self, self._resources.release)

    def __call__(self, batch: BatchT) -> ResultT:
        """Like ``step(batch)``.

        Raises:
            CaptureError: the capture failed, and ``on_capture_error="error"``: nothing has
                happened, and calls run eagerly from now on. Call again with this batch.
            GraphError: this call differs from the captured one, and ``on_mismatch="error"``.
        """
        if self.state == "warmup":
            if self._eager_calls["warmup"] < self._warmup_steps:
                return self._warmup(batch)
            mode = torch_state.reason_of_modes()
            if self._ranks.any(mode is not None):  # a capture is of all ranks
                return self._eager(batch, mode or "another_rank")
            self._try_to_capture(batch)
        if self.state != "captured":
            return self._eager(batch, self.state)
        leaves, structure = pytree.tree_flatten(batch)
        mismatch = self._recorded.mismatch(batch, leaves, structure)
        if self._agrees:
            mismatch = self._ranks.agree(mismatch)
        if mismatch is not None:
            if self._on_mismatch != "recapture":
                return self._mismatched(mismatch, batch)
            self._try_to_capture(batch)
            if self.state != "captured":
                return self._eager(batch, self.state)
        self._replayed += 1
        return self._recorded.replay(leaves)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a part of the step that a framework runs itself, after an eager call.

        What the Python inside reads is a part of what a graph depends on.
        """
        is_last = self.state == "warmup" and self._eager_calls["warmup"] == self._warmup_steps
        if not is_last or self._reads is None:
            yield
            return
        with AccessedNames(in_step=True) as accessed:
            yield
        self._reads = AccessedNames.together(self._reads, accessed)

    def capture(self, batch: BatchT) -> None:
        """Captures now, ahead of the first call, or again.

        Parameters, gradients, buffers, optimizer, ``state`` and random numbers are as before.

        Raises:
            CaptureError: the capture failed, whatever ``on_capture_error`` says, since a capture
                was asked for. Calls run eagerly.
        """
        if self.state == "released":
            raise GraphError("full iteration: it was released: make a new one")
        self._capture(batch, trial_runs=self._warmup_steps)

    def release(self) -> None:
        """Gives the graph's memory back; later calls run eagerly. Idempotent.

        Call it before ``destroy_process_group()``: a graph that holds collectives keeps it waiting.
        """
        self.state = "released"
        self._finalizer()

    def __enter__(self) -> FullIteration[BatchT, ResultT]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def report(self) -> FullIterationReport:
        """Report of what happened so far. It waits for the device."""
        recorded, backend = self._resources.captured, self._definition.backend
        return FullIterationReport(
            backend=backend.name,
            state=self.state,
            captures=self._captures,
            replayed=self._replayed,
            eager_calls=dict(self._eager_calls),
            kernels=recorded.graph.kernels if recorded else None,
            static_bytes=recorded.static_bytes() if recorded else 0,
            pool_bytes=backend.pool_bytes(recorded.pool) if recorded else 0,
            capture_seconds=self._capture_seconds,
            refused=self._refused,
            not_reproducible=self._not_reproducible,
            not_guarded=tuple(recorded.guards.not_followed) if recorded else (),
            occupancy=occupancy_of(self._definition.model),
            portable_launches=portable_launches(),
            details={word: text for (_, word), text in self._misses.details.items()},
            off_because=self._off_because,
        )

    @property
    def _recorded(self) -> RecordedStep:
        assert self._resources.captured is not None
        return self._resources.captured

    def _warmup(self, batch: Any) -> Any:
        """The last of these calls is watched: what its Python reads is what a graph depends on."""
        if self._eager_calls["warmup"] < self._warmup_steps - 1:
            return self._eager(batch, "warmup")
        with (
            torch.autograd.set_multithreading_enabled(False),
            AccessedNames(in_step=True) as accessed,
        ):
            result = self._eager(batch, "warmup")
        self._reads = accessed
        return result

    def _eager(self, batch: Any, reason: str, message: str | None = None) -> Any:
        self._eager_calls[reason] += 1
        self._misses.ran_eagerly(_NAME, reason, message)
        # DDP accumulates on the stream it was built on: elsewhere torch warns of the mismatch.
        given = self._has_stream
        with self._definition.backend.on_stream() if given else contextlib.nullcontext():
            return owned(self._definition.step(batch))

    def _mismatched(self, mismatch: Mismatch, batch: Any) -> Any:
        if self._on_mismatch == "error":
            raise GraphError(f"full iteration: {mismatch.message}")
        return self._eager(batch, mismatch.reason, mismatch.message)

    def _try_to_capture(self, batch: Any) -> None:
        try:
            self._capture(batch, trial_runs=2)
        except CaptureError as error:
            if self._on_capture_error == "error" or self.state != "capture_failed":
                raise  # where a replay differs from eager, ``on_mismatch`` decides
            warn(str(error))

    def _capture(self, batch: Any, trial_runs: int) -> None:
        started = time.perf_counter()
        self._resources.release()
        on_cuda = self._definition.backend.device.type == "cuda"
        if on_cuda and fsdp.wrappers(self._definition.model):
            eager_forwards = sum(self._eager_calls.values())
            trial_runs = max(trial_runs, fsdp.EAGER_FORWARDS - eager_forwards)
        self._off_because = None
        self.state = "captured"  # as replays find it, where the step looks at this object
        try:
            recorded, verifier = record_step(
                self._definition,
                batch,
                self._reads,
                trial_runs=trial_runs,
                verify=self._verify,
                ranks=self._ranks,
            )
        except BaseException as error:
            self.state, self._off_because = "capture_failed", str(error)
            raise
        self._captures, self._misses = self._captures + 1, FallbackWarning()
        self._capture_seconds += time.perf_counter() - started
        if verifier is not None and verifier.difference is not None:
            recorded.release()
            self._definition.backend.release()
            self._differs(f"its replay differs from eager: {verifier.difference}")
            return
        self._resources.captured = recorded
        self._not_reproducible = verifier is not None and verifier.not_reproducible

    def _differs(self, message: str) -> None:
        """Replays do not compute what eager does: it runs eagerly from now on."""
        self.state, self._refused = "differs_from_eager", message
        if self._on_mismatch == "error":
            raise CaptureError(f"full iteration: {message}; it runs eagerly now")
        warn(f"full iteration stays eager: {message}")
