"""The life of one model's graphs: observe, plan, capture, replay.

    graphs = moe_graphs.graph(model, GraphConfig(scopes="attn,moe_router,moe_preprocess"))
    for batch in batches:
        with graphs.step():
            model(batch).loss.backward()
        optimizer.step()

This file is the table of contents. The first ``warmup_steps`` steps run eagerly and are observed
(``observation.py``). A trial run of each kind of call looks once for what cannot be captured
(``trials.py``). At the end of the last warm-up step ``plan.py`` decides which calls get which call
sites. From then on the first microbatch that reaches a call site captures the call there
(``capture.py``), and ``verify.py`` compares the first replay with eager. Later calls are replayed
(``graphed_scope.py``, ``slots.py``) if they match the recording (``recording.py``).
A call that does not match runs eagerly and is counted, or it raises.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from moe_graphs.config import GraphConfig
from moe_graphs.engine.audit import Audits
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.backends.backend import Backend, Resources
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.nonfinite import find_nonfinite
from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.graphed_scope import (
    Captured,
    DelayedWeights,
    GraphedScope,
    install_all,
)
from moe_graphs.engine.partial.observation import Observation
from moe_graphs.engine.partial.plan import (
    CallMemory,
    ChunkMemory,
    MemoryPlan,
    Plan,
    memory_plan,
    plan,
)
from moe_graphs.engine.partial.recording import CallSite, PlannedCall, distinct_bytes
from moe_graphs.engine.partial.scope import find_scopes, recomputed_among
from moe_graphs.engine.partial.slots import BackwardPool, Chunk, Slot
from moe_graphs.engine.partial.trials import ScopeCall, Trials, Tried
from moe_graphs.engine.ranks import ALONE, Ranks
from moe_graphs.engine.reasons import BACKWARD
from moe_graphs.engine.report import FallbackWarning, Report, ScopeReport, occupancy_of
from moe_graphs.engine.side_outputs import Deferred, contents_of
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import Mismatch
from moe_graphs.engine.tracing import explaining_errors_of
from moe_graphs.engine.verify import warn
from moe_graphs.errors import CaptureError, GraphError
from moe_graphs.portable_launches import portable_launches

T = TypeVar("T")


def graph(
    model: nn.Module,
    config: GraphConfig | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Graphs:
    """Installs graphs on the scopes of ``model`` and returns their handle.

    Nothing is captured yet. Either train under ``with graphs.step():``, or capture ahead of time
    with ``graphs.capture(step)``. Keep using ``model`` as before.

    Args:
        generators: random number generators that scopes draw from, besides the default one.

    Raises:
        ValueError: if the config does not fit the model; the message says what to change.
    """
    return Graphs(model, config or GraphConfig(), generators)


class Graphs:
    """The graphs of one model, and the counters of which calls ran how.

    This object knows nothing of other models' graphs. ``release()`` frees the graphs; it has to
    come before ``destroy_process_group()``. Without it the graphs are freed when Python exits.

    Attributes:
        state: "warmup", "capturing" as long as a planned call has not been captured yet,
            "captured", "capture_failed", "released", or "off" (``impl="none"``).
        in_step: whether a ``step()`` is open.
        paused_by: the word under which calls run eagerly within ``paused()``; else None.
        off_because: the message of the capture that has failed, if one has.
        fallbacks: counts eager calls, and warns of them.
    """

    def __init__(
        self, model: nn.Module, config: GraphConfig, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.model = model
        self.config = config
        self.backend = backend_for((*model.parameters(), *model.buffers()), generators)
        self.delayed = DelayedWeights()
        self._trials = Trials(model, self.backend)
        self.in_step = self._is_ahead_of_time = False
        self.paused_by: str | None = None
        self._capture_seconds = 0.0
        self._ranks = Ranks(model)
        self._audits = Audits(config.audit_every, config.on_audit, self._ranks)
        self._begin_warmup()
        self.state = "warmup" if config.impl == "local" else "off"
        scopes = find_scopes(model, config) if config.impl == "local" else []
        anew, parts = recomputed_among(scopes, config.recompute)
        self.scopes, self._parts = install_all(
            self, scopes, config.on_mismatch, self.delayed, parts
        )
        for each in anew:
            self.scopes[scopes.index(each)].use_reentrant = False
        self._checks = Deferred()
        for scope in scopes:
            scope.assigned.deferred = self._checks
        self.resources = Resources[Captured](self.backend)
        self._finalizer = weakref.finalize(self, self.resources.release)

    def __repr__(self) -> str:
        names = [graphed.scope.name for graphed in self.scopes]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"<Graphs of {shown or 'nothing'}: {self.state}; report() says more>"

    def _begin_warmup(self) -> None:
        self.observation, self.fallbacks = Observation(), FallbackWarning()
        self.off_because: str | None = None
        self._measured: dict[int, CallMemory] = {}
        self._tried: dict[int, Tried] = {}
        self._communicating: set[int] = set()
        self._failure: CaptureError | None = None
        self._memory: MemoryPlan | None = None
        self._wants_recapture = False

    @property
    def captured(self) -> Captured | None:
        """The planned call sites and the graphs captured there, until they are released."""
        return self.resources.captured

    # ---- a training step

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context around all forwards and backwards of one training step.

        If a call cannot be captured, or if the graphs would take more than ``memory_limit``, a
        ``GraphWarning`` says so at the end of the step. The model then runs eagerly on all ranks.
        The results of this step are right, and training goes on.

        Raises:
            CaptureError: in place of that warning, with ``on_capture_error="error"``.
            GraphError: if a ``backward_weight()`` is missing.
            CheckError: for a check of a value that has failed in a replay, one step late.
        """
        if self.in_step:
            raise GraphError(
                "graphs.step() does not nest: one step is already open. capture(step) and "
                "find_nonfinite(step) open it themselves: hand them the code within it"
            )
        self._checks.poll()
        self.in_step = True
        self._audits.step += 1
        if self.captured is not None:
            self.captured.look_for_occasions()
        if self.state == "warmup":
            self.observation.begin_step()
        started = time.perf_counter()
        if self.state == "capturing":
            gc.collect()  # garbage is not collected while a capture runs
            self.backend.make_room()
        failures: list[CaptureError] = []
        try:
            yield
            self._check_weights_are_done()
            self._checks.poll()
        finally:
            self.in_step = False
            self.delayed.clear()
            if self.captured is not None:
                failures = self.captured.end_step()
        for error in failures:
            self._shape_failed(error)
        may_recapture = self.config.on_mismatch == "recapture" and self.captured is not None
        if may_recapture and self._ranks.any(self._wants_recapture):
            self.recapture()
            return
        try:
            if self.state == "warmup":
                self._warmup_step_ended()
            elif self.state == "capturing":
                self._capture_seconds += time.perf_counter() - started
                self._capturing_step_ended()
        except CaptureError as error:
            self._fail(error)

    def _warmup_step_ended(self) -> None:
        self.observation.end_step()
        self._fail_together(self._failure)
        accumulates = self._ranks.any(self.observation.accumulates)
        if self.observation.steps:
            planned = plan(self.observation.steps)
            self._memory = self._predicted(planned, accumulates)
            if len(self.observation.steps) == self.config.warmup_steps:
                self.resources.captured = self._places(planned, self._memory)
                self._tried.clear()
                self.state = "capturing"

    def _capturing_step_ended(self) -> None:
        captured = self.captured
        assert captured is not None
        self._fail_together(captured.recorder.failure)
        if captured.is_complete:
            self.state = "captured"
            for slot in captured.slots:
                slot.fails_alone = True
            self.backend.make_room()  # it frees memory of the verifications' eager runs
            for site in captured.sites:
                site.planned.tried = None

    def _shape_failed(self, error: CaptureError) -> None:
        """Tells that batches of one shape run eagerly; graphs of other shapes stay."""
        if self.config.on_capture_error == "error":
            raise error
        warn(f"batches of this shape run eagerly: {error}")

    def _fail_together(self, error: CaptureError | None) -> None:
        if self._ranks.any(error is not None):
            raise error or CaptureError(
                "another rank has failed to capture: the model is eager again on all ranks"
            )

    def _fail(self, error: CaptureError) -> None:
        self.state, self.off_because = "capture_failed", str(error)
        self.resources.release()
        if self._is_ahead_of_time or self.config.on_capture_error == "error":
            raise error
        warn(str(error))

    def mismatched(self, mismatch: Mismatch) -> None:
        """Counts a call that was to be replayed and runs eagerly."""
        if self.config.on_mismatch == "recapture" and mismatch.reason in _WORTH_A_CAPTURE:
            self._wants_recapture = True

    def wants_trials(self, signature_id: int) -> bool:
        return signature_id not in self._measured and self._failure is None

    def try_out(
        self, call: ScopeCall, signature_id: int, linked: list[int], accessed: AccessedNames
    ) -> None:
        """Finds in the first warm-up step what cannot be captured; the step's end reports it."""
        try:
            with explaining_errors_of(call.scope.name, "forward", self.backend):
                tried = self._trials.forward_and_backward(call, accessed, linked)
                observed = self.observation.calls_by_signature[signature_id]
                observed.signature = tried.call.signature
                is_plain = observed.use_reentrant is None
                self._measured[signature_id] = tried.memory if is_plain else tried.memory.anew()
                self._tried[signature_id] = Tried(self._trials, tried.call, accessed)
            if tried.groups:
                self._ranks.join(tried.groups)
                self._communicating.add(signature_id)
        except CaptureError as error:
            self._failure = error

    def _predicted(self, planned: Plan, accumulates: bool) -> MemoryPlan:
        copied, split = self.observation.with_gradients, self.config.split_backward
        memory = memory_plan(planned, self._measured, split, copied, accumulates=accumulates)
        limit = self.config.memory_limit
        if limit is not None:
            self._fail_together(CaptureError(
                f"graphs would take {memory.total_bytes:,} bytes, and memory_limit is {limit:,}: "
                f"choose fewer scopes, or raise the limit; the model is eager again\n{memory}"
            ) if memory.total_bytes > limit else None)  # fmt: skip
        return memory

    def _places(self, planned: Plan, memory: MemoryPlan) -> Captured:
        split, chunks = self.config.split_backward, []
        shared = BackwardPool(self.backend)
        for chunk, of_chunk in zip(planned.chunks, memory.chunks, strict=True):
            calls = [self._planned_call(number, of_chunk) for number in chunk.calls]
            given: dict[str, Any] = {"pool_bytes": of_chunk.piece()}
            given |= {"first_bytes": of_chunk.first_gradients}
            given |= {"backward_pool": shared} if of_chunk.shares_backwards else {}
            slots = [Slot(calls, self.backend, **given) for _ in range(chunk.slots)]
            # Ranks that communicate capture together, and another rank may have another length.
            alone = not any(number in self._communicating for number in chunk.calls)
            chunks.append(Chunk(slots, self.backend, self.config.shapes if alone else 1))
        self.observation.warn_of_eager_scopes(split=split)
        verify, audits = self.config.verify, self._audits
        recorder = Recorder(self.model, self.backend, split=split, verify=verify, audits=audits)
        return Captured(chunks, recorder, memory)

    def _planned_call(self, signature_id: int, chunk: ChunkMemory) -> PlannedCall:
        observed = self.observation.calls_by_signature[signature_id]
        return PlannedCall(
            observed.scope,
            observed.signature,
            tried=self._tried.get(signature_id),
            is_observed=True,
            ranks=self._ranks if signature_id in self._communicating else ALONE,
            refused=self.observation.refusal(observed.scope, split=chunk.split),
            copies_gradients=self.observation.copies_gradients(observed.scope, chunk),
            fallbacks=self.fallbacks,
            eager_bytes=self._measured[signature_id].eager_bytes,
            use_reentrant=observed.use_reentrant,
            recomputed_bytes=self._measured[signature_id].recomputed,
        )

    # ---- ahead of time

    def capture(
        self, step: Callable[[], object], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Captures before training starts, by steps that change nothing.

        ``step()`` does the forwards and backwards of one training step. It is called
        ``warmup_steps`` times, and then as often as it takes to capture everything. Afterwards
        parameters, their ``.grad``, buffers, random states and the optimizer are as before.

        Raises:
            GraphError: if ``step`` updates parameters and ``optimizer`` is not given.
            CaptureError: if the capture fails, whatever ``on_capture_error`` says, because this
                method was called to capture. The model is eager and unchanged then.
        """
        if self.state != "warmup":
            raise GraphError(f"capture() in state {self.state!r}: it belongs before training")
        self._is_ahead_of_time = True
        parameters, kept = list(self.model.parameters()), contents_of(self.model)
        try:
            with Snapshot(
                self.backend,
                values=(*parameters, *self.model.buffers()),
                gradients_of=parameters,
                optimizer=optimizer,
                python_random=True,
            ):
                for parameter in parameters:
                    parameter.grad = None
                self._capture_on(step, optimizer is not None)
        except BaseException:
            self.release()
            raise
        finally:
            self._is_ahead_of_time = False
            for graphed in self.scopes:
                graphed.scope.assigned.put_back(kept)

    def _capture_on(self, step: Callable[[], object], may_update: bool) -> None:
        versions = [parameter._version for parameter in self.model.parameters()]
        for _ in range(self.config.warmup_steps + _STEPS_TO_CAPTURE):
            if self.state in ("warmup", "capturing"):
                with self.step():
                    step()
        updated = versions != [parameter._version for parameter in self.model.parameters()]
        if updated and not may_update:
            raise GraphError(
                "step() updates parameters: pass optimizer=..., so that its state can be put "
                "back, or leave the update out of step()"
            )
        assert self.captured is not None
        for site in self.captured.sites:
            site.replayed = site.audited = 0

    def find_nonfinite(
        self,
        step: Callable[[], T],
        optimizer: torch.optim.Optimizer | None = None,
        state: Sequence[object] = (),
    ) -> T:
        """Runs one training step; if it leaves a NaN or infinity, names the first operation of it.

        Call it in place of the code of a step, to look for where a NaN comes from. It takes longer,
        because everything that the step may change is copied to the host first.

        Args:
            step: does the forwards and backwards of one training step, and may update.
            optimizer: the optimizer that ``step`` updates with, if it does.
            state: other objects that ``step`` changes: tensors, a ``DeviceStep``.

        Returns:
            The result of ``step()``, if everything is finite.

        Raises:
            NonFiniteError: with operation, module, line and the ranges of the inputs. The step has
                run again eagerly for that, and tensors are as before the step.
        """

        def graphed() -> T:
            with self.step():
                return step()

        def eagerly() -> T:
            with self.paused():
                return step()

        return find_nonfinite(
            graphed,
            eagerly,
            model=self.model,
            backend=self.backend,
            optimizers=[] if optimizer is None else [optimizer],
            state=state,
            anywhere=self._ranks.any,
        )

    def recapture(self) -> None:
        """Forgets what was captured: the next steps are warm-up steps again.

        Call it after the model was changed on purpose, or when another batch size becomes the
        common one.
        """
        if self.state in ("off", "released") or self.in_step:
            raise GraphError(f"recapture() in state {self.state!r}, or inside of a step")
        self.resources.release()
        self._audits.schedules = 0
        self._begin_warmup()
        self.state = "warmup"

    # ---- weight gradients apart, for zero-bubble schedules

    @contextlib.contextmanager
    def delayed_weights(self) -> Iterator[None]:
        """Context around the backward of one microbatch that delays the gradients of weights.

        Replayed scopes leave the gradients of their weights to a ``backward_weight()``, which has
        to follow within the step. Eager calls compute them at once.

        torch's own zero-bubble schedules need neither this context nor ``backward_weight()``.
        """
        if not self.config.split_backward:
            raise GraphError("delayed_weights() needs GraphConfig(split_backward=True)")
        if not self.in_step or self.delayed.is_collecting:
            raise GraphError("delayed_weights() belongs inside 'with graphs.step()', not nested")
        with self.delayed.collecting(), self.observation.delaying():
            yield

    def backward_weight(self) -> None:
        """Adds the weight gradients of the oldest delayed backward to ``.grad``.

        Raises:
            GraphError: if no backward waits.
        """
        self.delayed.replay_oldest()
        if self.state == "warmup":
            self.observation.weights()

    def _check_weights_are_done(self) -> None:
        missing = len(self.delayed)
        if missing:
            raise GraphError(
                f"the step ended with {missing} backward(s) whose weight gradients are missing: "
                f"call backward_weight() once for every 'with graphs.delayed_weights()'"
            )

    # ---- control

    def plan(self) -> MemoryPlan:
        """Predicted bytes of the graphs, per scope and slot; ``print`` shows a table.

        The prediction exists from the end of the first warm-up step on. With ``warmup_steps`` of
        two or more that is before anything is captured. ``report()`` has the bytes that the graphs
        really take.

        Raises:
            GraphError: before the end of the first warm-up step.
        """
        if self._memory is None:
            raise GraphError("no step was observed yet: plan() knows sizes after the first one")
        return self._memory

    @contextlib.contextmanager
    def paused(self, reason: str = "paused") -> Iterator[None]:
        """Context in which the model is eager; its calls are counted as ``paused``.

        ``reason``: another word of the guide's table, for integrations.
        """
        before, self.paused_by = self.paused_by, reason
        try:
            yield
        finally:
            self.paused_by = before

    def check(self) -> None:
        """Waits for the outcomes of all checks of values (``assert``) in replays.

        Raises:
            CheckError: for the first one that has failed.
        """
        self._checks.poll(waiting=True)

    def audit_soon(self) -> None:
        """Lets the next call of every captured call site be audited, for instance before a save.

        Ranks that communicate call it in the same step. With ``audit_every=None`` nothing happens.
        """
        for site, _ in self.captured.audited_sites() if self.captured is not None else ():
            site.audit_due = 0

    def release(self) -> None:
        """Makes the model eager for good and frees the graphs' memory. Idempotent."""
        if self.state == "released":
            return
        for installed in (*self.scopes, *self._parts):
            installed.uninstall()
        self.state = "released"
        self._finalizer()

    def report(self) -> Report:
        """Report of what was captured and what happened since. It waits for the device."""
        return report_of(
            self.backend,
            self.model,
            self.state,
            self.scopes,
            self.captured,
            self._capture_seconds,
            self.fallbacks,
            self.off_because,
            self._audits,
        )


_STEPS_TO_CAPTURE = 3
# Differences that will be there at the next call as well, so that a new capture pays.
_WORTH_A_CAPTURE = frozenset({
    "moved", "attribute", "checkpointing", "training_flag", "requires_grad", "hooks", "context",
    "autocast", "shape", "dtype", "stride", "structure", "constant", "slots_full", "not_observed",
})  # fmt: skip


# ---- the report of some scopes, from their counters


def report_of(
    backend: Backend,
    model: nn.Module,
    state: str,
    scopes: Sequence[GraphedScope],
    captured: Captured | None,
    capture_seconds: float,
    fallbacks: FallbackWarning,
    off_because: str | None = None,
    audits: Audits | None = None,
) -> Report:
    sites = captured.sites if captured is not None else []
    of_scopes = tuple(
        _report_scope(graphed, sites, fallbacks, _counted(captured, graphed.scope.name))
        for graphed in scopes
    )
    eager_calls: Counter[str] = Counter()
    for scope in of_scopes:
        eager_calls.update(scope.eager_calls)
    return Report(
        backend=backend.name,
        state=state,
        scopes=of_scopes,
        captured=sum(site.has_forward for site in sites),
        replayed=sum(scope.replayed for scope in of_scopes),
        audited=sum(scope.audited for scope in of_scopes),
        eager_calls=dict(eager_calls),
        static_bytes=captured.static_bytes if captured else 0,
        slots=tuple(chunk.lanes for chunk in captured.chunks) if captured else (),
        shapes=max((chunk.shapes for chunk in captured.chunks), default=0) if captured else 0,
        shapes_left=sum(chunk.left for chunk in captured.chunks) if captured else 0,
        predicted_pool_bytes=captured.memory.pool_bytes if captured else 0,
        pool_bytes=sum(map(backend.pool_bytes, captured.pools)) if captured else 0,
        abandoned=captured.abandoned if captured else 0,
        capture_seconds=capture_seconds,
        occupancy=occupancy_of(model),
        portable_launches=portable_launches(),
        off_because=off_because,
        **({} if audits is None else audits.reported()),
    )


def _counted(captured: Captured | None, scope: str) -> Counter[str]:
    """Replays and audits of call sites of a scope that are gone."""
    chunk = None if captured is None else captured.chunk_of_scope.get(scope)
    return Counter() if chunk is None else chunk.counted.get(scope, Counter())


def _report_scope(
    graphed: GraphedScope,
    sites: Sequence[CallSite],
    fallbacks: FallbackWarning,
    gone: Counter[str],
) -> ScopeReport:
    own_name = f"scope {graphed.scope.name!r}"
    of_scope = [site for site in sites if site.name == graphed.scope.name]
    own = [site for site in of_scope if site.has_forward]
    planned = {id(site.planned): site.planned for site in of_scope}.values()
    graphs = [graph for site in own for graph in site.graphs()]
    counts = [graph.kernels for graph in graphs if graph.kernels is not None]
    exits = [site.forward.exit.reason for site in own if site.forward.exit is not None]
    backwards: Counter[str] = Counter()
    for call in planned:
        backwards.update({f"{BACKWARD}{r}": n for r, n in call.eager_backwards.items()})
    leases = [lease for site in own for lease in site.gradient_leases()]
    not_guarded = {n for site in own for n in site.forward.conditions.guards.not_followed}
    return ScopeReport(
        name=graphed.scope.name,
        forward_graphs=len(own),
        backward_graphs=sum(p.backward is not None and p.backward.graph is not None for p in own),
        weight_graphs=sum(p.weights is not None and p.weights.graph is not None for p in own),
        kernels=sum(counts) if len(counts) == len(graphs) else None,
        static_bytes=distinct_bytes(t for site in own for t in site.static_tensors()),
        boundary_bytes=sum(t.nbytes for site in own for t in site.forward.outputs),
        replayed=gone["replayed"] + sum(site.replayed for site in own),
        audited=gone["audited"] + sum(site.audited for site in own),
        recomputed_bytes=sum(site.planned.recomputed_bytes for site in own),
        eager_calls=dict(graphed.eager_calls + backwards),
        details={
            word: text for (name, word), text in fallbacks.details.items() if name == own_name
        },
        interrupted=exits[0] if exits else None,
        refused=next((call.refused.message for call in planned if call.refused), None),
        not_reproducible=any(call.not_reproducible for call in planned),
        not_guarded=tuple(sorted(not_guarded)),
        gradients_in_place=sum(lease.in_place for lease in leases),
        copied_gradients=dict(sum((lease.copied for lease in leases), Counter())),
    )
