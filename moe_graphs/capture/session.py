"""One capture session: everything is captured, or everything is as it was before."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from moe_graphs.capture.backends.base import Backend
from moe_graphs.capture.call_capture import CallCapture, ObservedCall, Originals
from moe_graphs.capture.errors import CaptureError
from moe_graphs.capture.plan import Plan
from moe_graphs.capture.preserve import no_garbage_collection, preserved_rng, preserved_values
from moe_graphs.capture.recording import Recording
from moe_graphs.capture.rehearsal import source_line
from moe_graphs.capture.replay import Slot


def capture_slot(
    model: nn.Module, backend: Backend, plan: Plan, observed: Sequence[ObservedCall]
) -> Slot:
    """Captures the planned calls: all forwards, then all backwards in reverse, in one pool.

    Parameters, their ``.grad``, buffers, random states and optimizers are left as they were.

    Raises:
        CaptureError: naming scope, operation and source line. Nothing of the session remains.
    """
    pool = backend.new_pool()
    captures = {
        number: CallCapture(observed[number], position, backend, pool)
        for position, number in enumerate(plan.calls)
    }
    recordings = {number: capture.recording for number, capture in captures.items()}
    buffers: dict = {}
    try:
        with (
            _undisturbed(model, backend.device),
            backend.session(),
            _stand_in_parameters(model) as originals,
        ):
            known = [*model.parameters(), *model.buffers()]
            for capture in captures.values():
                with _explained(capture.recording, "forward"):
                    capture.rehearse(known)
            for capture in captures.values():
                with _explained(capture.recording, "forward"):
                    capture.allocate_inputs(recordings)
                    capture.record_forward(originals)
            for capture in reversed(captures.values()):
                with _explained(capture.recording, "backward"):
                    capture.record_backward(originals, buffers)
    except BaseException:
        for recording in recordings.values():
            recording.release()
        backend.release()
        raise
    uses = Counter(id(p) for recording in recordings.values() for p in recording.parameters)
    for recording in recordings.values():
        recording.complete(uses)
    return Slot(list(recordings.values()), pool, list(buffers.values()))


@contextlib.contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever happens inside: buffers, random states and garbage collection stay as they are."""
    with no_garbage_collection(), preserved_values(model.buffers()), preserved_rng(device):
        yield


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
