"""Rows between ranks in plain torch: what the kernels are held against, and the path on the CPU.

Shapes: T tokens of a rank, W ranks, G = W * T, D model, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_graphs.kernels.precision import accumulation_dtype, rounded


def push_rows(
    source_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    rows: Sequence[Tensor],
    experts: Sequence[Tensor],
    weights: Sequence[Tensor],
    rank: int,
    local: int,
) -> None:
    """Each token to the ranks that hold any of its experts; its routing, if given, to all."""
    mine = slice(rank * source_TD.shape[0], (rank + 1) * source_TD.shape[0])
    holder_TK = experts_TK // local
    for peer, rows_GD in enumerate(rows):
        wanted_T1 = (holder_TK == peer).any(1, keepdim=True)
        rows_GD[mine].copy_(torch.where(wanted_T1, source_TD, rows_GD[mine]))
        if weights_TK is not None:
            experts[peer][mine].copy_(experts_TK)
            weights[peer][mine].copy_(weights_TK)


def pull_rows(
    out_TD: Tensor,
    out_TK: Tensor,
    experts_TK: Tensor,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    rank: int,
    local: int,
) -> None:
    """Write ``out_TD``, the sum of a token's rows at the ranks that hold any of its experts.

    ``out_TK`` gets each pair's number at the rank of its expert, unless it is empty.
    """
    tokens = out_TD.shape[0]
    mine = slice(rank * tokens, (rank + 1) * tokens)
    holder_TK = experts_TK // local
    total_TD = torch.zeros_like(out_TD, dtype=accumulation_dtype(out_TD))
    for peer, rows_GD in enumerate(rows):
        wanted_T1 = (holder_TK == peer).any(1, keepdim=True)
        total_TD += torch.where(wanted_T1, rows_GD[mine], 0)
        if out_TK.numel():
            out_TK.copy_(torch.where(holder_TK == peer, weights[peer][mine], out_TK))
    out_TD.copy_(rounded(total_TD, out_TD.dtype))
