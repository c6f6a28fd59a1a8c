"""Training that has fallen back to eager, though nothing has failed, says so."""

from __future__ import annotations

from collections import Counter

from moe_graphs.engine.signature import Mismatch
from moe_graphs.engine.verify import warn

_MANY = 10  # eager calls, more than replays
_SAID_BEFORE = {"capture_failed", "differs_from_eager", "weights_apart"}


class Misses:
    """A ``GraphWarning``, once, when most calls of what was captured run eagerly."""

    def __init__(self) -> None:
        self._balance: Counter[str] = Counter()
        self._moved: set[str] = set()
        self._said = False

    def replayed(self, name: str) -> None:
        if self._balance[name]:
            self._balance[name] -= 1

    def ran_eagerly(self, name: str, mismatch: Mismatch) -> None:
        if mismatch.reason == "moved" and name not in self._moved:
            self._moved.add(name)
            warn(f"{name} runs eagerly from now on: {mismatch.message}")
        elif mismatch.reason != "moved" and mismatch.reason not in _SAID_BEFORE:
            self._balance[name] += 1
            if self._balance[name] == _MANY and not self._said:
                self._said = True
                warn(f"{name}: most calls run eagerly: {mismatch.message}")
