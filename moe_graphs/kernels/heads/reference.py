"""Heads of attention from their projection in plain torch: the kernels are tested against it.

Shapes: B batch, S sequence, H query heads, G kv heads, Q head dim, M = (H + 2G) * Q, N size of a
norm's weight, W ranks that exchange heads, L numbers of a token for one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from moe_graphs.kernels.rms_norm.reference import plain_rms_norm

Heads = tuple[Tensor, Tensor, Tensor]


def plain_split_heads(
    qkv_BSM: Tensor,
    cos_SQ: Tensor,
    sin_SQ: Tensor,
    query_weight_N: Tensor | None,
    key_weight_N: Tensor | None,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Heads:
    """``split_heads`` in torch's ops: the specification, and what runs where no kernel does."""
    size = qkv_BSM.shape[-1] // (heads + 2 * kv_heads)
    sizes = (heads * size, kv_heads * size, kv_heads * size)
    query, key, value = qkv_BSM.split(sizes, dim=-1)
    query, key = _norm(query, query_weight_N, eps), _norm(key, key_weight_N, eps)
    query_BSHQ, key_BSGQ, value_BSGQ = (
        rearrange(x, "b s (h q) -> b s h q", q=size) for x in (query, key, value)
    )
    return rotate(query_BSHQ, cos_SQ, sin_SQ), rotate(key_BSGQ, cos_SQ, sin_SQ), value_BSGQ


def plain_heads_by_rank(heads_BSHQ: Sequence[Tensor], ranks: int) -> Tensor:
    """Tensors ``[B, S, H, Q]``, of several H and Q, as one ``[W, B, S, L]`` to be exchanged.

    Each rank's part of every tensor's heads lies side by side. If the ranks do not divide the
    number of heads, a head goes to every rank that has a query head which uses it.
    """
    parts = []
    for x_BSHQ in heads_BSHQ:
        copies = ranks // math.gcd(ranks, x_BSHQ.shape[2])
        every_BSHQ = x_BSHQ if copies == 1 else x_BSHQ.repeat_interleave(copies, dim=2)
        parts.append(rearrange(every_BSHQ, "b s (w h) q -> w b s (h q)", w=ranks))
    return torch.cat(parts, dim=3)


def rotate(x_BSHQ: Tensor, cos_SQ: Tensor, sin_SQ: Tensor) -> Tensor:
    """Turns the pairs ``(i, i + Q / 2)`` by their position's angles, in the dtype of the tables.

    Rounded once to the input's dtype. Keeps nothing but the tables for backward.
    """
    return _Rotate.apply(x_BSHQ, cos_SQ[:, None], sin_SQ[:, None])


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx, x_BSHQ, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x_BSHQ, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad_BSHQ):
        cos, sin = ctx.saved_tensors
        return _turn(grad_BSHQ, cos, sin, -1), None, None


def _turn(x_BSHQ: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    turned_BSHQ = torch.empty_like(x_BSHQ)
    first, second = x_BSHQ.chunk(2, dim=-1)
    turned_first, turned_second = turned_BSHQ.chunk(2, dim=-1)
    turned_first.copy_((first * cos).addcmul_(second, sin, value=-direction))
    turned_second.copy_((second * cos).addcmul_(first, sin, value=direction))
    return turned_BSHQ


def _norm(x_BSN: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Over as many numbers as the weight has: one head's, or all."""
    if weight is None:
        return x_BSN
    x = rearrange(x_BSN, "b s (h n) -> b s h n", n=weight.shape[0])
    return rearrange(plain_rms_norm(x, weight, eps), "b s h n -> b s (h n)")
