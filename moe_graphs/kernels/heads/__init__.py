"""Heads of attention from their projection: split, normalised, rotated in one pass over memory.

Shapes: B batch, S sequence, H query heads, G kv heads, Q head dim, M = (H + 2G) * Q, N size of a
norm's weight, W ranks that exchange heads, L numbers of a token for one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.heads.reference import Heads, plain_heads_by_rank, plain_split_heads
from moe_graphs.kernels.ops import wants_gradient


def split_heads(
    qkv_BSM: Tensor,
    cos_SQ: Tensor,
    sin_SQ: Tensor,
    heads: int,
    kv_heads: int,
    query_weight_N: Tensor | None = None,
    key_weight_N: Tensor | None = None,
    eps: float = 1e-5,
) -> Heads:
    """Rows of queries, keys and values as ``[B, S, H, Q]``, ``[B, S, G, Q]``, ``[B, S, G, Q]``.

    Queries and keys are rotated (``reference.rotate``). With weights they are normalised
    before, by their root mean square: weights of Q numbers normalise every head by itself (Qwen3),
    weights for all heads normalise them together (OLMoE). A kernel does all of it in fp32 and
    rounds once. Values are a view of ``qkv_BSM``, and nothing but that is kept for backward.

    Args:
        cos_SQ, sin_SQ: ``[S, Q / 2]``, one row a position.

    Raises:
        ValueError: sizes that do not fit together.
    """
    _check(qkv_BSM, cos_SQ, sin_SQ, heads, kv_heads, query_weight_N, key_weight_N, eps)
    split = _SplitHeads.apply if has_kernel(qkv_BSM) else plain_split_heads
    return split(qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N, heads, kv_heads, eps)


def split_heads_by_rank(
    qkv_BSM: Tensor,
    cos_SQ: Tensor,
    sin_SQ: Tensor,
    heads: int,
    kv_heads: int,
    ranks: int,
    query_weight_N: Tensor | None = None,
    key_weight_N: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``split_heads``, laid out to be exchanged between ranks: ``[W, B, S, L]``.

    Each rank's part of the queries', keys' and values' heads lies side by side
    (``reference.plain_heads_by_rank``).

    The kernel does it in the same pass over memory if the ranks divide ``kv_heads``; otherwise
    there is a second one.

    Raises:
        ValueError: sizes that do not fit together, ``heads`` and ``ranks`` among them.
    """
    _check(qkv_BSM, cos_SQ, sin_SQ, heads, kv_heads, query_weight_N, key_weight_N, eps)
    if ranks < 1 or heads % ranks:
        raise ValueError(f"split_heads_by_rank: {ranks} ranks cannot share {heads} heads")
    weights = (query_weight_N, key_weight_N)
    if has_kernel(qkv_BSM) and kv_heads % ranks == 0:
        given = (qkv_BSM, cos_SQ, sin_SQ, *weights, heads, kv_heads, ranks, eps)
        return _SplitHeadsByRank.apply(*given)
    split = split_heads(qkv_BSM, cos_SQ, sin_SQ, heads, kv_heads, *weights, eps)
    return plain_heads_by_rank(split, ranks)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N, heads, kv_heads, eps):
        from moe_graphs.kernels.heads import triton_kernels as heads_triton

        tensors = (qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N)
        ctx.save_for_backward(*tensors)
        ctx.eps = eps
        query_BSHQ, key_BSGQ = heads_triton.heads_forward(*tensors, heads, kv_heads, eps)
        size = kv_heads * key_BSGQ.shape[3]
        value_BSM = qkv_BSM.narrow(-1, qkv_BSM.shape[-1] - size, size)
        return query_BSHQ, key_BSGQ, value_BSM.unflatten(-1, key_BSGQ.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BSHQ, grad_key_BSGQ, grad_value_BSGQ):
        from moe_graphs.kernels.heads import triton_kernels as heads_triton

        gradients = (grad_BSHQ, grad_key_BSGQ, grad_value_BSGQ)
        wants_weights = wants_gradient(ctx, 3) or wants_gradient(ctx, 4)
        # The gradients of the weights need that of qkv. If only they are asked for (by a
        # zero-bubble schedule), the gradient of qkv is written once more for nothing.
        grad_qkv, *grad_weights = heads_triton.heads_backward(
            *gradients, *ctx.saved_tensors, ctx.eps, wants_weights
        )
        return grad_qkv, None, None, *(grad_weights or (None, None)), None, None, None


class _SplitHeadsByRank(torch.autograd.Function):
    """Keeps its input only for norms."""

    @staticmethod
    def forward(
        ctx, qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N, heads, kv_heads, ranks, eps
    ):
        from moe_graphs.kernels.heads import triton_kernels as heads_triton

        tensors = (qkv_BSM, cos_SQ, sin_SQ, query_weight_N, key_weight_N)
        ctx.save_for_backward(None if query_weight_N is None else qkv_BSM, *tensors[1:])
        ctx.rest = (heads, kv_heads, eps)
        return heads_triton.heads_by_rank_forward(*tensors, heads, kv_heads, ranks, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_WBSL):
        from moe_graphs.kernels.heads import triton_kernels as heads_triton

        wants_weights = wants_gradient(ctx, 3) or wants_gradient(ctx, 4)
        grad_qkv, *grad_weights = heads_triton.heads_by_rank_backward(
            grad_WBSL, *ctx.saved_tensors, *ctx.rest, wants_weights
        )
        return grad_qkv, None, None, *(grad_weights or (None, None)), None, None, None, None


def _check(
    qkv_BSM: Tensor,
    cos_SQ: Tensor,
    sin_SQ: Tensor,
    heads: int,
    kv_heads: int,
    query_weight_N: Tensor | None,
    key_weight_N: Tensor | None,
    eps: float,
) -> None:
    size, rest = divmod(qkv_BSM.shape[-1], heads + 2 * kv_heads)
    if qkv_BSM.dim() != 3 or rest or size % 2:
        raise ValueError(
            f"split_heads wants [batch, sequence, ({heads} + 2 * {kv_heads}) heads of an even "
            f"size], got {tuple(qkv_BSM.shape)}"
        )
    table = (qkv_BSM.shape[1], size // 2)
    if cos_SQ.shape != table or sin_SQ.shape != table:
        raise ValueError(
            f"split_heads wants cos and sin of shape {table}, one row a position, got "
            f"{tuple(cos_SQ.shape)} and {tuple(sin_SQ.shape)}"
        )
    if query_weight_N is None and key_weight_N is None:
        return
    given = tuple(w if w is None else tuple(w.shape) for w in (query_weight_N, key_weight_N))
    per_head, together = ((size,), (size,)), ((heads * size,), (kv_heads * size,))
    if given not in (per_head, together) or eps <= 0:
        raise ValueError(
            f"split_heads wants two weights, {per_head} or {together}, and eps above 0, got "
            f"{given} and {eps}"
        )
