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
        self._before_updates = _contents(self._of_updates)

    def mismatch(self) -> Mismatch | None:
        for name, before, now in zip(self._names, self._before, self._now(), strict=True):
            if before != now:
                message = f"{name} has other hooks now, which a replay does not run"
                return Mismatch("hooks", f"{message}: register them before the capture")
        if _contents(self._of_updates) != self._before_updates or self._accumulators.hooked():
            message = "the optimizer or a gradient accumulator has hooks now, which a replay does "
            return Mismatch("hooks", f"{message} not run: register them before the capture")
        return None

    def _now(self) -> list[tuple[tuple, ...]]:
        return [
            (tuple(own.values()) if own else (), tuple(after.values()) if after else ())
            for own, after in map(_both_of, self._parameters)
        ]


def _contents(dicts: Iterable[dict]) -> list[tuple]:
    return [tuple(hooks.values()) for hooks in dicts]
