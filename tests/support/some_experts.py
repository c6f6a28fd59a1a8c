"""One rank of several, alone: its experts' rows, with room for the worst routing.

Shapes: T tokens, D model, K top-k, E experts, R rows that there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from moe_graphs.dispatch.dispatcher import Dispatched, Dispatcher, DispatchPlan
from moe_graphs.dispatch.local_rows import local_rows


@final
@dataclass(frozen=True)
class SomeExperts(Dispatcher):
    """The first half of the experts; what the others would add is missing."""

    rows_factor: float | None = 2.0
    name: ClassVar[str] = "some"
    host_sync: ClassVar[bool] = False
    leaves_tail: ClassVar[bool] = True

    def local_experts(self, num_experts: int) -> range:
        return range(num_experts // 2)

    def preprocess(
        self, hidden_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        local = self.local_experts(num_experts)
        rows = local_rows(experts_TK, local, num_experts, experts_TK.numel())
        return DispatchPlan(hidden_TD, weights_TK, rows.order, rows.dropped, rows.needed)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        return Dispatched(plan.tokens_XD, plan.order, plan.weights_TK)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        return sums_XD
