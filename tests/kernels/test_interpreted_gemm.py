"""Work lists and grouped GEMMs against the reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_graphs.kernels import gemm
from moe_graphs.kernels.gemm import (
    heuristics,
    launch,
    portable_pointer,
    reference,
    tile_scheduler,
)

POISON = 777.0

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned_memory")


def test_work_list_examples():
    offsets = torch.tensor([5, 5, 8], dtype=torch.int32)
    rows = tile_scheduler.row_tiles(offsets, 8, 4)
    assert rows.count[0] == 3
    records = rows.records.view(-1, 8)[:3, :5].tolist()
    assert records == [[0, 0, 2, 0, 5], [0, 0, 2, 0, 5], [2, 2, 1, 5, 8]]
    experts = tile_scheduler.expert_order(offsets, skip_empty=False)
    assert experts.records.view(-1, 4).tolist() == [[0, 0, 5, -1], [2, 5, 8, -1], [1, 5, 5, -1]]
    assert experts.count[:3].tolist() == [3, 2, 0]
    assert tile_scheduler.expert_order(offsets, skip_empty=True).count[:3].tolist() == [2, 2, 0]


def test_work_list_example_of_a_split_expert():
    offsets = torch.tensor([0, 512, 2048], dtype=torch.int32)
    work = tile_scheduler.expert_order(offsets, skip_empty=False, limit=512)
    assert work.count[:3].tolist() == [5, 4, 1]
    assert work.records.view(-1, 4)[:5].tolist() == [
        [1, 0, 512, -1], [2, 512, 1024, 0], [2, 1024, 1536, 1], [2, 1536, 2048, 2], [0, 0, 0, -1],
    ]  # fmt: skip
    assert work.splits[:3].tolist() == [2, 0, 3]


def test_row_tiles_example_of_a_cut_round():
    offsets = torch.tensor([24], dtype=torch.int32)
    work = tile_scheduler.row_tiles(
        offsets, 24, 1, tile_scheduler.LastRound(tiles_n=1, steps=64, programs=10)
    )
    assert work.count.tolist() == [24, 20, 4, 32]


@pytest.mark.parametrize("sizes", [(300, 17, 0, 65), (129,), (0, 64, 1), (0, 0)])
@pytest.mark.parametrize(
    ("columns", "steps", "programs"), [(200, 40, 7), (64, 33, 13), (500, 20, 5), (200, 90, 132)]
)
def test_cut_rounds_cover_every_step_once_and_add_up(monkeypatch, sizes, columns, steps, programs):
    """Partials that count their steps add up to all of them, on the rows of the cut tiles only."""
    monkeypatch.setattr(tile_scheduler, "ADD_GRID", 5)  # every program takes as long, idle ones too
    monkeypatch.setattr(tile_scheduler, "ADD_ROWS", 32)
    block_m, block_n = 64, 128
    ends = torch.cumsum(torch.tensor(sizes), 0).to(torch.int32)
    last_round = tile_scheduler.LastRound(-(-columns // block_n), steps, programs)
    rows = int(ends[-1]) + 5
    work = tile_scheduler.row_tiles(ends, rows, block_m, last_round)
    _, whole, cut, length = work.count.tolist()
    total = sum(-(-n // block_m) for n in sizes) * last_round.tiles_n
    assert (whole, cut) in ((total, 0), (total - total % programs, total % programs))
    assert not cut or steps - length >= tile_scheduler.LEAST_SAVED.value
    partials = torch.full((programs, block_m, block_n), POISON)
    seen = torch.zeros(max(cut, 1), steps)
    for program in range(cut * -(-steps // length)):
        part, tile = divmod(program, cut)
        end = min((part + 1) * length, steps)
        seen[tile, part * length : end] += 1
        partials[program] = float(end - part * length)
    assert not cut or bool((seen == 1).all())
    out = torch.full((rows, columns), POISON)
    tile_scheduler.add_cut_tiles_(out, partials, work, last_round)
    done = torch.zeros_like(out, dtype=torch.bool)
    for tile in range(whole, whole + cut):
        _, first, tiles_m, start, end = work.records.view(-1, 8)[
            tile // last_round.tiles_n, :5
        ].tolist()
        m, n = place(tile - first * last_round.tiles_n, tiles_m, last_round.tiles_n)
        row = start + m * block_m
        done[row : min(row + block_m, end), n * block_n : (n + 1) * block_n] = True
    assert bool((out[done] == steps).all())
    assert bool((out[~done] == POISON).all())


def place(local: int, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    """`tile_scheduler.place` in Python."""
    band, rest = divmod(local, 8 * tiles_n)
    column, row = divmod(rest, min(tiles_m - 8 * band, 8))
    return 8 * band + row, column


@pytest.mark.parametrize(
    ("rows", "tiles_of_expert", "limit"),
    [
        (65536, 96, 8192),  # 8 parts: 768 tiles are 5.8 rounds of 132
        (65536, 128, 0),  # 128 of 132 programs have a tile
        (65536, 3584, 0),
        (65536, 8, 2048),  # no more parts than there are slots
        (1000, 96, 0),  # too short to be worth it
        (2048, 96, 512),
    ],
)
def test_split_limit(rows, tiles_of_expert, limit):
    assert tile_scheduler.split_limit(rows, tiles_of_expert, 132) == limit


@pytest.mark.parametrize("seed", range(6))
def test_split_experts_keep_every_row_and_fit_the_slots(seed):
    torch.manual_seed(seed)
    sizes = torch.randint(0, 40, (16,)) ** torch.randint(1, 4, (16,))
    rows, ends = int(sizes.sum()), torch.cumsum(sizes, 0).to(torch.int32)
    limit = max(512, -(-rows // tile_scheduler.MAX_SLOTS))
    work = tile_scheduler.expert_order(ends, skip_empty=False, limit=limit)
    records = work.records.view(-1, 4)[: int(work.count[0])].tolist()
    lengths = [end - start for _, start, end, _ in records]
    assert max(lengths) < 2 * limit
    assert sum(lengths) == rows
    slots = sorted(slot for *_, slot in records if slot >= 0)
    assert slots == list(range(len(slots)))
    assert len(slots) <= rows // limit <= tile_scheduler.MAX_SLOTS
    for e, first, parts, _ in work.splits.view(-1, 4)[: int(work.count[2])].tolist():
        own = sorted((slot, start, end) for x, start, end, slot in records if x == e)
        assert [slot for slot, _, _ in own] == list(range(first, first + parts))
        assert sum(end - start for _, start, end in own) == sizes[e]


@pytest.mark.parametrize("add", [False, True])
def test_add_partials(monkeypatch, add):
    monkeypatch.setattr(tile_scheduler, "ADD_GRID", 5)
    torch.manual_seed(0)
    partials, out = torch.randn(3, 40, 72), torch.randn(3, 40, 72)
    work = tile_scheduler.expert_order(
        torch.tensor([0, 512, 2048], dtype=torch.int32), skip_empty=add, limit=512
    )
    expected = out.clone()
    expected[2] = partials.sum(0) + (out[2] if add else 0)
    tile_scheduler.add_partials_(out, partials, work, add)
    torch.testing.assert_close(out, expected)


def test_zero_tail(monkeypatch):
    monkeypatch.setattr(tile_scheduler, "ZERO_GRID", 3)
    rows = torch.full((7, 1030), POISON)
    tile_scheduler.zero_tail_(rows, torch.tensor([2, 5], dtype=torch.int32))
    assert bool((rows[:5] == POISON).all())
    assert bool((rows[5:] == 0).all())


# Short sides are the ranks of LoRA.
@pytest.mark.parametrize(("K", "N"), [(72, 200), (8, 200), (72, 16)])
@pytest.mark.parametrize("sizes", [(0, 70, 3, 130, 1), (64, 0, 0), (0, 0), (200,)])
def test_grouped_gemm(sizes, K, N):
    torch.manual_seed(0)
    ends = torch.cumsum(torch.tensor(sizes), 0).to(torch.int32)
    real, experts = int(ends[-1]), len(sizes)
    x, dy = torch.randn(real + 9, K), torch.randn(real + 9, N)
    x[real:], dy[real:] = float("nan"), float("nan")
    w = torch.randn(experts, K, N)
    variant = heuristics.row_variant("pointer", N)
    work = tile_scheduler.row_tiles(ends, len(x), variant.block_m)
    expected = reference.grouped_gemm(x, w, ends)
    for transposed, weights in ((False, w), (True, w.transpose(1, 2).contiguous())):
        out = torch.full((len(x), N), POISON)
        portable_pointer.rows_launch(variant, x, weights, out, work, transposed, 3).run()
        torch.testing.assert_close(out[:real], expected[:real], rtol=1e-4, atol=1e-4)
        assert bool((out[real:] == POISON).all())
    for add in (False, True):
        out = torch.full((experts, K, N), 2.0 if add else POISON)
        order = tile_scheduler.expert_order(ends, skip_empty=add)
        variant = heuristics.weight_variant("pointer", N, torch.float32)
        how = "fetch" if add else ""
        portable_pointer.weights_launch(variant, x, dy, out, order, how, 3).run()
        expected = reference.grouped_gemm_wgrad(x, dy, ends) + (2.0 if add else 0.0)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("K", "N"), [(200, 16), (136, 64), (128, 48)])
@pytest.mark.parametrize("sizes", [(0, 70, 3, 130, 1), (64, 0, 0), (1200, 0, 3, 1100)])
def test_gathered_weights(monkeypatch, sizes, K, N, transposed):
    """Rows are tokens by their order; long experts are split, and empty ones get zeros."""
    torch.manual_seed(0)
    monkeypatch.setattr(launch, "sm_count", lambda device: 2)
    top_k, rows = 2, sum(sizes) + sum(sizes) % 2
    ends = torch.cumsum(torch.tensor(sizes), 0).to(torch.int32)
    order = torch.randperm(rows).to(torch.int32)
    hidden, dy = torch.randn(rows // top_k, K), torch.randn(rows, N)
    dy[int(ends[-1]) :] = float("nan")
    expected = reference.grouped_gemm_wgrad(hidden[order.long() // top_k], dy, ends)
    given = hidden, order, top_k, dy, ends
    found = launch.matmul_weights_gathered(*given, transposed=transposed)
    found = found.mT if transposed else found
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sizes", [(0, 70, 3, 130, 1), (64, 0, 0, 5, 9)])
@pytest.mark.parametrize(("first", "end"), [(0, 2), (1, 4), (3, 5), (4, 5)])
def test_the_rows_of_some_experts(sizes, first, end):
    """Weights of some experts: the rows of all others keep what is there."""
    torch.manual_seed(0)
    ends = torch.cumsum(torch.tensor(sizes), 0).to(torch.int32)
    x, w = torch.randn(int(ends[-1]) + 9, 72), torch.randn(len(sizes), 72, 200)
    variant = heuristics.row_variant("pointer", 200)
    work = tile_scheduler.row_tiles(ends[first:end], len(x), variant.block_m, is_behind=bool(first))
    out = torch.full((len(x), 200), POISON)
    portable_pointer.rows_launch(variant, x, w[first:end], out, work, False, 3).run()
    expected = torch.full_like(out, POISON)
    rows = slice(int(ends[first - 1]) if first else 0, int(ends[end - 1]))
    expected[rows] = reference.grouped_gemm(x, w, ends)[rows]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("K", "rank"), [(72, 8), (64, 40)])
def test_a_product_beside_is_in_the_same_sum(K, rank, transposed):
    torch.manual_seed(0)
    ends, N = torch.tensor([0, 70, 73, 203], dtype=torch.int32), 200
    real, experts = int(ends[-1]), len(ends)
    x, low = torch.randn(real + 9, K), torch.randn(real + 9, rank)
    x[real:], low[real:] = float("nan"), float("nan")
    w, b = torch.randn(experts, K, N), torch.randn(experts, rank, N)
    expected = reference.grouped_gemm_with_lora(x, w, low, b, ends)
    apart = reference.grouped_gemm(x, w, ends) + reference.grouped_gemm(low, b, ends)
    torch.testing.assert_close(expected, apart, rtol=1e-4, atol=1e-4)
    w, b = (each.mT.contiguous() if transposed else each for each in (w, b))
    variant = heuristics.row_variant("pointer", N)
    work = tile_scheduler.row_tiles(ends, len(x), variant.block_m)
    out = torch.full((len(x), N), POISON)
    given = (variant, x, w, out, work, transposed, 3, None, (low, b))
    portable_pointer.rows_launch(*given).run()
    torch.testing.assert_close(out[:real], expected[:real], rtol=1e-4, atol=1e-4)
    assert bool((out[real:] == POISON).all())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_product_in_parts_is_the_whole_one(monkeypatch, at_once, beside, transposed):
    """The path of a GPU, whose weights come a part of the experts at a time."""
    monkeypatch.setattr(launch, "sm_count", lambda _: 3)
    torch.manual_seed(0)
    ends, K, N, rank = torch.tensor([0, 70, 73, 203], dtype=torch.int32), 72, 200, 8
    x, low = torch.randn(203, K), torch.randn(203, rank)
    w, b = torch.randn(4, K, N), torch.randn(4, rank, N)
    if transposed:
        w, b = (each.mT.contiguous().mT for each in (w, b))
    out = torch.full((203, N), POISON)
    for first in range(0, 4, at_once):
        part = slice(first, first + at_once)
        second = (low, b[part]) if beside else None
        found = gemm.rows_on_gpu(x, w[part], ends, False, second, out=out, first=first)
        assert found is out
    expected = gemm.rows_on_gpu(x, w, ends, False, (low, b) if beside else None)
    assert torch.equal(out, expected)
    plain = reference.grouped_gemm(x, w, ends)
    plain += reference.grouped_gemm(low, b, ends) if beside else 0
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)
