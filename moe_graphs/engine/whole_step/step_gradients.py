"""``.grad`` of every parameter, as a captured step expects and leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_graphs.engine.signature import Mismatch
from moe_graphs.engine.whole_step.static_inputs import copy_all
from moe_graphs.errors import CaptureError

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class StaticGradients:
    """Whatever the step does with ``.grad``, a replay does: fill, accumulate, zero, drop.

    Attributes:
        dropped: per parameter, whether the step forgets what it finds, so that it may find
            anything (``zero_grad()`` at its beginning).
        found: static memory of the ``.grad`` that the step was captured with, None where it was
            captured without.
        left: ``.grad`` after the step: memory of the graph, which the next replay writes again.
    """

    names: list[str]
    parameters: list[torch.Tensor]
    dropped: list[bool]
    found: Gradients
    left: Gradients

    def mismatch(self) -> Mismatch | None:
        if None not in self.found:
            return None
        everything = zip(self.names, self.parameters, self.dropped, self.found, strict=True)
        for name, parameter, dropped, found in everything:
            if found is None and not dropped and parameter.grad is not None:
                message = (
                    f"{name}.grad was None when the step was captured and is not now: an eager "
                    f"step would add to it, the graph overwrites it: call zero_grad() before "
                    f"every step, or within it"
                )
                return Mismatch("gradients_left", message)
        return None

    def load(self) -> None:
        """Puts the gradients where the graph finds them, whichever tensors hold them now."""
        targets, sources, zeros = [], [], []
        for parameter, found in zip(self.parameters, self.found, strict=True):
            if found is None or parameter.grad is found:
                continue
            if parameter.grad is None:
                zeros.append(found)
            else:
                targets.append(found)
                sources.append(parameter.grad)
        if zeros:
            torch._foreach_zero_(zeros)
        copy_all(targets, sources)

    def attach(self) -> None:
        """After the replay: every ``.grad`` is the one that the graph has written."""
        for parameter, left in zip(self.parameters, self.left, strict=True):
            if parameter.grad is not left:
                parameter.grad = left


def gradients_of(parameters: Sequence[torch.Tensor]) -> Gradients:
    return [parameter.grad for parameter in parameters]


def set_gradients(parameters: Sequence[torch.Tensor], gradients: Gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def static_gradients(
    parameters: Sequence[torch.Tensor], entry: Gradients, dropped: Sequence[bool]
) -> Gradients:
    """What to capture the step with, given what it is called with."""
    found: Gradients = []
    for parameter, gradient, ignored in zip(parameters, entry, dropped, strict=True):
        if gradient is None or ignored:
            found.append(None)
            continue
        if gradient.layout is not torch.strided:
            raise CaptureError("a gradient is sparse, which a graph cannot hold: use sparse=False")
        static = torch.empty_like(parameter, requires_grad=False)
        found.append(static.copy_(gradient))
    return found
