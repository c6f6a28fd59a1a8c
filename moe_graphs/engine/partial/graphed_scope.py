"""One call of a scope: it is observed, replayed, or run eagerly and counted.

A replay is a node of the caller's autograd graph (``Replay``). It hands gradients out of the static
memory of its graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import NEVER, CallAudit, Schedule
from moe_graphs.engine.autograd import accumulates, has_hooks, is_wanted
from moe_graphs.engine.backends.backend import Resources
from moe_graphs.engine.buffer_lease import BufferLease
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.torch_state import reason_to_run_eagerly
from moe_graphs.engine.partial.audited_call import AuditedCall, is_due
from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.installed import Installed, RecomputedPart
from moe_graphs.engine.partial.observation import Observation
from moe_graphs.engine.partial.plan import MemoryPlan
from moe_graphs.engine.partial.recording import (
    CallSite,
    PendingBackward,
    RecordedBackward,
    distinct_bytes,
    layouts_of,
    versions_of,
)
from moe_graphs.engine.partial.scope import Call, Exit, Part, Scope
from moe_graphs.engine.partial.slots import Chunk, Slot
from moe_graphs.engine.partial.trials import ScopeCall
from moe_graphs.engine.partial.verify import recompute
from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.report import FallbackWarning
from moe_graphs.engine.side_outputs import Left
from moe_graphs.engine.tensors import Mismatch, copy_to, flatten, leaves_of_outputs, unwrap
from moe_graphs.errors import CaptureError, GraphError
from moe_graphs.staged import open_blocks, recomputed_within

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

    @property
    def static_bytes(self) -> int:
        """Bytes of static buffers; memory that several of them lie in counts once."""
        own = (tensor for site in self.sites for tensor in site.static_tensors())
        return self.recorder.shared.nbytes + distinct_bytes(own)

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


# ---- delayed weight gradients: backwards whose first part, for the inputs, has run


@dataclass(frozen=True)
class WeightsPart:
    """The weights' part of one backward of a scope.

    ``compute`` gives a gradient (or None) for each of ``parameters``, good until the next replay.
    """

    parameters: list[Tensor]
    compute: Callable[[], list[Tensor | None]]


class DelayedWeights:
    """A queue of backwards, oldest first.

    Attributes:
        is_collecting: whether a backward that runs now leaves its weights' part to the queue.
        each_by_itself: whether every backward of a scope is an entry of the queue by itself, and is
            always collected.
    """

    def __init__(self, each_by_itself: bool = False) -> None:
        self._waiting: deque[list[WeightsPart]] = deque()
        self._each_by_itself = each_by_itself
        self.is_collecting = each_by_itself

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forgets the backwards of a step that has ended."""
        self._waiting.clear()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Context in which the backwards of all scopes belong to one entry of the queue."""
        self._waiting.append([])
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    def collect(self, pending: PendingBackward, part: WeightsPart) -> None:
        hooked = next(filter(has_hooks, pending.site.forward.parameters), None)
        if hooked is not None:
            raise GraphError(
                f"scope {pending.site.name!r}: a parameter {tuple(hooked.shape)} has gradient "
                f"hooks, which a delayed weight gradient does not run: remove them, or do not "
                f"delay this backward"
            )
        if self._each_by_itself:
            self._waiting.append([])
        self._waiting[-1].append(part)

    def replay_oldest(self) -> None:
        """Adds the weight gradients of the oldest backward to ``.grad``.

        If a parameter is used several times, its gradients are added up first, as autograd does.

        Raises:
            GraphError: if no backward waits.
        """
        if not self._waiting:
            raise GraphError(
                "backward_weight() without a backward that waits for it: call it once for every "
                "backward whose weights were delayed"
            )
        parts = self._waiting.popleft()
        uses = Counter(id(parameter) for part in parts for parameter in part.parameters)
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for part in parts:
            alone = []
            for parameter, gradient in zip(part.parameters, part.compute(), strict=True):
                if gradient is None:
                    continue
                if uses[id(parameter)] == 1:
                    alone.append((parameter, gradient))
                else:
                    known = sums.get(id(parameter))
                    total = gradient.clone() if known is None else known[1] + gradient
                    sums[id(parameter)] = (parameter, total)
            _add_to_grad(alone)
        _add_to_grad(list(sums.values()))


@torch.no_grad()
def _add_to_grad(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    totals, addends = [], []
    for parameter, gradient in pairs:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        else:
            totals.append(parameter.grad)
            addends.append(gradient)
    if totals:
        torch._foreach_add_(totals, addends)


# ---- the node of autograd that replays a scope


class Replay(torch.autograd.Function):
    """The node of autograd that replays a scope: inputs and parameters in, outputs out.

    It lists an input or parameter once per use, and gradients leave it as tensors of their own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slot: Slot,
        pending: PendingBackward,
        recorder: Recorder,
        delayed: DelayedWeights,
        leaves: Sequence[Any],
        *listed: Tensor,
    ) -> tuple[Tensor, ...]:
        site, forward = pending.site, pending.site.forward
        site.load(leaves)
        forward.graph.replay()
        site.replayed += 1
        # A replay changes these tensors unseen by autograd: an older autograd graph must notice.
        if forward.counted:
            torch.autograd.graph.increment_version(forward.counted)
        pending.versions = list(map(versions_of, forward.saved))
        if forward.scales is not None:
            pending.is_first_in_fp8 = fp8.claim_first()
        outputs = site.hand_out()
        if forward.constant_outputs:
            ctx.mark_non_differentiable(*map(outputs.__getitem__, forward.constant_outputs))
        ctx.set_materialize_grads(False)
        ctx.parts = slot, pending, recorder, delayed
        ctx.blocks = open_blocks.get()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        slot, pending, recorder, delayed = ctx.parts
        run = Backward(slot, pending, recorder, delayed, ctx).run
        if ctx.blocks:  # where no graph serves it, the forward runs anew
            run = recomputed_within(run, ctx.blocks)
        return (None, None, None, None, None, *run(gradients))


# This skips the checks of ``Function.apply`` in Python: there is no transform here, and no wrapper.
_apply = super(torch.autograd.Function, Replay).apply


def replay(
    slot: Slot,
    pending: PendingBackward,
    recorder: Recorder,
    delayed: DelayedWeights,
    leaves: Sequence[Any],
) -> list[Any]:
    """Replays the forward on the leaves of a call; returns the leaves of the outputs."""
    site, forward = pending.site, pending.site.forward
    listed = []
    for each in forward.listed:
        listed.append(leaves[each] if isinstance(each, int) else each)
    produced = _apply(slot, pending, recorder, delayed, leaves, *listed)
    site.note_handed(produced, pending)
    return leaves_of_outputs(forward.output_leaves, produced, leaves)


class Backward:
    """One backward of a replayed forward, or a part of it.

    It replays a graph if one was captured for it. Otherwise it runs eagerly: on the autograd graph
    of the capture as long as that exists, else by computing the forward anew.

    Args:
        node: the running node of autograd; None where weight gradients are asked for later.
    """

    def __init__(
        self,
        slot: Slot,
        pending: PendingBackward,
        recorder: Recorder,
        delayed: DelayedWeights,
        node: Any = None,
    ) -> None:
        self.slot, self.pending, self.site = slot, pending, pending.site
        self.recorder, self.delayed, self._node = recorder, delayed, node
        self._behind: list[Node | None] | None = None

    def run(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients per use, given those of the outputs."""
        slot, pending, forward = self.slot, self.pending, self.site.forward
        slot.check_alive(pending)
        self.site.check_plain(gradients)
        for output in pending.used_within:
            output.check()
        incoming = list(compress(gradients, forward.differentiable))
        results: dict[int, Tensor | None] = {}
        # Zero-bubble schedules run this node twice: for the inputs, and later for the weights.
        is_second_part = pending.is_done and forward.is_split
        if pending.is_over and slot.retains():
            # No recording serves one more backward of a forward whose graph was retained.
            slot.check(pending)
            return self._recomputed("second_backward", incoming)
        if not is_second_part or self._wants(int):
            slot.check(pending)
            pending.note_gradients(gradients)
            results |= self._first_part(incoming)
            if pending.is_first_in_fp8:
                fp8.update_scales_of_backwards()
        pending.check_gradients(gradients)
        if forward.is_split and self._wants(Tensor):
            if self.delayed.is_collecting:
                self.delayed.collect(pending, self._part_for_later())
            else:
                results |= self._weights_part()
        return list(map(results.get, range(len(forward.listed))))

    def nodes(self) -> Sequence[Node | None]:
        """The node that gets the gradient, per use. Autograd is asked only when it is needed."""
        if self._behind is None:
            self._behind = [node for node, _ in self._node.next_functions]
        return self._behind

    def _wants(self, kind: type) -> bool:
        """Whether the running backward needs a gradient of an input (``int``) or parameter."""
        listed = zip(self.nodes(), self.site.forward.listed, strict=True)
        return any(is_wanted(node) for node, each in listed if isinstance(each, kind))

    # ---- the first part: all gradients or, if the backward is split, those of the inputs

    def _first_part(self, incoming: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        slot, site, pending = self.slot, self.site, self.pending
        reason = slot.unreplayable(pending, layouts_of(incoming))
        if reason is None:
            slot.backward_done(pending, replayed=True)
            return self.replayed(incoming)
        if site.open is not None:
            results = self.recorder.backward(slot, pending, incoming)
            slot.backward_done(pending, replayed=site.backward is not None)
            failed = site.planned.refused or self.recorder.failure
            # The replay has left the same gradients in place.
            if site.backward is not None and not failed:
                results |= self._leased(site.first or site.backward, in_place_only=True)
            return results
        gradients = dict(enumerate(self._recomputed(reason, incoming)))
        backward, is_split = site.backward, site.forward.is_split
        if (
            reason == "other_layout"
            and not is_split
            and backward is not None
            and _fits(backward, incoming)
            and slot.backward_pool.added.reclaim()
        ):
            slot.backward_done(pending, replayed=True)
            _copy_in(backward, incoming)
            if self.recorder.verification.agrees(pending, backward, gradients):
                site.verified_layouts.add(layouts_of(incoming))
            return gradients
        slot.backward_done(pending, replayed=False)
        if is_split:
            is_parameter = [isinstance(each, Tensor) for each in site.forward.listed]
            pending.weight_gradients = {n: g for n, g in gradients.items() if is_parameter[n]}
            return {n: g for n, g in gradients.items() if not is_parameter[n]}
        return gradients

    def _recomputed(self, reason: str, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of an eager backward, whose forward is computed anew; it is counted."""
        self.site.planned.ran_backward_eagerly(reason)
        return recompute(self.recorder.backend, self.pending, incoming)

    def replayed(self, incoming: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        recorded = self.slot.backward_to_replay(self.site)
        _copy_in(recorded, incoming)
        if recorded.counts_anew is not None:
            recorded.replay(self.recorder.backend, self.pending.random)
        elif recorded.graph is not None:
            recorded.graph.replay()
        return self._outgoing(recorded)

    # ---- the gradients of weights, if they are computed apart

    def _part_for_later(self) -> WeightsPart:
        listed = enumerate(self.site.forward.listed)
        parameters = {use: each for use, each in listed if isinstance(each, Tensor)}
        later = Backward(self.slot, self.pending, self.recorder, self.delayed)

        def compute() -> list[Tensor | None]:
            gradients = later._weights_part()
            return [gradients.get(use) for use in parameters]

        return WeightsPart(list(parameters.values()), compute)

    def _weights_part(self) -> dict[int, Tensor | None]:
        """Gradients of the parameters by use.

        Without a running node they are static memory, good until the next replay in the slot.
        """
        slot, site, pending = self.slot, self.site, self.pending
        slot.weights_done(pending)
        if pending.weight_gradients is not None:
            return pending.weight_gradients
        if site.weights is None:
            assert site.run is not None
            second_uses = site.run.second_uses  # a failed capture drops the run
            gradients = self.recorder.backward_of_weights(slot, pending)
            return dict(zip(second_uses, gradients, strict=True))
        slot.backward_pool.added.reclaim()
        if site.weights.graph is not None:
            site.weights.graph.replay()
        if self._node is None:
            return dict(zip(site.weights.uses, site.weights.gradients, strict=True))
        return self._outgoing(site.weights)

    # ---- how gradients leave the static memory of a graph

    def _outgoing(self, recorded: RecordedBackward) -> dict[int, Tensor | None]:
        """The gradients by use, as tensors that autograd may take.

        If a parameter has no ``.grad`` and nothing else ever writes to the static memory of its
        gradient, autograd gets that memory itself and makes it ``.grad``. If the parameter has a
        ``.grad`` already (in a later microbatch), autograd adds to it from the static memory, which
        is leased until the next replay in the slot. In every other case (hooks, ``autograd.grad``,
        inputs) the gradient is a copy. The copy is laid out like the parameter, so it can become
        ``.grad`` without another copy.
        """
        results: dict[int, Tensor | None] = {}
        launches = recorded.launches
        if recorded.has_some_in_place or any(map(_has_grad, recorded.parameters)):
            results |= self._leased(recorded)
            launches = recorded.launches_without(tuple(results))
        for launch in launches:
            copies = list(map(torch.empty_like, launch.likes))
            targets = list(map(unwrap, copies))
            if len(copies) == 1:
                targets[0].copy_(launch.gradients[0])
            elif copies:
                torch._foreach_copy_(targets, launch.gradients)
            results.update(zip(launch.uses, copies, strict=True))
        return results

    def _leased(
        self, recorded: RecordedBackward, *, in_place_only: bool = False
    ) -> dict[int, Tensor]:
        """The gradients among the outgoing ones that are leased static memory."""
        found: dict[int, Tensor] = {}
        added: list[BufferLease] = []
        in_place: list[BufferLease] = []
        for use, parameter, lease in recorded.of_parameters:
            there = parameter.grad
            if there is None:
                leases = in_place if lease.in_place else None
            else:
                can_be_added = lease.can_be_added and there.layout is torch.strided
                leases = added if can_be_added and not in_place_only else None
            if leases is None:
                continue
            if not parameter._backward_hooks and accumulates(self.nodes()[use]):
                found[use] = lease.hand_out()
                leases.append(lease)
            elif there is None:
                lease.copied["hooks" if parameter._backward_hooks else "asked_for"] += 1
        self.slot.grant(self.site, added=added, in_place=in_place)
        return found


def _has_grad(parameter: Tensor) -> bool:
    return parameter.grad is not None


def _fits(recorded: RecordedBackward, incoming: Sequence[Tensor | None]) -> bool:
    """Whether static memory can hold the gradients; static memory of expanded ones is smaller."""
    given = [gradient for gradient in incoming if gradient is not None]
    return all(t.shape == g.shape for t, g in zip(recorded.targets, given, strict=True))


def _copy_in(recorded: RecordedBackward, incoming: Sequence[Tensor | None]) -> None:
    given = [gradient for gradient in incoming if gradient is not None]
    for target, gradient in zip(recorded.targets, given, strict=True):
        copy_to(target, gradient)


# ---- the replacement of the forward of a scope's module

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


class GraphedScope(Installed):
    """Replacement of the forward of one scope's module.

    Attributes:
        use_reentrant: if its calls keep their inputs only, how torch's checkpoint runs them
            eagerly; None if autograd saves what their backward needs.
        why_eager: a function that is called with the module at every call, or None. If it returns a
            word, the call runs eagerly and is counted under that word.
    """

    def __init__(
        self, graphs: Owner, scope: Scope, on_mismatch: str, delayed: DelayedWeights
    ) -> None:
        super().__init__(scope.module, f"scope {scope.name!r}")
        self.graphs, self.scope = graphs, scope
        self.on_mismatch = on_mismatch
        self.delayed = delayed  # backwards whose weights' part waits
        self.eager_calls: Counter[str] = Counter()
        self.use_reentrant: bool | None = None
        self.why_eager: Callable[[nn.Module], str | None] | None = None

    def install(self, **attributes: Any) -> None:
        """Takes the place of the module's forward. ``attributes`` are set on the module as well."""
        super().install(**attributes)
        # With gradients, a model that is compiled around the scope breaks its graph here.
        self._outside_of_compiler = torch.compiler.disable(
            self._call, reason=f"{self._name} has graphs of moe_graphs"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # dynamo traces this, and must not trace the engine
            if not torch.is_grad_enabled():  # no graph serves such a call: compiled generation
                return self.scope.forward(*args, **kwargs)
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
        number, signature_id = observation.forward(self.scope, planned, self.use_reentrant)
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
        return ScopeCall(self.scope, signature, flatten(inputs)[0], call)

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
        call = ScopeCall(self.scope, signature, leaves, arguments, leased=leased)
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
    graphs: Owner,
    scopes: Sequence[Scope],
    on_mismatch: str,
    delayed: DelayedWeights,
    parts: Sequence[Part] = (),
) -> tuple[list[GraphedScope], list[RecomputedPart]]:
    """Installs all graphed scopes, and what recomputes in them, or none if one cannot be."""
    graphed = [GraphedScope(graphs, scope, on_mismatch, delayed) for scope in scopes]
    anew = [RecomputedPart(part) for part in parts]
    try:
        for each in (*graphed, *anew):
            each.install()
    except BaseException:
        for each in (*graphed, *anew):
            each.uninstall()
        raise
    return graphed, anew
