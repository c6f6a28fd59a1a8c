"""Conversion of schedules of ``torch.distributed.pipelining``.

This module does not import torch. It reads torch's schedules by their attributes; tests construct
every schedule that torch has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from moe_graphs.engine.callables.order import KIND_OF, Action, Order
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
