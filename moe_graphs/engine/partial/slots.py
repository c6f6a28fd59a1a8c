"""Slots: which recording a call replays and whether it may, for microbatches in flight.

A microbatch takes a ``Slot`` with its first forward and gives it back with its last backward. The
recordings of a slot share a memory pool. So they may be replayed only in the order of their
capture: all forwards, then the backwards. A replay may leave recordings out, but it may not go
back; a comparison of two integers finds out. Every slot has a pool of its own, so microbatches in
different slots may be interleaved in any way. The backwards of several slots share one more pool
and run one at a time. What one backward leaves there is taken before the next one begins.

The first microbatch that takes a slot captures it.

May this call be replayed, and where does it write? ``GraphedScope`` asks ``Chunk.next_site`` for
the call site, and then ``Slot.mismatch``, in the order of this table. The first "no" is the reason
that is counted, and ``on_mismatch="error"`` names all of them. ``Slot.unreplayable`` is the same
for a backward.

| question | reason if the answer is no |
|---|---|
| can any graph serve it? (``GraphedScope.eager_reason``) | `paused`, `outside_step`, a mode, ... |
| does an integration need the Python to run? (``GraphedScope.why_eager``) | its own word |
| was the scope observed, and is a slot free? | `not_observed`, `slots_full` |
| does its replay compute what eager does? (``PlannedCall.refused``) | `differs_from_eager` |
| are the inputs those of the capture? (``Signature``) | `structure`, `shape`, `constant`, ... |
| is the state of torch that of the capture? (``TorchState``) | `autocast`, `context` |
| is all that Python can read as it was? (``Guards``) | `attribute`, `hooks`, `moved`, ... |
| is static memory that this call writes needed by no backward? | `input_moved` |
| does no caller hold that memory? (``BufferLease``) | `output_held`, `gradient_held` |
| has no capture failed on any rank, if the call is to be captured? (``Recorder.mismatch``) |
`capture_failed` |

| state of a call site | its next forward | where it writes |
|---|---|---|
| to be captured: the slot is not closed | is captured, on all ranks together | ``Slot.pool`` |
| recorded: it ``has_forward`` | is replayed | ``forward.outputs``, once they are reclaimed |
| left out: the slot is closed | runs eagerly (`not_captured`) | memory of the caller |
| refused: ``planned.refused`` | runs eagerly, by that reason | memory of the caller |

| state of its backward | the next backward | where it writes |
|---|---|---|
| to be captured: it is ``open`` | runs on autograd's graph of the capture, and is captured |
``Slot.backward_pool``, and ``Slot.pool_of_first`` for ``first`` |
| recorded: there is a ``backward`` | is replayed in the order of the capture (`out_of_order`) with
gradients laid out as before (`other_layout`, `other_outputs`) | ``first.gradients`` if there is a
``first`` and no ``.grad``, else ``backward.gradients`` |
| neither | computes its forward anew (`not_captured`) | memory of the caller |
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from moe_graphs.engine.audit import NEVER, CallAudit
from moe_graphs.engine.autograd import keeps_graph
from moe_graphs.engine.backends.backend import Backend, Graph
from moe_graphs.engine.buffer_lease import BufferLease, Leases, references_of_the_engine
from moe_graphs.engine.partial.recording import (
    BackwardRun,
    Layouts,
    OpenCall,
    RecordedBackward,
    RecordedForward,
    versions_of,
)
from moe_graphs.engine.partial.scope import Scope
from moe_graphs.engine.partial.trials import Tried
from moe_graphs.engine.ranks import ALONE, Ranks
from moe_graphs.engine.reasons import BACKWARD, EAGER_CALLS
from moe_graphs.engine.report import FallbackWarning
from moe_graphs.engine.tensors import Mismatch, Signature, copy_to, results_of, unwrap
from moe_graphs.engine.verify import Difference, same_bits, warn
from moe_graphs.errors import CaptureError, GraphError

_SEVERAL_SHAPES = "several_shapes"  # the reason why gradients are copied

# ---- one call site of a slot: what was recorded there, and what its replays change


@dataclass
class PlannedCall:
    """Facts about a call that hold for all slots of one shape.

    Attributes:
        signature: of the inputs; until the first call of another shape, that of the first shape.
        is_signed: whether the call has had its first call, if it is of another shape.
        tried: the findings of its trial run, until everything is captured.
        is_observed: whether warm-up steps have shown who uses its weights and their gradients.
        ranks: the ranks that it communicates with; they capture and compare it together.
        copied_outputs: outputs that are handed out as copies, because somebody keeps views of them
            beyond the next replay.
        refused: why the call is not replayed, or not any more.
        not_reproducible: whether eager runs differ from one another in their last bits.
        backward_runs_once: whether one backward uses up the autograd graph of its forward.
        eager_backwards: reason -> number of replayed forwards whose backward ran eagerly.
        copies_gradients: why no weight gradient may become ``.grad`` as it is; None if they may.
        fallbacks: warns of eager backwards; all calls of the graphs share it.
        eager_bytes: memory that an eager forward and backward take at most, as measured.
        use_reentrant: if it keeps its inputs only, how torch's checkpoint runs it eagerly.
        recomputed_bytes: saved tensors that each of its backwards computes anew, as measured.
    """

    scope: Scope
    signature: Signature
    tried: Tried | None = None
    is_observed: bool = False
    ranks: Ranks = ALONE
    copied_outputs: set[int] = field(default_factory=set)
    refused: Mismatch | None = None
    not_reproducible: bool = False
    backward_runs_once: bool = False
    eager_backwards: Counter[str] = field(default_factory=Counter)
    copies_gradients: str | None = "not_observed"
    fallbacks: FallbackWarning = field(default_factory=FallbackWarning)
    eager_bytes: int = 0
    use_reentrant: bool | None = None
    recomputed_bytes: int = 0
    is_signed: bool = True

    def of_another_shape(self) -> PlannedCall:
        """Returns the same call for another shape of microbatches, which has not come yet.

        Its weight gradients are copies: memory for them in place would grow with each shape.
        """
        return replace(
            self,
            is_signed=False,
            copied_outputs=set(),
            eager_backwards=Counter(),
            copies_gradients=_SEVERAL_SHAPES,
        )

    @property
    def is_of_later_shape(self) -> bool:
        """Whether graphs of other shapes were captured in its memory pool before."""
        return self.copies_gradients == _SEVERAL_SHAPES

    @property
    def recomputes(self) -> bool:
        """Whether it keeps its inputs only, and its backward runs its forward again."""
        return self.use_reentrant is not None

    def ran_backward_eagerly(self, reason: str) -> None:
        """Counts a backward of a replayed forward that no graph served."""
        self.eager_backwards[reason] += 1
        self.fallbacks.ran_eagerly(f"scope {self.scope.name!r}", f"{BACKWARD}{reason}")

    def differs(self, difference: Difference) -> Mismatch:
        """Turns replays of the call off, because they do not compute what eager computes."""
        message = f"its replay differs from eager: {difference}"
        self.refused = refused = Mismatch("differs_from_eager", message)
        warn(f"scope {self.scope.name!r} stays eager: {message}")
        return refused


class CallSite:
    """A call at its place in the order of a slot, with what was recorded there.

    Attributes:
        has_forward: whether its forward is recorded.
        forward: the recording of its forward; only call sites with ``has_forward`` have it.
        backward: the recording that computes all gradients or, if the backward is split, those of
            the inputs; then ``weights`` computes the others.
        first: the recording of the backward for the first microbatch of a step, if gradients are
            accumulated. Its gradients stay where they are, as ``.grad``.
        open: autograd's graph of the forward, until everything is recorded.
        run: the latest backward of ``open``.
        verified_layouts: further layouts of incoming gradients for which a replay was compared with
            eager.
        leases: one for each storage that its outputs lie on, if they are not copied.
        out: the leases among them whose outputs were handed out.
        audit: what its audits compare with, or None.
        audit_due: the count of replays at which an audit may be due.
    """

    forward: RecordedForward

    def __init__(self, planned: PlannedCall, position: int) -> None:
        self.planned, self.position, self.name = planned, position, planned.scope.name
        self.clear()

    def clear(self) -> None:
        self.has_forward = False
        self.__dict__.pop("forward", None)
        self.backward: RecordedBackward | None = None
        self.first: RecordedBackward | None = None
        self.weights: RecordedBackward | None = None
        self.backward_position = -1
        self.verified_layouts: set[Layouts] = set()
        self.open: OpenCall | None = None
        self.run: BackwardRun | None = None
        self.sources: dict[int, tuple[CallSite, int]] = {}
        self.leases: list[BufferLease] = []
        self.out = Leases()
        self.replayed = self.audited = 0
        self.audit: CallAudit | None = None
        self.audit_due = NEVER

    @property
    def is_recorded(self) -> bool:
        """Whether everything that its replays need is recorded."""
        if not self.has_forward or not any(self.forward.differentiable):
            return self.has_forward
        has_weights = self.weights is not None or not self.forward.is_split
        return self.backward is not None and has_weights

    def unused_inputs(self) -> list[str]:
        """The names of inputs that require a gradient and get none."""
        if self.backward is None:
            return []
        forward = self.forward
        got = {
            forward.listed[use]
            for use, gradient in zip(self.backward.uses, self.backward.gradients, strict=True)
            if gradient is not None and isinstance(forward.listed[use], int)
        }
        return [
            forward.signature.leaves[i].name
            for i in forward.loaded
            if forward.inputs[i].requires_grad and i not in got
        ]

    def gradient_leases(self) -> list[BufferLease]:
        """The leases of the weights' gradients."""
        recorded = (self.first or self.backward, self.weights)
        return [row[-1] for each in recorded if each is not None for row in each.of_parameters]

    def graphs(self) -> list[Graph]:
        recorded: list[RecordedForward | RecordedBackward | None]
        recorded = [self.forward] if self.has_forward else []
        recorded += [self.backward, self.first, self.weights]
        return [each.graph for each in recorded if each is not None and each.graph is not None]

    def opened(
        self,
        forward: RecordedForward,
        open: OpenCall,
        sources: dict[int, tuple[CallSite, int]],
        owned: set[int],
    ) -> None:
        """Notes the recording of its forward.

        Args:
            sources: per input that reads an output of another call site in place: that call site
                and the number of the output.
            owned: addresses of the model's own memory. An output that lies there is not leased.
        """
        self.forward, self.has_forward = forward, True
        self.open, self.sources = open, sources
        on_storage: dict[int, list[int]] = {}
        for index, output in enumerate(forward.outputs):
            storage = output.untyped_storage()
            if output.dim() > 0 and storage.data_ptr() not in owned:
                on_storage.setdefault(storage._cdata, []).append(index)
        self.leases = [
            BufferLease(forward.outputs[numbers[0]], outputs=numbers)
            for numbers in on_storage.values()
        ]
        # On a GPU the lease of an output that no backward saves did not see its holder. Outputs of
        # a later shape lie where graphs of earlier shapes work.
        if self.planned.recomputes or self.planned.is_of_later_shape:
            self.planned.copied_outputs.update(range(len(forward.outputs)))

    def is_in_place(self, index: int, leaf: Tensor) -> bool:
        """Whether static memory has the values of an input already."""
        if leaf.data_ptr() == self.forward.inputs[index].data_ptr():
            return True
        if index not in self.sources:
            return False
        source, output = self.sources[index]  # the output may have been handed out as a copy
        return source.handed_as(leaf) == output and leaf._version == 0

    def needs_output(self, source: CallSite, output: int) -> bool:
        """Whether the backward may read the memory of an output of a call site.

        It may if this is that call site, or if the memory is one of its static inputs.
        """
        memory = source.forward.outputs[output].untyped_storage()._cdata
        inputs = (at.forward.outputs[number].untyped_storage()
                  for at, number in self.sources.values())  # fmt: skip
        return self is source or any(each._cdata == memory for each in inputs)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copies the inputs into place, except those that are already there."""
        for index, target in self.forward.loads:
            if not self.is_in_place(index, leaves[index]):
                copy_to(target, leaves[index])

    def hand_out(self) -> list[Tensor]:
        """The outputs of this replay, as new tensor objects."""
        copied, handed = self.planned.copied_outputs, []
        for index, output in enumerate(self.forward.outputs):
            is_copied = index in copied or not output.dim()
            handed.append(output.clone() if is_copied else output.detach())
        return handed

    def note_handed(self, outputs: Sequence[Tensor]) -> None:
        """Leases the outputs: the tensors as they come out of autograd."""
        for lease in self.leases:
            lease.note_handed(map(outputs.__getitem__, lease.outputs))
        self.out.add(self.leases)

    def handed_as(self, leaf: Any) -> int | None:
        """The number of the output of the last replay that ``leaf`` is, or None.

        Only the very object that was handed out counts, and only until its memory was reclaimed.
        """
        numbers = (lease.output_of(leaf) for lease in self.leases)
        return next((number for number in numbers if number is not None), None)

    def reclaim(self) -> bool:
        """Reclaims the outputs before they are overwritten. False if somebody holds a view of one.

        Who holds a view once will do it again (a pipeline that waits late for a send), so from then
        on the output is handed out as a copy.
        """
        if self.out.reclaim():
            return True
        self.planned.copied_outputs.update(*(lease.outputs for lease in self.out))
        return False

    def release(self) -> None:
        for graph in self.graphs():
            graph.release()
        self.clear()


class PendingBackward:
    """One replayed forward until its backward. It lives as long as the autograd graph needs it.

    Attributes:
        is_done: whether its backward, or the part for the inputs, has run.
        cancelled: whether its backward will never run.
        weights: "with_backward" if one graph computes all gradients. Otherwise the graph of the
            weight gradients is still to be replayed ("pending") or was replayed ("done").
        random: positions of the random number generators before the forward, if it draws.
        weight_gradients: weight gradients that were computed together with those of the inputs.
        is_first_in_fp8: whether it contains the first module under Transformer Engine's autocast.
        versions: versions, after the replay, of the tensors that the backward needs.
    """

    is_first_in_fp8 = False

    def __init__(self, site: CallSite, leaves: Sequence[Any], random: Any) -> None:
        self.site = site
        self.is_done = self.cancelled = False
        self.weights = "pending" if site.forward.is_split else "with_backward"
        self.random = random
        self.weight_gradients: dict[int, Tensor | None] | None = None
        self._gradients: list[weakref.ref[Tensor] | None] = []
        self._inputs: list[tuple[weakref.ref[Tensor], int]] = []
        for index in site.forward.saved_inputs:
            self._inputs.append((weakref.ref(leaves[index]), leaves[index]._version))
        self.versions: list[int] = []

    @property
    def is_over(self) -> bool:
        return self.is_done and self.weights != "pending"

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        if self.weights == "pending":
            self._gradients = [None if g is None else weakref.ref(g) for g in gradients]

    def check_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Checks that the weights' part gets the very gradients that the first part was given."""
        if self.weights == "pending":
            known = [None if ref is None else ref() for ref in self._gradients]
            if any(a is not b for a, b in zip(known, gradients, strict=True)):
                raise GraphError(
                    f"scope {self.site.name!r}: the gradients of its weights are asked for with "
                    f"other output gradients than those of its inputs were: a graph's saved "
                    f"tensors serve one backward"
                )

    def written_unseen(self) -> list[tuple[int, Tensor]]:
        """Numbers and tensors of inputs that were written since the forward without a new version.

        ``.data`` and numpy write so. The values are read, so this waits for the device.
        """
        forward, found = self.site.forward, []
        own = set(forward.loaded) - forward.linked
        for number, (ref, version) in zip(forward.saved_inputs, self._inputs, strict=True):
            leaf, static = ref(), forward.inputs[number]
            if leaf is None or leaf._version != version or number not in own:
                continue
            is_in_place = unwrap(leaf).data_ptr() == unwrap(static).data_ptr()
            if not is_in_place and not same_bits(leaf, static):
                found.append((number, leaf))
        return found

    def mismatch_of_written(self, number: int) -> Mismatch:
        """The reason why a scope whose input was written unseen is not replayed."""
        name = self.site.planned.signature.leaves[number].name
        remedy = EAGER_CALLS["input_written"].remedy
        message = (
            f"input {name!r} was written between forward and backward without a new version "
            f"(.data), and a graph reads a copy from before: {remedy}"
        )
        return Mismatch("input_written", message)

    def check_unmodified(self) -> None:
        """Checks, as eager does, that no tensor that the backward needs was modified in place."""
        forward = self.site.forward
        what, now = None, list(map(versions_of, forward.saved))
        if now != self.versions:
            outputs = len(forward.saved_outputs)
            what = "a parameter or buffer"
            if now[:outputs] != self.versions[:outputs]:
                what = "an output"
        for ref, version in self._inputs if what is None else ():
            if (tensor := ref()) is not None and tensor._version != version:
                what = "an input"
        if what is not None:
            raise GraphError(
                f"scope {self.site.name!r}: {what} was modified in place before the backward that "
                f"needs it: clone it before modifying it"
            )


# ---- slots

_ATTEMPTS = 3  # number of attempts to capture a slot; a microbatch may leave scopes out
_NOT_CAPTURED = Mismatch(
    "not_captured",
    "a call before it was missing where its microbatch was captured: "
    + EAGER_CALLS["not_captured"].remedy,
)


class BackwardPool:
    """The memory pool in which backwards work, one after the other.

    Attributes:
        added: leases of gradients in the pool that autograd is adding to others just now.
    """

    def __init__(self, backend: Backend, pool: Any = None) -> None:
        self._backend, self._stream = backend, None
        self.pool = backend.new_pool() if pool is None else pool
        self.added = Leases()

    def begin(self) -> None:
        """Lets the next backward work in the pool, on the current stream."""
        stream = self._backend.current_stream()
        if self._stream is not None and stream != self._stream:
            self._backend.wait_for(self._stream)
        self._stream = stream


class Slot:
    """The recordings of one microbatch in flight, and how far the running microbatch has come.

    Args:
        pool: the memory pool of the recordings; None makes a new one.
        pool_bytes: size of the one piece that a new pool begins with.
        backward_pool: the pool that the backwards of several slots share; None lets the backwards
            work in the pool of the slot.
        first_bytes: if gradients are accumulated, size of the one piece that the pool for backwards
            of first microbatches begins with; 0 if gradients are not accumulated.
        fails_alone: whether a capture that fails here leaves other slots their graphs.

    Attributes:
        clock: the position that the running microbatch has come to; -1 if it has called nothing.
        failure: the error of a capture that has failed here, if it fails alone.
    """

    def __init__(
        self,
        calls: Sequence[PlannedCall],
        backend: Backend,
        pool: Any = None,
        *,
        pool_bytes: int = 0,
        backward_pool: BackwardPool | None = None,
        first_bytes: int = 0,
        fails_alone: bool = False,
    ) -> None:
        self.fails_alone, self._given = fails_alone, pool
        self.failure: CaptureError | None = None
        self._pool_bytes, self._first_bytes, self._shared = pool_bytes, first_bytes, backward_pool
        self.accumulates = first_bytes > 0
        self.sites = tuple(CallSite(call, position) for position, call in enumerate(calls))
        self._backend = backend
        self._of_scope: dict[str, list[CallSite]] = {}
        for site in self.sites:
            self._of_scope.setdefault(site.name, []).append(site)
        self.abandoned = self._attempts = 0
        self._begin_anew(pool)

    def _begin_anew(self, pool: Any) -> None:
        self.pool = self._backend.new_pool(self._pool_bytes) if pool is None else pool
        # Weight gradients come in any order: a capture after one of them must not get the memory
        # that it works in.
        self.pool_of_weights = self._backend.new_pool()
        # Only backwards of first microbatches write where ``.grad`` stays until the next step.
        self.pool_of_first = self._backend.new_pool(self._first_bytes)
        self.backward_pool = self._shared or BackwardPool(self._backend, self.pool)
        self.in_place = Leases()  # leases of gradients that have become ``.grad``
        self.clock, self._backwards = -1, 0
        self._stream: Any = None
        # The keys are positions: a recording waits for one backward at most.
        self._pending: dict[int, weakref.ref[PendingBackward]] = {}
        self._retained: weakref.WeakSet[PendingBackward] = weakref.WeakSet()
        self.is_closed = False

    def follows(self, other: Slot) -> None:
        """Orders its next replay behind those of a slot that works in the same pool."""
        self._stream = other._stream

    # ---- being captured

    def failed(self, error: CaptureError) -> None:
        """Notes a capture that fails alone: no more calls are captured or replayed here."""
        self.failure, self.is_closed = error, True

    def may_record(self, site: CallSite) -> bool:
        """Whether a forward may be captured: forwards go in their order, before all backwards."""
        earlier = self.sites[: site.position]
        return (
            not self.is_closed
            and self._backwards == 0
            and all(each.has_forward or each.planned.refused for each in earlier)
        )

    def may_record_backward(self) -> bool:
        """Whether a backward may be captured: only after all forwards.

        Memory of the forwards lies in the pool before that of the backwards.
        """
        complete = not self.is_closed and all(
            site.has_forward or site.planned.refused for site in self.sites
        )
        if complete and self._shared is not None:
            self._shared.begin()
        return complete and self.backward_pool.added.reclaim()

    def backward_recorded(self, site: CallSite) -> None:
        """Notes a captured backward: backwards may be replayed only in the order of captures."""
        site.backward_position = len(self.sites) + self._backwards
        self._backwards += 1

    def output_at(self, leaf: Tensor) -> tuple[CallSite, int] | None:
        """The call site and the number of the output whose static memory a tensor is, or None.

        The tensor must be the object that was handed out in this microbatch.
        """
        for site in self.sites:
            index = site.handed_as(leaf)
            if index is not None:
                static = site.forward.outputs[index]
                return (site, index) if static.data_ptr() == leaf.data_ptr() else None
        return None

    def leases(self) -> list[BufferLease]:
        """The leases of all outputs."""
        return [lease for site in self.sites for lease in site.leases]

    def uses_again(self, parameter: Tensor) -> str | None:
        """The reason to copy all gradients of a parameter: autograd adds several of them up."""
        forwards = (site.forward for site in self.sites if site.has_forward)
        uses = sum(each is parameter for forward in forwards for each in forward.listed)
        return "used_twice" if uses > 1 else None

    # ---- replays

    def next_site(self, scope: str) -> CallSite | None:
        """The next call of ``scope`` that this microbatch has not reached yet."""
        for site in self._of_scope.get(scope, ()):
            if site.position > self.clock:
                return site
        return None

    def begin(self) -> None:
        """Starts a new microbatch in the slot."""
        self._retained.clear()
        self.clock = -1

    def skip(self, site: CallSite) -> None:
        """Notes a call that runs eagerly in place of its recording, so the microbatch goes on."""
        self.clock = site.position

    def mismatch(self, site: CallSite, structure: Any, leaves: Sequence[Any]) -> Mismatch | None:
        """The reason why this call cannot be replayed now, or None. Makes room for its outputs."""
        first = next(self.mismatches(site, structure, leaves), None)
        if first is not None or not site.has_forward:
            return first
        return self._make_room(site, leaves)

    def mismatches(
        self, site: CallSite, structure: Any, leaves: Sequence[Any]
    ) -> Iterator[Mismatch]:
        """The reasons why this call cannot be replayed, whoever holds the memory that it writes."""
        if site.planned.refused is not None:
            yield site.planned.refused
        if self.failure is not None:
            yield Mismatch("capture_failed", str(self.failure))
        yield from site.planned.signature.mismatches(structure, leaves)
        if site.has_forward:
            forward = site.forward
            for check in forward.conditions.checks:
                if (found := check()) is not None:
                    yield found
            asked_for = forward.conditions.guards.asked_for
            if forward.written or asked_for:
                signature = site.planned.signature
                found = signature.mismatch_of_memory(leaves, forward.written, asked_for)
                if found is not None:
                    yield found
        elif not self.may_record(site):
            yield _NOT_CAPTURED

    def _make_room(self, site: CallSite, leaves: Sequence[Any]) -> Mismatch | None:
        writes = [site]
        for index, (source, output) in site.sources.items():
            if not site.is_in_place(index, leaves[index]):
                if any(each.site.needs_output(source, output) for each in self.in_flight()):
                    name = site.planned.signature.leaves[index].name
                    message = f"input {name!r}: captured as the untouched output of another scope"
                    remedy = EAGER_CALLS["input_moved"].remedy
                    return Mismatch("input_moved", f"{message}, got another tensor: {remedy}")
                writes.append(source)
        reclaimed = list(map(CallSite.reclaim, writes))  # all are reclaimed, even if one fails
        held, kind = "output", "an output"
        if all(reclaimed):
            # Forwards may write where the gradients of the last microbatch are, unless the
            # gradients have a pool of their own.
            free = self.accumulates or self.reclaim_in_place()
            if self.backward_pool.added.reclaim() and free:
                return None
            held, kind = "gradient", "a weight's gradient"
        message = f"a view of {kind} of its last replay is still in use: clone() what you keep"
        return Mismatch(f"{held}_held", message)

    def grant(
        self, site: CallSite, *, added: list[BufferLease], in_place: list[BufferLease]
    ) -> None:
        """Notes gradients that are handed out on memory of a pool.

        Autograd holds those in ``added`` while it adds them. Those in ``in_place`` become ``.grad``
        until a graph needs their memory again.
        """
        self.backward_pool.added.add(added)
        self.in_place.add(in_place, site.backward_position)

    def reclaim_in_place(self, site: CallSite | None = None) -> bool:
        """Reclaims gradients that have become ``.grad``.

        With ``site`` given, only those that its backward may overwrite.
        """
        return self.in_place.reclaim(0 if site is None else site.backward_position)

    def in_flight(self) -> list[PendingBackward]:
        """The replayed forwards whose backward may still come."""
        alive = [pending for ref in self._pending.values() if (pending := ref()) is not None]
        self.abandoned += len(self._pending) - len(alive)
        self._pending = {each.site.position: weakref.ref(each) for each in alive}
        return alive

    def retains(self) -> bool:
        """Whether another backward of the last microbatch may come (``retain_graph=True``)."""
        return len(self._retained) > 0

    def begin_replay(self, site: CallSite, leaves: Sequence[Any]) -> PendingBackward:
        """Begins a replay before the graph of the forward runs, on the current stream."""
        stream = self._backend.current_stream()
        if self._stream is not None and stream != self._stream:
            self._backend.wait_for(self._stream)
        self._stream = stream
        random = self._backend.random_position() if site.forward.draws else None
        pending = PendingBackward(site, leaves, random)
        self.clock = site.position
        if any(site.forward.differentiable):
            self._pending[site.position] = weakref.ref(pending)
        return pending

    def cancel(self, pending: PendingBackward) -> None:
        """Forgets a replayed forward whose outputs were thrown away."""
        self._pending.pop(pending.site.position, None)

    def check(self, pending: PendingBackward) -> None:
        """Checks that a backward may run.

        Raises:
            GraphError: if it must not run at all.
        """
        self.check_alive(pending)
        if pending.is_done and pending not in self._retained:
            raise GraphError(
                f"scope {pending.site.name!r}: a second backward of the same forward: the first "
                f"one needs retain_graph=True, and all of them have to come before the next "
                f"microbatch: run other forwards within graphs.paused()"
            )
        pending.check_unmodified()

    def unreplayable(self, pending: PendingBackward, layouts: Layouts) -> str | None:
        """The reason why the recorded backward cannot serve this one, or None."""
        site = pending.site
        if site.backward is None:
            return "not_captured"
        if site.backward_position <= self.clock:
            return "out_of_order"
        if layouts != site.backward.layouts and layouts not in site.verified_layouts:
            return site.backward.other(layouts)
        mismatch = next(results_of(site.backward.conditions.checks), None)
        if mismatch is not None:
            return mismatch.reason
        added = self.backward_pool.added
        if added.reclaim():
            return None
        if site.planned.ranks.group is not None:
            # Ranks collect garbage at different times, but they have to run the same operations.
            gc.collect()
            return None if added.reclaim() else "gradient_held"
        return "gradient_held"

    def backward_to_replay(self, site: CallSite) -> RecordedBackward:
        """The recording that serves a backward which can be replayed.

        If no ``.grad`` exists and nobody holds the memory where gradients of first microbatches
        stay, it is the recording for a first microbatch.
        """
        first = site.first
        if first is not None and first.finds_no_gradient() and self.reclaim_in_place(site):
            return first
        assert site.backward is not None
        return site.backward

    def backward_done(self, pending: PendingBackward, *, replayed: bool) -> None:
        """Notes that a backward has run, or is about to be replayed."""
        if replayed:
            self.clock = pending.site.backward_position
            if self._shared is not None:
                self._shared.begin()
        pending.is_done = True
        self._forget_if_over(pending)

    def weights_done(self, pending: PendingBackward) -> None:
        """Notes that the weight gradients have been computed by a graph of their own.

        They may come in any order: the tensors that they need are kept until all weight gradients
        of the slot are captured.
        """
        self.check_alive(pending)
        if not pending.is_done or pending.weights != "pending":
            when = "a second time" if pending.is_done else "before the gradients of its inputs"
            raise GraphError(
                f"scope {pending.site.name!r}: the gradients of its weights are asked for {when}"
            )
        pending.weights = "done"
        self._forget_if_over(pending)

    def end_step(self) -> None:
        """Ends a step: backwards that have not come will not come any more.

        A capture that has begun is complete now, or it begins anew with the next microbatch.
        """
        for pending in self.in_flight():
            pending.cancelled = True
            self.abandoned += 1
        self._pending.clear()
        self._retained.clear()
        self.clock = -1
        for lease in self.in_place:
            lease.note_grad()
        begun = any(site.has_forward for site in self.sites)
        if not self.is_closed and (begun or all(site.planned.refused for site in self.sites)):
            self._close_or_begin_anew()

    def _close_or_begin_anew(self) -> None:
        self._attempts += 1
        complete = all(site.is_recorded or site.planned.refused for site in self.sites)
        if complete or self._attempts == _ATTEMPTS:
            self.is_closed = True
            self.free_autograd_graphs(self.sites)
        else:
            self.release()
            self._begin_anew(self._given)

    def free_autograd_graphs(self, sites: Sequence[CallSite]) -> None:
        """Frees the autograd graphs that the captured forwards have left."""
        with references_of_the_engine(self.leases()):
            for site in sites:
                site.open = site.run = None

    def release(self) -> None:
        for site in self.sites:
            site.release()
        self.is_closed = True

    def check_alive(self, pending: PendingBackward) -> None:
        """Checks that the graphs of a backward are still there.

        Raises:
            GraphError: if the graphs are released, or the backward's step has ended.
        """
        if not pending.site.has_forward:
            raise GraphError(
                f"scope {pending.site.name!r}: its graphs were released before this backward"
            )
        if pending.cancelled:
            raise GraphError(
                f"scope {pending.site.name!r}: this backward belongs to a step that has ended: "
                f"call backward() inside the 'with graphs.step()' of its forward"
            )

    def _forget_if_over(self, pending: PendingBackward) -> None:
        if pending.is_over:
            self._pending.pop(pending.site.position, None)
            if keeps_graph():
                self._retained.add(pending)
