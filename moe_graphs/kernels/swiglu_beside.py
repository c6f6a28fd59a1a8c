"""A SwiGLU network on a side stream, begun early and joined late, in forward and backward.

Two nodes of autograd. The one that **begins** stands where the network would: in the forward it
forks, in the backward it joins. The one that **ends** stands where the result is needed: in the
forward it joins, in the backward it forks, as soon as the gradient is there. Gradients reach the
leaves from the first one, on the caller's stream and in the order of the same network on one
stream, so that sums of gradients have the same bits. What one node has for the other travels along
the edges of autograd between them: a backward can be run again, or in parts, as any other.

``held`` keeps what the side stream reads until the join, see ``moe_graphs.side_stream``.

Shapes: T tokens, D model, F ffn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs import side_stream
from moe_graphs.kernels import swiglu_reference
from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.swiglu import swiglu

Held = list[Tensor | None]
COMPUTED = 5  # of the tensors between the nodes: the others are what the network reads


def begin_swiglu(
    hidden_TD: Tensor,
    w1_2FD: Tensor,
    w2_DF: Tensor,
    gate_1D: Tensor | None = None,
    gated_TD: Tensor | None = None,
) -> tuple[Any, ...]:
    """``swiglu(hidden @ w1.t()) @ w2.t()``, times ``sigmoid(gated @ gate.t())`` if there is a gate,
    begun on the side stream of the current one; all of one dtype. ``gated_TD`` is the same as
    ``hidden_TD``, or a cast of its own of the same.

    Returns: what ``end_swiglu`` takes, and nobody looks into before.
    """
    held: Held = []
    return held, _Begin.apply(held, gated_TD, hidden_TD, w1_2FD, w2_DF, gate_1D)


def end_swiglu(begun: tuple[Any, ...]) -> Tensor:
    """``out_TD``, on the stream on which it was begun."""
    held, tensors = begun
    return _End.apply(held, *tensors)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, held, gated_TD, hidden_TD, w1_2FD, w2_DF, gate_1D):
        ctx.set_materialize_grads(False)
        ctx.held, ctx.device = held, hidden_TD.device
        read = (gated_TD, hidden_TD, w1_2FD, w2_DF, gate_1D)
        held += read
        with side_stream.forked(hidden_TD.device):
            x_T2F = hidden_TD.mm(w1_2FD.t())
            inner_TF = swiglu(x_T2F)
            plain_TD, share_T1 = inner_TF.mm(w2_DF.t()), None
            out_TD = plain_TD
            if gate_1D is not None:
                share_T1 = gated_TD.mm(gate_1D.t()).sigmoid()
                out_TD = share_T1 * plain_TD
        # Without a gate the product is the result, and no backward reads it.
        computed = (out_TD, x_T2F, inner_TF, None if share_T1 is None else plain_TD, share_T1)
        fixed = (t for t, needed in zip(read, ctx.needs_input_grad[1:], strict=True) if not needed)
        ctx.mark_non_differentiable(*(t for t in (*computed, *fixed) if t is not None))
        return *computed, *read

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        side_stream.join(ctx.device)
        ctx.held.clear()
        return None, *gradients[COMPUTED:]


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, held, out_TD, *others):
        ctx.held = held
        side_stream.join(out_TD.device)
        held.clear()
        ctx.save_for_backward(*others)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        saved = ctx.saved_tensors  # on the caller's stream, whatever unpacking them runs
        ctx.held.extend((grad_TD, *saved))
        with side_stream.forked(grad_TD.device):
            gradients = _gradients(grad_TD, saved, ctx.needs_input_grad[1 + COMPUTED :])
        if torch.is_anomaly_enabled():  # it looks at gradients as soon as they are returned
            side_stream.join(grad_TD.device)
        return *[None] * (1 + COMPUTED), *gradients


def _gradients(grad_TD: Tensor, saved: Any, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """Of what is read, by the products that autograd has for ``nn.Linear``, to the bit."""
    x_T2F, inner_TF, plain_TD, share_T1, gated_TD, hidden_TD, w1_2FD, w2_DF, gate_1D = saved
    of_gated = of_hidden = of_w1 = of_w2 = of_gate = None
    if gate_1D is not None:
        if needed[0] or needed[4]:
            of_share_T1 = (grad_TD * plain_TD).sum(1, keepdim=True)
            of_logits_T1 = torch.ops.aten.sigmoid_backward(of_share_T1, share_T1)
            of_gated = of_logits_T1.mm(gate_1D) if needed[0] else None
            of_gate = of_logits_T1.t().mm(gated_TD) if needed[4] else None
        grad_TD = grad_TD * share_T1
    if needed[3]:
        of_w2 = grad_TD.t().mm(inner_TF)
    if needed[1] or needed[2]:
        of_x_T2F = _swiglu_backward(x_T2F, grad_TD.mm(w2_DF))
        of_hidden = of_x_T2F.mm(w1_2FD) if needed[1] else None
        of_w1 = of_x_T2F.t().mm(hidden_TD) if needed[2] else None
    return [of_gated, of_hidden, of_w1, of_w2, of_gate]


def _swiglu_backward(x_T2F: Tensor, grad_TF: Tensor) -> Tensor:
    if has_kernel(x_T2F):
        from moe_graphs.kernels import swiglu_triton

        return swiglu_triton.swiglu_backward(x_T2F, grad_TF)
    return swiglu_reference.swiglu_backward(x_T2F, grad_TF)
