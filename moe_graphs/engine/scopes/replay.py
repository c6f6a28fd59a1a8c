"""Replaying a recording as a node of the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moe_graphs.engine.scopes.delayed_weights import DelayedWeights
from moe_graphs.engine.scopes.gradients import to_parameters
from moe_graphs.engine.scopes.recording import Recording
from moe_graphs.engine.scopes.slots import Flight, Slot


class Replay(torch.autograd.Function):
    """Inputs and parameters in, outputs out; gradients leave as tensors of their own."""

    @staticmethod
    def forward(ctx, slot: Slot, flight: Flight, delayed: DelayedWeights, *tensors: torch.Tensor):
        recording = flight.recording
        recording.load(tensors)
        recording.forward.replay()
        recording.replayed += 1
        flight.versions = [output._version for output in recording.saved_outputs]
        outputs = recording.hand_out(tensors)
        needed = recording.differentiable
        ctx.mark_non_differentiable(*(o for o, n in zip(outputs, needed, strict=True) if not n))
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.flight, ctx.delayed = slot, flight, delayed
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        slot, flight, delayed = ctx.slot, ctx.flight, ctx.delayed
        recording = flight.recording
        count = len(recording.tensor_indices)
        nodes = [node for node, _ in ctx.next_functions]
        for_inputs: list[torch.Tensor | None] = [None] * count
        for_parameters: list[torch.Tensor | None] = [None] * len(recording.parameters)
        # Zero-bubble schedules run this node twice: for the inputs, and later for the weights.
        is_second_part = flight.landed and recording.weights is not None
        if not is_second_part or any(map(_is_wanted, nodes[:count])):
            slot.land(flight)
            flight.note_gradients(gradients)
            for_inputs = _backward(recording, gradients)
        flight.check_gradients(gradients)
        if recording.weights is None:
            for_parameters = to_parameters(recording, nodes[count:])
        elif any(map(_is_wanted, nodes[count:])):
            if delayed.is_collecting:
                delayed.collect(slot, flight)
            else:
                slot.land_weights(flight)
                recording.weights.replay()
                for_parameters = to_parameters(recording, nodes[count:])
        return (None, None, None, *for_inputs, *for_parameters)


def replay(
    slot: Slot, recording: Recording, leaves: Sequence[Any], delayed: DelayedWeights
) -> list[Any]:
    """Replays the forward on the leaves of a call; returns the leaves of the outputs."""
    flight = slot.take_off(recording)
    tensors = [leaves[index] for index in recording.tensor_indices]
    produced = Replay.apply(slot, flight, delayed, *tensors, *recording.parameters)
    recording.note_handed(produced)
    sources = {"graph": produced, "input": leaves}
    return [
        leaf.value if leaf.source == "constant" else sources[leaf.source][leaf.value]
        for leaf in recording.output_leaves
    ]


def _backward(
    recording: Recording, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Replays the backward; returns the gradients of the inputs."""
    incoming = [g for g, n in zip(gradients, recording.differentiable, strict=True) if n]
    for static, gradient in zip(recording.gradient_outputs, incoming, strict=True):
        if gradient is None:
            static.zero_()
        else:
            static.copy_(gradient)
    if recording.backward is None:
        return [None] * len(recording.tensor_indices)
    recording.backward.replay()
    inputs = iter(recording.gradient_inputs)
    tensors = (recording.inputs[index] for index in recording.tensor_indices)
    return [_owned(next(inputs)) if t.requires_grad else None for t in tensors]


def _owned(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _is_wanted(node: torch.autograd.graph.Node | None) -> bool:
    """Whether the running backward needs the gradient that goes to ``node``."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
