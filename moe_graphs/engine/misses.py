"""Training that falls back to eager calls says so, and knows the detail of each reason."""

from __future__ import annotations

from collections import Counter

from moe_graphs.engine.reasons import reason_for
from moe_graphs.engine.verify import warn


class Misses:
    """Eager calls of what was to be replayed: one ``GraphWarning`` per name and reason.

    Scopes that have the same to say (an input of another shape in every layer) say it once.

    Attributes:
        details: name and reason -> the message of the last such call.
    """

    def __init__(self) -> None:
        self.details: dict[tuple[str, str], str] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._said: set[tuple[str, str]] = set()

    def ran_eagerly(self, name: str, word: str, message: str | None = None) -> None:
        """Count an eager call of ``name`` for the reason ``word``, and warn if it is time to."""
        reason, key = reason_for(word), (name, word)
        if message is not None:
            self.details[key] = message
        if reason.warns_at is None:
            return
        self._calls[key] += 1
        said = (word, message or "")
        if self._calls[key] == reason.warns_at and said not in self._said:
            self._said.add(said)
            often = "" if reason.warns_at == 1 else f" {reason.warns_at} times"
            warn(f"{name} ran eagerly{often} ({word}): {message or reason}")
