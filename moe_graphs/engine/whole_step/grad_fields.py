"""``.grad`` of every parameter, as a captured step expects and leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch

from moe_graphs.engine.backends.backend import Graph
from moe_graphs.engine.buffer_lease import BufferLease
from moe_graphs.engine.signature import Mismatch
from moe_graphs.engine.stand_for import local, stands_for_another
from moe_graphs.engine.static_memory import copy_all
from moe_graphs.errors import CaptureError

Gradients = list[torch.Tensor | None]
_GRAD_OF = attrgetter("grad")


class StaticGradients:
    """Whatever the step does with ``.grad``, a replay does: fill, accumulate, zero, drop.

    Args:
        dropped: per parameter, whether the step forgets what it finds, so that it may find
            anything (``zero_grad()`` at its beginning).
        found: memory of the ``.grad`` that the step was captured with, None where it was captured
            without. The very memory of those that are a part of a buffer, which others may read.
        left: ``.grad`` after the step: memory of the graph, which the next replay writes again.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        dropped: Sequence[bool],
        found: Gradients,
        left: Gradients,
    ) -> None:
        self.found, self.left = found, left
        rows = list(zip(names, parameters, dropped, found, left, strict=True))
        # Most steps find nothing and leave nothing: one loop in C says that they do.
        self._unset = {n: p for n, p, drops, f, _ in rows if f is None and not drops}
        self._set = [(p, f) for _, p, _, f, _ in rows if f is not None]
        self._parts = {n: p for n, p, _, f, _ in rows if f is not None and is_part(f)}
        stay_unset = {n for n, _, _, _, g in rows if n in self._unset and g is None}
        self._after = [(n, p, f, g) for n, p, _, f, g in rows if n not in stay_unset]
        self._leases: dict[str, tuple[torch.Tensor, bool, BufferLease]] = {}

    def settled(self) -> None:
        """At the end of the capture: from now on, who holds a gradient is a caller."""
        for name, parameter, found, left in self._after:
            if left is not None and not is_part(left):
                lease = BufferLease(left, parameter=parameter, standing=True)
                self._leases[name] = parameter, left is found, lease

    def mismatch(self) -> Mismatch | None:
        if not all(map(is_, map(_GRAD_OF, self._unset.values()), repeat(None))):
            name = next(name for name, p in self._unset.items() if p.grad is not None)
            message = (
                f"{name}.grad was None when the step was captured and is not now: an eager "
                f"step would add to it, the graph overwrites it: call zero_grad() before "
                f"every step, or within it"
            )
            return Mismatch("gradients_left", message)
        for name, parameter in self._parts.items():
            if parameter.grad is None:
                message = (
                    f"{name}.grad was a part of a buffer when the step was captured and is None "
                    f"now: call zero_grad(set_to_none=False)"
                )
                return Mismatch("gradients_gone", message)
        for name, (parameter, adds, lease) in self._leases.items():
            if adds and parameter.grad is lease.standing:
                continue  # the step adds to what it finds there
            if not lease.reclaim():
                message = (
                    f"a view of {name}.grad of an earlier step is still held, and the graph would "
                    f"write there: clone what is to be kept"
                )
                return Mismatch("gradients_held", message)
        return None

    def replay(self, graph: Graph) -> None:
        """Puts the gradients where the graph finds them, whichever tensors hold them now; those
        tensors get what the step does to them. Afterwards every ``.grad`` is what it has left."""
        others, zeros = [], []
        for parameter, found in self._set:
            if parameter.grad is None:
                zeros.append(found)
            elif not _lies_at(parameter.grad, found):
                others.append((local(parameter.grad), local(found)))
        if zeros:
            torch._foreach_zero_(list(map(local, zeros)))
        copy_all([found for _, found in others], [other for other, _ in others])
        graph.replay()
        copy_all([other for other, _ in others], [found for _, found in others])
        self._attach()

    def _attach(self) -> None:
        for name, parameter, found, left in self._after:
            if left is not None and left is found and parameter.grad is not None:
                continue  # it was added to, wherever it is
            if name in self._leases:
                left = self._leases[name][-1].standing
            if parameter.grad is not left:
                parameter.grad = left


def keep_apart(parameters: Sequence[torch.Tensor], found: Gradients) -> None:
    """Gives gradients of sharded parameters that the step has made memory of their own.

    FSDP2 makes those of a group as parts of one buffer, which could not be called in one by one.
    """
    for parameter, before in zip(parameters, found, strict=True):
        after = parameter.grad
        is_new = after is not None and after is not before and stands_for_another(after)
        if is_new and is_part(after):
            parameter.grad = after.detach().clone()


def gradients_of(parameters: Sequence[torch.Tensor]) -> Gradients:
    return [parameter.grad for parameter in parameters]


def set_gradients(parameters: Sequence[torch.Tensor], gradients: Gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def gradients_to_find(
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
        found.append(gradient.detach() if is_part(gradient) else static.copy_(gradient))
    return found


def _lies_at(gradient: torch.Tensor, found: torch.Tensor) -> bool:
    return local(gradient).data_ptr() == local(found).data_ptr()


def is_part(gradient: torch.Tensor) -> bool:
    """Whether it is a part of a larger buffer."""
    gradient = local(gradient)
    return gradient.untyped_storage().nbytes() > gradient.nbytes
