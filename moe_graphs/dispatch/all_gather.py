"""Expert parallelism in static shapes: every rank gets all tokens and runs its own experts on them.

Sizes stay on the device, so all of it can be captured: by NCCL in CUDA graphs, by gloo on the CPU.

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

from moe_graphs.dispatch.dispatcher import Dispatched, DispatchPlan
from moe_graphs.dispatch.equal_tokens import check_equal_tokens
from moe_graphs.dispatch.expert_group import ExpertParallel, rank_and_size
from moe_graphs.dispatch.local_rows import check_rows_factor, local_rows, room_for_rows
from moe_graphs.kernels import permute, unpermute


@final
@dataclass(frozen=True)
class AllGatherDispatcher(ExpertParallel):
    """Dropless expert parallelism over ``group`` (default: the world, or this process alone).

    Tokens, weights and expert numbers are gathered, and each rank has room for the worst routing:
    ``R = W * T * min(K, e)`` rows, all tokens' pairs at one rank. With ``rows_factor`` it is at
    most that many times ``T * K``, the rows of a balanced routing; pairs that do not fit are
    counted in ``dropped`` and the step has to be skipped and run again
    (``DeviceStep(...)(overflow=output.dropped_tokens)``). Rows past the last of
    ``offsets_e`` are zero and belong to no expert; memory grows with R, products with what is
    routed here. A token's partial sums come back rounded to the dtype of the rows and are added
    up in fp32, on the rank of the token: the same bits from NCCL and gloo, and those of
    ``LocalDispatcher`` where one rank holds all of a token's experts.

    Every rank must have the same number of tokens. The first call with another number than before
    compares them through the group's store, on the host and before anything is launched: a
    ``ValueError`` on every rank, or, if the others go on with a number they know, on this rank
    after five minutes. Later calls with a known number ask nobody, and replays run no Python:
    ranks have to go from one number to another together. ``group`` must be a ``ProcessGroup`` of
    torch.distributed, NCCL or gloo; without one it is one rank.
    """

    rows_factor: float | None = None
    name: ClassVar[str] = "all_gather"
    host_sync: ClassVar[bool] = False
    leaves_tail: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rows_factor(self.rows_factor)

    def preprocess(
        self, hidden_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        world_size, local = rank_and_size(self.group)[1], self.local_experts(num_experts)
        tokens, top_k = experts_TK.shape
        room = room_for_rows(tokens, top_k, local, world_size, self.rows_factor)
        group = self.process_group
        if group is not None:
            check_equal_tokens(group, tokens, self.name)
            hidden_TD = _AllGather.apply(hidden_TD, group)
            weights_TK = _AllGather.apply(weights_TK, group)
            experts_TK = _all_gather(experts_TK, group)
        rows = local_rows(experts_TK, local, num_experts, room)
        rows_RD = permute(hidden_TD, rows.order)
        needed = None if self.rows_factor is None else rows.needed
        return DispatchPlan(rows_RD, weights_TK, rows.order, rows.dropped, needed)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        return Dispatched(plan.rows_RD, plan.order.offsets_E)

    def combine(self, expert_rows: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        partial_GD = unpermute(expert_rows, plan.order, plan.weights_TK)
        if self.process_group is None:
            return partial_GD
        return _ReduceScatter.apply(partial_GD, self.process_group)


class _AllGather(torch.autograd.Function):
    """The ranks' rows one after the other; the gradient is the sum of what all ranks have of it."""

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
        # Its name in later versions of torch, which warn of the one before.
        later = getattr(dist, "all_gather_single", None)
        (later or dist.all_gather_into_tensor)(gathered, rows.contiguous(), group=group)
    return gathered


def _reduce_scatter(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """By an exchange and a sum: as many bytes as NCCL's, which rounds after every addition, in an
    order of its own."""
    world_size = dist.get_world_size(group)
    arrived = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.numel():
        dist.all_to_all_single(arrived, rows.contiguous(), group=group)
    return arrived.view(world_size, -1, *rows.shape[1:]).sum(0)
