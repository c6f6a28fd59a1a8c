"""Rows of this rank's experts, from the tokens of all ranks, in static shapes.

Shapes: T tokens of a rank, G = W * T of all W ranks, K top-k, e local experts, R rows that there
is room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_graphs.kernels import RowOrder, route_rows

ROUNDED_TO = 8  # The room is a multiple of 8 rows, so that memory stays aligned.


@dataclass(frozen=True)
class LocalRows:
    """Rows of the (token, expert) pairs whose experts are local.

    Attributes:
        order: order of the local pairs; other pairs have no row.
        needed: 0-dim int64 on the device: rows that the routing needs.
        dropped: 0-dim int64 on the device: needed rows that there is no room for. The last pairs
            of the last experts are dropped.
    """

    order: RowOrder
    needed: Tensor
    dropped: Tensor


def check_rows_factor(rows_factor: float | None) -> None:
    """Check that there is room for a balanced routing.

    Raises:
        ValueError: the factor is below 1 or not finite.
    """
    if rows_factor is not None and not (rows_factor >= 1 and math.isfinite(rows_factor)):
        raise ValueError(
            f"rows_factor must be at least 1 and finite, got {rows_factor}: 1.0 is room for a "
            f"balanced routing, None for the worst"
        )


def room_for_rows(
    tokens: int, top_k: int, local: range, world_size: int, rows_factor: float | None
) -> int:
    """R: ``rows_factor`` times the rows of a balanced routing, at most the rows of the worst.

    Example: 64 tokens, top-2, 4 of 8 experts: 128 rows each on two ranks if balanced, 256 at worst.
    """
    worst = world_size * tokens * min(top_k, len(local))
    if rows_factor is None:
        return worst
    return min(worst, -(-math.ceil(rows_factor * tokens * top_k) // ROUNDED_TO) * ROUNDED_TO)


def local_rows(experts_GK: Tensor, local: range, num_experts: int, room: int) -> LocalRows:
    """Sort the pairs of local experts by expert, in ``room`` rows.

    Example: experts ``[[2, 0], [0, 1], [2, 1]]`` on the rank of experts 0 and 1: order
    ``[1, 2, 3, 5, -1, -1]``, inverse ``[-1, 0, 1, 2, -1, 3]``, offsets ``[2, 4]``. With room for
    three rows: ``[1, 2, 3]``, ``[-1, 0, 1, 2, -1, -1]``, ``[2, 3]``, and one pair is dropped.
    """
    none = torch.zeros((), dtype=torch.int64, device=experts_GK.device)
    if len(local) == num_experts:
        return LocalRows(route_rows(experts_GK, num_experts), none + experts_GK.numel(), none)
    number_GK = experts_GK - local.start
    elsewhere_GK = (number_GK < 0) | (number_GK >= len(local))
    # Pairs of other ranks' experts are sorted behind the local ones, as one more expert.
    every = route_rows(number_GK.masked_fill(elsewhere_GK, len(local)), len(local) + 1)
    offsets_e = every.offsets_E[:-1].contiguous()
    needed = offsets_e[-1].to(torch.int64)
    dropped = none
    tokens, top_k = experts_GK.shape
    if room < tokens * min(top_k, len(local)):
        dropped = (needed - room).clamp(min=0)
        offsets_e = offsets_e.clamp(max=room)
    row_R = torch.arange(room, device=offsets_e.device)
    order_R = torch.where(row_R < offsets_e[-1], every.order_R[:room], -1)
    inverse = torch.where(every.inverse_R < offsets_e[-1], every.inverse_R, -1)
    return LocalRows(RowOrder(order_R, inverse, offsets_e, has_gaps=True), needed, dropped)
