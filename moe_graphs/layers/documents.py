"""Several documents in one row: which tokens belong together, and their attention.

Everything is computed on the device from tensors of a fixed shape, so a graph serves any number of
documents.

Shapes: B batch, S sequence, H query heads, G kv heads, Q head dim, V head dim of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_graphs.kernels import document_attention
from moe_graphs.kernels.document_attention.reference import document_mask, plain_attention

__all__ = ["causal_attention", "document_ids", "document_mask", "documents_between"]


def document_ids(position_ids_BS: Tensor) -> Tensor:
    """Number the documents of each row, from 0 on: int64 ``[B, S]``.

    A document ends where a position is not one more than the position before it, as in
    transformers. So documents may begin at any position.

    Args:
        position_ids_BS: integers, the position of each token in its document.
    """
    begins_BS = torch.zeros_like(position_ids_BS)
    begins_BS[:, 1:] = position_ids_BS.diff(dim=1) != 1
    return begins_BS.cumsum(1)


def documents_between(tokens_BS: Tensor, separator: int) -> Tensor:
    """Number the documents of each row, from 0 on: int64 ``[B, S]``.

    Each token ``separator`` begins a document. What comes before the first one is a document, too.
    """
    return (tokens_BS == separator).cumsum(1)


def causal_attention(
    query_BHSQ: Tensor,
    key_BGSQ: Tensor,
    value_BGSV: Tensor,
    document_ids_BS: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend causally within rows or within their documents: ``[B, H, S, V]``.

    Args:
        document_ids_BS: integers that differ for different documents of a row, which
            ``kernels.document_attention`` serves. Without them it is torch's attention.
        scale: factor of the scores, by default ``1 / sqrt(Q)``.
    """
    heads = (query_BHSQ, key_BGSQ, value_BGSV)
    if document_ids_BS is None:
        return plain_attention(*heads, None, dropout, scale)
    return document_attention(*heads, document_ids_BS, dropout=dropout, scale=scale)
