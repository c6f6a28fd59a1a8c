"""The order in which one rank runs forwards and backwards of microbatches.

``moe_graphs.pipelines`` makes schedules of several ranks from such orders. This module imports no
torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Kind = Literal["F", "B", "W"]


KINDS = ("F", "B", "W")


# The letters that torch writes.
KIND_OF: Mapping[str, Kind] = MappingProxyType({"F": "F", "B": "B", "I": "B", "W": "W"})


@dataclass(frozen=True)
class Action:
    """Forward or backward of one microbatch in one chunk; as text ``0F3``: chunk, kind, microbatch.

    Attributes:
        kind: ``F`` is the forward. ``B`` is the whole backward, unless the order also has the ``W``
            of this chunk and microbatch. In that case ``B`` computes the gradients of the inputs
            (torch writes ``I``) and ``W`` the gradients of the weights.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of an action: accepted are {', '.join(KINDS)}")
        if self.chunk < 0 or self.microbatch < 0:
            raise ValueError(f"{self}: chunk and microbatch of an action count from 0")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads ``0F3``, ``0B3``, ``0W3``, and torch's ``0I3`` as ``0B3``."""
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
        if match is None:
            raise ValueError(
                f"action {text!r}: write chunk, one of F, B, I, W, and microbatch, such as '0F3'"
            )
        chunk, kind, microbatch = match.groups()
        return cls(KIND_OF[kind], int(chunk), int(microbatch))

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


Order = tuple[Action, ...]


def check_order(order: Sequence[Action], name: str = "order") -> None:
    """Checks the order of one rank by itself.

    Raises:
        ValueError: if an action is there twice, comes before another one that it needs, or is
            missing (every chunk runs F and B of every microbatch; W is optional). The message has
            ``name``, the position and the action.
    """
    if not order:
        raise ValueError(f"{name} is empty: it needs at least one action")
    positions: dict[Action, int] = {}
    for position, action in enumerate(order):
        where = f"{name}, position {position}"
        if action in positions:
            raise ValueError(
                f"{where}: {action} has run already, at position {positions[action]}: run it once"
            )
        needed = _earlier_on_rank(action)
        if needed is not None and needed not in positions:
            raise ValueError(f"{where}: {action} needs {needed} before it")
        positions[action] = position
    last = max(action.microbatch for action in order)
    for chunk in sorted({action.chunk for action in order}):
        for microbatch in range(last + 1):
            for action in (Action("F", chunk, microbatch), Action("B", chunk, microbatch)):
                if action not in positions:
                    raise ValueError(
                        f"{name}: {action} is missing: every chunk runs forward and backward of "
                        f"every microbatch, 0 to {last}"
                    )


def slots(order: Sequence[Action]) -> dict[int, int]:
    """Largest number of microbatches in flight, per chunk: from F until the last of B and W."""
    ends = {(action.chunk, action.microbatch): i for i, action in enumerate(order)}
    in_flight: Counter[int] = Counter()
    peak: dict[int, int] = {}
    for position, action in enumerate(order):
        if action.kind == "F":
            in_flight[action.chunk] += 1
            peak[action.chunk] = max(peak.get(action.chunk, 0), in_flight[action.chunk])
        if ends[action.chunk, action.microbatch] == position:
            in_flight[action.chunk] -= 1
    return peak


def _earlier_on_rank(action: Action) -> Action | None:
    if action.kind == "F":
        return None
    return replace(action, kind="F" if action.kind == "B" else "B")


def from_te_order(signed: Sequence[int | float]) -> Order:
    """Reads one rank's order from Transformer Engine's ``_order``.

    ``c`` is a forward of the rank's own chunk ``c - 1``, ``-c`` is its backward, and ``-c - 0.5``
    are the weight gradients of the chunk's latest backward. The format has no microbatches: the
    n-th forward of a chunk, and its n-th backward, belong to microbatch n.

    Raises:
        ValueError: if an entry is wrong; the message names it.
    """
    counts: Counter[tuple[str, int]] = Counter()
    order: list[Action] = []
    for position, number in enumerate(signed):
        chunk = math.floor(abs(number)) - 1
        if chunk < 0 or number not in (chunk + 1, -chunk - 1, -chunk - 1.5):
            raise ValueError(
                f"position {position} of _order: {number!r} is none of c (forward), -c (backward) "
                f"and -c-0.5 (gradients of weights), with chunks c from 1"
            )
        if number == -chunk - 1.5:
            latest = counts["B", chunk] - 1
            if latest < 0:
                raise ValueError(
                    f"position {position} of _order: {number!r} comes before any backward of "
                    f"chunk {chunk + 1}"
                )
            order.append(Action("W", chunk, latest))
            continue
        kind: Kind = "F" if number > 0 else "B"
        order.append(Action(kind, chunk, counts[kind, chunk]))
        counts[kind, chunk] += 1
    check_order(order, "_order")
    return tuple(order)
