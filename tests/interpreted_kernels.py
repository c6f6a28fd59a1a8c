"""The plain Triton kernels against the references, run by Triton's interpreter on the CPU.

Not collected by itself: test_kernels_interpreter runs it with TRITON_INTERPRET=1, which has to be
set before the kernels are imported. TMA and Gluon kernels are beyond the interpreter (Triton 3.6).
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.nn import functional
from triton.runtime import interpreter

from moe_graphs.kernels import (
    RowOrder,
    cross_entropy_triton,
    gemm_launch,
    heads_triton,
    permute_triton,
    reference,
    route_rows,
    routing_triton,
    swiglu_triton,
    tiles,
)
from moe_graphs.kernels.heads import _SplitHeads, plain_split_heads

POISON = 777.0
# The package's `permute` is the function, the module is behind it.
plain = importlib.import_module("moe_graphs.kernels.permute")
loss = importlib.import_module("moe_graphs.kernels.cross_entropy")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def _scalars_of_numpy_2_4(monkeypatch):
    """Triton 3.6 calls int() on one-element arrays, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def test_work_list_examples():
    offsets = torch.tensor([5, 5, 8], dtype=torch.int32)
    rows = tiles.row_tiles(offsets, 8, 4)
    assert rows.count[0] == 3
    records = rows.records.view(-1, 8)[:3, :5].tolist()
    assert records == [[0, 0, 2, 0, 5], [0, 0, 2, 0, 5], [2, 2, 1, 5, 8]]
    experts = tiles.expert_order(offsets, skip_empty=False)
    assert experts.records.view(-1, 4).tolist() == [[0, 0, 5, -1], [2, 5, 8, -1], [1, 5, 5, -1]]
    assert experts.count[:3].tolist() == [3, 2, 0]
    assert tiles.expert_order(offsets, skip_empty=True).count[:3].tolist() == [2, 2, 0]


def test_work_list_example_of_a_split_expert():
    offsets = torch.tensor([0, 512, 2048], dtype=torch.int32)
    work = tiles.expert_order(offsets, skip_empty=False, limit=512)
    assert work.count[:3].tolist() == [5, 4, 1]
    assert work.records.view(-1, 4)[:5].tolist() == [
        [1, 0, 512, -1], [2, 512, 1024, 0], [2, 1024, 1536, 1], [2, 1536, 2048, 2], [0, 0, 0, -1],
    ]  # fmt: skip
    assert work.splits[:3].tolist() == [2, 0, 3]


def test_row_tiles_example_of_a_cut_round():
    offsets = torch.tensor([24], dtype=torch.int32)
    work = tiles.row_tiles(offsets, 24, 1, tiles.Tail(tiles_n=1, steps=64, programs=10))
    assert work.count.tolist() == [24, 20, 4, 32]


@pytest.mark.parametrize("sizes", [(300, 17, 0, 65), (129,), (0, 64, 1), (0, 0)])
@pytest.mark.parametrize(
    ("columns", "steps", "programs"), [(200, 40, 7), (64, 33, 13), (500, 20, 5), (200, 90, 132)]
)
def test_cut_rounds_cover_every_step_once_and_add_up(sizes, columns, steps, programs):
    """Partials that count their steps add up to all of them, on the rows of the cut tiles only."""
    block_m, block_n = 64, 128
    ends = torch.cumsum(torch.tensor(sizes), 0).to(torch.int32)
    rows, tail = int(ends[-1]) + 5, tiles.Tail(-(-columns // block_n), steps, programs)
    work = tiles.row_tiles(ends, rows, block_m, tail)
    _, whole, cut, length = work.count.tolist()
    total = sum(-(-n // block_m) for n in sizes) * tail.tiles_n
    assert (whole, cut) in ((total, 0), (total - total % programs, total % programs))
    assert not cut or steps - length >= tiles.LEAST_SAVED.value
    partials = torch.full((programs, block_m, block_n), POISON)
    seen = torch.zeros(max(cut, 1), steps)
    for program in range(cut * -(-steps // length)):
        part, tile = divmod(program, cut)
        end = min((part + 1) * length, steps)
        seen[tile, part * length : end] += 1
        partials[program] = float(end - part * length)
    assert not cut or bool((seen == 1).all())
    out = torch.full((rows, columns), POISON)
    tiles.add_tail_(out, partials, work, tail)
    done = torch.zeros_like(out, dtype=torch.bool)
    for tile in range(whole, whole + cut):
        _, first, tiles_m, start, end = work.records.view(-1, 8)[tile // tail.tiles_n, :5].tolist()
        m, n = place(tile - first * tail.tiles_n, tiles_m, tail.tiles_n)
        row = start + m * block_m
        done[row : min(row + block_m, end), n * block_n : (n + 1) * block_n] = True
    assert bool((out[done] == steps).all())
    assert bool((out[~done] == POISON).all())


def place(local: int, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    """`tiles.place` in Python."""
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
    assert tiles.split_limit(rows, tiles_of_expert, 132) == limit


@pytest.mark.parametrize("seed", range(6))
def test_split_experts_keep_every_row_and_fit_the_slots(seed):
    torch.manual_seed(seed)
    sizes = torch.randint(0, 40, (16,)) ** torch.randint(1, 4, (16,))
    rows, ends = int(sizes.sum()), torch.cumsum(sizes, 0).to(torch.int32)
    limit = max(512, -(-rows // tiles.MAX_SLOTS))
    work = tiles.expert_order(ends, skip_empty=False, limit=limit)
    records = work.records.view(-1, 4)[: int(work.count[0])].tolist()
    lengths = [end - start for _, start, end, _ in records]
    assert max(lengths) < 2 * limit
    assert sum(lengths) == rows
    slots = sorted(slot for *_, slot in records if slot >= 0)
    assert slots == list(range(len(slots)))
    assert len(slots) <= rows // limit <= tiles.MAX_SLOTS
    for e, first, parts, _ in work.splits.view(-1, 4)[: int(work.count[2])].tolist():
        own = sorted((slot, start, end) for x, start, end, slot in records if x == e)
        assert [slot for slot, _, _ in own] == list(range(first, first + parts))
        assert sum(end - start for _, start, end in own) == sizes[e]


@pytest.mark.parametrize("add", [False, True])
def test_add_partials(add):
    torch.manual_seed(0)
    partials, out = torch.randn(3, 40, 72), torch.randn(3, 40, 72)
    work = tiles.expert_order(
        torch.tensor([0, 512, 2048], dtype=torch.int32), skip_empty=add, limit=512
    )
    expected = out.clone()
    expected[2] = partials.sum(0) + (out[2] if add else 0)
    tiles.add_partials_(out, partials, work, add)
    torch.testing.assert_close(out, expected)


def test_zero_tail():
    rows = torch.full((7, 1030), POISON)
    tiles.zero_tail_(rows, torch.tensor([2, 5], dtype=torch.int32))
    assert bool((rows[:5] == POISON).all())
    assert bool((rows[5:] == 0).all())


@pytest.mark.parametrize("sizes", [(0, 70, 3, 130, 1), (64, 0, 0), (0, 0), (200,)])
def test_grouped_gemm(sizes):
    torch.manual_seed(0)
    ends = torch.cumsum(torch.tensor(sizes), 0).to(torch.int32)
    real, experts, K, N = int(ends[-1]), len(sizes), 72, 200
    x, dy = torch.randn(real + 9, K), torch.randn(real + 9, N)
    x[real:], dy[real:] = float("nan"), float("nan")
    w = torch.randn(experts, K, N)
    variant = gemm_launch.row_variant("pointer", N)
    work = tiles.row_tiles(ends, len(x), variant.block_m)
    expected = reference.grouped_gemm(x, w, ends)
    for transposed, weights in ((False, w), (True, w.transpose(1, 2).contiguous())):
        out = torch.full((len(x), N), POISON)
        gemm_launch.rows_launch(variant, x, weights, out, work, transposed, 3).run()
        torch.testing.assert_close(out[:real], expected[:real], rtol=1e-4, atol=1e-4)
        assert bool((out[real:] == POISON).all())
    for add in (False, True):
        out = torch.full((experts, K, N), 2.0 if add else POISON)
        order = tiles.expert_order(ends, skip_empty=add)
        variant = gemm_launch.weight_variant("pointer", N, torch.float32)
        gemm_launch.weights_launch(variant, x, dy, out, order, add, 3).run()
        expected = reference.grouped_gemm_wgrad(x, dy, ends) + (2.0 if add else 0.0)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(3, 2, 3), (100, 8, 64), (300, 4, 7), (40, 2, 1000), (0, 2, 4)],
)
def test_sort_pairs(tokens, top_k, experts):
    torch.manual_seed(0)
    ids = torch.randint(0, experts, (tokens, top_k))
    expected = route_rows(ids, experts)
    order, inverse, offsets = routing_triton.sort_pairs(ids, experts)
    assert torch.equal(order, expected.order_R)
    assert torch.equal(inverse, expected.inverse_R)
    assert torch.equal(offsets, expected.offsets_E)


def test_sort_pairs_example():
    ids = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order, inverse, offsets = routing_triton.sort_pairs(ids, 3)
    assert order.tolist() == [1, 2, 3, 5, 0, 4]
    assert inverse.tolist() == [4, 0, 1, 2, 5, 3]
    assert offsets.tolist() == [2, 4, 6]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(13, 3, 72), (5, 1, 2100)])
def test_permute(tokens, top_k, width, gaps):
    torch.manual_seed(0)
    inverse = torch.randperm(tokens * top_k).view(tokens, top_k)
    if gaps:
        inverse[2, 0], inverse[4, top_k - 1] = -1, -1
    flat = inverse.reshape(-1)
    order = torch.full((flat.numel(),), -1)
    order[flat[flat >= 0]] = torch.arange(flat.numel())[flat >= 0]
    row_order = RowOrder(order, flat, torch.tensor([flat.numel()], dtype=torch.int32), gaps)
    hidden, rows = torch.randn(tokens, width), torch.randn(len(flat), width, requires_grad=True)
    weights = torch.rand(tokens, top_k, requires_grad=True)
    moved = permute_triton.spread_rows(hidden, inverse, None, len(flat), gaps)
    assert torch.equal(moved, plain.permute(hidden, row_order))
    out = plain.unpermute(rows, row_order, weights)
    torch.testing.assert_close(permute_triton.collect_rows(rows, inverse, weights), out)
    out.backward(hidden)
    moved = permute_triton.spread_rows(hidden, inverse, weights, len(flat), gaps)
    torch.testing.assert_close(moved, rows.grad)
    torch.testing.assert_close(
        permute_triton.dot_rows(rows, inverse, hidden, torch.float32), weights.grad
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0), a maximum of NaNs
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "vocabulary"), [(7, 2500), (3, 300), (5, 1)])
def test_cross_entropy(rows, vocabulary, reduction):
    torch.manual_seed(0)
    targets = torch.randint(vocabulary, (rows,))
    targets[1] = -100
    # Rows that lie apart, with logits that must not be read behind them, and masked logits.
    padded = torch.cat([3 * torch.randn(rows, vocabulary), torch.full((rows, 4), POISON)], 1)
    logits = padded[:, :vocabulary].requires_grad_()
    logits.data[0, : vocabulary // 2] = -torch.inf
    targets[0] = vocabulary - 1
    losses, logsumexp = cross_entropy_triton.cross_entropy_rows(logits.detach(), targets, -100)
    expected = functional.cross_entropy(logits, targets, reduction=reduction)
    grad, count = torch.rand(expected.shape), None
    expected.backward(grad)
    found = losses
    if reduction == "mean":
        found, count = cross_entropy_triton.mean_of_counted(losses, targets, -100)
        assert count == rows - 1
    elif reduction == "sum":
        found = losses.sum()
    torch.testing.assert_close(found, expected.detach())
    found = cross_entropy_triton.cross_entropy_backward(
        logits.detach(), targets, logsumexp, grad, count, -100
    )
    torch.testing.assert_close(found, logits.grad)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo does that itself
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("compiled", [False, True])
def test_cross_entropy_differentiated(monkeypatch, reduction, compiled):
    """The function as a GPU has it, also under torch.compile, which may not break the graph."""
    monkeypatch.setattr(loss, "has_kernel", lambda x: True)
    ours = loss.cross_entropy
    if compiled:
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 20, requires_grad=True), torch.randint(20, (6,))
    found = ours(logits, targets, ignore_index=int(targets[2]), reduction=reduction)
    expected = functional.cross_entropy(
        logits, targets, ignore_index=int(targets[2]), reduction=reduction
    )
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad((3 * x).sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("target", [-1, 300, 1 << 40])
def test_cross_entropy_of_a_target_outside_the_vocabulary(target):
    """NaN for that row, and the others as they should be."""
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 300), torch.tensor([5, target, 299])
    losses, logsumexp = cross_entropy_triton.cross_entropy_rows(logits, targets, -100)
    found = cross_entropy_triton.cross_entropy_backward(
        logits, targets, logsumexp, torch.ones(()), None, -100
    )
    assert losses.isnan().tolist() == [False, True, False]
    assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0), a maximum of NaNs
@pytest.mark.parametrize("target", [0, 1])
def test_cross_entropy_of_infinite_logits(target):
    """Never a plausible number: a diverged model has to show."""
    for value in (torch.inf, torch.nan):
        logits = torch.tensor([[1.0, value, 2.0], [-torch.inf] * 3])
        targets = torch.full((2,), target)
        assert functional.cross_entropy(logits, targets, reduction="none").isnan().all()
        assert cross_entropy_triton.cross_entropy_rows(logits, targets, -100)[0].isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0), a maximum of NaNs
def test_cross_entropy_of_no_rows_that_count():
    logits, targets = torch.randn(3, 20), torch.full((3,), 7)
    losses, logsumexp = cross_entropy_triton.cross_entropy_rows(logits, targets, 7)
    assert losses.tolist() == [0, 0, 0]
    mean, count = cross_entropy_triton.mean_of_counted(losses, targets, 7)
    assert mean.isnan()
    assert count == 0
    found = cross_entropy_triton.cross_entropy_backward(
        logits, targets, logsumexp, torch.ones(()), count, 7
    )
    assert torch.equal(found, torch.zeros(3, 20))
    losses, logsumexp = cross_entropy_triton.cross_entropy_rows(logits[:0], targets[:0], 7)
    assert cross_entropy_triton.mean_of_counted(losses, targets[:0], 7)[0].isnan()


@pytest.mark.parametrize(("rows", "ffn"), [(13, 24), (3, 300)])
def test_swiglu(rows, ffn):
    torch.manual_seed(0)
    x, dh = torch.randn(rows, 2 * ffn, requires_grad=True), torch.randn(rows, ffn)
    expected = reference.swiglu(x)
    expected.backward(dh)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(swiglu_triton.swiglu_forward(x), expected)
        torch.testing.assert_close(swiglu_triton.swiglu_forward(x, ends)[:2], expected[:2])
        torch.testing.assert_close(swiglu_triton.swiglu_backward(x, dh), x.grad)
        torch.testing.assert_close(swiglu_triton.swiglu_backward(x, dh, ends)[:2], x.grad[:2])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "norm"),
    [(4, 2, 8, "none"), (4, 2, 8, "head"), (3, 3, 12, "full"), (5, 1, 1024, "head")],
)
def test_heads(monkeypatch, heads, kv_heads, size, norm):
    """Gradients come as attention returns them: [B, H, S, Q], transposed. Several tokens for a
    program, and for the last size several tiles for a token."""
    monkeypatch.setattr(heads_triton, "PROGRAMS", 4)
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, (heads + 2 * kv_heads) * size, requires_grad=True)
    angles = torch.randn(5, size // 2)
    inputs, weights = [qkv], (None, None)
    if norm != "none":
        spans = (1, 1) if norm == "head" else (heads, kv_heads)
        weights = tuple(torch.randn(span * size, requires_grad=True) for span in spans)
        inputs += weights
    given = (qkv, angles.cos(), angles.sin(), *weights, heads, kv_heads, 0.1)
    plain, found = plain_split_heads(*given), _SplitHeads.apply(*given)
    gradients = [torch.randn_like(x.transpose(1, 2)).transpose(1, 2) for x in plain]
    expected = torch.autograd.grad(plain, inputs, gradients)
    together = torch.autograd.grad(found, inputs, gradients, retain_graph=True)
    for got, want in zip((*found, *together), (*plain, *expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for leaf, want in zip(inputs, together, strict=True):
        (alone,) = torch.autograd.grad(found, leaf, gradients, retain_graph=True)
        assert torch.equal(alone, want)
