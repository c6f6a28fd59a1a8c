"""Schedules of others: ``torch.distributed.pipelining`` and Transformer Engine. No torch in here.

torch's schedules are read by their attributes; tests construct every one that torch has.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from moe_graphs.pipelines.schedule import KIND_OF, Action, Kind, Order, Schedule, check_order


def from_torch(schedule: Any) -> Schedule:
    """Any schedule of ``torch.distributed.pipelining`` (not its forward-only one).

    Its stage indices are our chunks. An overlapped forward and backward (DualPipeV) is the one
    after the other; communication, unsharding and the reduction of gradients are left out.

    Raises:
        ValueError: if it does not say its order, or the order is wrong.
    """
    by_rank = getattr(schedule, "pipeline_order", None)
    if not by_rank:
        raise ValueError(
            f"{type(schedule).__name__} has no pipeline_order to read: give a schedule of "
            f"torch.distributed.pipelining with forwards and backwards, or build a Schedule"
        )
    return Schedule(tuple(_from_torch_actions(by_rank[rank]) for rank in sorted(by_rank)))


def to_torch_csv(schedule: Schedule) -> str:
    """The text that torch's ``_PipelineScheduleRuntime._load_csv`` reads: a line per rank."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for order in schedule.ranks:
        split = {(action.chunk, action.microbatch) for action in order if action.kind == "W"}
        writer.writerow(
            str(action).replace("B", "I")
            if (action.chunk, action.microbatch) in split
            else str(action)
            for action in order
        )
    return text.getvalue()


def from_torch_csv(text: str) -> Schedule:
    """Reads what torch's ``_dump_csv`` and ``to_torch_csv`` write, of computations only."""
    rows = csv.reader(io.StringIO(text))
    return Schedule(
        tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows)
    )


def from_te_order(signed: Sequence[int | float]) -> Order:
    """One rank's order from Transformer Engine's ``_order``.

    ``c`` is a forward of the rank's own chunk ``c - 1``, ``-c`` its backward, ``-c - 0.5`` the
    gradients of weights of the chunk's latest backward. Microbatches are not written there: the
    n-th forward of a chunk, and its n-th backward, is microbatch n.

    Raises:
        ValueError: naming the entry.
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


def to_te_order(order: Iterable[Action]) -> list[int | float]:
    """Transformer Engine's ``_order`` of one rank, whose chunks are numbered from 0.

    ``schedule.local_order(rank)`` is such an order.

    Raises:
        ValueError: naming the action that the format cannot say: a chunk whose microbatches do not
            come in turn, or gradients of weights of another backward than the latest.
    """
    order = tuple(order)
    check_order(order)
    counts: Counter[tuple[str, int]] = Counter()
    signed: list[int | float] = []
    for position, action in enumerate(order):
        turn = counts["B", action.chunk] - 1
        if action.kind != "W":
            turn = counts[action.kind, action.chunk]
            counts[action.kind, action.chunk] += 1
        if action.microbatch != turn:
            raise ValueError(
                f"order, position {position}: Transformer Engine's format has no microbatches and "
                f"would take {action} for {Action(action.kind, action.chunk, turn)}"
            )
        number = action.chunk + 1
        signed.append({"F": number, "B": -number, "W": -number - 0.5}[action.kind])
    return signed


def _from_torch_actions(actions: Iterable[Any]) -> Order:
    order = []
    for action in actions:
        if action is None:  # a bubble
            continue
        for part in action.sub_actions or (action,):
            kind = KIND_OF.get(part.computation_type.value)
            if kind is not None:
                order.append(Action(kind, part.stage_index, part.microbatch_index))
    return _counted_from_zero(order)


def _counted_from_zero(order: Sequence[Action]) -> Order:
    """Schedule1F1B (torch 2.11 to 2.13) writes the last rank's forwards as 1 to M, and runs 0 to
    M-1: it goes through its microbatches without looking at what it wrote."""
    forwards = [action.microbatch for action in order if action.kind == "F"]
    backwards = [action.microbatch for action in order if action.kind == "B"]
    if forwards != [microbatch + 1 for microbatch in backwards]:
        return tuple(order)
    return tuple(
        replace(action, microbatch=action.microbatch - 1) if action.kind == "F" else action
        for action in order
    )
