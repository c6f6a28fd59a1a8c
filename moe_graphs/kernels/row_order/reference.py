"""The stable sort of (token, slot) pairs by expert in plain torch.

Shapes: T tokens, K top-k, E experts, R = T*K routed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_pairs(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``order_R``, ``inverse_R`` and ``offsets_E`` (ends) of a ``RowOrder``, all int32."""
    device = experts_TK.device
    # Narrow keys: a radix sort makes one pass per few bits.
    key_dtype = torch.int16 if num_experts <= 2**15 else torch.int32
    keys_R = experts_TK.detach().reshape(-1).to(key_dtype)
    sorted_R, order_R = torch.sort(keys_R, stable=True)
    # Every row is written exactly once, so the scatter is deterministic.
    row_R = torch.arange(keys_R.numel(), device=device, dtype=torch.int32)
    inverse_R = torch.empty_like(row_R).scatter_(0, order_R, row_R)
    ids_E = torch.arange(num_experts, device=device, dtype=key_dtype)
    offsets_E = torch.searchsorted(sorted_R, ids_E, right=True, out_int32=True)
    return order_R.to(torch.int32), inverse_R, offsets_E
