"""How a capture ends in the middle of a forward, and how the eager rest resumes there.

A ``Staged`` module writes its forward as an ordered list of named stages, each from one frozen
record of tensors to the next. That is all the engine needs to cut it:

- ``run_until`` runs the ordinary forward and stops it, by raising ``CaptureInterrupt``, before a
  named stage, or wherever a component says that it cannot be captured (``end_capture_here``).
- The interrupt unwinds to the caller. Every staged module that it passes adds a ``Frame``: the
  stage it was in and the record that entered it, so that whatever was still live in that module
  (a residual) travels along. The frames together are the ``Boundary``.
- ``MoETensorStore`` holds a boundary while the same forward is entered again: each staged module
  takes its frame and goes on from there instead of starting anew.

The same two verbs make a graph start in the middle of a layer: the eager prefix leaves by the
interrupt, the captured part enters by the store and leaves by the interrupt, the eager rest
enters by the store.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

from torch import nn
from torch.utils import _pytree as pytree

from moe_graphs.errors import CaptureError, GraphError

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose fields may cross a capture boundary.

    Registered as a pytree node, so fields may be tensors, constants, or other records.
    """
    cls = dataclass(frozen=True)(cls)
    pytree.register_dataclass(cls)
    return cls


@dataclass(frozen=True)
class Stage:
    """One named step of a staged module: ``run`` maps a record to the next record.

    ``dynamic`` says why the stage cannot be captured (it synchronises with the host), if so.
    """

    name: str
    run: Callable[[Any], Any]
    dynamic: str | None = None


@dataclass(frozen=True)
class Frame:
    """A staged module that was left before, or inside, ``stage``; ``record`` enters that stage."""

    module: nn.Module
    stage: str
    record: Any


@dataclass(frozen=True)
class Boundary:
    """Where a forward was left: frames from the outermost module to the innermost, and why."""

    frames: tuple[Frame, ...]
    reason: str


class CaptureInterrupt(BaseException):
    """Ends a forward at a boundary. Not an ``Exception``: no handler on the way may swallow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._frames: list[Frame] = []

    def passed(self, frame: Frame) -> None:
        """Adds a module that the interrupt unwinds through, innermost first."""
        self._frames.append(frame)

    def boundary(self) -> Boundary:
        return Boundary(tuple(reversed(self._frames)), self.reason)


@dataclass(frozen=True)
class Stop:
    """Where the running forward has to end. ``capturing``: dynamic components end it too."""

    module: nn.Module | None = None
    stage: str | None = None
    capturing: bool = False


@dataclass
class MoETensorStore:
    """The boundary of one call while its eager rest runs. Each frame is taken once, by its module.

    A value of that call, never kept on a module: an exception in the rest drops it.
    """

    frames: list[Frame] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.frames

    def take(self, module: nn.Module) -> Frame | None:
        if self.frames and self.frames[0].module is module:
            return self.frames.pop(0)
        return None


_stop: contextvars.ContextVar[Stop | None] = contextvars.ContextVar("moe_graphs_stop", default=None)
_store: contextvars.ContextVar[MoETensorStore | None] = contextvars.ContextVar(
    "moe_graphs_store", default=None
)


class Staged(nn.Module):
    """A module whose forward is a list of stages; see the top of this file.

    Subclasses implement ``stages`` and write ``forward`` as ``return self.run_stages(record)``
    and nothing else, since a resumed call enters and leaves through it, too. A stage that calls
    another staged module should do little before the call: on resuming, what stands before it is
    run again and its result is not used.
    """

    def stages(self) -> tuple[Stage, ...]:
        raise NotImplementedError

    def run_stages(self, record: Any) -> Any:
        """Runs the stages in order, from the first one or from where the store says."""
        store, stop = _store.get(), _stop.get()
        frame = store.take(self) if store is not None else None
        remaining = self.stages()
        if frame is not None:
            record = frame.record
            names = [stage.name for stage in remaining]
            remaining = remaining[names.index(frame.stage) :]
        for stage in remaining:
            try:
                if stop is not None and stop.module is self and stop.stage == stage.name:
                    raise CaptureInterrupt(f"the scope ends before stage {stage.name!r}")
                record = stage.run(record)
            except CaptureInterrupt as interrupt:
                interrupt.passed(Frame(self, stage.name, record))
                raise
        return record


def end_capture_here(reason: str) -> None:
    """Called by a component that cannot be captured. Does nothing in an ordinary forward.

    Raises:
        CaptureInterrupt: if the forward runs for a capture.
    """
    stop = _stop.get()
    if stop is not None and stop.capturing:
        raise CaptureInterrupt(reason)


def run_until(stop: Stop, call: Callable[[], Any]) -> tuple[Any, Boundary | None]:
    """Runs ``call``; returns its result and None, or None and the boundary it was left at.

    Raises:
        CaptureError: if the interrupt passed a module that cannot be resumed.
    """
    token = _stop.set(stop)
    try:
        return call(), None
    except CaptureInterrupt as interrupt:
        if stop.capturing:
            _check_resumable(interrupt)
        return None, interrupt.boundary()
    finally:
        _stop.reset(token)


@contextlib.contextmanager
def resuming(boundary: Boundary) -> Iterator[MoETensorStore]:
    """Within this context the next call of the outermost module goes on from ``boundary``.

    Raises:
        GraphError: if the block ended without every frame having been taken.
    """
    store = MoETensorStore(list(boundary.frames))
    store_token, stop_token = _store.set(store), _stop.set(None)
    try:
        yield store
        if not store.is_empty:
            left = ", ".join(f"{type(f.module).__name__} at {f.stage!r}" for f in store.frames)
            raise GraphError(f"the eager rest did not resume: {left} was never entered")
    finally:
        store.frames.clear()
        _stop.reset(stop_token)
        _store.reset(store_token)


def _check_resumable(interrupt: CaptureInterrupt) -> None:
    """Every module forward from the root to the innermost frame must have added a frame.

    A plain module in between would be entered from its start again: its work would be done
    twice, with other dropout masks. (Further in, the stage as a whole is entered again.) Read off
    the traceback, so it costs nothing elsewhere.
    """
    resumable = [id(frame.module) for frame in interrupt.boundary().frames]
    traceback = interrupt.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if traceback.tb_frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            if id(module) not in resumable:
                raise CaptureError(
                    f"capture ended inside {type(module).__name__} ({interrupt.reason}), which "
                    f"cannot be resumed in the middle: derive {type(module).__name__} from "
                    f"moe_graphs.Staged, or choose scopes that do not contain the boundary"
                ) from interrupt
            if id(module) == resumable[-1]:
                return
        traceback = traceback.tb_next
