"""Backwards of which only the first part has run: the weights' gradients wait to be asked for."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from moe_graphs.engine.scopes.gradients import has_hooks, replay_weights
from moe_graphs.engine.scopes.slots import Flight, Slot
from moe_graphs.errors import GraphError


class DelayedWeights:
    """A queue of backwards, oldest first.

    is_collecting: whether a backward that runs now leaves its weights' part to the queue.
    each_by_itself: whether every flight is a backward of its own, and always collected.
    """

    def __init__(self, each_by_itself: bool = False) -> None:
        self._waiting: deque[list[tuple[Slot, Flight]]] = deque()
        self._each_by_itself = each_by_itself
        self.is_collecting = each_by_itself

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forgets backwards of a step that has ended."""
        self._waiting.clear()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Within this context all flights that land belong to one backward."""
        self._waiting.append([])
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    def collect(self, slot: Slot, flight: Flight) -> None:
        hooked = next(filter(has_hooks, flight.recording.parameters), None)
        if hooked is not None:
            raise GraphError(
                f"scope {flight.recording.scope.name!r}: a parameter {tuple(hooked.shape)} has "
                f"gradient hooks, which a delayed weight gradient does not run: remove them, or "
                f"do not delay this backward"
            )
        if self._each_by_itself:
            self._waiting.append([])
        self._waiting[-1].append((slot, flight))

    def replay_oldest(self) -> None:
        """Adds the weights' gradients of the oldest backward to ``.grad``.

        Raises:
            GraphError: if none waits.
        """
        if not self._waiting:
            raise GraphError(
                "backward_weight() without a backward that waits for it: call it once for every "
                "backward whose weights were delayed"
            )
        replay_weights(self._waiting.popleft())
