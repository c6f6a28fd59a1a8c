"""Attention within the documents of a row in plain torch: the specification.

Shapes: B batch, S sequence, H query heads, G kv heads, Q head dim, V head dim of values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """Bool ``[B, 1, S, S]``, True where a token (row) sees another one (column).

    A token sees itself and the tokens before it that have the same number.
    """
    length = document_ids_BS.shape[1]
    place_S = torch.arange(length, device=document_ids_BS.device)
    is_before_SS = place_S[:, None] >= place_S
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    return (same_BSS & is_before_SS)[:, None]


def plain_attention(
    query_BHSQ: Tensor,
    key_BGSQ: Tensor,
    value_BGSV: Tensor,
    document_ids_BS: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Torch's attention, causal within rows (no numbers) or their documents: ``[B, H, S, V]``."""
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
