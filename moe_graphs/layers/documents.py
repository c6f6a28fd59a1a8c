"""Several documents in one row: which tokens belong together, and the mask of their attention.

Everything is computed on the device from tensors of a fixed shape, so a graph serves any number of
documents.

Shapes: B batch, S sequence, H query heads, G kv heads, Q head dim, V head dim of values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """Bool ``[B, 1, S, S]``, True where a token (row) sees another one (column).

    A token sees itself and the tokens before it that have the same number.
    """
    length = document_ids_BS.shape[1]
    place_S = torch.arange(length, device=document_ids_BS.device)
    is_before_SS = place_S[:, None] >= place_S
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    return (same_BSS & is_before_SS)[:, None]


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
    """Call torch's attention, causal within rows or within their documents: ``[B, H, S, V]``.

    Args:
        document_ids_BS: integers that differ for different documents of a row. With them torch's
            flash attention, which takes no mask, is not used.
        scale: factor of the scores, by default ``1 / sqrt(Q)``.
    """
    mask_B1SS = None if document_ids_BS is None else document_mask(document_ids_BS)
    return functional.scaled_dot_product_attention(
        query_BHSQ,
        key_BGSQ,
        value_BGSV,
        mask_B1SS,
        dropout_p=dropout,
        is_causal=mask_B1SS is None,
        scale=scale,
        enable_gqa=key_BGSQ.shape[1] != query_BHSQ.shape[1],
    )
