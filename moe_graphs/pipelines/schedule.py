"""Pipeline schedules: the actions of every rank in their order. This module imports no torch.

A model is cut into chunks, numbered from its input to its output over all ranks (torch calls the
number a stage index); a rank holds one chunk or several. An order is the sequence of actions of one
rank; a schedule has one order per rank. Both are checked when they are made, and errors name the
action.

``builders.py`` makes the usual schedules; ``formats.py`` reads torch's and Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from moe_graphs.engine.callables.order import (
    Action,
    Order,
    check_order,
    slots,
)

# Units of time in a table. A whole backward takes as long as B and W together.
UNIT_COSTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 1, "W": 1})


class Span(NamedTuple):
    """An action with the units of time at which it starts and ends."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: one order per rank. ``print`` shows a table of time and ranks.

    The orders determine the rank of each chunk, so any placement of chunks is possible.

    Raises:
        ValueError: an order is wrong by itself (``check_order``), a chunk is on two ranks or on
            none, a microbatch runs on one rank and not on another, or ranks wait for each other.
            The message has the rank, the position and the action. The check assumes that sending
            does not block; ranks that send synchronously may still wait for each other.
    """

    ranks: tuple[Order, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(tuple(order) for order in self.ranks))
        if not self.ranks:
            raise ValueError("a schedule needs the order of at least one rank")
        for rank, order in enumerate(self.ranks):
            check_order(order, f"rank {rank}")
        self._check_chunks()
        self.timeline()

    @property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self.ranks[0])

    @property
    def num_chunks(self) -> int:
        """Number of chunks on all ranks together."""
        return 1 + max(action.chunk for order in self.ranks for action in order)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Chunks that ``rank`` holds, in the order of the model."""
        return tuple(sorted({action.chunk for action in self.ranks[rank]}))

    def local_order(self, rank: int) -> Order:
        """Order of ``rank`` with its own chunks numbered from 0."""
        local = {chunk: i for i, chunk in enumerate(self.chunks(rank))}
        return tuple(replace(action, chunk=local[action.chunk]) for action in self.ranks[rank])

    def slots(self) -> tuple[dict[int, int], ...]:
        """Largest number of microbatches in flight, per rank and chunk."""
        return tuple(slots(order) for order in self.ranks)

    def timeline(self, costs: Mapping[str, int] = UNIT_COSTS) -> tuple[tuple[Span, ...], ...]:
        """Start and end of each action, per rank, if each starts as soon as it can."""
        split = {(a.chunk, a.microbatch) for order in self.ranks for a in order if a.kind == "W"}
        spans: list[list[Span]] = [[] for _ in self.ranks]
        ended: dict[Action, int] = {}
        while any(len(done) < len(order) for done, order in zip(spans, self.ranks, strict=True)):
            before = len(ended)
            for rank, order in enumerate(self.ranks):
                for action in order[len(spans[rank]) :]:
                    needed = self._from_other_chunk(action)
                    if needed is not None and needed not in ended:
                        break
                    cost = costs[action.kind]
                    if action.kind == "B" and (action.chunk, action.microbatch) not in split:
                        cost += costs["W"]
                    free = spans[rank][-1].end if spans[rank] else 0
                    start = max(free, 0 if needed is None else ended[needed])
                    ended[action] = start + cost
                    spans[rank].append(Span(action, start, start + cost))
            if len(ended) == before:
                raise ValueError(self._deadlock([len(done) for done in spans]))
        return tuple(map(tuple, spans))

    def table(self, costs: Mapping[str, int] = UNIT_COSTS) -> str:
        """Table as text: a line per unit of time, a column per rank; ``|`` continues an action.

        Args:
            costs: units of time of F, B and W; a whole backward takes those of B and W together.
        """
        timeline = self.timeline(costs)
        length = max(spans[-1].end for spans in timeline)
        columns = []
        for rank, spans in enumerate(timeline):
            cells = [""] * length
            for span in spans:
                cells[span.start : span.end] = ["|"] * (span.end - span.start)
                if span.end > span.start:
                    cells[span.start] = str(span.action)
            columns.append([f"rank {rank}", *cells])
        lines = zip(["time", *map(str, range(length))], *columns, strict=True)
        width = max(len(cell) for column in columns for cell in column)
        return "\n".join(
            "  ".join([time.rjust(5), *(cell.ljust(width) for cell in cells)]).rstrip()
            for time, *cells in lines
        )

    def __str__(self) -> str:
        return self.table()

    def _check_chunks(self) -> None:
        """Check that every chunk is on one rank and all chunks run the same microbatches."""
        holders: dict[int, int] = {}
        for rank, order in enumerate(self.ranks):
            for position, action in enumerate(order):
                holder = holders.setdefault(action.chunk, rank)
                if holder != rank:
                    raise ValueError(
                        f"rank {rank}, position {position}: {action} belongs to a chunk of rank "
                        f"{holder}: a chunk lies on one rank"
                    )
                if action.microbatch >= self.microbatches:
                    raise ValueError(
                        f"rank {rank}, position {position}: {action} is a microbatch that rank 0 "
                        f"does not run: it ends at {self.microbatches - 1}"
                    )
        absent = sorted(set(range(self.num_chunks)) - holders.keys())
        if absent:
            raise ValueError(f"chunk {absent[0]} lies on no rank: chunks count from 0 without gaps")
        for rank, order in enumerate(self.ranks):
            if max(action.microbatch for action in order) < self.microbatches - 1:
                missing = Action("F", self.chunks(rank)[0], self.microbatches - 1)
                raise ValueError(f"rank {rank}: {missing} is missing: rank 0 runs this microbatch")

    def _from_other_chunk(self, action: Action) -> Action | None:
        """Action on the chunk before (F) or after (B) that has to have run, or None."""
        if action.kind == "F" and action.chunk > 0:
            return replace(action, chunk=action.chunk - 1)
        if action.kind == "B" and action.chunk < self.num_chunks - 1:
            return replace(action, chunk=action.chunk + 1)
        return None

    def _deadlock(self, positions: Sequence[int]) -> str:
        waits = [
            f"rank {rank}, position {position}: {order[position]} waits for "
            f"{self._from_other_chunk(order[position])}"
            for rank, (order, position) in enumerate(zip(self.ranks, positions, strict=True))
            if position < len(order)
        ]
        return "deadlock: " + "; ".join(waits)
