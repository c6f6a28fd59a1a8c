"""Dispatcher for one rank with all experts: nothing to send or to drop, every shape static.

Shapes: T tokens, D model, K top-k, R = T*K rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from moe_graphs.dispatch.dispatcher import Dispatched, Dispatcher, DispatchPlan
from moe_graphs.kernels import route_rows


@final
@dataclass(frozen=True)
class LocalDispatcher(Dispatcher):
    """Dropless dispatcher without expert parallelism.

    Shapes are static and offsets stay on the device, so the whole layer can be captured. There are
    ``T * K`` rows, and nothing is sent or dropped.
    """

    name: ClassVar[str] = "local"
    host_sync: ClassVar[bool] = False

    def local_experts(self, num_experts: int) -> range:
        return range(num_experts)

    def preprocess(
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        order = route_rows(experts_TK, num_experts)
        dropped = torch.zeros((), dtype=torch.int64, device=hidden.device)
        return DispatchPlan(hidden, weights_TK, order, dropped)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        return Dispatched(plan.tokens.flatten(0, -2), plan.order, plan.weights_TK)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        return sums_XD
