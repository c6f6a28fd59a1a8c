"""Captures calls where they happen: the first call that reaches a call site is recorded there.

A forward is captured in the caller's forward, under whatever contexts the caller has entered. A
backward is captured within the caller's backward, on autograd's thread. The first replay of each is
compared with an eager run on the same inputs before anything depends on it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import Audits, Stream
from moe_graphs.engine.autograd import LeafUses, has_hooks, leaves_behind, used_within
from moe_graphs.engine.backends.backend import Backend, Graph
from moe_graphs.engine.buffer_lease import (
    Allocations,
    BufferLease,
    reason_to_copy,
    references_of_the_engine,
    wait_for_autograd,
)
from moe_graphs.engine.fp8 import Scales
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.guards.torch_state import TorchState
from moe_graphs.engine.partial.recording import (
    BackwardRun,
    CallSite,
    OpenCall,
    PendingBackward,
    Recomputed,
    RecordedBackward,
    RecordedForward,
    ReplayConditions,
    Saved,
)
from moe_graphs.engine.partial.scope import Exit
from moe_graphs.engine.partial.slots import Slot
from moe_graphs.engine.partial.trials import ScopeCall, Trials, TriedForward, check_capturable
from moe_graphs.engine.partial.verify import Expected, SideEffects, Verification, recompute
from moe_graphs.engine.snapshot import ParameterAliases, Snapshot
from moe_graphs.engine.static_buffers import StaticBuffers
from moe_graphs.engine.tensors import (
    Mismatch,
    OutputLeaf,
    address,
    as_leaf,
    copy_to,
    is_plain,
    same_value,
    static_like,
    target_of,
    unwrap,
)
from moe_graphs.engine.tracing import Operations, differing_op, explaining_errors_of
from moe_graphs.errors import CaptureError

# ``uses``, ``listed``, ``gradients`` and ``leases`` of a ``RecordedBackward``
_OfUses = tuple[
    tuple[int, ...],
    tuple[int | Tensor, ...],
    tuple[Tensor | None, ...],
    tuple[BufferLease | None, ...],
]


class Recorder:
    """Captures the calls of one model.

    Args:
        split: whether weight gradients are captured apart from those of the inputs.
        verify: whether the first replays are compared with eager.
        audits: the audits of the calls, or None if nothing is audited.

    Attributes:
        failure: the first error; nothing is captured any more after it.
        shared: static buffers of incoming gradients. Graphs only read them, and only within one
            backward, so all recordings share them: one buffer for the first gradient of each, one
            for the second.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        *,
        split: bool = False,
        verify: bool = True,
        audits: Audits | None = None,
    ) -> None:
        self.audits = audits or Audits(None, "eager")
        self.model, self.backend, self.split, self.verify = model, backend, split, verify
        self.trials = Trials(model, backend)
        self.verification = Verification(model, self.trials, verify=verify)
        self.failure: CaptureError | None = None
        self.shared = StaticBuffers()

    def failed(self, slot: Slot, error: CaptureError) -> None:
        """Notes a capture that has failed: nothing is captured any more, or not in this slot."""
        if slot.fails_alone:
            slot.failed(error)
        else:
            self.failure = error

    # ---- forward

    def mismatch(self, site: CallSite, mismatch: Mismatch | None) -> Mismatch | None:
        """The reason why a call is not captured now, or None.

        A capture runs the call in addition to the real one. So all ranks with which the call
        communicates capture it, or none does.
        """
        if mismatch is None and self.failure is not None:
            mismatch = Mismatch("capture_failed", str(self.failure))
        return site.planned.ranks.agree(mismatch)

    def record_forward(self, slot: Slot, site: CallSite, call: ScopeCall) -> Expected:
        """Captures the call into the call site; nothing else is changed.

        Raises:
            CaptureError: if the call cannot be captured, with scope and source line.
        """
        with explaining_errors_of(site.name, "forward", self.backend), call.forward_hooks() as done:
            state = TorchState(self.backend.device.type)
            check_capturable(call, state, is_observed=site.planned.is_observed)
            if site.planned.tried is not None:
                site.planned.tried.again_if_changed(call)
            tried = self.trials.forward(call)
            guards = self.trials.guards(call, tried.run.accessed, tried.run.trace.read)
            guards.check_hooks()
            guards.check_keys()
            self.trials.check_identities(call, guards)
            others = tuple(tried.run.trace.check_others(guards.tensors))
            written = [tensor for tensor, _ in tried.written]
            expected = Expected(tried, Snapshot(self.backend, values=written))
            objects, conditions = Snapshot(guards=[guards]), ReplayConditions(guards, state, others)
            with references_of_the_engine(slot.leases()):
                self._capture_forward(slot, site, call, expected, conditions)
            for lease in site.leases:
                lease.settle()
            try:
                guards.check_unchanged()
            except CaptureError:
                objects.put_back()
                raise
            done["output"] = pytree.tree_unflatten(tried.outputs, tried.structure)
        return expected

    def _capture_forward(
        self,
        slot: Slot,
        site: CallSite,
        call: ScopeCall,
        expected: Expected,
        conditions: ReplayConditions,
    ) -> None:
        inputs, sources = self._static_inputs(slot, site, call)
        aliases = self.trials.aliases(call)
        saved = self._saved(site, inputs, expected, aliases)
        operations = Operations(self.audits.origins(by_address=True))
        scales = fp8.Scales.of(call.scope.module) if expected.tried.uses_fp8 else None
        try:
            with (
                aliases.installed(),
                saved.noting(),
                fp8.Autocast().beside(inputs),
                self.backend.record(slot.pool) as graphs,
            ):
                if scales is not None:
                    scales.keep()
                with operations:  # entered here, because the beginning of a capture runs operations
                    output, exit = call.run(inputs)
        finally:
            expected.before.put_back()  # the CPU recorder has run the operations, too
        (graph,) = graphs
        try:
            _check_operations(operations, expected, split=self.split)
            read = self.model, conditions.others
            captured = CapturedForward(call, inputs, output, exit, aliases, saved, *read)
            recorded, open = captured.described(
                graph,
                conditions,
                expected.tried,
                linked=frozenset(sources),
                scales=scales,
                split=self.split,
            )
            if open.recomputed is not None:
                if open.recomputed.is_reentrant:
                    _check_used_once(slot, recorded)
                open.recomputed.follows(call.scope, recorded, recorded.inputs)
            owned = set(map(address, [*self.trials.known(), *conditions.others]))
            site.opened(recorded, open, sources, owned)
            if any(map(_is_one_of_several_views, pytree.tree_leaves(output))):
                self.audits.skipped["views"] += 1  # an audited call would hand out no such views
            elif self.audits.are_on:
                results, name = pytree.tree_leaves(output), f"{site.name} {site.position}"
                site.audit = self.audits.of_call(operations, results, name)
                site.audit_due = 0
        except BaseException:
            graph.release()
            raise

    def _saved(
        self, site: CallSite, inputs: Sequence[Any], expected: Expected, aliases: ParameterAliases
    ) -> Saved:
        if not site.planned.recomputes:
            return Saved()
        if expected.tried.uses_fp8:
            raise CaptureError(
                "it casts to FP8, and a recomputation would scale by other amaxes: leave it out of "
                "recompute"
            )
        written = {address(tensor) for tensor, _ in expected.tried.written}
        reads = {address(each) for each in inputs if isinstance(each, Tensor)}
        reads |= set(expected.tried.run.trace.read) - written
        return Recomputed(self.backend, aliases, reads, site.planned.use_reentrant)

    def _static_inputs(
        self, slot: Slot, site: CallSite, call: ScopeCall
    ) -> tuple[list[Any], dict[int, tuple[CallSite, int]]]:
        """Static inputs with the call's values; unchanged outputs of the slot are read in place."""
        sources: dict[int, tuple[CallSite, int]] = {}

        def static(index: int, leaf: Tensor) -> Tensor:
            source = slot.output_at(leaf)
            if source is None:
                made = slot.inputs.like((site.position, index), leaf)
                copy_to(target_of(made), leaf.detach())
                return as_leaf(made, leaf.requires_grad)
            sources[index] = source
            return as_leaf(source[0].forward.outputs[source[1]].detach(), leaf.requires_grad)

        return call.signature.anew(call.leaves, static), sources

    # ---- backward

    def backward(
        self, slot: Slot, pending: PendingBackward, incoming: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """Gradients by use, run eagerly on the autograd graph of the capture.

        If the backward is split, these are the gradients of the inputs. On the way the backward is
        captured, if it is time to.
        """
        site = pending.site
        assert site.open is not None
        self._take_over_inputs(pending)
        site.run = run = BackwardRun(site.open, incoming, self.split)

        def eagerly() -> list[Tensor | None]:
            if not site.planned.backward_runs_once:
                return run.first_part(run.incoming, random=pending.random)
            gradients = recompute(self.backend, pending, incoming)
            return [gradients[use] for use in run.first_uses]

        effects = SideEffects(self.backend)
        with self.backend.on_stream(), AccessedNames() as accessed, effects.seen():
            eager = eagerly()
        if site.backward is None and self._may_record(slot, site):
            with (
                self._failing(slot, site),
                explaining_errors_of(site.name, "backward", self.backend),
            ):
                guards = Guards(accessed.of_contexts, accessed)
                guards.check_followable()
                site.forward.conditions.guards.also_read(accessed, effects.read)
                state = TorchState(self.backend.device.type, of_backward=True)
                of_forward = self._of_forward(site, effects)
                conditions = ReplayConditions(guards, state, of_forward=of_forward)
                with effects.once(), Snapshot(guards=[guards]):
                    again = self._again(slot, site, eagerly, effects)
                    if site.open is not None:
                        self._record(slot, pending, run, eager, again, conditions, effects)
                    guards.check_unchanged()
        return dict(zip(run.first_uses, eager, strict=True))

    def _take_over_inputs(self, pending: PendingBackward) -> None:
        """Gives the backward inputs as they are now, if they were written past their versions.

        Such a scope runs eagerly from now on.
        """
        site = pending.site
        for number, leaf in pending.written_unseen():
            copy_to(site.forward.targets[site.forward.loaded.index(number)], leaf)
            site.planned.refused = pending.mismatch_of_written(number)

    def _of_forward(self, site: CallSite, effects: SideEffects) -> Guards | None:
        """The guards of the forward that a backward runs again, or None.

        Raises:
            CaptureError: if the backward draws random numbers behind the forward's.
        """
        if not site.planned.recomputes:
            return None
        if effects.has_drawn():
            raise CaptureError(
                "its backward draws random numbers of its own, and one graph would draw them from "
                "where its forward began: leave it out of recompute"
            )
        return site.forward.conditions.guards

    def _again(
        self,
        slot: Slot,
        site: CallSite,
        eagerly: Callable[[], list[Tensor | None]],
        effects: SideEffects,
    ) -> list[Tensor | None] | None:
        """Gradients of another eager run, or None.

        Some backwards can be run only once (an autograd function that clears its ``ctx``). From
        then on each such backward gets a forward of its own: the next microbatch captures the slot
        anew.
        """
        if not self.verify:
            return None
        effects.again()
        try:
            with self.backend.on_stream():
                return eagerly()
        except Exception as error:
            if site.planned.backward_runs_once or self.split:
                raise CaptureError(f"its backward cannot be run twice: {error}") from error
            site.planned.backward_runs_once = True
            slot.free_autograd_graphs([site])
            return None

    def backward_of_weights(self, slot: Slot, pending: PendingBackward) -> list[Tensor | None]:
        """Runs and captures the second part of a split backward: gradients per parameter use."""
        site = pending.site
        effects = SideEffects(self.backend)
        run, first = site.run, site.backward
        assert run is not None
        with self.backend.on_stream(), effects.seen():
            eager = run.second_part()
        if first is not None and site.weights is None and self._may_record(slot, site):
            with (
                self._failing(slot, site),
                explaining_errors_of(site.name, "backward", self.backend),
            ):
                with effects.once():
                    self._record_weights(slot, pending, run, first, eager, effects)
        return eager

    def _may_record(self, slot: Slot, site: CallSite) -> bool:
        may_not = self.failure is not None or not slot.may_record_backward()
        may_not |= site.planned.refused is not None
        return not site.planned.ranks.any(may_not)

    @contextlib.contextmanager
    def _failing(self, slot: Slot, site: CallSite) -> Iterator[None]:
        """Context in which a failed capture is noted, and autograd goes on with eager results.

        The end of the step reports the failure. The autograd graph may have lost its saved tensors,
        so other backwards compute their forward anew.
        """
        try:
            yield
        except CaptureError as error:
            self.failed(slot, error)
            slot.free_autograd_graphs([site])

    def _record(
        self,
        slot: Slot,
        pending: PendingBackward,
        run: BackwardRun,
        eager: Sequence[Tensor | None],
        again: Sequence[Tensor | None] | None,
        conditions: ReplayConditions,
        effects: SideEffects,
    ) -> None:
        site = pending.site
        with site.planned.ranks.together():
            self._record_backward(slot, site, run, conditions)
        for recorded in (site.first, site.backward):  # in the order of their captures
            if recorded is not None and site.planned.refused is None:
                self.verification.backward(pending, run.given, recorded, eager, again, effects)

    def _record_backward(
        self, slot: Slot, site: CallSite, run: BackwardRun, conditions: ReplayConditions
    ) -> None:
        audit, static = site.audit, self._static_incoming(run.incoming)
        targets = tuple(map(target_of, static))
        for target, gradient in zip(targets, run.incoming, strict=True):
            copy_to(target, gradient)
        origins = None if audit is None else audit.origins
        if origins is not None:
            origins.go_on_in_backward(static, site.planned.scope.module)

        def recorded(pool: Any, *, last: bool, copies: str | None) -> RecordedBackward:
            graph, made = None, Allocations()
            if run.first_uses:
                operations = Operations(origins if last else None)
                with self.backend.record(pool) as graphs, made, operations:
                    gradients = run.first_part(static, last=last)
                (graph,) = graphs
                found = operations.rounding_of_any_order()
                site.planned.any_order = max(site.planned.any_order, found)
                if audit is not None and operations.origins is not None:
                    audit.backward = Stream.of(operations, gradients)
            else:
                gradients = run.first_part(static)
            of_uses = self._by_use(slot, site, run.first_uses, gradients, made, copies)
            anew = site.forward.counted if site.planned.recomputes else None
            return RecordedBackward(graph, conditions, run.layouts, targets, *of_uses, anew)

        first, copies = None, site.planned.copies_gradients
        with references_of_the_engine(slot.leases()):
            if copies == "accumulated" and not site.planned.backward_runs_once:
                first = recorded(slot.pool_of_first, last=False, copies=None)
            backward = recorded(slot.backward_pool.pool, last=not self.split, copies=copies)
            if not self.split:
                run.close()
                site.open = site.run = None
        site.first, site.backward = first, backward
        if audit is not None:
            audit.origins = None
        slot.backward_recorded(site)

    def _record_weights(
        self,
        slot: Slot,
        pending: PendingBackward,
        run: BackwardRun,
        first: RecordedBackward,
        eager: Sequence[Tensor | None],
        effects: SideEffects,
    ) -> None:
        site, again = pending.site, None
        if self.verify:
            effects.again()
            with self.backend.on_stream():
                again = run.second_part()
        graph: Graph | None = None
        gradients: list[Tensor | None] = []
        if run.second_uses:
            pool = slot.pool_of_weights
            with references_of_the_engine(slot.leases()), self.backend.record(pool) as graphs:
                gradients = run.second_part()
            (graph,) = graphs
        copies = site.planned.copies_gradients
        of_uses = self._by_use(slot, site, run.second_uses, gradients, Allocations(), copies)
        weights = RecordedBackward(graph, first.conditions, first.layouts, (), *of_uses)
        site.weights = weights
        self.verification.backward(pending, run.given, weights, eager, again, effects)

    def _static_incoming(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        if self.split:  # the weights' part needs them, too
            return list(map(static_like, gradients))
        return [self.shared.like(number, each) for number, each in enumerate(gradients)]

    def _by_use(
        self,
        slot: Slot,
        site: CallSite,
        uses: tuple[int, ...],
        gradients: Sequence[Tensor | None],
        made: Allocations,
        copies: str | None,
    ) -> _OfUses:
        """``uses``, ``listed``, ``gradients`` and ``leases`` of a ``RecordedBackward``.

        ``copies`` is the reason why no gradient stays in place, or None.
        """
        wait_for_autograd(self.backend.device)
        listed = tuple(site.forward.listed[use] for use in uses)
        static: list[Tensor | None] = []
        leases: list[BufferLease | None] = []
        for each, gradient in zip(listed, gradients, strict=True):
            reason: str | None = "of_an_input"
            if isinstance(each, Tensor) and gradient is not None:
                reason = copies or slot.uses_again(each)
                reason = reason or reason_to_copy(each, gradient, gradients, made)
            kept = None if gradient is None else unwrap(gradient.detach())
            if kept is not None and reason is not None:
                kept = self.backend.borrow(kept)
            static.append(kept)
            if isinstance(each, Tensor) and kept is not None:
                leases.append(BufferLease(kept, parameter=each, reason=reason))
            else:
                leases.append(None)
        return uses, listed, tuple(static), tuple(leases)


def _check_operations(operations: Operations, expected: Expected, *, split: bool) -> None:
    """Checks that a captured forward did what its trial run did.

    Raises:
        CaptureError: if it did not, or recomputes a part of itself and its backward is split.
    """
    differing = differing_op(expected.tried.run.trace, operations)
    if differing is not None:
        raise CaptureError(f"the capture does something else than a run: {differing}")
    if split and operations.checkpoint.calls:
        raise CaptureError(
            "torch.utils.checkpoint is called within it, and its recomputation serves one part of "
            "a backward only: leave out split_backward or checkpoint"
        )


def _check_used_once(slot: Slot, recorded: RecordedForward) -> None:
    """Checks that no other scope uses a weight of a forward under reentrant checkpoint.

    Raises:
        CaptureError: if one does.
    """
    others = (site.forward.parameters for site in slot.sites if site.has_forward)
    used = {id(parameter) for parameters in others for parameter in parameters}
    if any(id(parameter) in used for parameter in recorded.parameters):
        raise CaptureError(
            "several scopes use one of its weights, and checkpoint(use_reentrant=True) adds each "
            "gradient to .grad by itself, in another order than a graph: take use_reentrant=False"
        )


# ---- what a capture of a forward has produced, and the values that replays need


class CapturedForward:
    """Tensors that the capture of a forward has produced, until they are described."""

    def __init__(
        self,
        call: ScopeCall,
        inputs: Sequence[Any],
        output: Any,
        exit: Exit | None,
        aliases: ParameterAliases,
        saved: Saved,
        model: nn.Module,
        others: Iterable[Tensor],
    ) -> None:
        self._call, self._inputs, self._exit = call, inputs, exit
        self._aliases, self._saved = aliases, saved
        self._tensors = call.signature.tensors()
        self._numbers = {id(inputs[i]): i for i in reversed(self._tensors)}
        frozen = (p for p in model.parameters() if not p.requires_grad)
        self._constants = {id(each): each for each in (*model.buffers(), *frozen, *others)}
        self._flat, self._structure = pytree.tree_flatten(output)

    def described(
        self,
        graph: Graph,
        conditions: ReplayConditions,
        tried: TriedForward,
        *,
        linked: frozenset[int],
        scales: Scales | None,
        split: bool,
    ) -> tuple[RecordedForward, OpenCall]:
        leaves, outputs, open = self.opened(tried.outputs)
        live = open.outputs
        saved, first = self._saved, self._call.signature.first
        loaded = tuple(i for i in self._tensors if first[i] == i)
        forward = RecordedForward(
            graph=graph,
            signature=self._call.signature,
            conditions=conditions,
            inputs=tuple(self._inputs),
            loaded=loaded,
            targets=tuple(target_of(self._inputs[i]) for i in loaded),
            linked=linked,
            outputs=tuple(output.detach() for output in outputs),
            differentiable=tuple(output.requires_grad for output in outputs),
            # Nobody but the rest of the module gets the outputs of a scope that ends within it.
            used_within=used_within(outputs) if self._exit is None else (),
            output_leaves=leaves,
            output_structure=self._structure,
            exit=self._exit,
            listed=self.listed(open),
            saved_outputs=tuple(o.detach() for o in outputs if saved.has(o)),
            saved_inputs=tuple(i for i in self._tensors if saved.has(self._inputs[i])),
            saved_of_model=tuple(filter(saved.has, self._of_model(open))),
            written=tuple(tensor for tensor, _ in tried.written),
            counted=tuple(tried.counted),
            draws=tried.draws,
            scales=scales,
            is_split=split and bool(live),
            arguments=self._call.arguments.without_tensors(),
        )
        return forward, open

    def opened(self, eager: Sequence[Any]) -> tuple[tuple[OutputLeaf, ...], list[Tensor], OpenCall]:
        """The sources of the leaves of the outputs, the tensors among them, and their history.

        ``eager`` has the leaves that another run has returned.
        """
        leaves, outputs = self._sources(eager)
        return leaves, outputs, self._open([each for each in outputs if each.requires_grad])

    def listed(self, open: OpenCall) -> tuple[int | Tensor, ...]:
        """The inputs of the autograd node, per use."""
        return tuple(self._listed(open, use) for use in open.uses.of)

    def _sources(self, eager: Sequence[Any]) -> tuple[tuple[OutputLeaf, ...], list[Tensor]]:
        leaves: list[OutputLeaf] = []
        outputs: dict[int, tuple[int, Tensor]] = {}
        for leaf, before in zip(self._flat, eager, strict=True):
            original = self._original(leaf) if isinstance(leaf, Tensor) else leaf
            if id(leaf) in self._numbers:
                # The caller gets its own tensor back: what the caller does with it does not concern
                # the graph.
                leaves.append(OutputLeaf("input", self._numbers[id(leaf)]))
            elif not isinstance(leaf, Tensor):
                _check_constant(leaf, before)
                leaves.append(OutputLeaf("constant", leaf))
            elif original is not leaf or id(leaf) in self._constants:
                leaves.append(OutputLeaf("constant", original))
            else:
                outputs.setdefault(id(leaf), (len(outputs), leaf))
                leaves.append(OutputLeaf("graph", outputs[id(leaf)][0]))
        return tuple(leaves), [leaf for _, leaf in outputs.values()]

    def _of_model(self, open: OpenCall) -> list[Tensor]:
        return [*map(self._original, open.parameters), *self._constants.values()]

    def _open(self, live: Sequence[Tensor]) -> OpenCall:
        wanted = {
            number: self._inputs[number]
            for number in sorted(self._numbers.values())
            if self._inputs[number].requires_grad
        }
        parameters = [leaf for leaf in leaves_behind(live) if id(leaf) not in self._numbers]
        for parameter in parameters:
            if has_hooks(parameter):  # it is no parameter alias, which has no hooks
                raise CaptureError(
                    f"a parameter {tuple(parameter.shape)} is reached past its module and has "
                    f"gradient hooks, which would run twice: register it as a parameter of a module"
                )
        inputs = list(wanted.values())
        recomputed = self._saved if isinstance(self._saved, Recomputed) else None
        is_reentrant = recomputed is not None and recomputed.is_reentrant
        uses = LeafUses(live, [*inputs, *parameters], len(inputs) if is_reentrant else 0)
        return OpenCall(list(live), tuple(wanted), inputs, parameters, uses, recomputed)

    def _listed(self, open: OpenCall, use: int) -> int | Tensor:
        if use < len(open.inputs):
            return open.numbers[use]
        return self._original(open.parameters[use - len(open.inputs)])

    def _original(self, tensor: Tensor) -> Tensor:
        return self._aliases.original(tensor)


def _is_one_of_several_views(leaf: Any) -> bool:
    """Whether autograd forbids to modify it: it is an output of chunk, split or unbind."""
    if not (isinstance(leaf, Tensor) and leaf._is_view() and leaf.requires_grad):
        return False
    meta = torch._C._autograd
    return meta._get_creation_meta(leaf) == meta.CreationMeta.MULTI_OUTPUT_NODE


def _check_constant(value: Any, before: Any) -> None:
    """Checks that a constant is the same in every call.

    Raises:
        CaptureError: if it is made anew in every call, and callers would share it.
    """
    if value is before or (is_plain(value) and same_value(value, before)):
        return
    if not isinstance(value, types.FunctionType):
        raise CaptureError(
            f"it returns a {type(value).__name__} that it makes anew in every call "
            f"({value!r:.60} after {before!r:.60}), and a replay would hand out the same one for "
            f"ever: return tensors, or what stays the same"
        )
