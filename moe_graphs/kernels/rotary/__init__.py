"""Rotary positions on queries and keys that lie apart, as transformers' models have them.

Shapes: B batch, S sequence, H query heads, G kv heads, Q head dim, R columns of it that turn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel

Pair = tuple[Tensor, Tensor]


def apply_rotary(query_BHSQ: Tensor, key_BGSQ: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Pair:
    """Turns the pairs ``(i, i + R / 2)`` of the first R columns of every head; the others stay.

    ``x * cos + cat(-x2, x1) * sin``, with x1 and x2 the halves of R columns (arXiv 2104.09864 in
    the layout of Llama). A kernel does it in fp32 and rounds once. Any strides; results and
    gradients lie like what they are of. Only the tables are kept for backward.

    Args:
        cos_BSR, sin_BSR: a row a position, for every sequence or (B = 1) for all of them. R at
            most Q and even. They get no gradient.

    Raises:
        ValueError: sizes that do not fit together, or tables that want a gradient.
    """
    _check(query_BHSQ, key_BGSQ, cos_BSR, sin_BSR)
    if has_kernel(query_BHSQ):
        return _ApplyRotary.apply(query_BHSQ, key_BGSQ, cos_BSR, sin_BSR)
    return plain_rotary(query_BHSQ, key_BGSQ, cos_BSR, sin_BSR)


def plain_rotary(query_BHSQ: Tensor, key_BGSQ: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Pair:
    """``apply_rotary`` in torch's ops: the specification, and what runs where no kernel does."""
    return _plain(query_BHSQ, cos_BSR, sin_BSR), _plain(key_BGSQ, cos_BSR, sin_BSR)


def _plain(x_BHSQ: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    turning, rest = x_BHSQ.tensor_split([cos_BSR.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    cos, sin = cos_BSR[:, None], sin_BSR[:, None]
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x_BHSQ.dtype), rest), dim=-1)


class _ApplyRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_BHSQ, key_BGSQ, cos_BSR, sin_BSR):
        from moe_graphs.kernels.rotary.triton_kernels import turn_heads

        ctx.save_for_backward(cos_BSR, sin_BSR)
        return turn_heads(query_BHSQ, key_BGSQ, cos_BSR, sin_BSR, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSQ, grad_key_BGSQ):
        from moe_graphs.kernels.rotary.triton_kernels import turn_heads

        return *turn_heads(grad_BHSQ, grad_key_BGSQ, *ctx.saved_tensors, True), None, None


def _check(query_BHSQ: Tensor, key_BGSQ: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> None:
    (B, _, S, Q), R = query_BHSQ.shape, cos_BSR.shape[-1]
    if key_BGSQ.shape[0::2] != (B, S) or key_BGSQ.shape[3] != Q:
        raise ValueError(
            f"apply_rotary wants queries and keys [batch, heads, sequence, head dim] that differ "
            f"in their heads only, got {tuple(query_BHSQ.shape)} and {tuple(key_BGSQ.shape)}"
        )
    tables = ((1, S, R), (B, S, R))
    if cos_BSR.shape not in tables or sin_BSR.shape != cos_BSR.shape or R % 2 or R > Q:
        raise ValueError(
            f"apply_rotary wants cos and sin [1 or {B}, {S}, an even number up to {Q}], got "
            f"{tuple(cos_BSR.shape)} and {tuple(sin_BSR.shape)}"
        )
    if cos_BSR.requires_grad or sin_BSR.requires_grad:
        raise ValueError("apply_rotary gives cos and sin no gradient: detach them")
