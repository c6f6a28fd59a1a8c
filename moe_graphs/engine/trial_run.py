"""A trial run: a block is run beside the real run and watched, before anything is captured.

Scopes and callables (`partial/trials.py`) and whole steps (`whole_step/capture_step.py`) try what
they are about to capture. If a graph cannot have something, the trial run refuses it by name. A
`Snapshot` puts back what the block has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tracing import Trace


class TrialRun:
    """A context around one run of a block.

    Args:
        known: memory from outside that the block may read.
        before: the snapshot that gets what the block writes; None if the caller has one already.
        inputs: tensors that the block must not modify, by name.
        strict: whether reads of any other memory from outside are refused.
        behind: the trial run of the forward, if the block is its backward.
        in_step: whether the block is a whole step.

    Attributes:
        accessed: which Python ran.
        trace: which operations ran, the memory that they read, and the process groups over which
            they communicated.

    Raises:
        CaptureError: inside of the block, for an operation that cannot be in a graph.
    """

    def __init__(
        self,
        backend: Backend,
        known: Iterable[Tensor] = (),
        *,
        before: Snapshot | None = None,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        strict: bool = True,
        behind: TrialRun | None = None,
        in_step: bool = False,
    ) -> None:
        self.accessed = AccessedNames(in_step=in_step, refuse=True)
        self.trace = Trace(
            backend.device,
            known,
            strict=strict,
            inputs=inputs,
            generators=backend.generators if behind is None else (),
            before=before,
        )
        if behind is not None:
            self.trace.goes_on_from(behind.trace)
        self._has_backward = in_step or behind is not None

    def __enter__(self) -> TrialRun:
        self._threads = _on_this_thread() if self._has_backward else contextlib.nullcontext()
        self._threads.__enter__()
        self.accessed.__enter__()
        self.trace.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.trace.__exit__(*exception)
        finally:
            self.accessed.__exit__(*exception)
            self._threads.__exit__(*exception)

    def check(self, *, asked: frozenset[str] = frozenset()) -> None:
        """Checks the Python of the block, and puts back what it drew from Python and numpy.

        Args:
            asked: attributes of tensors whose values in a graph differ from those outside.

        Raises:
            CaptureError: for Python that a replay could not do again.
        """
        self.accessed.check_random()
        self.accessed.check_impure_calls(asked=asked)


def _on_this_thread() -> contextlib.AbstractContextManager[None]:
    """Context in which backwards run on this thread, where ``accessed`` can see them."""
    return torch.autograd.set_multithreading_enabled(False)
