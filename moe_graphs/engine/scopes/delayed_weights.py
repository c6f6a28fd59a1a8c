"""Backwards of which only the first part has run: the weights' gradients wait to be asked for."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_graphs.engine.autograd import has_hooks
from moe_graphs.engine.scopes.place import PendingBackward
from moe_graphs.errors import GraphError


@dataclass(frozen=True)
class WeightsPart:
    """The weights' part of one backward of a scope. ``compute`` gives a gradient (or None) for each
    of ``parameters``, good until the next replay."""

    parameters: list[Tensor]
    compute: Callable[[], list[Tensor | None]]


class DelayedWeights:
    """A queue of backwards, oldest first.

    is_collecting: whether a backward that runs now leaves its weights' part to the queue.
    each_by_itself: whether every backward of a scope is one of the queue, and always collected.
    """

    def __init__(self, each_by_itself: bool = False) -> None:
        self._waiting: deque[list[WeightsPart]] = deque()
        self._each_by_itself = each_by_itself
        self.is_collecting = each_by_itself

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forgets backwards of a step that has ended."""
        self._waiting.clear()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Within this context the backwards of all scopes that run belong to one of the queue."""
        self._waiting.append([])
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    def collect(self, pending: PendingBackward, part: WeightsPart) -> None:
        hooked = next(filter(has_hooks, pending.place.forward.parameters), None)
        if hooked is not None:
            raise GraphError(
                f"scope {pending.place.name!r}: a parameter {tuple(hooked.shape)} has gradient "
                f"hooks, which a delayed weight gradient does not run: remove them, or do not "
                f"delay this backward"
            )
        if self._each_by_itself:
            self._waiting.append([])
        self._waiting[-1].append(part)

    def replay_oldest(self) -> None:
        """Adds the weights' gradients of the oldest backward to ``.grad``.

        A parameter that several scopes use, or one several times, is added up first, as autograd
        does.

        Raises:
            GraphError: if none waits.
        """
        if not self._waiting:
            raise GraphError(
                "backward_weight() without a backward that waits for it: call it once for every "
                "backward whose weights were delayed"
            )
        parts = self._waiting.popleft()
        uses = Counter(id(parameter) for part in parts for parameter in part.parameters)
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for part in parts:
            alone = []
            for parameter, gradient in zip(part.parameters, part.compute(), strict=True):
                if gradient is None:
                    continue
                if uses[id(parameter)] == 1:
                    alone.append((parameter, gradient))
                else:
                    known = sums.get(id(parameter))
                    total = gradient.clone() if known is None else known[1] + gradient
                    sums[id(parameter)] = (parameter, total)
            _add_to_grad(alone)
        _add_to_grad(list(sums.values()))


@torch.no_grad()
def _add_to_grad(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    totals, addends = [], []
    for parameter, gradient in pairs:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        else:
            totals.append(parameter.grad)
            addends.append(gradient)
    if totals:
        torch._foreach_add_(totals, addends)
