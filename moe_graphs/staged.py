"""Forwards that a capture can leave in the middle, and that the eager rest can resume there.

A ``Staged`` module writes its forward as an ordered list of named stages, each from one frozen
record of tensors to the next. With this list the engine can cut the forward:

- ``run_until`` runs the ordinary forward and ends it by raising ``CaptureInterrupt``: before a
  named stage, or where a component says that it cannot be captured (``end_capture_here``).
- The interrupt unwinds to the caller. Every staged module that it passes adds a ``Frame``: the
  module's current stage and the record that entered the stage, so tensors that are still needed in
  that module (a residual) travel along. All frames together are the ``Boundary``.
- ``MoETensorStore`` holds a boundary while the same forward is entered again: each staged module
  takes its frame and goes on from there instead of starting anew.

A graph can start in the middle of a layer by the same two means: the eager prologue leaves by the
interrupt, the captured part enters by the store and leaves by the interrupt, the eager epilogue
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
Block = Callable[[], contextlib.AbstractContextManager[None]]
"""A function that enters a block once more."""


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Class decorator for a frozen dataclass whose fields may cross a capture boundary.

    The class becomes a pytree node, so fields may be tensors, constants, or other records.
    """
    cls = dataclass(frozen=True)(cls)
    pytree.register_dataclass(cls)
    return cls


@dataclass(frozen=True)
class Stage:
    """One named step of a staged module: ``run`` maps a record to the next record.

    ``dynamic`` is the reason why the stage cannot be captured (it waits for the device), or None.
    """

    name: str
    run: Callable[[Any], Any]
    dynamic: str | None = None


@dataclass(frozen=True)
class Frame:
    """Place where a staged module was left: before or inside ``stage``, which ``record`` enters."""

    module: nn.Module
    stage: str
    record: Any


@dataclass(frozen=True)
class Boundary:
    """Place where a forward was left: frames from the outermost to the innermost, and why."""

    frames: tuple[Frame, ...]
    reason: str


class CaptureInterrupt(BaseException):
    """Signal that ends a forward at a boundary.

    It is not an ``Exception``, so that no handler on the way swallows it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._frames: list[Frame] = []

    def passed(self, frame: Frame) -> None:
        """Add the frame of a module that the interrupt unwinds through, innermost first."""
        self._frames.append(frame)

    def boundary(self) -> Boundary:
        return Boundary(tuple(reversed(self._frames)), self.reason)


@dataclass(frozen=True)
class Stop:
    """Place where the running forward has to end.

    With ``capturing``, components that cannot be captured end the forward, too.
    """

    module: nn.Module | None = None
    stage: str | None = None
    capturing: bool = False


@dataclass
class MoETensorStore:
    """The boundary of one call while its eager rest runs; each module takes its frame once.

    The store is a value of that call and never kept on a module, so an exception in the eager rest
    drops it.
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


open_blocks: contextvars.ContextVar[tuple[Block, ...]] = contextvars.ContextVar(
    "moe_graphs_blocks", default=()
)
"""The blocks of ``carried_block`` that are open now."""


@contextlib.contextmanager
def carried_block(block: Block) -> Iterator[None]:
    """Context within which ``recomputed_within`` notes ``block``, which is entered already."""
    token = open_blocks.set((*open_blocks.get(), block))
    try:
        yield
    finally:
        open_blocks.reset(token)


def recomputed_within(
    run: Callable[..., T], blocks: tuple[Block, ...] | None = None
) -> Callable[..., T]:
    """Bind a function that a backward may run again to the blocks that are open now, or to others.

    Activation checkpointing runs a forward again when the blocks around it may have ended
    (``moe_graphs.routing.replay``), or others have begun.
    """
    blocks = open_blocks.get() if blocks is None else blocks
    if not blocks:
        return run

    def again(*args: Any, **kwargs: Any) -> T:
        still_open = open_blocks.get()
        with contextlib.ExitStack() as stack:
            for block in blocks:
                if block not in still_open:
                    stack.enter_context(block())
            return run(*args, **kwargs)

    return again


class Staged(nn.Module):
    """A module whose forward is a list of stages; see the top of this file.

    Subclasses implement ``stages`` and write ``forward`` as ``return self.run_stages(record)`` and
    nothing else, since a resumed call enters and leaves through ``forward``, too. A stage that
    calls another staged module should do little before that call: a resumed call runs the code
    before it again and does not use the result.
    """

    def stages(self) -> tuple[Stage, ...]:
        raise NotImplementedError

    def run_stages(self, record: Any) -> Any:
        """Run the stages in order, from the first one or from the frame in the store."""
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
    """End a running capture; components that cannot be captured call this function.

    In an ordinary forward nothing happens.

    Raises:
        CaptureInterrupt: the forward runs for a capture.
    """
    stop = _stop.get()
    if stop is not None and stop.capturing:
        raise CaptureInterrupt(reason)


def run_until(stop: Stop, call: Callable[[], Any]) -> tuple[Any, Boundary | None]:
    """Run ``call`` until it ends or is interrupted.

    Returns:
        The result of ``call`` and None; or None and the boundary, if an interrupt ended it.

    Raises:
        CaptureError: the interrupt passed a module that cannot be resumed.
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
    """Context in which the next call of the outermost module goes on from ``boundary``.

    Raises:
        GraphError: at the end of the block, if a frame was not taken.
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
    """Check that every module forward from the root to the innermost frame has added a frame.

    A plain module in between would start anew when the forward is resumed: its work would be done
    twice, with other dropout masks. Plain modules inside the innermost frame's stage are fine,
    because that stage as a whole starts anew. The modules are read off the traceback, so an
    ordinary forward pays nothing for this check.

    Raises:
        CaptureError: a plain module is in between; the message names it.
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
