"""An exchange of ``symmetric`` on the side stream, begun early and ended late.

Two nodes of autograd each, as in ``kernels.swiglu_beside``: in the forward the first one forks and
the second one joins, in the backward the other way round. What the side stream reads is ``held``
until the join.

Between fork and join the forking stream is to be given nothing that waits for other ranks, see
``side_stream``. So all exchanges are in one order on every rank, whichever stream they are on, as
``kernels.peer_rows`` demands, and need no memory beside that of the others.

Shapes: T tokens of a rank, G of all, D model, K top-k, R rows that there is room for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs import side_stream
from moe_graphs.dispatch.dispatcher import DispatchPlan
from moe_graphs.dispatch.expert_group import rank_and_size
from moe_graphs.dispatch.local_rows import room_for_rows
from moe_graphs.dispatch.symmetric import SymmetricDispatcher, send, sums_backward
from moe_graphs.kernels import RowOrder
from moe_graphs.kernels.peer_rows import pull_gradients, pull_sums

Held = list[Tensor]
SENT = 7  # tensors that ``send`` makes


def begin_preprocess(
    dispatcher: SymmetricDispatcher,
    hidden_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    num_experts: int,
) -> tuple[Any, ...]:
    """``dispatcher.preprocess``, begun on the side stream, for ``end_preprocess``."""
    local, ranks = dispatcher.local_experts(num_experts), rank_and_size(dispatcher.group)[1]
    memory, held = dispatcher.memory_for(hidden_TD, experts_TK), Held()
    tokens, top_k = experts_TK.shape
    room = room_for_rows(tokens, top_k, local, ranks, dispatcher.rows_factor)
    begun = _BeginDispatch.apply(
        held, hidden_TD, weights_TK.float(), experts_TK, local, num_experts, room, memory
    )
    return held, begun, experts_TK, len(local), memory


def end_preprocess(begun: tuple[Any, ...]) -> DispatchPlan:
    """On the stream on which it was begun. ``rows_needed`` is None."""
    held, sent, experts_TK, local, memory = begun
    order_R, inverse_R, offsets_e, dropped, _ = sent[2:SENT]
    rows_RD, weights_GK = _EndDispatch.apply(
        held, *sent[:2], inverse_R, experts_TK, local, memory, *sent[SENT:]
    )
    order = RowOrder(order_R, inverse_R, offsets_e, has_gaps=True)
    return DispatchPlan(rows_RD, weights_GK, order, dropped, handle=experts_TK)


def begin_combine(
    dispatcher: SymmetricDispatcher, expert_rows: Tensor, plan: DispatchPlan
) -> tuple[Any, ...]:
    """``dispatcher.combine``, begun on the side stream, for ``end_combine``."""
    order, experts_TK, local = plan.order, plan.handle, plan.order.offsets_E.numel()
    memory, held = dispatcher.memory_for(expert_rows, experts_TK), Held()
    begun = _BeginCombine.apply(
        held, expert_rows, plan.weights_TK, experts_TK, order.inverse_R, local, memory
    )
    return held, begun, experts_TK, order, local, memory


def end_combine(begun: tuple[Any, ...]) -> Tensor:
    """``sums_TD``, on the stream on which it was begun."""
    held, combined, experts_TK, order, local, memory = begun
    return _EndCombine.apply(
        held, *combined, experts_TK, order.order_R, order.inverse_R, local, memory
    )


def _begun(ctx: Any, held: Held, made: tuple[Tensor, ...], read: tuple[Tensor, ...]) -> Any:
    """What is made has no gradient here: what is read goes on to the node that ends, and gets its
    gradient from there."""
    ctx.set_materialize_grads(False)
    ctx.held, ctx.made, ctx.device = held, len(made), read[0].device
    fixed = (t for t, needed in zip(read, ctx.needs_input_grad[1:3], strict=True) if not needed)
    ctx.mark_non_differentiable(*made, *fixed)
    return *made, *read


def _joined(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """In the backward of the node that begins."""
    side_stream.join(ctx.device)
    ctx.held.clear()
    return None, *gradients[ctx.made :]


def _ended(held: Held, device: torch.device) -> None:
    """In the forward of the node that ends."""
    side_stream.join(device)
    held.clear()


def _looked_at(device: torch.device) -> None:
    if torch.is_anomaly_enabled():  # it looks at gradients as soon as they are returned
        side_stream.join(device)


class _BeginDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, held: Any, hidden_TD: Any, weights_TK: Any, experts_TK: Any, *sizes: Any
    ) -> Any:
        held += (hidden_TD, weights_TK, experts_TK)
        with side_stream.forked(hidden_TD.device):
            sent = send(hidden_TD, weights_TK, experts_TK, *sizes)
        return _begun(ctx, held, sent, (hidden_TD, weights_TK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *_joined(ctx, gradients), *[None] * 5


class _EndDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        held: Any,
        rows_RD: Any,
        weights_GK: Any,
        inverse_R: Any,
        experts_TK: Any,
        local: Any,
        memory: Any,
        *read: Any,
    ) -> Any:
        _ended(held, rows_RD.device)
        ctx.held, ctx.local, ctx.memory = held, local, memory
        ctx.save_for_backward(experts_TK, inverse_R.view_as(weights_GK))
        return rows_RD, weights_GK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Any, grad_weights_GK: Any) -> Any:
        experts_TK, inverse_GK = ctx.saved_tensors
        ctx.held.extend((grad_RD, grad_weights_GK, experts_TK, inverse_GK))
        with side_stream.forked(grad_RD.device):
            gradients = pull_gradients(
                grad_RD, inverse_GK, grad_weights_GK, experts_TK, ctx.local, *ctx.memory
            )
        _looked_at(grad_RD.device)
        needed = ctx.needs_input_grad[-2:]
        return *[None] * 7, *(g if n else None for g, n in zip(gradients, needed, strict=True))


class _BeginCombine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        held: Any,
        rows_RD: Any,
        weights_GK: Any,
        experts_TK: Any,
        inverse_R: Any,
        local: Any,
        memory: Any,
    ) -> Any:
        held += (rows_RD, weights_GK, experts_TK, inverse_R)
        with side_stream.forked(rows_RD.device):
            inverse_GK = inverse_R.view_as(weights_GK)
            sums_TD = pull_sums(rows_RD, inverse_GK, weights_GK, experts_TK, local, *memory)
        return _begun(ctx, held, (sums_TD,), (rows_RD, weights_GK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *_joined(ctx, gradients), *[None] * 4


class _EndCombine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        held: Any,
        sums_TD: Any,
        rows_RD: Any,
        weights_GK: Any,
        experts_TK: Any,
        order_R: Any,
        inverse_R: Any,
        local: Any,
        memory: Any,
    ) -> Any:
        _ended(held, sums_TD.device)
        ctx.held, ctx.local, ctx.memory = held, local, memory
        ctx.save_for_backward(rows_RD, weights_GK, experts_TK, order_R, inverse_R)
        return sums_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Any) -> Any:
        saved = ctx.saved_tensors
        ctx.held.extend((grad_TD, *saved))
        with side_stream.forked(grad_TD.device):
            gradients = sums_backward(
                grad_TD, saved, ctx.needs_input_grad[2:4], ctx.local, ctx.memory, None
            )
        _looked_at(grad_TD.device)
        return None, None, *gradients, *[None] * 5
