"""What a call was when the warm-up looked into it, and whether that has changed before its capture.

A capture runs a call beside the real one, too. Without trace it does so because the call has been
looked into: it changes nothing in Python, and runs no hooks. Where what its Python could read is
another by then, it is looked into again before it is captured.
"""

from __future__ import annotations

from moe_graphs.engine.guards import reads_before_running
from moe_graphs.engine.reads import Reads
from moe_graphs.engine.scopes.dry_run import DryRun, ScopeCall
from moe_graphs.engine.snapshot import Snapshot


class Examined:
    """``reads``: of a real run of the call."""

    def __init__(self, dry_run: DryRun, call: ScopeCall, reads: Reads) -> None:
        self._dry_run, self._reads = dry_run, reads
        self._guards = dry_run.guards(call, reads, ())

    def again_if_changed(self, call: ScopeCall) -> None:
        """Leaves no trace in what the call can reach.

        Raises:
            CaptureError: for what cannot be captured now.
        """
        if self._guards.mismatch() is None:
            return
        self._dry_run.guards(call, self._reads, ()).check_hooks()
        reached = reads_before_running(
            [call.scope.forward],
            call.scope.module.modules(),
            lambda reads: self._dry_run.guards(call, reads, ()),
        )
        guards = self._dry_run.guards(call, Reads.together(self._reads, reached), ())
        with Snapshot(guards=[guards]):
            self._dry_run.examine(call, self._reads)
            guards.check_unchanged()
        self._guards = self._dry_run.guards(call, self._reads, ())
