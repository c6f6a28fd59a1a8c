"""Replaying a recording as a node of the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moe_graphs.capture.recording import Recording
from moe_graphs.capture.slots import DelayedWeights, Flight, Slot, has_hooks

_LARGE = 1 << 22  # elements


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
        to_inputs: list[torch.Tensor | None] = [None] * count
        to_parameters: list[torch.Tensor | None] = [None] * len(recording.parameters)
        # Zero-bubble schedules run this node twice: for the inputs, and later for the weights.
        is_second_part = flight.landed and recording.weights is not None
        if not is_second_part or any(map(_is_wanted, nodes[:count])):
            slot.land(flight)
            flight.note_gradients(gradients)
            to_inputs = _backward(recording, gradients)
        flight.check_gradients(gradients)
        if recording.weights is None:
            to_parameters = _to_parameters(recording, nodes[count:])
        elif any(map(_is_wanted, nodes[count:])):
            if delayed.is_collecting:
                delayed.collect(slot, flight)
            else:
                slot.land_weights(flight)
                recording.weights.replay()
                to_parameters = _to_parameters(recording, nodes[count:])
        return (None, None, None, *to_inputs, *to_parameters)


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


def replay_weights(waiting: Sequence[tuple[Slot, Flight]]) -> None:
    """Replays the weights' part of a backward that was delayed, and adds to ``.grad``."""
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for slot, flight in waiting:
        recording = flight.recording
        slot.land_weights(flight)
        recording.weights.replay()
        totals, addends = [], []
        for parameter, gradient, is_sole_user in zip(
            recording.parameters, recording.gradient_parameters, recording.is_sole_user, strict=True
        ):
            if not is_sole_user:  # autograd adds up the gradients of a backward before it adds them
                known = sums.get(id(parameter))
                total = gradient.clone() if known is None else known[1] + gradient
                sums[id(parameter)] = (parameter, total)
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            else:
                totals.append(parameter.grad)
                addends.append(gradient)
        _for_all(torch._foreach_add_, torch.Tensor.add_, totals, addends)
    for parameter, total in sums.values():
        parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


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
    gradient = parameter.grad
    return gradient is not None and not has_hooks(parameter) and gradient.layout is torch.strided


def _accumulates(node: torch.autograd.graph.Node) -> bool:
    """Whether a gradient handed to ``node`` is added to a ``.grad``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf in torch.autograd.grad(): its gradient goes to the caller
        return False


def _is_wanted(node: torch.autograd.graph.Node | None) -> bool:
    """Whether the running backward needs the gradient that goes to ``node``."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
