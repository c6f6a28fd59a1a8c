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
full one. With a `LastRound` its tiles are cut into equal parts along K, one program each, whose
partial sums go to a workspace: with 10 programs, 24 output tiles of 64 steps are 20 whole ones and
4 in 2 parts of 32 steps; program p has part p // 4 of tile 20 + p % 4. Programs with the same part
of neighbouring tiles read the same operands at the same time, as in a whole round. Parts that begin
anywhere would balance better and read from memory what now comes from L2. That was measured: from
90 tiles on it is slower than not to cut at all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2

# A row tile's record and its words; int32, five used, so that a record is 32 bytes.
ROW_RECORD = tl.constexpr(8)
ROW_EXPERT, ROW_FIRST_TILE, ROW_TILES, ROW_START, ROW_END = map(tl.constexpr, range(5))
# Counts of a list of row tiles: records, output tiles that are done whole, output tiles that are
# cut along K, and the steps of a part of a cut tile.
COUNT_RECORDS, COUNT_WHOLE, COUNT_CUT, COUNT_LENGTH = map(tl.constexpr, range(4))
# The record of an expert, or of a part of its rows. `slot` is -1 for an expert in one piece.
EXPERT_RECORD = tl.constexpr(4)
PART_EXPERT, PART_START, PART_END, PART_SLOT = map(tl.constexpr, range(4))
# An entry of `splits`, as long as an expert's record.
SPLIT_EXPERT, SPLIT_SLOT, SPLIT_PARTS = map(tl.constexpr, range(3))
# More counts of an expert order: records of experts with rows, and entries of `splits`.
COUNT_FULL, COUNT_SPLITS = map(tl.constexpr, (1, 2))
COUNTS = 4  # words, so that the records behind them are aligned to 16 bytes

# Row tiles of one expert are walked in bands of this many, all columns of a band before the next
# band, so that a band's rows and a column's weights meet in L2. 4 to 64 measured equal on H200.
BAND = tl.constexpr(8)
MAX_SLOTS = 32  # parts of all split experts together
# A cut last round must be shorter by this many K steps, about 0.8 us each on an H200.
LEAST_SAVED = tl.constexpr(16)
MAX_PARTS = tl.constexpr(8)
SHORTEST_LIMIT = 512  # rows; a shorter part would not be worth writing and reading its partial sum
NO_LIMIT = 1 << 30  # rows; no expert has twice as many
PART_ROWS = tl.constexpr(64)  # divides the rows of every part of an expert but the last

ROW_TILES_AT_ONCE = 128  # records that a program writes at once
ADD_GRID = 264  # programs that add up partial sums: two for each SM of an H200
ADD_ROWS = 8  # rows of a tile they add up at once
ADD_NUMBERS = 2048  # numbers of a matrix they add up at once
ZERO_GRID = 256
ZERO_COLUMNS = tl.constexpr(1024)


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
class LastRound:
    """The last round of tiles, which may be cut along K: column tiles, K steps, programs."""

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
def _group_bounds(offsets_ptr, e, num_experts, EXPERTS: tl.constexpr, BEHIND: tl.constexpr):
    """Expert numbers and group sizes (zero past the last expert), start and end of group `e`.

    BEHIND: another expert's end lies before the first one.
    """
    lane = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + lane, mask=lane < num_experts, other=0)
    own = (lane + BEHIND > 0) & (lane < num_experts)
    starts = tl.load(offsets_ptr + lane - 1, mask=own, other=0)
    start = tl.load(offsets_ptr + e - 1, mask=e + BEHIND > 0, other=0)
    return lane, ends - starts, start, tl.load(offsets_ptr + e)


@triton.jit
def row_tiles_kernel(
    offsets_ptr, records_ptr, count_ptr, padded_ptr, num_experts, tiles_n, steps,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
    BEHIND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per expert: records of its own row tiles, PADDED its padded end. Grid (E,)."""
    e = tl.program_id(0)
    lane, sizes, start, end = _group_bounds(offsets_ptr, e, num_experts, EXPERTS, BEHIND)
    first = tl.sum(tl.where(lane < e, tl.cdiv(sizes, BLOCK_M), 0), 0)
    tiles = tl.cdiv(end - start, BLOCK_M)
    for base in range(0, tiles, CHUNK):
        tile = base + tl.arange(0, CHUNK)
        record = records_ptr + (first + tile) * ROW_RECORD
        live = tile < tiles
        tl.store(record + ROW_EXPERT, e, mask=live)
        tl.store(record + ROW_FIRST_TILE, first, mask=live)
        tl.store(record + ROW_TILES, tiles, mask=live)
        tl.store(record + ROW_START, start, mask=live)
        tl.store(record + ROW_END, end, mask=live)
    if PADDED:
        tl.store(padded_ptr + e, (first + tiles) * BLOCK_M)
    if e == num_experts - 1:
        tl.store(count_ptr + COUNT_RECORDS, first + tiles)
        if PROGRAMS:
            _cut_last_round((first + tiles) * tiles_n, count_ptr, steps, PROGRAMS)


@triton.jit
def _cut_last_round(total, count_ptr, steps, PROGRAMS: tl.constexpr):
    """Counts of tiles in whole rounds and after them, and steps of the latter's parts."""
    tail = total % PROGRAMS
    parts = tl.minimum(PROGRAMS // tl.maximum(tail, 1), MAX_PARTS)
    length = tl.cdiv(steps, parts)
    if steps - length < LEAST_SAVED:  # one part, or not worth adding up
        tail = 0
    tl.store(count_ptr + COUNT_WHOLE, total - tail)
    tl.store(count_ptr + COUNT_CUT, tail)
    tl.store(count_ptr + COUNT_LENGTH, length)


@triton.jit
def add_tail_kernel(
    out_ptr, partials_ptr, records_ptr, count_ptr, tiles_n, steps, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Rows of the tiles cut along K: the sum of their partials, in the order of the parts."""
    PIECES: tl.constexpr = BLOCK_M // ROWS
    tail = tl.load(count_ptr + COUNT_CUT)
    for piece in range(tl.program_id(0), tail * PIECES, GRID):
        slot = piece // PIECES
        tile = tl.load(count_ptr + COUNT_WHOLE) + slot
        record = records_ptr + (tile // tiles_n) * ROW_RECORD
        local = tile - tl.load(record + ROW_FIRST_TILE) * tiles_n
        tile_m, tile_n = place(local, tl.load(record + ROW_TILES), tiles_n)
        line = (piece % PIECES) * ROWS + tl.arange(0, ROWS)  # line of the tile
        row = tl.load(record + ROW_START) + tile_m * BLOCK_M + line
        lane = tl.arange(0, BLOCK_N)
        live = (row < tl.load(record + ROW_END))[:, None] & (tile_n * BLOCK_N + lane < N)[None, :]
        total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for _ in range(tl.cdiv(steps, tl.load(count_ptr + COUNT_LENGTH))):
            at = partials_ptr + (slot * BLOCK_M + line)[:, None] * BLOCK_N + lane[None, :]
            total += tl.load(at, mask=live, other=0)
            slot += tail
        at = out_ptr + row.to(tl.int64)[:, None] * N + tile_n * BLOCK_N + lane[None, :]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _parts(sizes, limit):
    """Number and length of the parts an expert's rows are cut into: 1 below twice `limit` rows.

    Cut parts are between `limit` and twice `limit` rows.
    """
    parts = tl.maximum(sizes // limit, 1)
    length = tl.where(parts > 1, tl.cdiv(tl.cdiv(sizes, parts), PART_ROWS) * PART_ROWS, sizes)
    return tl.maximum(tl.cdiv(sizes, tl.maximum(length, 1)), 1), length


@triton.jit
def expert_order_kernel(
    offsets_ptr, records_ptr, count_ptr, splits_ptr, num_experts, limit,
    EXPERTS: tl.constexpr, SKIP_EMPTY: tl.constexpr,
):  # fmt: skip
    """One program per expert: its records at its rank by length, so that the last wave is short."""
    e = tl.program_id(0)
    lane, sizes, start, end = _group_bounds(offsets_ptr, e, num_experts, EXPERTS, 0)
    real = lane < num_experts
    own_parts, own_length = _parts(end - start, limit)
    parts, lengths = _parts(sizes, limit)
    ahead = real & ((lengths > own_length) | ((lengths == own_length) & (lane < e)))
    rank = tl.sum(tl.where(ahead, parts, 0), 0)
    split = (parts > 1) & (lane < e)
    slot = tl.sum(tl.where(split, parts, 0), 0)
    for part in range(0, own_parts):
        record = records_ptr + (rank + part) * EXPERT_RECORD
        tl.store(record + PART_EXPERT, e)
        tl.store(record + PART_START, start + part * own_length)
        tl.store(record + PART_END, tl.minimum(start + (part + 1) * own_length, end))
        tl.store(record + PART_SLOT, tl.where(own_parts > 1, slot + part, -1))
    if own_parts > 1:
        entry = splits_ptr + tl.sum(split.to(tl.int32), 0) * EXPERT_RECORD
        tl.store(entry + SPLIT_EXPERT, e)
        tl.store(entry + SPLIT_SLOT, slot)
        tl.store(entry + SPLIT_PARTS, own_parts)
    if e == 0:
        full = tl.sum(tl.where(sizes > 0, parts, 0), 0)
        empty = tl.sum((real & (sizes <= 0)).to(tl.int32), 0)
        tl.store(count_ptr + COUNT_RECORDS, full if SKIP_EMPTY else full + empty)
        tl.store(count_ptr + COUNT_FULL, full)
        tl.store(count_ptr + COUNT_SPLITS, tl.sum((parts > 1).to(tl.int32), 0))


@triton.jit
def add_partials_kernel(
    out_ptr, partials_ptr, splits_ptr, count_ptr, size,
    ADD: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """out[e] (+)= the sum of the expert's partials, slot after slot. Matrices of `size` numbers."""
    blocks = tl.cdiv(size, BLOCK)
    for tile in range(tl.program_id(0), tl.load(count_ptr + COUNT_SPLITS) * blocks, GRID):
        entry = splits_ptr + (tile // blocks) * EXPERT_RECORD
        e = tl.load(entry + SPLIT_EXPERT).to(tl.int64)
        slot = tl.load(entry + SPLIT_SLOT).to(tl.int64)
        at = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
        live = at < size
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        if ADD:
            total += tl.load(out_ptr + e * size + at, mask=live)
        for part in range(tl.load(entry + SPLIT_PARTS)):
            total += tl.load(partials_ptr + (slot + part) * size + at, mask=live)
        tl.store(out_ptr + e * size + at, total.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def zero_tail_kernel(
    rows_ptr, offsets_ptr, rows, columns, last, GRID: tl.constexpr,
):  # fmt: skip
    """Zeros the rows past the last end, row by row over the programs. Grid (GRID,)."""
    lane = tl.arange(0, ZERO_COLUMNS)
    first = (tl.load(offsets_ptr + last) + tl.program_id(0)).to(tl.int64)
    for row in range(first, rows, GRID):  # 64 bits, like its start
        for base in range(0, columns, ZERO_COLUMNS):
            at = rows_ptr + row * columns + base + lane
            zero = tl.zeros((ZERO_COLUMNS,), dtype=rows_ptr.dtype.element_ty)
            tl.store(at, zero, mask=base + lane < columns)


def zero_tail_(rows_RN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Zeros the rows past the last end in place; one short launch when there are none."""
    rows, columns = rows_RN.shape
    if rows:
        args = (rows_RN, offsets_E, rows, columns, offsets_E.numel() - 1)
        launch(zero_tail_kernel, (ZERO_GRID,), args, GRID=ZERO_GRID)
    return rows_RN


def row_tiles(
    offsets_E: torch.Tensor,
    rows: int,
    block_m: int,
    last_round: LastRound | None = None,
    is_behind: bool = False,
) -> WorkList:
    """Row tiles of every expert in order, at most `ceil(rows / block_m) + E` of them.

    `offsets_E` int32 ends on the device. Rows past the last end belong to no tile. `is_behind`:
    they are a view behind the end of another expert, whose rows and those before have no tile.
    """
    return _row_tiles(offsets_E, rows, block_m, last_round, is_behind, None)


def padded_tiles(offsets_E: torch.Tensor, rows: int, block_m: int) -> tuple[WorkList, torch.Tensor]:
    """`row_tiles`, and the ends that groups have when each begins at a tile: int32 `[E]`."""
    padded_E = torch.empty_like(offsets_E)
    return _row_tiles(offsets_E, rows, block_m, None, False, padded_E), padded_E


def _row_tiles(
    offsets_E: torch.Tensor,
    rows: int,
    block_m: int,
    last_round: LastRound | None,
    is_behind: bool,
    padded_E: torch.Tensor | None,
) -> WorkList:
    experts = offsets_E.numel()
    cut = last_round or LastRound(1, 1, 0)
    records = cdiv(rows, block_m) + experts
    work = _empty_list(offsets_E, records * ROW_RECORD.value)
    padded = work.records if padded_E is None else padded_E
    launch(
        row_tiles_kernel, (experts,),
        (offsets_E, work.records, work.count, padded, experts, cut.tiles_n, cut.steps),
        BLOCK_M=block_m, EXPERTS=next_power_of_2(experts), CHUNK=ROW_TILES_AT_ONCE,
        PROGRAMS=cut.programs, BEHIND=int(is_behind), PADDED=padded_E is not None,
    )  # fmt: skip
    return work


def add_cut_tiles_(
    out_RN: torch.Tensor, partials: torch.Tensor, work: WorkList, last_round: LastRound
) -> None:
    """Write the rows of the tiles that were cut along K; `partials` [programs, M, N] of a tile."""
    _, block_m, block_n = partials.shape
    sizes = (last_round.tiles_n, last_round.steps, out_RN.shape[1])
    launch(
        add_tail_kernel, (ADD_GRID,), (out_RN, partials, work.records, work.count, *sizes),
        BLOCK_M=block_m, BLOCK_N=block_n, ROWS=ADD_ROWS, GRID=ADD_GRID,
    )  # fmt: skip


def expert_order(offsets_E: torch.Tensor, *, skip_empty: bool, limit: int = 0) -> WorkList:
    """Experts, longest first (ties by number). `skip_empty` leaves empty ones out of the count.

    Experts of twice `limit` rows or more are split; 0 splits none. At most `rows // limit` slots.
    """
    experts = offsets_E.numel()
    slots = MAX_SLOTS if limit else 0
    words = EXPERT_RECORD.value
    work = _empty_list(offsets_E, (experts + slots) * words, max(slots, 1) * words)
    launch(
        expert_order_kernel, (experts,),
        (offsets_E, work.records, work.count, work.splits, experts, limit or NO_LIMIT),
        EXPERTS=next_power_of_2(experts), SKIP_EMPTY=skip_empty,
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
        add_partials_kernel, (ADD_GRID,), (out_EKN, partials, work.splits, work.count, size),
        ADD=add, BLOCK=ADD_NUMBERS, GRID=ADD_GRID,
    )  # fmt: skip


def _empty_list(offsets_E: torch.Tensor, record_words: int, split_words: int = 0) -> WorkList:
    """One allocation, and parts of it aligned to 16 bytes."""
    sizes = (COUNTS, record_words, split_words)
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=offsets_E.device)
    count, records, splits = memory.split_with_sizes(sizes)
    return WorkList(records, count, splits)
