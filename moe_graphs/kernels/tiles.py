"""Device-side work lists for the grouped GEMMs: which expert and which rows a tile number means.

The sizes of the groups are known on the device only, so the grid is static and a kernel of one
program per expert writes what the persistent GEMM kernels then read with two or three scalar loads
per tile. Nothing here synchronises; every buffer has a size that follows from shapes alone.

R routed rows, E experts, M rows of a tile.

Worked example, its numbers are also the test: tiles of M=4 rows, `offsets_E = [5, 5, 8]`, so the
experts have 5, 0 and 3 rows. `row_tiles` gives a count of 3 and the records
(expert, first tile of the expert, tiles of the expert, first row, end row)

    tile 0: 0 0 2 0 5        rows 0..3 of expert 0
    tile 1: 0 0 2 0 5        row 4 of expert 0, rows 5..7 of the tile are masked
    tile 2: 2 2 1 5 8        rows 5..7 of expert 2; expert 1 is empty and has no tile

and `expert_order` the records (expert, first row, end row), longest expert first, ties by number:

    0 0 5;  2 5 8;  1 5 5    count 3, or 2 when empty experts are left out
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ROW_RECORD = 8  # int32 words of a row tile's record; five used, so that a record is 32 bytes
EXPERT_RECORD = 4


@dataclass(frozen=True)
class WorkList:
    """Records a persistent kernel walks through, and how many of them are real; on the device."""

    records: torch.Tensor
    count: torch.Tensor


@triton.jit
def _group_bounds(offsets_ptr, e, num_experts, EXPERTS: tl.constexpr):
    """Expert numbers and group sizes (zero past the last expert), start and end of group `e`."""
    lane = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + lane, mask=lane < num_experts, other=0)
    starts = tl.load(offsets_ptr + lane - 1, mask=(lane > 0) & (lane < num_experts), other=0)
    start = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
    return lane, ends - starts, start, tl.load(offsets_ptr + e)


@triton.jit
def row_tiles_kernel(
    offsets_ptr, records_ptr, count_ptr, num_experts,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, RECORD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per expert: the records of its own row tiles. Grid (E,)."""
    e = tl.program_id(0)
    lane, sizes, start, end = _group_bounds(offsets_ptr, e, num_experts, EXPERTS)
    first = tl.sum(tl.where(lane < e, tl.cdiv(sizes, BLOCK_M), 0), 0)
    tiles = tl.cdiv(end - start, BLOCK_M)
    for base in range(0, tiles, CHUNK):
        tile = base + tl.arange(0, CHUNK)
        record = records_ptr + (first + tile) * RECORD
        live = tile < tiles
        tl.store(record, e, mask=live)
        tl.store(record + 1, first, mask=live)
        tl.store(record + 2, tiles, mask=live)
        tl.store(record + 3, start, mask=live)
        tl.store(record + 4, end, mask=live)
    if e == num_experts - 1:
        tl.store(count_ptr, first + tiles)


@triton.jit
def expert_order_kernel(
    offsets_ptr, records_ptr, count_ptr, num_experts,
    EXPERTS: tl.constexpr, RECORD: tl.constexpr, SKIP_EMPTY: tl.constexpr,
):  # fmt: skip
    """One program per expert: its record at its rank by size, so that the last wave is short."""
    e = tl.program_id(0)
    lane, sizes, start, end = _group_bounds(offsets_ptr, e, num_experts, EXPERTS)
    size = end - start
    ahead = (lane < num_experts) & ((sizes > size) | ((sizes == size) & (lane < e)))
    record = records_ptr + tl.sum(ahead.to(tl.int32), 0) * RECORD
    tl.store(record, e)
    tl.store(record + 1, start)
    tl.store(record + 2, end)
    if e == 0:
        if SKIP_EMPTY:
            tl.store(count_ptr, tl.sum((sizes > 0).to(tl.int32), 0))
        else:
            tl.store(count_ptr, num_experts)


@triton.jit
def zero_tail_kernel(rows_ptr, offsets_ptr, rows, columns, last, GRID: tl.constexpr):
    """Zeros the rows past the last end, row by row over the programs. Grid (GRID,)."""
    lane = tl.arange(0, 1024)
    first = (tl.load(offsets_ptr + last) + tl.program_id(0)).to(tl.int64)
    for row in range(first, rows, GRID):  # 64-bit, as its start is
        for base in range(0, columns, 1024):
            at = rows_ptr + row * columns + base + lane
            zero = tl.zeros((1024,), dtype=rows_ptr.dtype.element_ty)
            tl.store(at, zero, mask=base + lane < columns)


def zero_tail_(rows_RN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Zeros the rows past the last end in place; one short launch when there are none."""
    rows, columns = rows_RN.shape
    if rows:
        last = offsets_E.numel() - 1
        zero_tail_kernel[(256,)](rows_RN, offsets_E, rows, columns, last, GRID=256)
    return rows_RN


def row_tiles(offsets_E: torch.Tensor, rows: int, block_m: int) -> WorkList:
    """Row tiles of every expert in order, at most `ceil(rows / block_m) + E` of them.

    `offsets_E` int32 ends on the device. Rows past the last end belong to no tile.
    """
    experts = offsets_E.numel()
    work = _empty_list(offsets_E, triton.cdiv(rows, block_m) + experts, ROW_RECORD)
    row_tiles_kernel[(experts,)](
        offsets_E, work.records, work.count, experts,
        BLOCK_M=block_m, EXPERTS=triton.next_power_of_2(experts), RECORD=ROW_RECORD, CHUNK=128,
    )  # fmt: skip
    return work


def expert_order(offsets_E: torch.Tensor, *, skip_empty: bool) -> WorkList:
    """Experts, longest first (ties by number). `skip_empty` leaves empty ones out of the count."""
    experts = offsets_E.numel()
    work = _empty_list(offsets_E, experts, EXPERT_RECORD)
    expert_order_kernel[(experts,)](
        offsets_E, work.records, work.count, experts,
        EXPERTS=triton.next_power_of_2(experts), RECORD=EXPERT_RECORD, SKIP_EMPTY=skip_empty,
    )  # fmt: skip
    return work


def _empty_list(offsets_E: torch.Tensor, records: int, words: int) -> WorkList:
    return WorkList(
        torch.empty((records, words), dtype=torch.int32, device=offsets_E.device),
        torch.empty(1, dtype=torch.int32, device=offsets_E.device),
    )
