"""Hooks that run within a step and are none of its code: of gradients, of updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from torch import Tensor
from torch.optim import Optimizer

from moe_graphs.engine.hooks import OF_TENSORS, hooks_of_updates
from moe_graphs.engine.signature import Mismatch
from moe_graphs.engine.whole_step.accumulators import Accumulators

_both_of = attrgetter(*OF_TENSORS)


class StepHooks:
    """A graph has those that ran when it was captured; it runs no others.

    Args:
        parameters: by name; their own hooks and those of the nodes that add their gradients up.
        optimizers: that update within the step.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._accumulators = Accumulators(self._parameters)
        self._of_updates = hooks_of_updates(optimizers) if optimizers else []
        self._before = self._now()
        self._as_they_were = _copies(map(_both_of, self._parameters))
        self._before_updates = _contents(self._of_updates)

    def mismatch(self) -> Mismatch | None:
        as_they_are = list(map(_both_of, self._parameters))
        if as_they_are != self._as_they_were:
            name = self._differing()
            if name is not None:
                message = f"{name} has other hooks now, which a replay does not run"
                return Mismatch("hooks", f"{message}: register them before the capture")
            self._as_they_were = _copies(as_they_are)
        if _contents(self._of_updates) != self._before_updates or self._accumulators.hooked():
            message = "the optimizer or a gradient accumulator has hooks now, which a replay does "
            return Mismatch("hooks", f"{message} not run: register them before the capture")
        return None

    def _differing(self) -> str | None:
        """A parameter with other hooks than before, not with the same ones under other numbers."""
        rows = zip(self._names, self._before, self._now(), strict=True)
        return next((name for name, before, now in rows if before != now), None)

    def _now(self) -> list[list[tuple]]:
        return [
            [tuple(hooks.values()) if hooks else () for hooks in both]
            for both in map(_both_of, self._parameters)
        ]


def _copies(dicts: Iterable[tuple]) -> list[tuple]:
    return [tuple(None if hooks is None else dict(hooks) for hooks in both) for both in dicts]


def _contents(dicts: Iterable[dict]) -> list[tuple]:
    return [tuple(hooks.values()) for hooks in dicts]
