"""One capture session: everything is captured, or everything is as it was before."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moe_graphs.engine.backends.base import Backend
from moe_graphs.engine.preserve import stand_in_parameters, undisturbed
from moe_graphs.engine.rehearsal import source_line
from moe_graphs.engine.scopes.call_capture import CallCapture, Hooks, Originals
from moe_graphs.engine.scopes.memory import CallMemory, ChunkMemory, MemoryPlan
from moe_graphs.engine.scopes.observation import Observation
from moe_graphs.engine.scopes.plan import Plan, PlannedChunk
from moe_graphs.engine.scopes.recording import Recording
from moe_graphs.engine.scopes.slots import Captured, Chunk, Slot
from moe_graphs.errors import CaptureError


@dataclass(frozen=True)
class CaptureOptions:
    """How to capture.

    split: the gradients of the weights apart from those of the inputs.
    rehearsals: eager runs of every call before its capture.
    pool: to be captured into, where there is only one slot.
    hooks: by number of the call, what to call around each run and capture (see ``CallCapture``).
    memory_limit: bytes; a capture that is predicted to take more is refused.
    """

    split: bool = False
    rehearsals: int = 1
    pool: Any = None
    hooks: Mapping[int, Hooks] = field(default_factory=dict)
    before_rehearsals: Callable[[], None] | None = None
    after_rehearsals: Callable[[], None] | None = None
    memory_limit: int | None = None


def predict_memory(
    model: nn.Module,
    backend: Backend,
    plan: Plan,
    observation: Observation,
    options: CaptureOptions,
) -> MemoryPlan:
    """Rehearses the planned calls, captures nothing, and leaves everything as it was.

    Raises:
        CaptureError: as ``capture_plan``.
    """
    chunks = [_captures_of_slot(chunk, observation, backend, options) for chunk in plan.chunks]
    with _session(model, backend):
        return _rehearse(model, plan, chunks, options)


def capture_plan(
    model: nn.Module,
    backend: Backend,
    plan: Plan,
    observation: Observation,
    options: CaptureOptions,
) -> Captured:
    """Captures the planned calls of every chunk, once for each of its slots.

    Parameters, their ``.grad``, buffers, random states and optimizers are left as they were.

    Raises:
        CaptureError: naming scope, operation and source line, or with the table of ``MemoryPlan``
            if that is over the limit. Nothing of the session remains.
    """
    buffers: dict = {}
    # Before the stand-ins take the parameters' places: the guards compare with the real ones.
    captures = [
        [_captures_of_slot(chunk, observation, backend, options) for _ in range(chunk.slots)]
        for chunk in plan.chunks
    ]
    chunks = []
    try:
        with _session(model, backend):
            memory = _rehearse(model, plan, [of_chunk[0] for of_chunk in captures], options)
        with _session(model, backend) as originals:
            for of_chunk in captures:
                slots = [_capture_slot(own, originals, buffers, options.split) for own in of_chunk]
                chunks.append(Chunk(slots))
    except BaseException:
        for capture in (c for of_chunk in captures for own in of_chunk for c in own.values()):
            capture.recording.release()
        backend.release()
        raise
    captured = Captured(chunks, list(buffers.values()), memory)
    for slot in captured.slots:
        slot.complete()
    return captured


@contextlib.contextmanager
def _session(model: nn.Module, backend: Backend) -> Iterator[Originals]:
    with (
        undisturbed(model, backend.device, backend.generators),
        backend.session(),
        stand_in_parameters(model) as originals,
    ):
        yield originals


def _captures_of_slot(
    chunk: PlannedChunk, observation: Observation, backend: Backend, options: CaptureOptions
) -> dict[int, CallCapture]:
    pool = options.pool if options.pool is not None else backend.new_pool()
    captures = {}
    for position, number in enumerate(chunk.calls):
        call = observation.calls[number]
        captures[number] = CallCapture(
            call,
            observation.inputs_of(call),
            position,
            backend,
            pool,
            split=options.split,
            hooks=options.hooks.get(number, {}),
        )
    return captures


def _rehearse(
    model: nn.Module,
    plan: Plan,
    chunks: Sequence[dict[int, CallCapture]],
    options: CaptureOptions,
) -> MemoryPlan:
    """In turn, as the calls will come; every chunk once, whatever its number of slots."""
    known = [*model.parameters(), *model.buffers()]
    measured: dict[int, CallMemory] = {}
    if options.before_rehearsals is not None:
        options.before_rehearsals()
    for _ in range(options.rehearsals):
        for number, capture in (item for chunk in chunks for item in chunk.items()):
            with _explained(capture.recording, "forward"):
                measured[number] = capture.rehearse(known)
    if options.after_rehearsals is not None:
        options.after_rehearsals()
    memory = _memory_plan(plan, measured, options.split)
    if options.memory_limit is not None and memory.total_bytes > options.memory_limit:
        raise CaptureError(
            f"graphs would take {memory.total_bytes:,} bytes, and memory_limit is "
            f"{options.memory_limit:,}: choose fewer scopes, or raise the limit; the model is "
            f"eager again\n{memory}"
        )
    return memory


def _memory_plan(plan: Plan, measured: Mapping[int, CallMemory], split: bool) -> MemoryPlan:
    chunks = [
        ChunkMemory(tuple(measured[n] for n in chunk.calls if n in measured), chunk.slots, split)
        for chunk in plan.chunks
    ]
    gradients = [call.gradients for chunk in chunks for call in chunk.calls]
    own = sum(chunk.slots * call.gradients for chunk in chunks for call in chunk.calls)
    return MemoryPlan(tuple(chunks), own if split else max(gradients, default=0))


def _capture_slot(
    captures: dict[int, CallCapture], originals: Originals, buffers: dict, split: bool
) -> Slot:
    """All forwards, then all backwards in reverse, then the weights' part, in one pool."""
    recordings = {number: capture.recording for number, capture in captures.items()}
    for capture in captures.values():
        with _explained(capture.recording, "forward"):
            capture.allocate_inputs(recordings)
            capture.record_forward(originals)
    for capture in reversed(captures.values()):
        with _explained(capture.recording, "backward"):
            capture.record_backward(originals, buffers)
    if split:
        for capture in reversed(captures.values()):
            with _explained(capture.recording, "backward"):
                capture.record_weights(originals)
        # Only now, so that the weights' parts of a slot may be replayed in any order.
        for capture in captures.values():
            capture.finish()
    return Slot(list(recordings.values()), next(iter(captures.values())).pool)


@contextlib.contextmanager
def _explained(recording: Recording, direction: str) -> Iterator[None]:
    """Turns whatever goes wrong into a ``CaptureError`` that says where."""
    where = f"scope {recording.scope.name!r}: capture of its {direction} failed"
    try:
        yield
    except CaptureError as error:
        _drop_leaked_hooks(error)
        raise CaptureError(f"{where}: {error}; the model is eager again") from error
    except Exception as error:
        line = source_line(traceback.extract_tb(error.__traceback__))
        memory = ""
        if isinstance(error, torch.OutOfMemoryError):
            free, total = torch.cuda.mem_get_info(recording.device)
            memory = f" ({free / 2**20:.0f} of {total / 2**20:.0f} MiB free)"
        raise CaptureError(
            f"{where} with {type(error).__name__}{memory}: {error}; at {line}; "
            f"the model is eager again"
        ) from error


def _drop_leaked_hooks(error: BaseException) -> None:
    """torch's checkpoint leaves its saved-tensor hooks in force as long as the traceback of an
    exception from inside it holds the frame of its generator (2.11)."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        traceback.clear_frames(error.__traceback__)
