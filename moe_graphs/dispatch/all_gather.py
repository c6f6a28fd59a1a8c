"""Expert parallelism in static shapes: every rank gets all tokens and runs its own experts on them.

Sizes stay on the device, so the whole exchange can be captured: by NCCL in CUDA graphs, by gloo on
the CPU.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, K top-k, E experts, e local
experts, R rows that there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.dispatch.dispatcher import (
    DispatchCosts,
    Dispatched,
    DispatchPlan,
    PlannedExchange,
)
from moe_graphs.dispatch.equal_tokens import check_equal_tokens
from moe_graphs.dispatch.expert_group import ExpertParallel, rank_and_size
from moe_graphs.dispatch.local_rows import check_rows_factor, local_rows, room_for_rows
from moe_graphs.dispatch.stand_in import StandIn
from moe_graphs.kernels import permute


@final
@dataclass(frozen=True)
class AllGatherDispatcher(ExpertParallel):
    """Dropless expert parallelism over ``group`` (default: the world, or this process alone).

    Tokens, weights and expert numbers are gathered. Each rank has room for the worst routing, in
    which one rank gets all pairs: ``R = W * T * min(K, e)`` rows. With ``rows_factor`` the room is
    at most ``rows_factor * T * K`` rows, where ``T * K`` is a balanced routing. Pairs that do not
    fit are counted in ``dropped``, and the step has to be skipped and run again
    (``DeviceStep(...)(overflow=output.dropped_tokens)``). Rows past the last expert's
    belong to no expert. Memory grows with R; the time of the products grows with the rows
    that are routed here.

    A token's partial sums come back rounded to the dtype of the rows and are added up in fp32 on
    the token's rank. NCCL and gloo give the same bits. If one rank holds all of a token's experts,
    the bits are those of ``LocalDispatcher``.

    Every rank must have the same number of tokens. The first call with a new number of tokens
    compares the ranks' numbers through the group's store, on the host and before anything is
    launched. If the numbers differ, every rank gets a ``ValueError``; if the other ranks go on
    with a number that they know, this rank gets it after five minutes. Later calls with a known
    number compare nothing, and replays run no Python, so the ranks have to change their number
    together.

    Args:
        group: ranks that share the experts, a ``ProcessGroup`` of torch.distributed with NCCL or
            gloo; without a process group there is one rank.
        rows_factor: room for rows, as a multiple of the rows of a balanced routing, at least 1;
            None makes room for the worst routing.

    Raises:
        ValueError: ``rows_factor`` is below 1 or not finite.
    """

    rows_factor: float | None = None
    name: ClassVar[str] = "all_gather"
    host_sync: ClassVar[bool] = False
    leaves_tail: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rows_factor(self.rows_factor)

    @classmethod
    def costs(cls, exchange: PlannedExchange) -> DispatchCosts:
        """Count all tokens of the other ranks, and their pairs."""
        rows = 2.0 * exchange.tokens * (exchange.ranks - 1) * exchange.row_bytes
        return DispatchCosts(
            stand_in=StandIn(exchange.ranks, rows_or_tokens, exchange.rows_factor),
            dispatch_bytes=rows + gathered_pairs(exchange),
            combine_bytes=rows,
            expert_rows=planned_room(exchange),
        )

    def preprocess(
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        world_size, local = rank_and_size(self.group)[1], self.local_experts(num_experts)
        tokens, top_k = experts_TK.shape
        room = room_for_rows(tokens, top_k, local, world_size, self.rows_factor)
        group = self.process_group
        if group is not None:
            check_equal_tokens(group, tokens, self.name)
            hidden = _AllGather.apply(hidden.flatten(0, -2), group)
            weights_TK = _AllGather.apply(weights_TK, group)
            experts_TK = _all_gather(experts_TK, group)
        rows = local_rows(experts_TK, local, num_experts, room)
        needed = None if self.rows_factor is None else rows.needed
        return DispatchPlan(hidden, weights_TK, rows.order, rows.dropped, needed)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        return rows_or_tokens(plan)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        if self.process_group is None:
            return sums_XD
        return _ReduceScatter.apply(sums_XD, self.process_group)


def gathered_pairs(exchange: PlannedExchange) -> int:
    """Bytes of the pairs of the other ranks. Gradients of weights travel back."""
    others = exchange.ranks - 1
    return exchange.tokens * exchange.top_k * others * (exchange.pair_bytes + 4)


def planned_room(exchange: PlannedExchange) -> int:
    """Rows that there is room for, as in ``preprocess``."""
    local = range(exchange.num_experts // exchange.ranks)
    by = exchange.tokens, exchange.top_k, local, exchange.ranks, exchange.rows_factor
    return room_for_rows(*by)


def rows_or_tokens(plan: DispatchPlan) -> Dispatched:
    """Give the experts what takes less memory until the backward: all tokens, or their rows."""
    tokens_GD, order = plan.tokens.flatten(0, -2), plan.order
    if order.order_R.numel() >= len(tokens_GD):
        return Dispatched(tokens_GD, order, plan.weights_TK)
    return rows_of(plan)


def rows_of(plan: DispatchPlan) -> Dispatched:
    """Give the experts the rows of a plan that has tokens."""
    rows_RD = permute(plan.tokens.flatten(0, -2), plan.order)
    return Dispatched(rows_RD, plan.order, plan.weights_TK, is_sorted=True)


class _AllGather(torch.autograd.Function):
    """All ranks' rows, in the order of ranks; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_gather(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """Each rank's rows, summed over the ranks; the gradient goes to all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _reduce_scatter(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def _all_gather(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    world_size = dist.get_world_size(group)
    gathered = rows.new_empty(world_size * rows.shape[0], *rows.shape[1:])
    if rows.numel():
        # Newer versions of torch have this name, and warn about the old one.
        later = getattr(dist, "all_gather_single", None)
        (later or dist.all_gather_into_tensor)(gathered, rows.contiguous(), group=group)
    return gathered


def _reduce_scatter(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum every rank's rows by an all-to-all and one sum.

    NCCL's reduce-scatter moves as many bytes, but rounds after every addition and adds in an order
    of its own.
    """
    world_size = dist.get_world_size(group)
    arrived = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.numel():
        dist.all_to_all_single(arrived, rows.contiguous(), group=group)
    return arrived.view(world_size, -1, *rows.shape[1:]).sum(0)
