"""A trial run: a block is run beside the real run and watched, before anything is captured.

Scopes and callables (`partial/trials.py`) and whole steps (`whole_step/capture_step.py`) try what
they are about to capture. If a graph cannot have something, the trial run refuses it by name. A
`Snapshot` puts back what the block has changed. An error in a trial run or in a capture becomes a
`CaptureError` with the line that it comes from (`explaining_errors`).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.reasons import remedy_at
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tracing import Trace, source_line
from moe_graphs.errors import CaptureError


class TrialRun:
    """A context around one run of a block.

    Args:
        known: memory from outside that the block may read.
        before: the snapshot that gets what the block writes; None if the caller has one already.
        before_others: the snapshot of memory that the caller's snapshot does not know, or None.
        inputs: tensors that the block must not modify, by name.
        strict: whether reads of any other memory from outside are noted (``Trace.others``).
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
        before_others: Snapshot | None = None,
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
            before_others=before_others,
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

    def __exit__(self, *exception: Any) -> None:
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


# ---- errors of captures, with what was captured and the line that they come from


@contextlib.contextmanager
def explaining_errors(what: str, backend: Backend, *, then: str) -> Iterator[None]:
    """Turns any error into a ``CaptureError`` that says where it came from and what runs now."""
    try:
        yield
    except CaptureError as error:
        _drop_leaked_hooks(error)
        raise CaptureError(f"{what} failed: {error}{remedy_at(str(error))}; {then}") from error
    except Exception as error:
        line = source_line(traceback.extract_tb(error.__traceback__))
        _drop_leaked_hooks(error)
        if isinstance(error, KeyError) and isinstance(error.args[0], torch.nn.Parameter):
            raise CaptureError(
                f"{what} failed: a dictionary is keyed by a parameter, at {line}: a capture runs "
                f"forwards on other parameters, which lie in the same memory: key it by the "
                f"parameter's name; {then}"
            ) from None
        raise CaptureError(
            f"{what} failed with {type(error).__name__}{backend.memory_note(error)}: {error}; at "
            f"{line}{remedy_at(line)}; {then}"
        ) from error


def explaining_errors_of(
    scope: str, direction: str, backend: Backend
) -> contextlib.AbstractContextManager[None]:
    """Turns errors in a scope's forward or backward (``direction``) into a ``CaptureError``."""
    what = f"scope {scope!r}: capture of its {direction}"
    return explaining_errors(what, backend, then="the model is eager again")


def _drop_leaked_hooks(error: BaseException) -> None:
    """Removes the saved-tensor hooks that an exception inside torch's checkpoint leaves in force.

    They stay as long as the traceback holds the frame of checkpoint's generator (torch 2.11).
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        traceback.clear_frames(error.__traceback__)
