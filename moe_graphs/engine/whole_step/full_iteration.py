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

The function is recorded as it is: a replay does with gradients and optimizer whatever the function
does. For validation wrap a second function; both may be called in any order.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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

from moe_graphs.config import (
    ON_CAPTURE_ERROR,
    ON_MISMATCH,
    check_option,
)
from moe_graphs.engine.audit import NEVER, Audits, UndoneError
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.backends.backend import Resources
from moe_graphs.engine.guards import torch_state
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.nonfinite import find_nonfinite
from moe_graphs.engine.ranks import Ranks
from moe_graphs.engine.report import FallbackWarning, PrintedReport, occupancy_of
from moe_graphs.engine.side_outputs import Left
from moe_graphs.engine.tensors import Mismatch, owned
from moe_graphs.engine.verify import warn
from moe_graphs.engine.whole_step import fsdp
from moe_graphs.engine.whole_step.audited_step import audited_step, missing_bytes, why_not
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
        state: "warmup", "captured", "capture_failed", "differs_from_eager", "found_by_audit" or
            "released".
        captures: number of captures. An audit that does not fit beside the graph needs a new one.
        audited: number of steps that ran eagerly in place of a replay, to be compared with the
            capture.
        eager_calls: reason -> number of calls that ran eagerly.
        details: reason -> what differed in the last such call, and what to do.
        kernels: number of kernels in the graph (operations on the CPU recorder); None if nothing is
            captured or they could not be counted.
        static_bytes: inputs, outputs and gradients that the graph reads and writes in place.
        pool_bytes: device memory held by the graph; 0 on the CPU.
        capture_seconds: time of all captures together.
        refused: why a captured step is not replayed, or None.
        not_reproducible: whether eager steps differ from one another; replays cannot be equal then.
        not_guarded: values that the step's Python can have read and that no guard compares.
        occupancy: ``engine.report.occupancy_of`` the model: rows that were asked for, and rows that
            there are.
        portable_launches: as in ``engine.report.Report``.
        off_because: why there is no graph, after a capture that failed.
        audits_passed, audit_seconds, audits_missed_bytes: as in ``engine.report.Report``.
        audits_skipped: reason -> number of audits that could not be made: "memory" (an eager step
            does not fit beside the graph, and a new capture would have taken more than the share of
            the time; or memory ran out), "fp8" (such steps are never audited), "other_gradients" (a
            ``.grad`` was missing that the capture found), "mismatch" (the call was not to be
            replayed), "another_rank" (it could not be made there), "often" (models are switched or
            loaded too often for an audit each time).
        last_audited_step: number of the last call whose audit passed; None before the first.
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
    audited: int = 0
    audits_passed: int = 0
    audit_seconds: float = 0.0
    audits_skipped: dict[str, int] = field(default_factory=dict)
    audits_missed_bytes: int = 0
    last_audited_step: int | None = None


class FullIteration(Generic[BatchT, ResultT]):
    """A step function whose calls are replayed as one graph once ``warmup_steps`` ran eagerly.

    Outputs are copies of your own, without autograd history. After each replay ``.grad`` is the
    graph's memory. If you have kept a gradient tensor, it gets memory of its own before the graph
    writes again. While you hold a view of one, calls run eagerly. ``zero_grad()`` in any form,
    inside or outside the step, is right. If the step was captured while ``.grad`` was None, a call
    that finds a ``.grad`` is a mismatch, since the graph would not add to it.

    Ranks that communicate in the step (DDP, FSDP2, dispatchers, collectives of the step's own) must
    make the same calls. A capture succeeds on all ranks or on none. With ``on_mismatch`` other than
    "eager", ranks agree before each call that it matches.

    Args:
        step: takes one pytree (tensors on the model's device, constants) and returns one. It does
            forward and backward of all microbatches, and the optimizer's update if that is to be in
            the graph.
        model: the module, or several of them (pipeline stages).
        optimizer: the optimizer that ``step`` updates with, if it does.
        state: other objects that ``step`` changes or reads: scaler, averages, tensors, a
            ``DeviceStep``.
        generators: random number generators that ``step`` draws from, besides the default ones.
        on_mismatch: what happens to a call that differs from the captured one (shapes, keys,
            constants, flags, hyperparameters, addresses). "eager" runs it eagerly, counts it in
            ``report()``, and warns at the third one of a reason (``GraphWarning``); "error" raises
            a ``GraphError`` that names every difference; "recapture" captures again.
        on_capture_error: what happens if a capture fails. "eager" warns and runs this call and all
            later ones eagerly; "error" raises ``CaptureError``. ``capture(batch)`` raises in any
            case.
        agree: with "eager", too, ranks agree before each call: all replay it or none does. This is
            for steps whose communication has another order where they run eagerly.
        verify: compare the first replay bit for bit with an eager step from the same state.
        stream: the stream to capture on; with DDP, the stream that it was built on.
        audit_every: how often a step runs eagerly in place of its replay, to compare what it does
            with what was captured: "auto", a number of calls, or None, as in ``GraphConfig``.
        on_audit: what happens if an audit finds a difference: "eager" or "error", as in
            ``GraphConfig``.

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
        audit_every: int | str | None = "auto",
        on_audit: str = "eager",
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
        self._reads: AccessedNames | None = None  # by the last warm-up call
        self._peak = 0  # bytes that this call allocated at most; nobody counts them on a CPU
        self._refused: str | None = None
        self._not_reproducible = False
        self.state = "warmup"
        self._captures = self._replayed = self._audited = self._calls = 0
        self._audits = Audits(audit_every, on_audit, self._ranks)
        self._audit_due = NEVER
        self._gives_graph_up = False  # for an audit
        self._misses = FallbackWarning()
        self._eager_calls: Counter[str] = Counter()
        self._capture_seconds = 0.0
        self._resources = Resources[RecordedStep](backend)
        self._finalizer = weakref.finalize(self, self._resources.release)

    def __call__(self, batch: BatchT) -> ResultT:
        """Runs ``step(batch)``, by a replay if the call matches the captured step.

        Raises:
            CaptureError: if the capture failed, with ``on_capture_error="error"``. Nothing has
                happened, and calls run eagerly from now on. Call again with this batch.
            GraphError: if this call differs from the captured one, with ``on_mismatch="error"``.
        """
        self._calls += 1
        assigned = self._definition.assigned
        if assigned.deferred.now or assigned.deferred.waiting:
            assigned.deferred.poll()
        if self.state == "warmup":
            if self._eager_calls["warmup"] < self._warmup_steps and not self._gives_graph_up:
                return self._warmup(batch)
            mode = torch_state.reason_of_modes()
            if self._ranks.any(mode is not None):  # all ranks capture together
                return self._eager(batch, mode or "another_rank")
            self._try_to_capture(batch)
        if self.state != "captured":
            return self._eager(batch, self.state)
        given = assigned.given(batch) if assigned.places else batch
        leaves, structure = pytree.tree_flatten(given)
        mismatch = next(self._recorded.mismatches(given, leaves, structure), None)
        if self._agrees:
            mismatch = self._ranks.agree(mismatch)
        is_audited = self._is_audited(mismatch)
        if mismatch is not None:
            if self._on_mismatch == "error":
                others = self._recorded.mismatches(given, leaves, structure)
                raise mismatch.error("full iteration", others)
            if self._on_mismatch == "eager":
                return self._eager(batch, mismatch.reason, mismatch.message)
        if is_audited and (audited := self._audit(leaves, structure)) is not None:
            return audited[0]
        if mismatch is not None or self._gives_graph_up:
            self._try_to_capture(batch)
            if self.state != "captured":
                return self._eager(batch, self.state)
            leaves, structure = pytree.tree_flatten(self._definition.given(batch))
        self._replayed += 1
        result = self._recorded.replay(leaves)
        if type(result) is Left:
            result = assigned.take(result)
            assigned.deferred.poll()
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context around a part of the step that a framework runs by itself, after an eager call.

        The graph depends on what the Python inside reads, so that is watched, too.
        """
        is_last = self.state == "warmup" and self._eager_calls["warmup"] == self._warmup_steps
        if not is_last or self._reads is None:
            yield
            return
        with AccessedNames(in_step=True) as accessed:
            yield
        self._reads = AccessedNames.together(self._reads, accessed)

    def find_nonfinite(self, batch: BatchT) -> ResultT:
        """Runs ``step(batch)``; if it leaves a NaN or infinity, names the first operation of it.

        Call it in place of the step, to look for where a NaN comes from. It takes longer, because
        everything that the step may change is copied to the host first.

        Raises:
            NonFiniteError: with operation, module, line and the ranges of the inputs. The step has
                run again eagerly for that, and tensors are as before the step.
        """
        definition = self._definition
        return find_nonfinite(
            functools.partial(self, batch),
            functools.partial(definition.step, batch),
            model=definition.model,
            backend=definition.backend,
            optimizers=definition.optimizers(),
            state=definition.state,
            anywhere=self._ranks.any,
        )

    def capture(self, batch: BatchT) -> None:
        """Captures now, ahead of the first call, or again.

        Afterwards parameters, gradients, buffers, optimizer, ``state`` and random numbers are as
        before.

        Raises:
            CaptureError: if the capture failed, whatever ``on_capture_error`` says, because this
                method was called to capture. Calls run eagerly from now on.
        """
        if self.state == "released":
            raise GraphError("full iteration: it was released: make a new one")
        self._capture(batch, trial_runs=self._warmup_steps)

    def check(self) -> None:
        """Waits for the outcomes of all checks of values (``assert``) in replayed steps.

        Raises:
            CheckError: for the first one that has failed.
        """
        self._definition.assigned.deferred.poll(waiting=True)

    def audit_soon(self) -> None:
        """Lets the next step be audited, for instance before a save.

        All ranks call this before the same step. With ``audit_every=None`` nothing happens.
        """
        if self._audit_due != NEVER:
            self._audit_due = 0

    def release(self) -> None:
        """Frees the graph's memory; later calls run eagerly. Idempotent.

        Call it before ``destroy_process_group()``: a graph that holds collectives makes that call
        wait.
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
            audited=self._audited,
            **self._audits.reported(),
        )

    @property
    def _recorded(self) -> RecordedStep:
        assert self._resources.captured is not None
        return self._resources.captured

    def _warmup(self, batch: Any) -> Any:
        """Runs one call eagerly.

        The last warm-up call is watched, because a graph depends on what its Python reads.
        """
        if self._eager_calls["warmup"] < self._warmup_steps - 1:
            with self._definition.states_apart():
                return self._eager(batch, "warmup")
        if self._definition.backend.device.type == "cuda":
            gc.collect()  # what garbage frees within the call would be missing from its peak
        with (
            torch.autograd.set_multithreading_enabled(False),
            self._definition.backend.meter() as meter,
            AccessedNames(in_step=True) as accessed,
        ):
            result = self._eager(batch, "warmup")
        self._reads = accessed
        if self._warmup_steps > 1:  # the first update makes states, which last
            self._peak = meter.peak()
        return result

    def _eager(self, batch: Any, reason: str, message: str | None = None) -> Any:
        self._eager_calls[reason] += 1
        self._misses.ran_eagerly(_NAME, reason, message)
        with self._on_given_stream():
            return owned(self._definition.step(batch))

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
        self._audits.step, self._audits.schedules, self._audit_due = self._calls, 0, NEVER
        on_cuda = self._definition.backend.device.type == "cuda"
        if on_cuda and fsdp.wrappers(self._definition.model):
            eager_forwards = sum(self._eager_calls.values())
            trial_runs = max(trial_runs, fsdp.EAGER_FORWARDS - eager_forwards)
        self._off_because = None
        self.state = "captured"  # the step may look at this object, and replays find this state
        try:
            recorded, verifier = record_step(
                self._definition,
                batch,
                self._reads,
                peak=self._peak,
                trial_runs=trial_runs,
                verify=self._verify,
                ranks=self._ranks,
                audits=self._audits,
            )
        except BaseException as error:
            self.state, self._off_because = "capture_failed", str(error)
            raise
        self._definition.backend.make_room()  # comparisons leave memory in the allocator's cache
        self._captures, self._misses = self._captures + 1, FallbackWarning()
        seconds = time.perf_counter() - started
        self._capture_seconds += seconds
        if self._gives_graph_up:
            self._audits.seconds, self._gives_graph_up = self._audits.seconds + seconds, False
        if verifier is not None and verifier.difference is not None:
            recorded.release()
            self._definition.backend.release()
            self._differs(f"its replay differs from eager: {verifier.difference}")
            return
        self._resources.captured = recorded
        if recorded.audit is not None:
            recorded.audit.schedule.begin(self._calls)
            self._audit_due = recorded.audit.schedule.due
        self._not_reproducible = verifier is not None and verifier.not_reproducible

    def _is_audited(self, mismatch: Mismatch | None) -> bool:
        """Whether this call is audited, on all ranks. If it is due and cannot be, chooses another.

        Ranks that communicate are due at the same calls, because the schedule counts calls.
        """
        audit, is_alone = self._recorded.audit, self._ranks.group is None
        if audit is None:
            return False
        schedule = audit.schedule
        if self._audits.are_asked_for(
            self._calls, self._objects, lambda: [schedule]
        ) and schedule.soon(self._calls):
            self._audit_due = schedule.due
        if self._calls < self._audit_due or (is_alone and mismatch is not None):
            return False
        is_other = mismatch is not None
        reason = "mismatch" if is_other else why_not(self._definition, self._recorded)
        missing = without_graph = 0
        if reason is None:
            missing, without_graph = missing_bytes(self._definition, self._recorded)
        of_a_capture = self._capture_seconds / max(1, self._captures)
        fits = not missing or (not without_graph and schedule.affords(of_a_capture))
        is_blocked = reason is not None or not fits
        blocked, gives_up = self._ranks.highest([int(is_blocked), int(missing > 0)])
        if not blocked:
            self._gives_graph_up = bool(gives_up)
            return True
        if missing:
            self._audits.without_memory(missing)
        else:
            self._audits.skipped[reason or "another_rank"] += 1
        schedule.put_off(self._calls)
        self._audit_due = schedule.due
        return False

    def _objects(self) -> list[Any]:
        """The objects that, when they are switched or loaded, let the next step be audited."""
        return [*self._definition.model.modules(), *self._definition.optimizers()]

    def _audit(self, leaves: list[Any], structure: Any) -> tuple[Any, ...] | None:
        """Runs a step eagerly and compares it with the capture; returns its result in a tuple.

        Returns None if memory ran out. Everything is as before then, and the step may be replayed.
        If the graph is given up for the audit, the next step is captured again.
        """
        self._audits.step = self._calls
        recorded, result, missing = self._recorded, None, None
        audit = recorded.audit
        assert audit is not None
        started = time.perf_counter()
        if self._gives_graph_up:
            self._resources.release()
            self.state = "warmup"
        try:
            result, difference = self._run_audited(recorded, leaves, structure)
        except UndoneError as error:
            missing = error.missing
        if result is None:
            gc.collect()  # frames of the error may hold memory of the step
        self._definition.backend.make_room()  # no memory of an eager step is kept beside the graph
        seconds = time.perf_counter() - started
        self._audits.seconds += seconds
        audit.schedule.took(seconds)
        audit.schedule.audited(self._calls)
        self._audit_due = audit.schedule.due
        if result is None:
            self._audits.ran_out(_NAME, missing, warn)
            return None
        self._audited += 1
        if difference is None:
            self._audits.note_passed()
            audit.last = self._calls
            return result
        message = self._audits.message(difference, audit.last)
        self.state, self._refused = "found_by_audit", message
        self._resources.release()
        self._audits.found(_NAME, message, warn)
        return result

    def _run_audited(
        self, recorded: RecordedStep, leaves: list[Any], structure: Any
    ) -> tuple[tuple[Any, ...], str | None]:
        """The result of an audited step in a tuple, and the first difference on any rank."""
        is_alone = self._ranks.group is None  # other ranks cannot put their step back
        with self._on_given_stream():
            outputs, difference = audited_step(
                self._definition, recorded, leaves, structure, may_undo=is_alone
            )
            result = owned(self._definition.assigned.take(outputs))
        return (result,), self._ranks.first_of(difference)

    def _on_given_stream(self) -> contextlib.AbstractContextManager[None]:
        """DDP accumulates on the stream that it was built on; on another one torch warns."""
        given = self._has_stream
        return self._definition.backend.on_stream() if given else contextlib.nullcontext()

    def _differs(self, message: str) -> None:
        """Turns replays off, because they do not compute what eager computes."""
        self.state, self._refused = "differs_from_eager", message
        if self._on_mismatch == "error":
            raise CaptureError(f"full iteration: {message}; it runs eagerly now")
        warn(f"full iteration stays eager: {message}")
