"""Expert parallelism in static shapes: every rank gets all tokens and runs its own experts on them.

Sizes stay on the device, so all of it can be captured: by NCCL in CUDA graphs, by gloo on the CPU.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, K top-k, E experts, e local
experts, R = G * min(K, e) rows.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.dispatch.dispatcher import Dispatched, Dispatcher, DispatchPlan
from moe_graphs.dispatch.expert_group import block_of_experts, rank_and_size, several_ranks
from moe_graphs.kernels import RowOrder, permute, route_rows, unpermute

PATIENCE = 300.0  # seconds, for the other ranks to come with a new number of tokens, too


@final
@dataclass(frozen=True)
class AllGatherDispatcher(Dispatcher):
    """Dropless expert parallelism over ``group`` (default: the world, or this process alone).

    Tokens, weights and expert numbers are gathered, and each rank has room for the worst routing:
    ``R = W * T * min(K, e)`` rows, all tokens' pairs at one rank. Rows past the last of
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

    group: dist.ProcessGroup | None = None
    name: ClassVar[str] = "all_gather"
    host_sync: ClassVar[bool] = False
    leaves_tail: ClassVar[bool] = True

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return several_ranks(self.group)

    def local_experts(self, num_experts: int) -> range:
        return block_of_experts(num_experts, self.group)

    def preprocess(
        self, hidden_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        group = self.process_group
        if group is not None:
            _check_tokens(group, hidden_TD.shape[0])
            hidden_TD = _AllGather.apply(hidden_TD, group)
            weights_TK = _AllGather.apply(weights_TK, group)
            experts_TK = _all_gather(experts_TK, group)
        order = _local_order(experts_TK, self.local_experts(num_experts), num_experts)
        dropped = torch.zeros((), dtype=torch.int64, device=hidden_TD.device)
        return DispatchPlan(permute(hidden_TD, order), weights_TK, order, dropped)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        return Dispatched(plan.rows_RD, plan.order.offsets_E)

    def combine(self, expert_rows: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        partial_GD = unpermute(expert_rows, plan.order, plan.weights_TK)
        if self.process_group is None:
            return partial_GD
        return _ReduceScatter.apply(partial_GD, self.process_group)


def _local_order(experts_GK: Tensor, local: range, num_experts: int) -> RowOrder:
    """The order of the pairs whose experts are local; the others have no row.

    Example: experts ``[[2, 0], [0, 1], [2, 1]]`` on the rank of experts 0 and 1: order
    ``[1, 2, 3, 5, -1, -1]``, inverse ``[-1, 0, 1, 2, -1, 3]``, offsets ``[2, 4]``.
    """
    if len(local) == num_experts:
        return route_rows(experts_GK, num_experts)
    number_GK = experts_GK - local.start
    elsewhere_GK = (number_GK < 0) | (number_GK >= len(local))
    # One more expert, behind the others, for what is elsewhere.
    every = route_rows(number_GK.masked_fill(elsewhere_GK, len(local)), len(local) + 1)
    offsets_e = every.offsets_E[:-1].contiguous()
    tokens, top_k = experts_GK.shape
    order_R = every.order_R[: tokens * min(top_k, len(local))]
    row_R = torch.arange(order_R.numel(), device=order_R.device)
    order_R = torch.where(row_R < offsets_e[-1], order_R, -1)
    inverse = torch.where(every.inverse_R < offsets_e[-1], every.inverse_R, -1)
    return RowOrder(order_R, inverse, offsets_e, has_gaps=True)


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


@functools.cache
def _check_tokens(group: dist.ProcessGroup, tokens: int) -> None:
    """Once per group and number of tokens: on every rank it is the same number.

    The n-th number that a rank comes with is compared with the n-th of every other rank.
    """
    rank, world_size = rank_and_size(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    nth = store.add(f"all_gather numbers of rank {rank}", 1)
    keys = [f"all_gather tokens {nth} of rank {each}" for each in range(world_size)]
    store.set(keys[rank], str(tokens))
    remedy = (
        "all_gather has static shapes and takes equal numbers of tokens: pad the batches, or "
        "choose dispatcher 'all_to_all', which takes any"
    )
    try:
        store.wait(keys, datetime.timedelta(seconds=PATIENCE))
    except RuntimeError as error:  # of every kind of store
        raise ValueError(
            f"rank {rank} has {tokens} tokens for the first time, and not all of the other ranks "
            f"of its expert-parallel group have a new number, too. {remedy}"
        ) from error
    found = [int(store.get(key)) for key in keys]
    if set(found) != {tokens}:
        raise ValueError(f"the ranks of the expert-parallel group have {found} tokens. {remedy}")
