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

A weight gradient has a fixed number of output tiles per expert, so an expert with most of the rows
would leave SMs idle: from twice `limit` rows on, its rows are split into several records, each with
a slot of a workspace where its partial sum goes; `splits` says which slots belong together. With
`offsets_E = [0, 512, 2048]` and limit 512 the records (expert, first row, end row, slot) are

    1 0 512 -1;  2 512 1024 0;  2 1024 1536 1;  2 1536 2048 2;  0 0 0 -1

and `splits` (expert, first slot, slots) has the one entry 2 0 3.

Row tiles are dealt to the programs in rounds, and a last round with few tiles takes as long as a
full one. With a `Tail` its tiles are cut into equal parts along K, one program each, whose partial
sums go to a workspace: with 10 programs, 24 output tiles of 64 steps are 20 whole ones and 4 in 2
parts of 32 steps; program p has part p // 4 of tile 20 + p % 4. Programs with the same part of
neighbouring tiles read the same operands at the same time, as in a whole round: parts that begin
anywhere would balance better and read from memory what now comes from L2 (measured: slower than
not to cut at all from 90 tiles on).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2

ROW_RECORD = 8  # int32 words of a row tile's record; five used, so that a record is 32 bytes
EXPERT_RECORD = 4
# Row tiles of one expert are walked in bands of this many, all columns of a band before the next
# band, so that a band's rows and a column's weights meet in L2. 4 to 64 measured equal on H200.
BAND = tl.constexpr(8)
MAX_SLOTS = 32  # parts of all split experts together
# A cut last round must be shorter by this many K steps, about 0.8 us each on an H200.
LEAST_SAVED = tl.constexpr(16)
MAX_PARTS = tl.constexpr(8)
SHORTEST_LIMIT = 512  # rows; a shorter part would not be worth writing and reading its partial sum


@dataclass(frozen=True)
class WorkList:
    """Records a persistent kernel walks through, and how many of them are real; on the device.

    Flat int32; a record is ROW_RECORD or EXPERT_RECORD words, an entry of `splits` as many.

    An expert order counts records, those of experts with rows, and entries of `splits`. Row tiles
    count records, output tiles done whole, those cut along K, and steps of their parts.
    """

    records: torch.Tensor
    count: torch.Tensor
    splits: torch.Tensor | None = None


@dataclass(frozen=True)
class Tail:
    """What the last round's tiles are cut by: column tiles and K steps of a tile, programs."""

    tiles_n: int
    steps: int
    programs: int


@triton.jit
def place(local, tiles_m, tiles_n):
    """Number of a tile inside its expert -> row tile and column tile."""
    width = BAND * tiles_n
    band = local // width
    first_m = band * BAND
    height = tl.minimum(tiles_m - first_m, BAND)
    rest = local - band * width
    column = rest // height
    return first_m + rest - column * height, column


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
    offsets_ptr, records_ptr, count_ptr, num_experts, tiles_n, steps,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, RECORD: tl.constexpr, CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr,
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
        if PROGRAMS:
            _cut_tail((first + tiles) * tiles_n, count_ptr, steps, PROGRAMS)


@triton.jit
def _cut_tail(total, count_ptr, steps, PROGRAMS: tl.constexpr):
    """Counts of tiles in whole rounds and after them, and steps of the latter's parts."""
    tail = total % PROGRAMS
    parts = tl.minimum(PROGRAMS // tl.maximum(tail, 1), MAX_PARTS)
    length = tl.cdiv(steps, parts)
    if steps - length < LEAST_SAVED:  # one part, or not worth adding up
        tail = 0
    tl.store(count_ptr + 1, total - tail)
    tl.store(count_ptr + 2, tail)
    tl.store(count_ptr + 3, length)


@triton.jit
def add_tail_kernel(
    out_ptr, partials_ptr, records_ptr, count_ptr, tiles_n, steps, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, RECORD: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """Rows of the tiles cut along K: the sum of their partials, in the order of the parts."""
    PIECES: tl.constexpr = BLOCK_M // ROWS
    tail = tl.load(count_ptr + 2)
    for piece in range(tl.program_id(0), tail * PIECES, GRID):
        slot = piece // PIECES
        tile = tl.load(count_ptr + 1) + slot
        record = records_ptr + (tile // tiles_n) * RECORD
        local = tile - tl.load(record + 1) * tiles_n
        tile_m, tile_n = place(local, tl.load(record + 2), tiles_n)
        line = (piece % PIECES) * ROWS + tl.arange(0, ROWS)  # of the tile
        row = tl.load(record + 3) + tile_m * BLOCK_M + line
        lane = tl.arange(0, BLOCK_N)
        live = (row < tl.load(record + 4))[:, None] & (tile_n * BLOCK_N + lane < N)[None, :]
        total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for _ in range(tl.cdiv(steps, tl.load(count_ptr + 3))):
            at = partials_ptr + (slot * BLOCK_M + line)[:, None] * BLOCK_N + lane[None, :]
            total += tl.load(at, mask=live, other=0)
            slot += tail
        at = out_ptr + row.to(tl.int64)[:, None] * N + tile_n * BLOCK_N + lane[None, :]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _parts(sizes, limit):
    """Number and length of the parts an expert's rows are cut into: 1 below twice `limit` rows.

    Cut parts are between `limit` and twice `limit` rows, a multiple of 64 except for the last.
    """
    parts = tl.maximum(sizes // limit, 1)
    length = tl.where(parts > 1, tl.cdiv(tl.cdiv(sizes, parts), 64) * 64, sizes)
    return tl.maximum(tl.cdiv(sizes, tl.maximum(length, 1)), 1), length


@triton.jit
def expert_order_kernel(
    offsets_ptr, records_ptr, count_ptr, splits_ptr, num_experts, limit,
    EXPERTS: tl.constexpr, RECORD: tl.constexpr, SKIP_EMPTY: tl.constexpr,
):  # fmt: skip
    """One program per expert: its records at its rank by length, so that the last wave is short."""
    e = tl.program_id(0)
    lane, sizes, start, end = _group_bounds(offsets_ptr, e, num_experts, EXPERTS)
    real = lane < num_experts
    own_parts, own_length = _parts(end - start, limit)
    parts, lengths = _parts(sizes, limit)
    ahead = real & ((lengths > own_length) | ((lengths == own_length) & (lane < e)))
    rank = tl.sum(tl.where(ahead, parts, 0), 0)
    split = (parts > 1) & (lane < e)
    slot = tl.sum(tl.where(split, parts, 0), 0)
    for part in range(0, own_parts):
        record = records_ptr + (rank + part) * RECORD
        tl.store(record, e)
        tl.store(record + 1, start + part * own_length)
        tl.store(record + 2, tl.minimum(start + (part + 1) * own_length, end))
        tl.store(record + 3, tl.where(own_parts > 1, slot + part, -1))
    if own_parts > 1:
        entry = splits_ptr + tl.sum(split.to(tl.int32), 0) * RECORD
        tl.store(entry, e)
        tl.store(entry + 1, slot)
        tl.store(entry + 2, own_parts)
    if e == 0:
        full = tl.sum(tl.where(sizes > 0, parts, 0), 0)
        empty = tl.sum((real & (sizes <= 0)).to(tl.int32), 0)
        tl.store(count_ptr, full if SKIP_EMPTY else full + empty)
        tl.store(count_ptr + 1, full)
        tl.store(count_ptr + 2, tl.sum((parts > 1).to(tl.int32), 0))


@triton.jit
def add_partials_kernel(
    out_ptr, partials_ptr, splits_ptr, count_ptr, size,
    ADD: tl.constexpr, BLOCK: tl.constexpr, RECORD: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """out[e] (+)= the sum of the expert's partials, slot after slot. Matrices of `size` numbers."""
    blocks = tl.cdiv(size, BLOCK)
    for tile in range(tl.program_id(0), tl.load(count_ptr + 2) * blocks, GRID):
        entry = splits_ptr + (tile // blocks) * RECORD
        e = tl.load(entry).to(tl.int64)
        slot = tl.load(entry + 1).to(tl.int64)
        at = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
        live = at < size
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        if ADD:
            total += tl.load(out_ptr + e * size + at, mask=live)
        for part in range(tl.load(entry + 2)):
            total += tl.load(partials_ptr + (slot + part) * size + at, mask=live)
        tl.store(out_ptr + e * size + at, total.to(out_ptr.dtype.element_ty), mask=live)


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
        launch(zero_tail_kernel, (256,), (rows_RN, offsets_E, rows, columns, last), GRID=256)
    return rows_RN


def row_tiles(
    offsets_E: torch.Tensor, rows: int, block_m: int, tail: Tail | None = None
) -> WorkList:
    """Row tiles of every expert in order, at most `ceil(rows / block_m) + E` of them.

    `offsets_E` int32 ends on the device. Rows past the last end belong to no tile.
    """
    experts = offsets_E.numel()
    cut = tail or Tail(1, 1, 0)
    records = cdiv(rows, block_m) + experts
    work = _empty_list(offsets_E, records, ROW_RECORD)
    launch(
        row_tiles_kernel, (experts,),
        (offsets_E, work.records, work.count, experts, cut.tiles_n, cut.steps),
        BLOCK_M=block_m, EXPERTS=next_power_of_2(experts), RECORD=ROW_RECORD, CHUNK=128,
        PROGRAMS=cut.programs,
    )  # fmt: skip
    return work


def add_tail_(out_RN: torch.Tensor, partials: torch.Tensor, work: WorkList, tail: Tail) -> None:
    """Writes the rows of the tiles that were cut along K; `partials` [programs, M, N] of a tile."""
    _, block_m, block_n = partials.shape
    launch(
        add_tail_kernel, (264,),
        (out_RN, partials, work.records, work.count, tail.tiles_n, tail.steps, out_RN.shape[1]),
        BLOCK_M=block_m, BLOCK_N=block_n, ROWS=8, RECORD=ROW_RECORD, GRID=264,
    )  # fmt: skip


def expert_order(offsets_E: torch.Tensor, *, skip_empty: bool, limit: int = 0) -> WorkList:
    """Experts, longest first (ties by number). `skip_empty` leaves empty ones out of the count.

    Experts of twice `limit` rows or more are split; 0 splits none. At most `rows // limit` slots.
    """
    experts = offsets_E.numel()
    slots = MAX_SLOTS if limit else 0
    work = _empty_list(offsets_E, experts + slots, EXPERT_RECORD, slots)
    launch(
        expert_order_kernel, (experts,),
        (offsets_E, work.records, work.count, work.splits, experts, limit or 1 << 30),
        EXPERTS=next_power_of_2(experts), RECORD=EXPERT_RECORD, SKIP_EMPTY=skip_empty,
    )  # fmt: skip
    return work


def split_limit(rows: int, tiles: int, programs: int) -> int:
    """The `limit` for experts of `tiles` output tiles each; 0 where splitting would not pay.

    Not when one expert's tiles fill their rounds of `programs` by themselves. Otherwise an expert
    with all the rows is cut into as many parts as fill theirs, and a part is a third of a program's
    share of the rows or less, so that several long experts balance, too.
    """

    def filled(parts: int) -> float:
        return parts * tiles / (cdiv(parts * tiles, programs) * programs)

    if filled(1) >= 0.9:
        return 0
    least = min(cdiv(10 * programs, 3 * tiles), MAX_SLOTS)
    parts = next((n for n in range(least, MAX_SLOTS) if filled(n) >= 0.95), MAX_SLOTS)
    limit = max(SHORTEST_LIMIT, cdiv(rows, parts))
    return limit if rows >= 2 * limit else 0


def add_partials_(out_EKN: torch.Tensor, partials: torch.Tensor, work: WorkList, add: bool) -> None:
    """Sums the partial gradients of split experts into `out_EKN`, in the order of the slots."""
    size = out_EKN[0].numel()
    launch(
        add_partials_kernel, (264,), (out_EKN, partials, work.splits, work.count, size),
        ADD=add, BLOCK=2048, RECORD=EXPERT_RECORD, GRID=264,
    )  # fmt: skip


def _empty_list(offsets_E: torch.Tensor, records: int, words: int, splits: int = 0) -> WorkList:
    """One allocation, and parts of it aligned to 16 bytes."""
    sizes = (4, records * words, max(splits, 1) * words)
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=offsets_E.device)
    count, records, splits = memory.split_with_sizes(sizes)
    return WorkList(records, count, splits)
