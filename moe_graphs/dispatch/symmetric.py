"""Expert parallelism in static shapes through peers' memory: only tokens that are needed travel.

The results are those of ``all_gather``, to the bit, but each token is sent only to the ranks that
hold one of its experts, and once to each of them. Sizes and destinations stay on the device, so the
whole exchange can be captured.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, K top-k, E experts, e local
experts, R rows that there is room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.dispatch.all_gather import gathered_pairs, planned_room, rows_of
from moe_graphs.dispatch.dispatcher import (
    DispatchCosts,
    Dispatched,
    DispatchPlan,
    PlannedExchange,
)
from moe_graphs.dispatch.equal_tokens import check_equal_tokens
from moe_graphs.dispatch.expert_group import ExpertParallel, rank_and_size
from moe_graphs.dispatch.local_rows import check_rows_factor, local_rows, room_for_rows
from moe_graphs.dispatch.peer_memory import peer_memory
from moe_graphs.dispatch.stand_in import StandIn
from moe_graphs.kernels import RowOrder
from moe_graphs.kernels.peer_rows import (
    pull_gradients,
    pull_sums,
    push_gradients,
    push_tokens,
    received_rows,
    received_tokens,
)


@final
@dataclass(frozen=True)
class SymmetricDispatcher(ExpertParallel):
    """Dropless expert parallelism over ``group`` (default: the world), by peers' memory.

    The ranks have to reach each other's memory: GPUs of one host, or processes of one host on the
    CPU. Rows, ``rows_factor`` and the refusal of unequal numbers of tokens are as in
    ``AllGatherDispatcher``. With up to four ranks the bits are the same as well; torch adds up the
    sums of more ranks in another order.

    All layers share memory for W * T rows; ``kernels.peer_rows`` says why that is enough. All ranks
    make the memory together in the first call with a number of tokens, which has to come before any
    capture, and keep it. On GPUs a rank that waits ten minutes for another one ends with a CUDA
    error.

    Args:
        group: ranks of one host that share the experts.
        rows_factor: room for rows, as a multiple of the rows of a balanced routing, at least 1;
            None makes room for the worst routing.

    Raises:
        ValueError: ``rows_factor`` is below 1 or not finite. The first call raises it on every rank
            if memory cannot be shared or D is not divisible by 8; the message says which
            dispatcher to take.
    """

    rows_factor: float | None = None
    name: ClassVar[str] = "symmetric"
    host_sync: ClassVar[bool] = False
    leaves_tail: ClassVar[bool] = True
    needs_peers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rows_factor(self.rows_factor)

    @classmethod
    def costs(cls, exchange: PlannedExchange) -> DispatchCosts:
        """Count a token once for every rank with any of its experts, here taken as random."""
        ranks, experts, top_k = exchange.ranks, exchange.num_experts, exchange.top_k
        elsewhere = experts - experts // ranks
        reached = 1 - math.comb(elsewhere, top_k) / math.comb(experts, top_k)
        rows = 2.0 * exchange.tokens * (ranks - 1) * reached * exchange.row_bytes
        token = exchange.row_bytes + top_k * exchange.pair_bytes
        return DispatchCosts(
            stand_in=StandIn(ranks, rows_of, exchange.rows_factor),
            dispatch_bytes=rows + gathered_pairs(exchange),
            combine_bytes=rows,
            expert_rows=planned_room(exchange),
            shared_bytes=ranks * exchange.tokens * token,
        )

    def preprocess(
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        world_size, local = rank_and_size(self.group)[1], self.local_experts(num_experts)
        tokens, top_k = experts_TK.shape
        room = room_for_rows(tokens, top_k, local, world_size, self.rows_factor)
        if world_size == 1:
            rows = local_rows(experts_TK, local, num_experts, room)
            needed = None if self.rows_factor is None else rows.needed
            return DispatchPlan(hidden, weights_TK, rows.order, rows.dropped, needed)
        hidden_TD = hidden.flatten(0, -2)
        memory = self.memory_for(hidden_TD, experts_TK)
        rows_RD, weights_GK, order_R, inverse_R, offsets_e, dropped, needed = _Dispatch.apply(
            hidden_TD, weights_TK.float(), experts_TK, local, num_experts, room, memory
        )
        order = RowOrder(order_R, inverse_R, offsets_e, has_gaps=True)
        needed = None if self.rows_factor is None else needed
        return DispatchPlan(rows_RD, weights_GK, order, dropped, needed, handle=experts_TK)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        is_sorted = plan.handle is not None
        return Dispatched(plan.tokens.flatten(0, -2), plan.order, plan.weights_TK, is_sorted)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        if plan.handle is None:
            return sums_XD
        memory = self.memory_for(sums_XD, plan.handle)
        return _Combine.apply(sums_XD, plan.handle, plan.order.offsets_E.numel(), memory)

    def memory_for(self, rows: Tensor, experts_TK: Tensor) -> tuple[int, str]:
        """Number of the peer memory for ``rows`` ``[..., D]``, and the name of the group.

        Rows of another dtype have another memory.

        Raises:
            ValueError: the ranks have different numbers of tokens, or cannot share memory.
        """
        group, (tokens, top_k) = self.process_group, experts_TK.shape
        assert group is not None
        check_equal_tokens(group, tokens, self.name)
        number = peer_memory(group, tokens, rows.shape[1], top_k, rows.dtype, rows.device)
        return number, group.group_name


class _Dispatch(torch.autograd.Function):
    """Push tokens to the ranks of their experts, and sort the rows; gradients are pulled back."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        local: range,
        num_experts: int,
        room: int,
        memory: tuple[int, str],
    ) -> tuple[Tensor, ...]:
        ctx.local, ctx.memory = len(local), memory
        experts_GK, weights_GK = push_tokens(hidden_TD, experts_TK, weights_TK, len(local), *memory)
        rows = local_rows(experts_GK, local, num_experts, room)
        order = rows.order
        inverse_GK = order.inverse_R.view_as(experts_GK)
        rows_RD = received_rows(order.order_R, inverse_GK, memory[0])
        plain = (order.order_R, order.inverse_R, order.offsets_E, rows.dropped, rows.needed)
        ctx.save_for_backward(experts_TK, inverse_GK)
        ctx.mark_non_differentiable(*plain)
        return rows_RD, weights_GK, *plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor, grad_weights_GK: Tensor, *_: Any) -> tuple[Any, ...]:
        experts_TK, inverse_GK = ctx.saved_tensors
        grad_TD, grad_TK = pull_gradients(
            grad_RD, inverse_GK, grad_weights_GK, experts_TK, ctx.local, *ctx.memory
        )
        return grad_TD, grad_TK, None, None, None, None, None


class _Combine(torch.autograd.Function):
    """Bring sums of the experts' rows to the ranks of their tokens; gradients are pushed."""

    @staticmethod
    def forward(
        ctx: Any, sums_GD: Tensor, experts_TK: Tensor, local: int, memory: tuple[int, str]
    ) -> Tensor:
        ctx.local, ctx.memory = local, memory
        ctx.save_for_backward(experts_TK)
        return pull_sums(sums_GD, experts_TK, local, *memory)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        (experts_TK,) = ctx.saved_tensors
        push_gradients(grad_TD, experts_TK, ctx.local, *ctx.memory)
        return received_tokens(experts_TK, ctx.memory[0]), None, None, None
