"""What a capture ahead of time must not change."""

from __future__ import annotations

from collections.abc import Sequence

from moe_graphs.engine.guards import Guards, reads_before_running
from moe_graphs.engine.hooks import KeptHooks
from moe_graphs.engine.preserve import HiddenState
from moe_graphs.engine.reads import PythonRandomState
from moe_graphs.engine.scopes.dry_run import DryRun, ScopeCall


class NoTrace:
    """A context. If it is left by an exception, all is as before that the calls can reach:
    attributes, containers, hooks, gradients, random numbers. The values of tensors are put back by
    each run itself."""

    def __init__(self, dry_run: DryRun, calls: Sequence[ScopeCall]) -> None:
        self._dry_run, self._calls = dry_run, calls

    def __enter__(self) -> NoTrace:
        """
        Raises:
            CaptureError: if a call may use up what nobody can put back.
        """
        model, backend = self._dry_run.model, self._dry_run.backend
        self._before = [self._guards(call) for call in self._calls]
        self._rehearsed = self._before
        for guards in self._before:
            guards.check_followable()
        self._hooks = KeptHooks(model.parameters(), model, ())
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self._hidden = HiddenState(backend.device, backend.generators)
        self._python_random = PythonRandomState()
        return self

    def rehearsed(self) -> None:
        """What a first run makes (a table that is kept) is no change."""
        self._rehearsed = [self._guards(call) for call in self._calls]

    def check(self) -> None:
        """
        Raises:
            CaptureError: if the runs since have changed anything.
        """
        for call, guards in zip(self._calls, self._rehearsed, strict=True):
            guards.check_unchanged(f"scope {call.scope.name!r}: ")

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if kind is None:
            return
        for each in (*self._before, self._hooks, self._hidden, self._python_random):
            each.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _guards(self, call: ScopeCall) -> Guards:
        dry_run, functions = self._dry_run, [call.scope.forward]
        reads = reads_before_running(
            functions,
            call.scope.module.modules(),
            lambda reads: dry_run.guards(call, reads, ()),
        )
        return dry_run.guards(call, reads, ())
