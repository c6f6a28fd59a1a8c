"""Rows sorted by expert in blocks of 128, and the sparse matrix of stk that says whose they are.

All of it on the device and in static shapes.

Shapes: F ffn, e experts of this rank, R rows, P padded rows, M blocks of rows, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_graphs.kernels import RowOrder

BLOCK = 128  # rows, and columns, of a block of stk


@dataclass(frozen=True)
class BlockLayout:
    """How rows sorted by expert lie in blocks that belong to one expert each.

    Attributes:
        padded: from rows to padded rows, zero where there is none.
        back: from padded rows to rows.
        blocks_e: int64, blocks of each expert; those left over are the last one's.
        expert_M: int64, whose each block of rows is.
    """

    padded: RowOrder
    back: RowOrder
    blocks_e: Tensor
    expert_M: Tensor


def num_blocks(rows: int, experts: int) -> int:
    """Blocks of rows that are enough for any routing: each expert with rows leaves 127 at most."""
    return (rows + (BLOCK - 1) * min(experts, rows)) // BLOCK


def block_layout(offsets_e: Tensor, rows: int) -> BlockLayout:
    """Static shapes, no host sync.

    Example, if blocks had 2 rows: 4 rows with offsets ``[1, 4]`` need 3 blocks at most, those of
    experts ``[0, 1, 1]``, which hold rows ``[0, -1, 1, 2, 3, -1]``.
    """
    ends_e = offsets_e.to(torch.int64)
    starts_e = torch.cat([ends_e.new_zeros(1), ends_e[:-1]])
    blocks_e = (ends_e - starts_e + BLOCK - 1) // BLOCK
    block_ends_e = blocks_e.cumsum(0)
    # Where the rows of an expert have moved to.
    shift_e = BLOCK * (block_ends_e - blocks_e) - starts_e
    total = num_blocks(rows, offsets_e.numel())

    block_M = torch.arange(total, device=offsets_e.device)
    expert_M = torch.searchsorted(block_ends_e, block_M, right=True)
    expert_M = expert_M.clamp(max=offsets_e.numel() - 1)
    blocks_e[-1] += total - block_ends_e[-1]

    row_R = torch.arange(rows, device=offsets_e.device)
    place_R = row_R + shift_e[torch.searchsorted(ends_e, row_R, right=True)]
    place_P = torch.arange(total * BLOCK, device=offsets_e.device)
    expert_P = expert_M[place_P // BLOCK]
    row_P = place_P - shift_e[expert_P]
    row_P = torch.where(row_P < ends_e[expert_P], row_P, -1)
    return BlockLayout(
        padded=RowOrder(row_P, place_R, offsets_e, has_gaps=True),
        back=RowOrder(place_R, row_P, offsets_e, has_gaps=True),
        blocks_e=blocks_e,
        expert_M=expert_M,
    )


def topology(layout: BlockLayout, ffn_hidden_size: int, dtype: torch.dtype) -> Any:
    """The ``stk.Matrix [P, e * F]`` whose blocks are each block of rows by its expert's columns."""
    import stk

    per_row, expert_M = ffn_hidden_size // BLOCK, layout.expert_M
    block_N = torch.arange(expert_M.numel() * per_row, device=expert_M.device)
    rows_N = block_N // per_row
    columns_N = expert_M[rows_N] * per_row + block_N % per_row
    ends_M = torch.arange(0, block_N.numel() + 1, per_row, device=expert_M.device)
    by_column_N = columns_N.sort(stable=True).indices
    column = torch.arange(layout.blocks_e.numel() * per_row, device=expert_M.device)
    column_ends = layout.blocks_e[column // per_row].cumsum(0)
    return stk.Matrix(
        (expert_M.numel() * BLOCK, layout.blocks_e.numel() * ffn_hidden_size),
        torch.empty(block_N.numel(), BLOCK, BLOCK, dtype=dtype, device="meta"),
        rows_N.int(),
        columns_N.int(),
        ends_M.int(),
        rows_N[by_column_N].int(),
        torch.cat([column_ends.new_zeros(1), column_ends]).int(),
        by_column_N.int(),
    )
