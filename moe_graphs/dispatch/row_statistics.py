"""Counters of the rows that routing needs from this rank's experts, beside the rows with room."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs.dispatch.dispatcher import DispatchPlan


class RowStatistics(nn.Module):
    """Numbers of rows that an MoE layer needed on this rank, and had room for.

    The counters change in place and on the device, so a graph can count. They are buffers, move
    with their layer, and are in no ``state_dict``.

    Attributes:
        most_rows: 0-dim int64, the largest number of rows that one call needed since the counters
            were last zeroed.
        rows_room: 0-dim int64, the number of rows that the last call had room for. If
            ``most_rows`` is larger, some call dropped (token, expert) pairs.
    """

    most_rows: Tensor
    rows_room: Tensor

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        for name in ("most_rows", "rows_room"):
            rows = torch.zeros((), dtype=torch.int64, device=device)
            self.register_buffer(name, rows, persistent=False)

    def count(self, plan: DispatchPlan) -> None:
        """Count the rows of a call; nothing happens if its dispatcher had no ``rows_factor``."""
        if plan.rows_needed is not None:
            self.most_rows.clamp_(min=plan.rows_needed)
            self.rows_room.fill_(plan.order.order_R.numel())

    def zero(self) -> None:
        """Zero both counters."""
        self.most_rows.zero_()
        self.rows_room.zero_()

    def read(self) -> tuple[int, int]:
        """Return ``most_rows`` and ``rows_room`` as numbers; waits for the device."""
        return int(self.most_rows), int(self.rows_room)
