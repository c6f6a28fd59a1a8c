"""Conversion of schedules of ``torch.distributed.pipelining`` and of Transformer Engine.

This module does not import torch. It reads torch's schedules by their attributes; tests construct
every schedule that torch has.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from moe_graphs.engine.callables.order import (
    KIND_OF,
    Action,
    Order,
    check_order,
)
from moe_graphs.pipelines.schedule import Schedule


def from_torch(schedule: Any) -> Schedule:
    """Read a schedule of ``torch.distributed.pipelining``; all but the forward-only one.

    Stage indices become chunks. An overlapped forward and backward (DualPipeV) become a forward and
    then a backward. Communication, unsharding and the reduction of gradients are left out.

    Raises:
        ValueError: the schedule has no order, or the order is wrong.
    """
    by_rank = getattr(schedule, "pipeline_order", None)
    if not by_rank:
        raise ValueError(
            f"{type(schedule).__name__} has no pipeline_order to read: give a schedule of "
            f"torch.distributed.pipelining with forwards and backwards, or build a Schedule"
        )
    return Schedule(tuple(_from_torch_actions(by_rank[rank]) for rank in sorted(by_rank)))


def to_torch_csv(schedule: Schedule) -> str:
    """Write the text that torch's ``_PipelineScheduleRuntime._load_csv`` reads: a line per rank."""
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
    """Read the computations that torch's ``_dump_csv`` and ``to_torch_csv`` write."""
    rows = csv.reader(io.StringIO(text))
    return Schedule(
        tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows)
    )


def to_te_order(order: Iterable[Action]) -> list[int | float]:
    """Write Transformer Engine's ``_order`` of one rank.

    Args:
        order: the rank's order with chunks numbered from 0, as ``schedule.local_order(rank)`` is.

    Raises:
        ValueError: the format cannot express an action, which the message names: microbatches of a
            chunk that do not come in turn, or weight gradients of another backward than the latest.
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
        if action is None:  # torch writes None for a bubble
            continue
        for part in action.sub_actions or (action,):
            kind = KIND_OF.get(part.computation_type.value)
            if kind is not None:
                order.append(Action(kind, part.stage_index, part.microbatch_index))
    return _counted_from_zero(order)


def _counted_from_zero(order: Sequence[Action]) -> Order:
    """Renumber an order whose microbatches are counted from 1.

    Schedule1F1B (torch 2.11 to 2.13) writes the last rank's forwards as 1 to M, but runs 0 to M-1:
    it does not read the numbers that it writes.
    """
    forwards = [action.microbatch for action in order if action.kind == "F"]
    backwards = [action.microbatch for action in order if action.kind == "B"]
    if forwards != [microbatch + 1 for microbatch in backwards]:
        return tuple(order)
    return tuple(
        replace(action, microbatch=action.microbatch - 1) if action.kind == "F" else action
        for action in order
    )
