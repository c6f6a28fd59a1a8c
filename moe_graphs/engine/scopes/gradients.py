"""How the gradients of parameters leave the static memory of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_graphs.engine.scopes.recording import Recording
from moe_graphs.engine.scopes.slots import Flight, Slot

_LARGE = 1 << 22  # elements


def to_parameters(
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


def has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def replay_weights(flights: Sequence[tuple[Slot, Flight]]) -> None:
    """Replays the weights' part of one backward, and adds what each graph leaves to ``.grad``.

    A parameter that several of them use is added up first, as autograd does.
    """
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for slot, flight in flights:
        recording = flight.recording
        slot.land_weights(flight)
        recording.weights.replay()
        totals, addends = [], []
        for parameter, gradient, is_sole_user in zip(
            recording.parameters, recording.gradient_parameters, recording.is_sole_user, strict=True
        ):
            if not is_sole_user:
                known = sums.get(id(parameter))
                total = gradient.clone() if known is None else known[1] + gradient
                sums[id(parameter)] = (parameter, total)
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            else:
                totals.append(parameter.grad)
                addends.append(gradient)
        _for_all(torch._foreach_add_, torch.Tensor.add_, totals, addends)
    for parameter, total in sums.values():
        parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
