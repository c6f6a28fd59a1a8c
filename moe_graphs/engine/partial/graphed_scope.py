"""One call of a scope: it is observed, replayed, or run eagerly and counted; and the report."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import NEVER, Audits, CallAudit, Schedule
from moe_graphs.engine.backends.backend import Backend, Resources
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.torch_state import reason_to_run_eagerly
from moe_graphs.engine.partial.audited_call import AuditedCall, is_due
from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.observation import Observation
from moe_graphs.engine.partial.plan import MemoryPlan
from moe_graphs.engine.partial.recording import CallSite
from moe_graphs.engine.partial.replay import DelayedWeights, replay
from moe_graphs.engine.partial.scope import Call, Exit, Scope
from moe_graphs.engine.partial.slots import Chunk, Slot
from moe_graphs.engine.partial.trials import ScopeCall
from moe_graphs.engine.reasons import BACKWARD, EAGER_CALLS
from moe_graphs.engine.report import FallbackWarning, Report, ScopeReport, occupancy_of
from moe_graphs.engine.side_outputs import Left
from moe_graphs.engine.tensors import Mismatch, flatten
from moe_graphs.errors import CaptureError
from moe_graphs.portable_launches import portable_launches
from moe_graphs.staged import recomputed_within

# ---- what is captured or will be


class Captured:
    """The chunks, their recorder, and the predicted memory."""

    def __init__(self, chunks: Sequence[Chunk], recorder: Recorder, memory: MemoryPlan) -> None:
        self.chunks, self.recorder, self.memory = tuple(chunks), recorder, memory
        self.chunk_of_scope = {name: chunk for chunk in self.chunks for name in chunk.scopes}

    @property
    def slots(self) -> list[Slot]:
        return [slot for chunk in self.chunks for slot in chunk.slots]

    @property
    def sites(self) -> list[CallSite]:
        return [site for slot in self.slots for site in slot.sites]

    @property
    def pools(self) -> list[Any]:
        of_slots = (
            (s.pool, s.pool_of_first, s.pool_of_weights, s.backward_pool.pool) for s in self.slots
        )
        return list(dict.fromkeys(pool for pools in of_slots for pool in pools))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be captured, but for shapes that may still come."""
        return all(chunk.is_complete for chunk in self.chunks)

    @property
    def abandoned(self) -> int:
        return sum(slot.abandoned for slot in self.slots)

    def static_tensors(self) -> list[Tensor]:
        recorded = (site.forward for site in self.sites if site.has_forward)
        own = (tensor for forward in recorded for tensor in forward.static_tensors())
        return [*self.recorder.shared.values(), *own]

    def audited_sites(self) -> list[tuple[CallSite, CallAudit]]:
        """The call sites that audits are due at, now or later."""
        pairs = ((site, site.audit) for site in self.sites if site.audit_due != NEVER)
        return [(site, audit) for site, audit in pairs if audit is not None]

    def look_for_occasions(self) -> None:
        """Lets the next calls be audited if the model has been switched or loaded.

        Ranks that communicate do this with the same number of the step.
        """
        audits, model = self.recorder.audits, self.recorder.model

        def schedules() -> list[Schedule]:
            return [audit.schedule for _, audit in self.audited_sites()]

        if audits.are_on and audits.are_asked_for(audits.step, model.modules, schedules):
            for site, audit in self.audited_sites():
                if audit.schedule.soon(site.replayed):
                    site.audit_due = 0

    def end_step(self) -> list[CaptureError]:
        """Ends a step. The failures are those of shapes whose graphs are gone therefore."""
        return [error for chunk in self.chunks for error in chunk.end_step()]

    def release(self) -> None:
        for chunk in self.chunks:
            chunk.release()
        self.recorder.shared.clear()


# ---- the replacement of the forward of a scope's module

_NEVER = object()
_NOT_OBSERVED = Mismatch("not_observed", str(EAGER_CALLS["not_observed"]))
_OTHER_CHECKPOINTING = Mismatch("checkpointing", str(EAGER_CALLS["checkpointing"]))


_SERVING = ("warmup", "capturing", "captured")


class Owner(Protocol):
    """The owner of the graphs of some scopes.

    Attributes:
        resources: what is captured or will be, until it is released.
        state: as of ``Graphs``; in any state but three all calls run eagerly, and it says why.
        in_step: whether a step is open.
        paused_by: the word under which all calls run eagerly for a while, or None.
    """

    observation: Observation
    fallbacks: FallbackWarning
    resources: Resources[Captured]
    state: str
    in_step: bool
    paused_by: str | None

    def try_out(
        self, call: ScopeCall, signature_id: int, linked: list[int], accessed: AccessedNames
    ) -> None:
        """Looks for what cannot be captured. ``signature_id`` is that of the observed call."""

    def wants_trials(self, signature_id: int) -> bool: ...

    def mismatched(self, mismatch: Mismatch) -> None:
        """Counts a call that was to be replayed and runs eagerly."""


class GraphedScope:
    """Replacement of the forward of one scope's module, on that instance only.

    Attributes:
        installed: the attributes that it has set on the module, itself among them.
        use_reentrant: if its calls keep their inputs only, how torch's checkpoint runs them
            eagerly; None if autograd saves what their backward needs.
        why_eager: a function that is called with the module at every call, or None. If it returns a
            word, the call runs eagerly and is counted under that word.
    """

    def __init__(
        self, graphs: Owner, scope: Scope, on_mismatch: str, delayed: DelayedWeights
    ) -> None:
        self.graphs = graphs
        self.scope, self._name = scope, f"scope {scope.name!r}"
        self.on_mismatch = on_mismatch
        self.delayed = delayed  # backwards whose weights' part waits
        self.eager_calls: Counter[str] = Counter()
        self.installed: dict[str, Any] = {}
        self.use_reentrant: bool | None = None
        self.why_eager: Callable[[nn.Module], str | None] | None = None

    def check_unpatched(self) -> None:
        """Checks that nobody has patched the module's forward.

        Raises:
            ValueError: if the module's forward is patched already.
        """
        attributes, name = self.scope.module.__dict__, self.scope.name
        if isinstance(attributes.get("forward"), GraphedScope):
            raise ValueError(f"scope {name!r} has graphs already: release() them first")
        if "forward" in attributes:
            raise ValueError(f"scope {name!r}: forward is patched on this instance: undo it")

    def install(self, **attributes: Any) -> None:
        """Takes the place of the module's forward. ``attributes`` are set on the module as well."""
        self.check_unpatched()
        # Copies and pickles of the module carry a plain, eager forward.
        self.installed = {"forward": self, "__getstate__": self._state, **attributes}
        # A model that is compiled around the scope breaks its graph here, and calls the scope.
        self._outside_of_compiler = torch.compiler.disable(
            self._call, reason=f"{self._name} has graphs of moe_graphs"
        )
        self.scope.module.__dict__.update(self.installed)

    def uninstall(self) -> None:
        attributes = self.scope.module.__dict__
        if attributes.get("forward") is self:
            for name in self.installed:
                attributes.pop(name, None)

    def _state(self) -> dict[str, Any]:
        module = self.scope.module
        of_class = getattr(type(module), "__getstate__", None)
        state = of_class(module) if of_class is not None else module.__dict__
        return {name: v for name, v in state.items() if v is not self.installed.get(name, _NEVER)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # dynamo traces this line, and must not trace the engine
            return self._outside_of_compiler(*args, **kwargs)
        return self._call(*args, **kwargs)

    def eager_reason(self) -> str | None:
        """The reason why every call runs eagerly now, or None if calls are observed or replayed."""
        graphs = self.graphs
        if graphs.state not in _SERVING:
            return graphs.state
        if graphs.paused_by is not None:
            return graphs.paused_by
        if not graphs.in_step and torch.is_grad_enabled():
            return "outside_step"
        return reason_to_run_eagerly()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        reason = cause = self.eager_reason()
        if self.why_eager is not None and reason in (None, "saved_tensors_hooks", "recompute"):
            cause = self.why_eager(self.scope.module) or reason
            # The scope knows a better name for the hooks of checkpointing. The forward that
            # checkpointing runs again is counted apart, and the user has asked for it as well.
            reason = reason if reason == "recompute" else cause
        if reason is not None:
            self.eager_calls[reason] += 1
            self.graphs.fallbacks.ran_eagerly(self._name, cause or reason)
            if self.use_reentrant is not None and reason_to_run_eagerly() is None:
                whole = functools.partial(self.scope.forward, **kwargs)
                return checkpoint(recomputed_within(whole), *args, use_reentrant=self.use_reentrant)
            return self.scope.forward(*args, **kwargs)
        call = Call(args, kwargs)
        inputs = (args, kwargs) if self.scope.start is None else self.scope.prologue(call)
        planned = fp8.with_flag_on_device(inputs) if fp8.FLAG in kwargs else inputs
        if self.scope.assigned.places:
            planned = self.scope.assigned.given(planned)
        captured = self.graphs.resources.captured
        if captured is None:
            return self._observe(inputs, planned, call)
        return self._replay(captured, inputs, planned, call)

    def _observe(self, inputs: Any, planned: Any, call: Call) -> Any:
        self.eager_calls["warmup"] += 1
        observation = self.graphs.observation
        number, signature_id, _ = observation.forward(self.scope, planned, self.use_reentrant)
        linked = observation.linked(planned)
        accessed = AccessedNames()
        if not self.graphs.wants_trials(signature_id):
            outputs, exit = self._run(inputs, call, capturing=True)
        else:
            outputs, exit = self._run(inputs, call, capturing=True, accessed=accessed)
            self.graphs.try_out(
                self._scope_call(planned, call, signature_id), signature_id, linked, accessed
            )
        observation.produced(number, self.scope, (outputs, self.scope.assigned.values()), inputs)
        return self.scope.epilogue(outputs, exit, call)

    def _run(
        self, inputs: Any, call: Call, *, capturing: bool, accessed: AccessedNames | None = None
    ) -> tuple[Any, Exit | None]:
        """Runs a call eagerly, under torch's checkpoint if it keeps its inputs only.

        ``accessed`` watches its Python, but not that of a recomputation.
        """
        watched = iter([accessed or contextlib.nullcontext()])

        def run(inputs: Any) -> tuple[Any, Exit | None]:
            with next(watched, contextlib.nullcontext()):
                return self.scope.run(inputs, call, capturing=capturing)

        if self.use_reentrant is None:
            return run(inputs)
        if not self.use_reentrant:
            return checkpoint(recomputed_within(run), inputs, use_reentrant=False)
        args, kwargs = inputs
        whole = recomputed_within(lambda *given: run((given, kwargs))[0])
        return checkpoint(whole, *args, use_reentrant=True), None

    def _scope_call(self, inputs: Any, call: Call, signature_id: int) -> ScopeCall:
        signature = self.graphs.observation.calls_by_signature[signature_id].signature
        return ScopeCall(self.scope, signature, flatten(inputs)[0], call, {})

    def _replay(self, captured: Captured, inputs: Any, planned: Any, call: Call) -> Any:
        """Replays the call, or runs it eagerly.

        ``planned`` are the inputs as they are captured; an eager call gets the original inputs.
        """
        leaves, structure = flatten(planned)
        chunk = captured.chunk_of_scope.get(self.scope.name)
        found: tuple[Slot, CallSite] | Mismatch = _NOT_OBSERVED
        if chunk is not None:
            found = chunk.next_site(self.scope.name, structure, leaves)
        if isinstance(found, Mismatch):
            return self._mismatched(found, inputs, call)
        slot, site = found
        if site.planned.use_reentrant is not self.use_reentrant:
            slot.skip(site)
            return self._mismatched(_OTHER_CHECKPOINTING, inputs, call)
        mismatch = slot.mismatch(site, structure, leaves)
        produced: list[Any] = []
        if not site.has_forward:
            first = self._first_replay(captured.recorder, slot, site, leaves, call, mismatch)
            if isinstance(first, Mismatch):
                mismatch = first
            else:
                produced = first
        elif mismatch is None:
            if site.replayed >= site.audit_due and is_due(captured.recorder, slot, site):
                audited = AuditedCall(captured.recorder, slot, site, self.scope, leaves).run(call)
                if audited is not None:
                    outputs, exit = audited
                    return self.scope.epilogue(self.scope.assigned.take(outputs), exit, call)
            pending = slot.begin_replay(site, leaves)
            produced = replay(slot, pending, captured.recorder, self.delayed, leaves)
        if mismatch is not None:
            slot.skip(site)
            others = slot.mismatches(site, structure, leaves)
            return self._mismatched(mismatch, inputs, call, others)
        forward = site.forward
        outputs, exit = forward.build_outputs(produced), forward.exit
        if type(outputs) is Left:
            outputs = self.scope.assigned.take(outputs)
        return outputs if exit is None else self.scope.epilogue(outputs, exit, call)

    def _first_replay(
        self,
        recorder: Recorder,
        slot: Slot,
        site: CallSite,
        leaves: list[Any],
        arguments: Call,
        mismatch: Mismatch | None,
    ) -> list[Any] | Mismatch:
        """Captures the call, replays it, and compares that with eager."""
        if not (slot.is_closed or site.planned.refused):  # ranks decide together
            mismatch = recorder.mismatch(site, mismatch)
        if mismatch is not None:
            return mismatch
        signature = site.planned.signature
        leased = frozenset(i for i in signature.tensors() if slot.output_at(leaves[i]) is not None)
        call = ScopeCall(self.scope, signature, leaves, arguments, {}, leased)
        try:
            with site.planned.ranks.together():
                expected = recorder.record_forward(slot, site, call)
        except CaptureError as error:
            recorder.failed(slot, error)
            return Mismatch("capture_failed", str(error))
        pending = slot.begin_replay(site, leaves)
        produced = replay(slot, pending, recorder, self.delayed, leaves)
        difference = recorder.verification.difference_of_forward(site, call, expected, produced)
        if difference is None:
            return produced
        slot.cancel(pending)
        return site.planned.differs(difference)

    def _mismatched(
        self, mismatch: Mismatch, inputs: Any, call: Call, others: Iterable[Mismatch] = ()
    ) -> Any:
        if self.on_mismatch == "error" and mismatch.reason != "capture_failed":
            raise mismatch.error(self._name, others)
        self.graphs.mismatched(mismatch)
        self.eager_calls[mismatch.reason] += 1
        self.graphs.fallbacks.ran_eagerly(self._name, mismatch.reason, mismatch.message)
        outputs, exit = self._run(inputs, call, capturing=False)
        return self.scope.epilogue(outputs, exit, call)


def install_all(
    graphs: Owner, scopes: Sequence[Scope], on_mismatch: str, delayed: DelayedWeights
) -> list[GraphedScope]:
    """Installs all graphed scopes, or none if one cannot be installed."""
    graphed: list[GraphedScope] = []
    try:
        for scope in scopes:
            each = GraphedScope(graphs, scope, on_mismatch, delayed)
            each.install()
            graphed.append(each)
    except BaseException:
        for each in graphed:
            each.uninstall()
        raise
    return graphed


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
        static_bytes=sum(t.nbytes for t in captured.static_tensors()) if captured else 0,
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
    statics = [tensor for site in own for tensor in site.forward.static_tensors()]
    not_guarded = {n for site in own for n in site.forward.conditions.guards.not_followed}
    return ScopeReport(
        name=graphed.scope.name,
        forward_graphs=len(own),
        backward_graphs=sum(p.backward is not None and p.backward.graph is not None for p in own),
        weight_graphs=sum(p.weights is not None and p.weights.graph is not None for p in own),
        kernels=sum(counts) if len(counts) == len(graphs) else None,
        static_bytes=sum(tensor.nbytes for tensor in statics),
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
