"""A dispatcher with the shapes of expert parallelism, for one process and a balanced routing.

Plans use it (``Dispatcher.costs``), because the real dispatchers ask other ranks or read sizes on
the host. Rows are sorted, permuted and kept
by the same functions as in the real ones.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, K top-k, E experts, e local
experts, R rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moe_graphs.dispatch.dispatcher import Dispatched, Dispatcher, DispatchPlan
from moe_graphs.dispatch.local_rows import local_rows, room_for_rows
from moe_graphs.kernels import permute, route_rows, sum_rows


@final
@dataclass(frozen=True)
class StandIn(Dispatcher):
    """Stand-in for the dispatcher of rank 0 of ``ranks``.

    With ``gathered`` every rank gets all tokens, and ``gathered`` makes of them what the experts
    get. Without it a rank receives as many rows as it sends.
    """

    ranks: int
    gathered: Callable[[DispatchPlan], Dispatched] | None = None
    rows_factor: float | None = None
    name: ClassVar[str] = "stand_in"
    host_sync: ClassVar[bool] = False
    leaves_tail: ClassVar[bool] = True

    def local_experts(self, num_experts: int) -> range:
        return range(num_experts // self.ranks)

    def preprocess(
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        none = torch.zeros((), dtype=torch.int64, device=hidden.device)
        if self.gathered is None:
            order = route_rows(experts_TK, num_experts)
            return DispatchPlan(permute(hidden.flatten(0, -2), order), weights_TK, order, none)
        tokens, top_k = experts_TK.shape
        everyone = self.ranks * tokens
        local = self.local_experts(num_experts)
        room = room_for_rows(tokens, top_k, local, self.ranks, self.rows_factor)
        hidden_GD = _Travel.apply(hidden.flatten(0, -2), everyone)
        weights_GK = _Travel.apply(weights_TK, everyone)
        experts_GK = experts_TK.new_zeros(everyone, top_k)
        rows = local_rows(experts_GK, local, num_experts, room)
        return DispatchPlan(hidden_GD, weights_GK, rows.order, rows.dropped)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        if self.gathered is not None:
            return self.gathered(plan)
        rows_RD = _Travel.apply(plan.tokens, plan.tokens.shape[0])
        weights_R1 = permute(plan.weights_TK.reshape(-1, 1), plan.order)
        weights_R1 = _Travel.apply(weights_R1, weights_R1.shape[0])
        local = plan.order.offsets_E.numel() // self.ranks
        arrival = route_rows(plan.order.order_R.new_zeros(rows_RD.shape[0], 1), local)
        return Dispatched(rows_RD, arrival, weights_R1)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        if self.gathered is not None:
            return _Travel.apply(sums_XD, sums_XD.shape[0] // self.ranks)
        rows_RD = _Travel.apply(sums_XD, sums_XD.shape[0])
        return sum_rows(rows_RD, plan.order, plan.weights_TK.shape[1])


class _Travel(torch.autograd.Function):
    """Exchange in shapes alone: rows arrive, gradients of the sent rows come back.

    Nothing is kept for the backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arriving: int) -> Tensor:
        ctx.sent = rows.shape[0]
        return rows.new_zeros(arriving, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.sent, *grad.shape[1:]), None
