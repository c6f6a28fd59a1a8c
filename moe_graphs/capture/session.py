"""One capture session: everything is captured, or everything is as it was before."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moe_graphs.capture.backends.base import Backend
from moe_graphs.capture.call_capture import CallCapture, Hooks, Originals
from moe_graphs.capture.errors import CaptureError
from moe_graphs.capture.observation import Observation
from moe_graphs.capture.plan import Plan, PlannedChunk
from moe_graphs.capture.preserve import preserved_rng, preserved_values
from moe_graphs.capture.recording import Recording
from moe_graphs.capture.rehearsal import source_line
from moe_graphs.capture.slots import Captured, Chunk, Slot


@dataclass(frozen=True)
class CaptureOptions:
    """How to capture.

    split: the gradients of the weights apart from those of the inputs.
    rehearsals: eager runs of every call before its capture.
    pool: to be captured into, where there is only one slot.
    hooks: by number of the call, what to call around each run and capture (see ``CallCapture``).
    """

    split: bool = False
    rehearsals: int = 1
    pool: Any = None
    hooks: Mapping[int, Hooks] = field(default_factory=dict)
    before_rehearsals: Callable[[], None] | None = None
    after_rehearsals: Callable[[], None] | None = None


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
        CaptureError: naming scope, operation and source line. Nothing of the session remains.
    """
    buffers: dict = {}
    # Before the stand-ins take the parameters' places: the guards compare with the real ones.
    captures = [
        [_captures_of_slot(chunk, observation, backend, options) for _ in range(chunk.slots)]
        for chunk in plan.chunks
    ]
    chunks = []
    try:
        with (
            _undisturbed(model, backend),
            backend.session(),
            _stand_in_parameters(model) as originals,
        ):
            known = [*model.parameters(), *model.buffers()]
            _rehearse([of_chunk[0] for of_chunk in captures], known, options)
            for of_chunk in captures:
                chunks.append(Chunk([_capture_slot(own, originals, buffers) for own in of_chunk]))
    except BaseException:
        for capture in (c for of_chunk in captures for own in of_chunk for c in own.values()):
            capture.recording.release()
        backend.release()
        raise
    captured = Captured(chunks, list(buffers.values()))
    for slot in captured.slots:
        slot.complete()
    return captured


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
    chunks: Sequence[dict[int, CallCapture]],
    known: Sequence[torch.Tensor],
    options: CaptureOptions,
) -> None:
    """In turn, as the calls will come; every chunk once, whatever its number of slots."""
    if options.before_rehearsals is not None:
        options.before_rehearsals()
    for _ in range(options.rehearsals):
        for capture in (capture for chunk in chunks for capture in chunk.values()):
            with _explained(capture.recording, "forward"):
                capture.rehearse(known)
    if options.after_rehearsals is not None:
        options.after_rehearsals()


def _capture_slot(captures: dict[int, CallCapture], originals: Originals, buffers: dict) -> Slot:
    """All forwards, then all backwards in reverse, then the weights' part, in one pool."""
    recordings = {number: capture.recording for number, capture in captures.items()}
    for capture in captures.values():
        with _explained(capture.recording, "forward"):
            capture.allocate_inputs(recordings)
            capture.record_forward(originals)
    for capture in reversed(captures.values()):
        with _explained(capture.recording, "backward"):
            capture.record_backward(originals, buffers)
    for capture in reversed(captures.values()):
        with _explained(capture.recording, "backward"):
            capture.record_weights(originals)
    # Only now, so that the weights' parts of a slot may be replayed in any order.
    for capture in captures.values():
        capture.finish()
    return Slot(list(recordings.values()), next(iter(captures.values())).pool)


@contextlib.contextmanager
def _undisturbed(model: nn.Module, backend: Backend) -> Iterator[None]:
    """Whatever happens inside: buffers, random states and garbage collection stay as they are."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a graph that is collected during a capture invalidates it
    try:
        rng = preserved_rng(backend.device, backend.generators)
        with preserved_values(model.buffers()), rng:
            yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _stand_in_parameters(model: nn.Module) -> Iterator[Originals]:
    """Within this context every module holds a stand-in on the same memory for each parameter.

    A parameter's gradient accumulator belongs to the stream on which it was first used. As long as
    the caller keeps a loss of an eager step, that is the caller's stream, and capturing a backward
    into it would make that stream wait for the capture, which CUDA refuses.
    """
    places = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    stand_ins = {id(p): nn.Parameter(p.detach()) for _, _, p in places}
    try:
        for place, key, parameter in places:
            place[key] = stand_ins[id(parameter)]
        yield {id(stand_ins[id(p)]): p for _, _, p in places}
    finally:
        for place, key, parameter in places:
            place[key] = parameter


@contextlib.contextmanager
def _explained(recording: Recording, direction: str) -> Iterator[None]:
    """Turns whatever goes wrong into a ``CaptureError`` that says where."""
    where = f"scope {recording.scope.name!r}: capture of its {direction} failed"
    try:
        yield
    except CaptureError as error:
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
