"""Several documents in one row: which tokens belong together, and the mask of their attention.

Everything is computed on the device from tensors of a fixed shape, so a graph serves any number of
documents.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
