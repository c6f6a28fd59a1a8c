"""Audits of a scope's calls: a call runs eagerly in place of its replay, and so does its backward.

The call runs on the caller's own values, outside of the graph's pool, with an autograd graph of its
own; a node of the caller's graph stands for it, as for a replay. If it does what was captured, its
outputs are left in static memory, so that the scopes behind it go on as after a replay. If it does
something else, the caller gets the outputs as they are, and the scope stays eager.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.audit import (
    NEVER,
    Audits,
    CallAudit,
    Comparison,
    Stream,
    UndoneError,
    named_tensors,
)
from moe_graphs.engine.autograd import keeps_graph
from moe_graphs.engine.partial.capture import CapturedForward, Recorder
from moe_graphs.engine.partial.recording import (
    BackwardRun,
    CallSite,
    OpenCall,
    PendingBackward,
    Recomputed,
    ReplayConditions,
    Saved,
    layouts_of,
    versions_of,
)
from moe_graphs.engine.partial.scope import Call, Exit, Scope
from moe_graphs.engine.partial.slots import Slot
from moe_graphs.engine.partial.trials import ScopeCall
from moe_graphs.engine.partial.verify import compute_anew
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import (
    Mismatch,
    apart,
    copy_to,
    leaves_of_outputs,
    same_value,
    storage_of,
    target_of,
    unwrap,
)
from moe_graphs.engine.tracing import Origins
from moe_graphs.engine.verify import warn
from moe_graphs.errors import CaptureError, GraphError
from moe_graphs.staged import recomputed_within


def is_due(recorder: Recorder, slot: Slot, site: CallSite) -> bool:
    """Whether this call is to be audited. Chooses the next audit if this one cannot be made."""
    audit, audits = site.audit, recorder.audits
    if audit is None or not slot.is_closed:
        return False
    schedule = audit.schedule
    if schedule.due == NEVER:  # everything is captured now
        reason = _never(site)
        if reason is None:
            schedule.begin(site.replayed)
            audit.origins = None
        else:
            audits.skipped[reason] += 1
        site.audit_due = schedule.due
    if site.replayed < site.audit_due:
        return False
    free = recorder.backend.free_bytes()
    if free is not None and free < site.planned.eager_bytes:
        audits.without_memory(site.planned.eager_bytes - free)
        schedule.put_off(site.replayed)
        site.audit_due = schedule.due
        return False
    return True


def _never(site: CallSite) -> str | None:
    """The reason why no call at the call site is audited, or None."""
    if site.forward.is_split:
        return "split_backward"
    return "fp8" if site.forward.scales is not None else None


class AuditedCall:
    """One call that runs eagerly in place of its replay."""

    def __init__(
        self, recorder: Recorder, slot: Slot, site: CallSite, scope: Scope, leaves: Sequence[Any]
    ) -> None:
        assert site.audit is not None
        self._recorder, self.slot, self.site = recorder, slot, site
        self._scope, self._leaves = scope, leaves
        self._audit: CallAudit = site.audit
        self._origins: Origins | None = None
        self._open: OpenCall | None = None
        self._has_passed = False

    @property
    def _audits(self) -> Audits:
        return self._recorder.audits

    # ---- the forward

    def run(self, arguments: Call) -> tuple[Any, Exit | None] | None:
        """Runs the call and compares it. Returns its outputs, and where the forward was left.

        Returns None if memory ran out. Everything is as before the call then, so it may be
        replayed.

        Raises:
            GraphError: for a difference, with ``on_audit="error"``, or if the call now does what
                cannot be handed on to its caller.
        """
        site, audit = self.site, self._audit
        pending = self.slot.begin_replay(site, self._leaves)
        self._origins = origins = Origins(by_address=True)
        comparison = self._comparison(audit.forward, origins, site.forward.conditions)
        ran, missing = None, None
        with self._timed():
            try:
                with comparison.undone_without_memory():
                    ran = self._run(arguments, pending, comparison)
            except UndoneError as error:
                missing = error.missing
        audit.schedule.audited(site.replayed)
        site.audit_due = audit.schedule.due
        if ran is None:
            self.slot.cancel(pending)
            self._ran_out(missing)
            return None
        site.audited += 1
        exit, structure, outputs = ran
        return pytree.tree_unflatten(outputs, structure), exit

    def _comparison(
        self,
        stream: Stream,
        origins: Origins,
        conditions: ReplayConditions,
        *,
        may_undo: bool = True,
    ) -> Comparison:
        """A comparison with a captured stream that can be undone, unless ranks run it together."""
        before = None
        if may_undo and self.site.planned.ranks.group is None:
            before = Snapshot(self._recorder.backend, guards=[conditions.guards.present()])
        return Comparison(stream, origins, self._named, before)

    def _run(
        self, arguments: Call, pending: PendingBackward, comparison: Comparison
    ) -> tuple[Any, Any, list[Any]]:
        recorder, site = self._recorder, self.site
        forward = site.forward
        call = self._call(arguments)
        own = call.detached_leaves()
        for number, leaf in enumerate(call.leaves):
            first = call.signature.first[number]
            if isinstance(leaf, Tensor) and not leaf.requires_grad and first not in call.leased:
                own[number] = leaf  # the caller's own object, which the Python may know
        origins = comparison.origins
        assert origins is not None
        for number in forward.loaded:
            origins.stands_in(own[number], forward.inputs[number])
        aliases = recorder.trials.aliases(call)
        recomputes = site.planned.recomputes
        saved = (
            Recomputed(recorder.backend, aliases, set(), site.planned.use_reentrant)
            if recomputes
            else Saved()
        )
        hooks = saved.noting() if recomputes else contextlib.nullcontext()
        try:
            with aliases.installed(), hooks, comparison:
                output, exit = call.run(own)
            read = recorder.model, forward.conditions.others
            ran = CapturedForward(call, own, output, exit, aliases, saved, *read)
            flat, structure = pytree.tree_flatten(output)
            of_leaves, produced, open = ran.opened(flat)
        except CaptureError as error:
            raise GraphError(
                f"scope {site.name!r}: an audit found what is not captured, and cannot go on: "
                f"{error}"
            ) from error
        comparison.finish(flat)
        if open.recomputed is not None:
            open.recomputed.follows(self._scope, forward, own)
        listed = ran.listed(open)
        self._compare(comparison, structure, of_leaves, listed, exit)
        self._open = open if any(forward.differentiable) or open.outputs else None
        difference = comparison.difference
        self._has_passed = difference is None
        if difference is None:
            site.load(self._leaves)  # the backward may have to compute the forward anew
            for static, value in zip(forward.outputs, produced, strict=True):
                copy_to(target_of(unwrap(static)), unwrap(value.detach()))
        pending.versions = list(map(versions_of, forward.saved))
        constants = [i for i, each in enumerate(produced) if not each.requires_grad]
        inputs = [self._leaves[each] if isinstance(each, int) else each for each in listed]
        given = _Audited.apply(self, pending, constants, produced, *inputs)
        if difference is None:
            site.note_handed(given, pending)
            if not any(each.requires_grad for each in given):
                self._passed()  # no backward is to come
        else:
            self.slot.cancel(pending)  # nothing of this call lies in static memory
            self._differs(difference)
        leaves, self._leaves = self._leaves, ()  # the caller may free its inputs
        return exit, structure, leaves_of_outputs(of_leaves, given, leaves)

    def _call(self, arguments: Call) -> ScopeCall:
        """The call. Inputs that lie on the memory of others are copied, as in static memory."""
        signature, copied = self.site.planned.signature, set[int]()
        seen = set(map(storage_of, self._recorder.trials.known()))
        for number in self.site.forward.loaded:
            storage = storage_of(self._leaves[number])
            if (storage and storage in seen) or self.slot.output_at(
                self._leaves[number]
            ) is not None:
                copied.add(number)
            seen.add(storage)
        leased = frozenset(copied)
        return ScopeCall(self._scope, signature, self._leaves, arguments, leased=leased)

    def _named(self) -> dict[str, Tensor]:
        forward = self.site.forward
        inputs = {forward.signature.leaves[i].name: forward.inputs[i] for i in forward.loaded}
        return named_tensors(self._recorder.model, inputs)

    def _compare(
        self, comparison: Comparison, structure: Any, of_leaves: Any, listed: Any, exit: Any
    ) -> None:
        forward = self.site.forward
        if structure != forward.output_structure or not _are_alike(
            of_leaves, forward.output_leaves
        ):
            comparison.differs("it returns other values than at the capture")
        if exit != forward.exit:
            comparison.differs("it is left at another stage than at the capture")
        if len(listed) != len(forward.listed) or any(
            (a is not b) if isinstance(b, Tensor) else not same_value(a, b)
            for a, b in zip(listed, forward.listed, strict=True)
        ):
            comparison.differs("its gradients go to other inputs or parameters")
        written = forward.conditions.guards.mismatch()
        if written is not None:
            comparison.differs(f"it changes what its Python reads: {written.message}")

    def hand_out(self, produced: Sequence[Tensor]) -> list[Tensor]:
        """The outputs as new tensor objects; they lie in static memory, as after a replay."""
        if self._has_passed:
            return self.site.hand_out()
        return [each.detach() for each in produced]

    # ---- the backward, within the caller's

    def backward(
        self, pending: PendingBackward, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients per use; compares the backward if it is one that is captured.

        Raises:
            GraphError: for a difference, with ``on_audit="error"``, or if it must not run.
        """
        self.site.check_plain(gradients)
        for output in pending.used_within:
            output.check()
        if self._open is None:
            raise GraphError(f"scope {self.site.name!r}: a second backward of the same forward")
        self.slot.check(pending)
        with self._timed():
            try:
                return self._backward(pending, gradients)
            except UndoneError as error:
                missing = error.missing
            self._ran_out(missing)
            return self._backward_anew(pending, gradients)

    def _backward_anew(
        self, pending: PendingBackward, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The backward without an audit, after the memory of the forward has been freed."""
        difference, found = compute_anew(self._recorder.backend, pending, apart(gradients))
        if difference is not None:
            raise GraphError(
                f"scope {self.site.name!r}: memory ran out in its backward in an audit, and its "
                f"forward, computed anew, differs: {difference}: audit_every=None turns audits off"
            )
        self.slot.backward_done(pending, replayed=False)
        return found

    def _backward(
        self, pending: PendingBackward, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        open, stream = self._open, self._audit.backward
        assert open is not None
        incoming = apart(gradients)
        run = BackwardRun(open, incoming, split=False)
        keeps = keeps_graph()
        comparison: Comparison | None = None
        layouts = layouts_of(incoming)
        backward = self.site.backward
        is_captured = (
            backward is not None
            and layouts == backward.layouts
            and self.slot.unreplayable(pending, layouts) is None
        )
        origins, self._origins = self._origins, None  # for the first backward only
        if self._has_passed and origins is not None:
            self._compare_inputs(pending)
            self._take_over_outputs(open)
        if self._has_passed and is_captured and origins is not None and stream is not None:
            assert backward is not None
            origins.go_on_in_backward(run.incoming, self._scope.module)
            conditions = backward.conditions
            comparison = self._comparison(stream, origins, conditions, may_undo=not keeps)
        with contextlib.ExitStack() as stack:
            if comparison is not None:
                stack.enter_context(comparison.undone_without_memory())
                stack.enter_context(comparison)
            found = run.first_part(run.incoming, last=not keeps, random=pending.random)
        self.slot.backward_done(pending, replayed=False)
        if not keeps:
            self._open = None
            run.close()
        if comparison is not None:
            comparison.finish(found)
        if comparison is not None and comparison.difference is not None:
            self._differs(f"in its backward, {comparison.difference}")
        elif self._has_passed and origins is not None:
            self._passed()
        return found

    def _compare_inputs(self, pending: PendingBackward) -> None:
        """Looks for inputs that were written past their versions since the forward."""
        written = pending.written_unseen()
        if written:
            self._differs(pending.mismatch_of_written(written[0][0]).message)
            self._has_passed = False

    def _take_over_outputs(self, open: OpenCall) -> None:
        """Gives the backward its saved outputs as they are now.

        The caller has them in static memory, and may have written there past their versions.
        """
        forward = self.site.forward
        saved = {each.data_ptr() for each in forward.saved_outputs}
        differentiable = compress(forward.outputs, forward.differentiable)
        for static, live in zip(differentiable, open.outputs, strict=True):
            if static.data_ptr() in saved:
                copy_to(target_of(unwrap(live)), unwrap(static))

    # ---- what an audit leads to

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._audit.schedule.took(seconds)
            self._audits.seconds += seconds

    def _ran_out(self, missing: int | None) -> None:
        self._open = None
        gc.collect()  # frames of the error may hold memory of the call
        self._recorder.backend.make_room()
        self._audits.ran_out(f"scope {self.site.name!r}", missing, warn)

    def _passed(self) -> None:
        self._audits.note_passed()
        self._audit.last = self._audits.step

    def _differs(self, difference: str) -> None:
        planned, audits = self.site.planned, self._audits
        if planned.refused is None:
            message = audits.message(difference, self._audit.last)
            planned.refused = Mismatch("found_by_audit", message)
            audits.found(f"scope {self.site.name!r}", message, warn)


def _are_alike(now: Sequence[Any], captured: Sequence[Any]) -> bool:
    return len(now) == len(captured) and all(
        a.source == b.source and (a.value is b.value or same_value(a.value, b.value))
        for a, b in zip(now, captured, strict=True)
    )


class _Audited(torch.autograd.Function):
    """The node of autograd that stands for an audited call."""

    @staticmethod
    def forward(
        ctx: Any,
        call: AuditedCall,
        pending: PendingBackward,
        constants: Sequence[int],
        produced: Sequence[Tensor],
        *listed: Tensor,
    ) -> tuple[Tensor, ...]:
        handed = call.hand_out(produced)
        ctx.mark_non_differentiable(*(handed[i] for i in constants))
        ctx.set_materialize_grads(False)
        ctx.parts = recomputed_within(call.backward), pending, constants
        return tuple(handed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        backward, pending, constants = ctx.parts
        incoming = [g for i, g in enumerate(gradients) if i not in constants]
        return (None, None, None, None, *backward(pending, incoming))
