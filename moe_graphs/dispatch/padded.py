"""Drop and pad to a capacity: every expert gets exactly C rows (GShard, arXiv 2006.16668).

Shapes: T tokens, D model, K top-k, E experts, C capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_graphs.dispatch.dispatcher import Dispatched, Dispatcher, DispatchPlan
from moe_graphs.kernels import RowOrder, route_rows


@final
@dataclass(frozen=True)
class PaddedDispatcher(Dispatcher):
    """Dispatcher with a fixed number of rows per expert, all experts on this rank.

    Every expert has ``C = ceil(T * K / E * capacity_factor)`` rows; free rows are zero. An expert's
    surplus pairs are dropped, the last tokens first: a dropped pair adds nothing to the output, and
    the weights of the token's other experts stay as they are. The plan counts dropped pairs.

    Args:
        capacity_factor: room of an expert, as a multiple of its rows if routing is balanced. 1.25
            leaves a quarter of head-room, ``E / K`` never drops.

    Raises:
        ValueError: the factor is not positive and finite.
    """

    capacity_factor: float = 1.25
    name: ClassVar[str] = "padded"
    host_sync: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.capacity_factor > 0 and math.isfinite(self.capacity_factor)):
            raise ValueError(
                f"capacity_factor must be positive and finite, got {self.capacity_factor}: "
                f"1.25 leaves a quarter of head-room, num_experts / top_k never drops"
            )

    def local_experts(self, num_experts: int) -> range:
        return range(num_experts)

    def capacity(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """C, the number of rows of each expert, for ``num_tokens`` tokens."""
        return math.ceil(num_tokens * top_k / num_experts * self.capacity_factor)

    def preprocess(
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        order = route_rows(experts_TK, num_experts)
        num_tokens, top_k = experts_TK.shape
        capacity = self.capacity(num_tokens, top_k, num_experts)
        padded = _pad(order, experts_TK, capacity)
        dropped = (padded.inverse_R < 0).sum()
        return DispatchPlan(hidden, weights_TK, padded, dropped)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        return Dispatched(plan.tokens.flatten(0, -2), plan.order, plan.weights_TK)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        return sums_XD


def _pad(order: RowOrder, experts_TK: Tensor, capacity: int) -> RowOrder:
    """Give expert e the rows ``[e * C, (e + 1) * C)``, by gathers and arithmetic alone.

    Example: experts ``[[0], [0], [0], [1]]``, capacity 2: the third token is dropped, order is
    ``[0, 1, 3, -1]``, inverse ``[0, 1, -1, 2]``, offsets ``[2, 4]``.
    """
    ends_E = order.offsets_E
    starts_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    slot_C = torch.arange(capacity, device=ends_E.device, dtype=torch.int32)
    row_EC = starts_E.unsqueeze(1) + slot_C
    # A slot past an expert's last row would read the next expert's row: clamp it, then mark it.
    pair_EC = order.order_R[row_EC.clamp(max=max(order.order_R.numel() - 1, 0))]
    padded_order = torch.where(row_EC < ends_E.unsqueeze(1), pair_EC, -1).reshape(-1)

    expert_R = experts_TK.reshape(-1)
    slot_R = order.inverse_R - starts_E[expert_R]
    padded_row_R = expert_R * capacity + slot_R
    padded_inverse = torch.where(slot_R < capacity, padded_row_R, -1).to(torch.int32)

    num_experts = ends_E.numel()
    offsets_E = torch.arange(1, num_experts + 1, device=ends_E.device, dtype=torch.int32)
    return RowOrder(padded_order, padded_inverse, offsets_E * capacity, has_gaps=True)
