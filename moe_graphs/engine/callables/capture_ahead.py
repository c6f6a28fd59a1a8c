"""Captures the calls of a slot ahead of time, on sample arguments, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.recording import CallSite, PendingBackward
from moe_graphs.engine.partial.slots import Slot
from moe_graphs.engine.partial.trials import ScopeCall
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import leaves_of_outputs
from moe_graphs.engine.tracing import explaining_errors_of
from moe_graphs.errors import GraphError

# ---- the capture of a slot on sample arguments


def capture_slot(slot: Slot, calls: Sequence[ScopeCall], recorder: Recorder) -> None:
    """Captures all forwards, then all backwards in reverse, and compares each with eager.

    Afterwards everything else is as before.

    Raises:
        CaptureError: for what cannot be captured.
    """
    with Snapshot(recorder.backend, values=recorder.model.buffers()):
        while not slot.is_closed:  # it captures again if backwards turn out to run only once
            _capture(slot, calls, recorder)
            slot.end_step()


def _capture(slot: Slot, calls: Sequence[ScopeCall], recorder: Recorder) -> None:
    generator = torch.Generator(recorder.backend.device).manual_seed(0)
    backwards: list[PendingBackward] = []
    for site, call in zip(slot.sites, calls, strict=True):
        _capture_forward(slot, site, call, recorder)
    for site, call in reversed(list(zip(slot.sites, calls, strict=True))):
        forward = site.forward
        if not site.planned.refused and any(forward.differentiable):
            pairs = zip(forward.outputs, forward.differentiable, strict=True)
            incoming = [_gradient(output, generator) for output, needed in pairs if needed]
            random = recorder.backend.random_position() if forward.draws else None
            pending = PendingBackward(site, call.leaves, random)
            backwards.append(pending)
            with explaining_errors_of(site.name, "backward", recorder.backend):
                with call.backward_hooks(incoming) as found:
                    found += recorder.backward(slot, pending, incoming).values()
            _raise(recorder)
    if recorder.split:
        for pending in backwards:
            if pending.site.run is not None:
                recorder.backward_of_weights(slot, pending)
                _raise(recorder)


def _capture_forward(slot: Slot, site: CallSite, call: ScopeCall, recorder: Recorder) -> None:
    expected = recorder.record_forward(slot, site, call)
    try:
        forward = site.forward
        forward.graph.replay()
        outputs = leaves_of_outputs(forward.output_leaves, forward.outputs, call.leaves)
        difference = recorder.verification.difference_of_forward(site, call, expected, outputs)
        if difference is not None:
            site.planned.differs(difference)
    finally:
        expected.before.put_back()


def _gradient(output: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(output.shape, generator=generator, dtype=torch.float32, device=output.device)
    return torch.empty_like(output, requires_grad=False).copy_(made)


def _raise(recorder: Recorder) -> None:
    if recorder.failure is not None:
        raise recorder.failure


def check_unused(slot: Slot, allowed: bool) -> None:
    """Checks that every input that requires a gradient gets one.

    Raises:
        GraphError: for an input that requires a gradient and gets none, unless that is allowed.
    """
    for site in slot.sites:
        unused = site.unused_inputs()
        if unused and not allowed:
            raise GraphError(
                f"{site.name}: input {unused[0]!r} requires a gradient and gets none: pass "
                f"allow_unused_input=True, or a sample that requires none"
            )
