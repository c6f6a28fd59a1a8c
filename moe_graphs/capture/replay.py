"""Replaying a recording as a node of the caller's autograd graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from moe_graphs.capture.errors import GraphError
from moe_graphs.capture.recording import Recording
from moe_graphs.capture.signature import Mismatch

_LARGE = 1 << 22  # elements


class Flight:
    """One replayed forward until its backward. Lives as long as the autograd graph needs it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.versions: list[int] = []
        self.landed = False
        self.cancelled = False


class Slot:
    """The recordings of one microbatch in flight, and how far the running microbatch has come.

    They share a memory pool, so they may only be replayed in the order of their capture: all
    forwards, then the backwards in reverse. Leaving some out is right; going back is not, and is
    refused here by comparing two integers.
    """

    def __init__(
        self, recordings: Sequence[Recording], pool: Any, shared: Sequence[torch.Tensor] = ()
    ) -> None:
        self.recordings = tuple(recordings)
        self.pool = pool
        self.shared = tuple(shared)  # incoming gradients, used by all recordings
        self._of_scope: dict[str, list[Recording]] = {}
        for recording in self.recordings:
            self._of_scope.setdefault(recording.scope.name, []).append(recording)
        self._clock = -1
        # By position: a recording is in the air once at most.
        self._flights: dict[int, weakref.ref[Flight]] = {}
        self.abandoned = 0

    def next_recording(self, scope: str) -> Recording | None:
        """The recording that the next call of ``scope`` replays; None if it has none at all.

        Raises:
            GraphError: if the previous microbatch is still in flight.
        """
        own = self._of_scope.get(scope, [])
        for recording in own:
            if recording.position > self._clock:
                return recording
        if not own:
            return None
        in_flight = self.in_flight()
        if in_flight:
            raise GraphError(
                f"scope {scope!r}: a second microbatch is in flight (the backward of "
                f"{in_flight[0].recording.scope.name!r} and {len(in_flight) - 1} more is still to "
                f"come), and 1 was captured: run each microbatch's backward before the next "
                f"forward, or put such forwards into graphs.paused()"
            )
        self._clock = -1
        return own[0]

    def mismatch(
        self, recording: Recording, structure: pytree.TreeSpec, leaves: Sequence[Any]
    ) -> Mismatch | None:
        """Why this call cannot be replayed now, or None. Makes room for its outputs."""
        difference = recording.mismatch(structure, leaves)
        if difference is not None:
            return difference
        for index, source in recording.linked.items():
            moved = leaves[index].data_ptr() != recording.inputs[index].data_ptr()
            if moved and any(flight.recording is source for flight in self.in_flight()):
                name = recording.signature.leaves[index].name
                message = f"input {name!r}: captured as the untouched output of another scope"
                return Mismatch("input_moved", f"{message}, got another tensor")
        if not recording.rescue_outputs():
            message = (
                "a view of an output of its last replay is still in use: clone() what you keep"
            )
            return Mismatch("output_held", message)
        return None

    def in_flight(self) -> list[Flight]:
        """Replayed forwards whose backward may still come."""
        alive = [flight for ref in self._flights.values() if (flight := ref()) is not None]
        self.abandoned += len(self._flights) - len(alive)
        self._flights = {f.recording.position: weakref.ref(f) for f in alive}
        return alive

    def take_off(self, recording: Recording) -> Flight:
        flight = Flight(recording)
        self._clock = recording.position
        if recording.backward is not None:
            self._flights[recording.position] = weakref.ref(flight)
        return flight

    def land(self, flight: Flight) -> None:
        """Checks that the backward of a flight may run now, and marks it as run."""
        recording = flight.recording
        name = recording.scope.name
        if recording.backward is None:
            raise GraphError(f"scope {name!r}: its graphs were released before this backward")
        if flight.cancelled:
            raise GraphError(
                f"scope {name!r}: this backward belongs to a step that has ended: call backward() "
                f"inside the 'with graphs.step()' of its forward"
            )
        if flight.landed:
            raise GraphError(
                f"scope {name!r}: a second backward of the same forward; a graph's saved tensors "
                f"serve one: put such forwards into graphs.paused()"
            )
        position = 2 * len(self.recordings) - 1 - recording.position
        if position <= self._clock:
            raise GraphError(
                f"scope {name!r}: its backward comes out of the captured order, and memory it "
                f"needs may have been reused"
            )
        changed = [o._version for o in recording.saved_outputs] != flight.versions
        if changed:
            raise GraphError(
                f"scope {name!r}: an output was modified in place before the backward that needs "
                f"it: clone it before modifying it"
            )
        self._clock = position
        flight.landed = True
        del self._flights[recording.position]

    def end_step(self) -> None:
        """Flights of a step that has ended will not be continued."""
        for flight in self.in_flight():
            flight.cancelled = True
            self.abandoned += 1
        self._flights.clear()
        self._clock = -1


class Replay(torch.autograd.Function):
    """Inputs and parameters in, outputs out; gradients leave as tensors of their own."""

    @staticmethod
    def forward(ctx, slot: Slot, flight: Flight, *tensors: torch.Tensor):
        recording = flight.recording
        recording.load(tensors)
        recording.forward.replay()
        recording.replayed += 1
        flight.versions = [output._version for output in recording.saved_outputs]
        outputs = recording.hand_out(tensors)
        needed = recording.differentiable
        ctx.mark_non_differentiable(*(o for o, n in zip(outputs, needed, strict=True) if not n))
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.flight = slot, flight
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        recording = ctx.flight.recording
        ctx.slot.land(ctx.flight)
        incoming = [g for g, n in zip(gradients, recording.differentiable, strict=True) if n]
        for static, gradient in zip(recording.gradient_outputs, incoming, strict=True):
            if gradient is None:
                static.zero_()
            else:
                static.copy_(gradient)
        recording.backward.replay()
        inputs = iter(recording.gradient_inputs)
        tensors = (recording.inputs[index] for index in recording.tensor_indices)
        to_inputs = [_owned(next(inputs)) if t.requires_grad else None for t in tensors]
        nodes = [node for node, _ in ctx.next_functions[len(to_inputs) :]]
        return (None, None, *to_inputs, *_to_parameters(recording, nodes))


def replay(slot: Slot, recording: Recording, leaves: Sequence[Any]) -> list[Any]:
    """Replays the forward on the leaves of a call; returns the leaves of the outputs."""
    flight = slot.take_off(recording)
    tensors = [leaves[index] for index in recording.tensor_indices]
    produced = Replay.apply(slot, flight, *tensors, *recording.parameters)
    recording.note_handed(produced)
    sources = {"graph": produced, "input": leaves}
    return [
        leaf.value if leaf.source == "constant" else sources[leaf.source][leaf.value]
        for leaf in recording.output_leaves
    ]


def _owned(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _to_parameters(
    recording: Recording, nodes: Sequence[torch.autograd.graph.Node]
) -> list[torch.Tensor | None]:
    """The parameters' gradients as tensors that autograd may keep, or None where that is done.

    A parameter that has a ``.grad`` already (a later microbatch) is added to right here, which is
    what autograd would do next, without a copy in between. In every other case (first microbatch,
    hooks, ``autograd.grad``, a parameter that other scopes use too) autograd gets a copy, laid
    out like the parameter so that it can become ``.grad`` without another one.
    """
    totals, addends, copies, sources = [], [], [], []
    results: list[torch.Tensor | None] = []
    parameters = zip(recording.parameters, recording.is_sole_user, strict=True)
    gradients = zip(recording.gradient_parameters, nodes, strict=True)
    for (parameter, is_sole_user), (gradient, node) in zip(parameters, gradients, strict=True):
        if is_sole_user and _has_plain_grad(parameter) and _accumulates(node):
            totals.append(parameter.grad)
            addends.append(gradient)
            results.append(None)
        else:
            copies.append(torch.empty_like(parameter, requires_grad=False))
            sources.append(gradient)
            results.append(copies[-1])
    _for_all(torch._foreach_add_, torch.Tensor.add_, totals, addends)
    _for_all(torch._foreach_copy_, torch.Tensor.copy_, copies, sources)
    return results


def _for_all(
    for_small: Callable[..., Any],
    for_large: Callable[..., Any],
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
) -> None:
    """Small tensors in one launch. Large ones each by themselves: the kernel for many tensors
    moves 2.6 TB/s on an H200, the one for a single tensor 4.3 (2026-11-21)."""
    pairs = list(zip(targets, sources, strict=True))
    small = [pair for pair in pairs if pair[0].numel() < _LARGE]
    if small:
        for_small(*map(list, zip(*small, strict=True)))
    for target, source in pairs:
        if target.numel() >= _LARGE:
            for_large(target, source)


def _has_plain_grad(parameter: torch.Tensor) -> bool:
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    gradient = parameter.grad
    return gradient is not None and not hooks and gradient.layout is torch.strided


def _accumulates(node: torch.autograd.graph.Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf in torch.autograd.grad(): its gradient goes to the caller
        return False
