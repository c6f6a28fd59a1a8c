"""Causal attention of rows that have several documents, each of which sees itself alone.

Shapes: B batch, S sequence, H query heads, G kv heads, Q head dim, V head dim of values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.document_attention.reference import plain_attention

LARGEST_HEAD = 256


def document_attention(
    query_BHSQ: Tensor,
    key_BGSQ: Tensor,
    value_BGSV: Tensor,
    document_ids_BS: Tensor,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend within documents: ``[B, H, S, V]``, where H is a multiple of G.

    On a GPU, in bf16 and fp16, without dropout and with heads of at most 256 numbers, a kernel
    (arXiv 2307.08691) reads the documents' bounds on the device. It visits only the keys of a
    query's document, so time grows with the squares of the documents' lengths, and memory with
    the length of the row. Any number of documents of any length is served, and no sum is in
    changing order. All else has a mask ``[B, 1, S, S]`` of torch's attention.

    Args:
        document_ids_BS: integers. A document ends where the number changes. No number comes again
            in a row behind another one.
        scale: factor of the scores, by default ``1 / sqrt(Q)``.
    """
    if not has_document_kernel(query_BHSQ, value_BGSV, dropout):
        given = (query_BHSQ, key_BGSQ, value_BGSV, document_ids_BS, dropout, scale)
        return plain_attention(*given)
    scale = 1 / math.sqrt(query_BHSQ.shape[3]) if scale is None else scale
    heads = (query_BHSQ, key_BGSQ, value_BGSV)
    output_BHSV: Tensor = _DocumentAttention.apply(*heads, document_ids_BS, scale)
    return output_BHSV


def has_document_kernel(query_BHSQ: Tensor, value_BGSV: Tensor, dropout: float) -> bool:
    """Whether the kernel of ``document_attention`` serves these tensors."""
    return (
        has_kernel(query_BHSQ)
        and query_BHSQ.dtype != torch.float32
        and dropout == 0
        and max(query_BHSQ.shape[3], value_BGSV.shape[3]) <= LARGEST_HEAD
        and query_BHSQ.numel() > 0
    )


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_BHSQ, key_BGSQ, value_BGSV, document_ids_BS, scale):
        from moe_graphs.kernels.document_attention.triton_kernels import (
            attend_forward,
            document_bounds,
        )

        heads = (query_BHSQ, key_BGSQ, value_BGSV)
        bounds_2BS = document_bounds(document_ids_BS)
        output_BHSV, logsumexp_BHS = attend_forward(*heads, bounds_2BS, scale)
        ctx.save_for_backward(*heads, bounds_2BS, output_BHSV, logsumexp_BHS)
        ctx.scale = scale
        return output_BHSV

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSV):
        from moe_graphs.kernels.document_attention.triton_kernels import attend_backward

        return *attend_backward(grad_BHSV, *ctx.saved_tensors, ctx.scale), None, None
