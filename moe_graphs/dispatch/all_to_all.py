"""Expert parallelism by all-to-all with split sizes on the host.

Every rank holds a contiguous block of experts. Rows sorted by expert are therefore sorted by
destination rank too, and go out as they are. What arrives is sorted by source rank, and the experts
gather it in their order. Routing weights travel with the rows: the experts multiply by them, so
that nobody keeps the rows that come back.

Shapes: T tokens, D model, K top-k, E experts, e local experts, W ranks, R rows sent, M received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_graphs.dispatch.dispatcher import (
    DispatchCosts,
    Dispatched,
    DispatchPlan,
    PlannedExchange,
)
from moe_graphs.dispatch.expert_group import ExpertParallel, rank_and_size
from moe_graphs.dispatch.stand_in import StandIn
from moe_graphs.kernels import RowOrder, permute, route_rows, sum_rows
from moe_graphs.staged import end_capture_here, record


@record
class Exchange:
    """Route of the rows of one call, for sending them back.

    Attributes:
        sent: number of rows that go to each rank, on the host.
        received: number of rows that come from each rank, on the host.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


@final
@dataclass(frozen=True)
class AllToAllDispatcher(ExpertParallel):
    """Dropless expert parallelism over ``group`` (default: the world, or this process alone).

    ``dispatch`` reads the split sizes on the host, once, so a capture ends there. Ranks may have
    different numbers of tokens. NCCL and gloo both work; without a process group there is one rank.

    Args:
        group: ranks that share the experts; each holds an equal block of them. All ranks have to
            make every call, forward and backward.
    """

    name: ClassVar[str] = "all_to_all"
    host_sync: ClassVar[bool] = True

    @classmethod
    def costs(cls, exchange: PlannedExchange) -> DispatchCosts:
        """Count the rows of a balanced routing, and the counts of rows."""
        others, pairs = exchange.ranks - 1, exchange.tokens * exchange.top_k
        rows = 2.0 * pairs * exchange.row_bytes * others / exchange.ranks
        counts = 8.0 * exchange.num_experts * others / exchange.ranks
        return DispatchCosts(
            stand_in=StandIn(exchange.ranks),
            dispatch_bytes=rows + counts,
            combine_bytes=rows,
            expert_rows=pairs,
        )

    def preprocess(
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        order = route_rows(experts_TK, num_experts)
        dropped = torch.zeros((), dtype=torch.int64, device=hidden.device)
        return DispatchPlan(permute(hidden.flatten(0, -2), order), weights_TK, order, dropped)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        end_capture_here("all_to_all split sizes live on the host")
        world_size = rank_and_size(self.group)[1]
        sent_We = _counts(plan.order.offsets_E).view(world_size, -1)
        received_We = self._exchange_counts(sent_We)
        # The one host sync of the layer: both directions in one copy.
        sent, received = torch.stack([sent_We.sum(1), received_We.sum(1)]).tolist()
        weights_R1 = permute(plan.weights_TK.reshape(-1, 1), plan.order)
        rows_MD = _AllToAll.apply(plan.tokens, sent, received, self.group)
        weights_M1 = _AllToAll.apply(weights_R1, sent, received, self.group)
        arrival = _expert_order(received_We, sum(received))
        exchange = Exchange(tuple(sent), tuple(received))
        return Dispatched(rows_MD, arrival, weights_M1, handle=exchange)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        exchange = dispatched.handle
        rows_RD = _AllToAll.apply(sums_XD, list(exchange.received), list(exchange.sent), self.group)
        return sum_rows(rows_RD, plan.order, plan.weights_TK.shape[1])

    def _exchange_counts(self, sent_We: Tensor) -> Tensor:
        if sent_We.shape[0] == 1:
            return sent_We
        received_We = torch.empty_like(sent_We)
        dist.all_to_all_single(received_We, sent_We, group=self.group)
        return received_We


class _AllToAll(torch.autograd.Function):
    """Exchange of consecutive rows with consecutive ranks; the gradient travels back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    if len(sent) == 1:
        return rows.clone()
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def _expert_order(received_We: Tensor, num_rows: int) -> RowOrder:
    """Order that stably sorts rows by expert, which came in blocks (source rank, local expert).

    Example: two ranks sent ``[[1, 2], [2, 0]]`` rows for two experts. Order
    ``[0, 3, 4, 1, 2]``, offsets ``[3, 5]``.
    """
    world_size, num_local = received_We.shape
    expert_We = torch.arange(num_local, device=received_We.device).repeat(world_size)
    expert_M = expert_We.repeat_interleave(received_We.reshape(-1), output_size=num_rows)
    return route_rows(expert_M.unsqueeze(1), num_local)


def _counts(offsets_E: Tensor) -> Tensor:
    ends_E = offsets_E.to(torch.int64)
    return ends_E - torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
