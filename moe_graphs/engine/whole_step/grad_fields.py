"""``.grad`` of every parameter, as a captured step expects and leaves it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch

from moe_graphs.engine.backends.backend import Graph
from moe_graphs.engine.scopes.loans import references
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
        self._lent: dict[str, tuple[torch.Tensor, _Lent]] = {}

    def settled(self) -> None:
        """At the end of the capture: from now on, who holds a gradient is a caller."""
        for name, parameter, found, left in self._after:
            if left is not None and not is_part(left):
                self._lent[name] = parameter, _Lent(left, adds=left is found)

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
        for name, (parameter, lent) in self._lent.items():
            if not lent.call_in(is_set=parameter.grad is lent.handed):
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
            if name in self._lent:
                left = self._lent[name][1].handed
            if parameter.grad is not left:
                parameter.grad = left


class _Lent:
    """Memory of a gradient, and the tensor that is handed out as ``.grad``.

    An eager step makes new ones: whoever still has the last one gets memory of its own.

    adds: the step adds to what it finds, so that only a ``.grad`` that was dropped is called in.
    """

    def __init__(self, left: torch.Tensor, *, adds: bool) -> None:
        self._static, self.handed = left.detach(), left.detach()
        self._storage, self._adds = local(left).untyped_storage(), adds
        self._known = references(self._storage)
        self._known_of_handed = sys.getrefcount(self.handed)  # ``.grad`` itself is none of them

    def call_in(self, *, is_set: bool) -> bool:
        """False if something else (a view) holds the memory. ``is_set``: as ``.grad``, still."""
        if is_set and self._adds:
            return True
        if sys.getrefcount(self.handed) > self._known_of_handed:
            _move(self.handed)
            self.handed = self._static.detach()
        return references(self._storage) <= self._known


def _move(handed: torch.Tensor) -> None:
    """To memory of its own. A tensor that stands for another one is given another to stand for."""
    part = local(handed)
    if part is handed:
        handed.data = handed.detach().clone()
        return
    holder: torch.Tensor = handed
    while (inner := getattr(holder, name := holder.__tensor_flatten__()[0][0])) is not part:
        holder = inner
    setattr(holder, name, part.detach().clone())


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
