"""The plain Triton kernels around the GEMMs against plain torch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from moe_graphs.kernels import (
    LossRule,
    RowOrder,
    add_sums,
    linear_cross_entropy,
    permute,
    route_rows,
    unpermute,
)
from moe_graphs.kernels.cross_entropy import linear as cross_entropy_linear
from moe_graphs.kernels.cross_entropy import part as cross_entropy_part
from moe_graphs.kernels.cross_entropy import triton_kernels as cross_entropy_triton
from moe_graphs.kernels.document_attention import _DocumentAttention
from moe_graphs.kernels.document_attention import triton_kernels as document_triton
from moe_graphs.kernels.document_attention.reference import plain_attention
from moe_graphs.kernels.heads import (
    _SplitHeads,
    _SplitHeadsByRank,
    plain_heads_by_rank,
    plain_split_heads,
)
from moe_graphs.kernels.heads import triton_kernels as heads_triton
from moe_graphs.kernels.packed_weights import FORMATS
from moe_graphs.kernels.packed_weights import triton_kernels as packed_weights_triton
from moe_graphs.kernels.permute import triton_kernels as permute_triton
from moe_graphs.kernels.rms_norm import (
    _AddRMSNorm,
    _RMSNorm,
    plain_add_rms_norm,
    plain_rms_norm,
)
from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton
from moe_graphs.kernels.rotary import _ApplyRotary, plain_rotary
from moe_graphs.kernels.rotary import triton_kernels as rotary_triton
from moe_graphs.kernels.routed_experts import reference as routed_experts_reference
from moe_graphs.kernels.routed_experts import triton_kernels as routed_experts_triton
from moe_graphs.kernels.row_order import triton_kernels as row_order_triton
from moe_graphs.kernels.swiglu import NO_CLAMP, ClampedGate
from moe_graphs.kernels.swiglu import reference as swiglu_reference
from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton
from moe_graphs.kernels.transpose import triton_kernels as transpose_triton

POISON = 777.0
GATES = [
    NO_CLAMP,
    ClampedGate(1.7, 0.8),
    ClampedGate(1.0, 0.8, 0.0, by_turns=False),
    ClampedGate(1.7, 0.8, by_turns=False),
]

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned_memory")


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(3, 2, 3), (100, 8, 64), (300, 4, 7), (40, 2, 1000), (0, 2, 4)],
)
def test_sort_pairs(tokens, top_k, experts):
    torch.manual_seed(0)
    ids = torch.randint(0, experts, (tokens, top_k))
    expected = route_rows(ids, experts)
    order, inverse, offsets = row_order_triton.sort_pairs(ids, experts)
    assert torch.equal(order, expected.order_R)
    assert torch.equal(inverse, expected.inverse_R)
    assert torch.equal(offsets, expected.offsets_E)


def test_sort_pairs_example():
    ids = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order, inverse, offsets = row_order_triton.sort_pairs(ids, 3)
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
    assert torch.equal(moved, permute(hidden, row_order))
    out = unpermute(rows, row_order, weights)
    torch.testing.assert_close(permute_triton.collect_rows(rows, inverse, weights), out)
    out.backward(hidden)
    moved = permute_triton.spread_rows(hidden, inverse, weights, len(flat), gaps)
    torch.testing.assert_close(moved, rows.grad)
    torch.testing.assert_close(permute_triton.dot_rows(rows, inverse, hidden), weights.grad)


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
    in_place = logits.detach().contiguous()
    cross_entropy_triton.cross_entropy_backward_in_place(
        in_place, targets, logsumexp, grad, count, -100
    )
    assert torch.equal(in_place, found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0), exp of large numbers
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_linear_cross_entropy_by_a_rule(reduction, cap, monkeypatch):
    """The kernels' loss and gradients are those of the path without kernels."""
    torch.manual_seed(0)
    targets = torch.randint(300, (7,))
    targets[1] = -100
    hidden, weight = (torch.randn(n, 16, requires_grad=True) for n in (7, 300))
    rule = LossRule(logit_scale=0.7, logit_cap=cap, label_smoothing=0.1, z_loss=0.01)

    def results() -> list[torch.Tensor]:
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, rule=rule)
        grad = torch.linspace(0.3, 1, max(1, loss.numel())).view(loss.shape)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad)]

    expected = results()
    for module in (cross_entropy_linear, cross_entropy_part):
        monkeypatch.setattr(module, "has_kernel", lambda _: True)
    torch.testing.assert_close(results(), expected)


@pytest.mark.parametrize("shape", [(7, 500), (1,), (0, 3)])
def test_scaled(shape):
    x, scale = torch.randn(shape), torch.tensor(0.3)
    assert torch.equal(cross_entropy_triton.scaled(x, scale, torch.float64), (x * scale).double())


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
    expected = swiglu_reference.swiglu(x)
    expected.backward(dh)
    with torch.no_grad():
        torch.testing.assert_close(swiglu_triton.swiglu_forward(x, *NO_CLAMP), expected)
        for with_result in (True, False):
            dx, h = swiglu_triton.swiglu_backward(x, dh, with_result)
            torch.testing.assert_close(dx, x.grad)
            again = swiglu_triton.swiglu_forward(x, *NO_CLAMP) if with_result else dh[:0, 0]
            assert torch.equal(h, again)


@pytest.mark.parametrize("gate", GATES[1:])
def test_clamped_gate(gate):
    torch.manual_seed(0)
    x = torch.randn(13, 600)
    x[3, 0] = torch.nan
    found = swiglu_triton.swiglu_forward(x, *gate)
    torch.testing.assert_close(found, swiglu_reference.clamped_gate(x, *gate), equal_nan=True)
    assert found[3, 0].isnan()


@pytest.mark.parametrize("gate", GATES, ids=["swiglu", "gpt-oss", "DeepSeek V4", "MiniMax M3"])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "ffn"), [(7, 2, 24), (5, 1, 300)])
def test_weighted_swiglu(tokens, top_k, ffn, gaps, gate):
    """Rows without a pair lie between others and at the end, full of NaN; nothing reads them."""
    torch.manual_seed(0)
    inverse_TK = torch.randperm(tokens * top_k).view(tokens, top_k)
    if gaps:
        inverse_TK[2, 0], inverse_TK[4, top_k - 1] = -1, -1
    flat = inverse_TK.reshape(-1)
    order_R = torch.full((flat.numel() + (3 if gaps else 0),), -1)
    order_R[flat[flat >= 0]] = torch.arange(flat.numel())[flat >= 0]
    x, dh = torch.randn(len(order_R), 2 * ffn), torch.randn(len(order_R), ffn)
    x[order_R < 0], dh[order_R < 0] = torch.nan, torch.nan
    weights = torch.rand(tokens, top_k)
    plain = routed_experts_reference.weighted_swiglu(x, weights, order_R, *gate)
    found = routed_experts_triton.weighted_swiglu(x, weights, order_R, *gate)
    torch.testing.assert_close(found, plain)
    dx, dweights, h = routed_experts_reference.weighted_swiglu_backward(
        x, dh, weights, order_R, inverse_TK, gaps, *gate
    )
    of_x = torch.empty_like(x)
    alone = routed_experts_triton.weighted_swiglu_backward(
        x, dh, weights, order_R, of_x, gaps, False, *gate
    )
    given = (x, dh, weights, order_R, x)  # both results in the place of what they come from
    found = x, routed_experts_triton.weighted_swiglu_backward(*given, gaps, True, *gate), dh
    torch.testing.assert_close(found[1], dweights)
    assert found[1][inverse_TK < 0].eq(0).all()
    assert torch.equal(h, plain)
    for got, want in zip(found[::2], (dx, h), strict=True):
        torch.testing.assert_close(got, want)
        assert got[order_R < 0].eq(0).all()
    assert all(map(torch.equal, (of_x, alone), found))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "norm", "length"),
    [
        (4, 2, 8, "none", 3),
        (4, 2, 8, "head", 3),
        (3, 3, 12, "full", 3),
        (5, 1, 1024, "head", 2),
    ],
)
def test_heads(monkeypatch, heads, kv_heads, size, norm, length):
    """Gradients come as attention returns them: [B, H, S, Q], transposed.

    A program has several tokens, and for the last size a token has several tiles.
    """
    monkeypatch.setattr(heads_triton, "PROGRAMS", 3)
    monkeypatch.setitem(add_sums.TILE, "COLS", 128)  # fewer programs of the small kernel
    torch.manual_seed(0)
    qkv = torch.randn(2, length, (heads + 2 * kv_heads) * size, requires_grad=True)
    angles = torch.randn(length, size // 2)
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "size", "norm"),
    [
        (4, 2, 2, 8, "none"),
        (6, 3, 3, 12, "full"),
        (8, 4, 2, 1024, "head"),
    ],
)
def test_heads_by_rank(monkeypatch, heads, kv_heads, ranks, size, norm):
    """The rows that are sent, and gradients as they arrive.

    For the last size a token has several tiles, with heads of two ranks.
    """
    monkeypatch.setattr(heads_triton, "PROGRAMS", 3)
    monkeypatch.setitem(add_sums.TILE, "COLS", 128)
    torch.manual_seed(0)
    qkv = torch.randn(2, 3, (heads + 2 * kv_heads) * size, requires_grad=True)
    angles, inputs, weights = torch.randn(3, size // 2), [qkv], (None, None)
    if norm != "none":
        spans = (1, 1) if norm == "head" else (heads, kv_heads)
        weights = tuple(torch.randn(span * size, requires_grad=True) for span in spans)
        inputs += weights
    given = (qkv, angles.cos(), angles.sin(), *weights, heads, kv_heads)
    plain = plain_heads_by_rank(plain_split_heads(*given, 0.1), ranks)
    found = _SplitHeadsByRank.apply(*given, ranks, 0.1)
    gradient = torch.randn_like(plain.mT).mT
    expected = torch.autograd.grad(plain, inputs, gradient)
    together = torch.autograd.grad(found, inputs, gradient, retain_graph=True)
    for got, want in zip((found, *together), (plain, *expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (alone,) = torch.autograd.grad(found, qkv, gradient)
    assert torch.equal(alone, together[0])


@pytest.mark.parametrize(("M", "N"), [(1, 1), (130, 64), (64, 200), (0, 8)])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_transpose(M, N, is_rounded):
    """The product is rounded once, of a number that bf16 does not have.

    The interpreter cuts numbers off where a GPU rounds them.
    """
    dtypes = [torch.bfloat16, torch.float32]
    of_x, of_y = dtypes[::-1] if is_rounded else dtypes
    torch.manual_seed(0)
    x, found = torch.randn(M, N).to(of_x), torch.empty(N, M, dtype=of_y)
    transpose_triton.transpose(x, 0.7, found)
    expected = torch.ops.moe_graphs.transpose(x, 0.7, of_y)
    assert expected.is_contiguous()
    assert torch.equal(expected, (x.mT.float() * 0.7).to(of_y))
    torch.testing.assert_close(found, expected, rtol=2**-7 if is_rounded else 0.0, atol=0.0)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "columns"), [(4, 2, 8, 8), (3, 1, 12, 6)])
@pytest.mark.parametrize("sequences", [1, 2])
def test_rotary(monkeypatch, heads, kv_heads, size, columns, sequences):
    """Several tiles for a token; heads that stay in part; the tables' halves differ."""
    monkeypatch.setattr(rotary_triton, "TILE", 8)
    torch.manual_seed(0)
    query = torch.randn(2, 5, heads, size).transpose(1, 2).requires_grad_()
    key = torch.randn(2, kv_heads, 5, size, requires_grad=True)
    tables = [torch.randn(sequences, 5, columns) for _ in range(2)]
    plain, found = (f(query, key, *tables) for f in (plain_rotary, _ApplyRotary.apply))
    assert [x.stride() for x in found] == [query.stride(), key.stride()]
    gradients = [torch.randn_like(x.mT).mT for x in plain]  # heads do not lie in one piece
    expected, grads = (torch.autograd.grad(x, (query, key), gradients) for x in (plain, found))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: scores of rows that are not there
@pytest.mark.parametrize(
    ("heads", "sizes", "rows"),
    [
        ((4, 2), (16, 16), ([70], [1, 2, 30, 37])),
        ((2, 2), (24, 6), ([1] * 35,)),
        ((3, 1), (16, 20), ([33, 1, 16, 15],)),
        ((2, 1), (8, 8), ([1], [1])),
    ],
)
def test_document_attention(monkeypatch, heads, sizes, rows):
    """Documents within tiles and over several; the bounds' tiles end within documents."""
    monkeypatch.setattr(document_triton, "BOUNDS_TILE", 16)
    for name, tile in (("FORWARD", (32, 16)), ("OF_QUERIES", (16, 32)), ("OF_KEYS", (32, 16))):
        monkeypatch.setattr(document_triton, name, ((*tile, 1, 4),) * 4)
    torch.manual_seed(0)
    ids = torch.stack(
        [torch.arange(len(lengths)).mul(3).repeat_interleave(torch.tensor(lengths))
         for lengths in rows]
    )  # fmt: skip
    (B, S), (H, G), Q = ids.shape, heads, sizes[0]
    query = torch.randn(B, S, H, Q).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(B, G, S, size, requires_grad=True) for size in sizes)
    leaves = (query, key, value)
    plain = plain_attention(*leaves, ids, 0.0, 0.3)
    found = _DocumentAttention.apply(*leaves, ids, 0.3)
    assert found.transpose(1, 2).is_contiguous()
    gradient = torch.randn_like(plain.mT).mT
    expected, grads = (torch.autograd.grad(x, leaves, gradient) for x in (plain, found))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-5)


def test_bounds_of_documents(monkeypatch):
    monkeypatch.setattr(document_triton, "BOUNDS_TILE", 4)
    ids = torch.tensor([[7, 7, 7, 7, 7, 7, 7, 7, 7], [0, 1, 1, 1, 2, 2, 2, 2, 9]])
    begins, ends = document_triton.document_bounds(ids)
    assert begins.tolist() == [[0] * 9, [0, 1, 1, 1, 4, 4, 4, 4, 8]]
    assert ends.tolist() == [[9] * 9, [1, 4, 4, 4, 8, 8, 8, 8, 9]]
    wide = torch.stack([ids, ids + 1], 2)[:, :, 0]
    assert torch.equal(document_triton.document_bounds(wide)[0], begins)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: 1 / 0 in rows that are not there
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(7, 1), (200, 70), (3, 2048), (2, 2880)])
def test_rms_norm(monkeypatch, rows, size, zero_centred):
    """Rows lie apart, a program has several tiles, and the last tile has rows past the end.

    Those rows would divide by zero, since eps is zero.
    """
    monkeypatch.setattr(rms_norm_triton, "PROGRAMS", 2)
    monkeypatch.setitem(add_sums.TILE, "COLS", 128)
    torch.manual_seed(0)
    wide = torch.cat([torch.randn(rows, size), torch.full((rows, 4), POISON)], 1)
    x, weight = wide[:, :size].requires_grad_(), torch.randn(size, requires_grad=True)
    dy = torch.randn(size, rows).t()
    for eps in (0.1, 0.0):
        given = (x, weight, eps, zero_centred)
        plain, found = plain_rms_norm(*given), _RMSNorm.apply(*given)
        torch.testing.assert_close(found, plain)
        expected = torch.autograd.grad(plain, (x, weight), dy)
        together = torch.autograd.grad(found, (x, weight), dy, retain_graph=True)
        for leaf, got, want in zip((x, weight), together, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            (alone,) = torch.autograd.grad(found, leaf, dy, retain_graph=True)
            assert torch.equal(alone, got)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(7, 1), (100, 70), (3, 2048)])
def test_add_rms_norm(monkeypatch, rows, size, zero_centred):
    """Norms with an update and without; gradients together, one by one, and of one output alone."""
    monkeypatch.setattr(rms_norm_triton, "PROGRAMS", 2)
    monkeypatch.setitem(add_sums.TILE, "COLS", 128)
    torch.manual_seed(0)
    x, added = (torch.randn(size, rows).t().requires_grad_() for _ in range(2))
    weight, grads = torch.randn(size, requires_grad=True), torch.randn(size, rows, 2).unbind(2)
    grads = tuple(grad.t() for grad in grads)
    for update, leaves in ((added, (x, added, weight)), (None, (x, weight))):
        given = (x, weight, update, 0.1, zero_centred)
        plain, found = plain_add_rms_norm(*given), _AddRMSNorm.apply(*given)
        torch.testing.assert_close(found, plain)
        expected = torch.autograd.grad(plain, leaves, grads, retain_graph=True)
        together = torch.autograd.grad(found, leaves, grads, retain_graph=True)
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)
        for leaf, want in zip(leaves, together, strict=True):
            (alone,) = torch.autograd.grad(found, leaf, grads, retain_graph=True)
            assert torch.equal(alone, want)
        for output, other, grad in zip(found, plain, grads, strict=True):
            options = dict(retain_graph=True, allow_unused=True)
            expected = torch.autograd.grad(other, leaves, grad, **options)
            for got, want in zip(
                torch.autograd.grad(output, leaves, grad, **options), expected, strict=True
            ):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rms_norm_of_no_rows_and_frozen_weights():
    x, weight = torch.randn(0, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    found = _RMSNorm.apply(x, weight, 0.1, False)
    grad_x, grad_weight = torch.autograd.grad(found, (x, weight), torch.randn(0, 6))
    assert found.shape == grad_x.shape == (0, 6)
    assert torch.equal(grad_weight, torch.zeros(6))
    x = torch.randn(5, 6, requires_grad=True)
    (got,) = torch.autograd.grad(_RMSNorm.apply(x, weight.detach(), 0.1, False).sum(), x)
    (want,) = torch.autograd.grad(plain_rms_norm(x, weight.detach(), 0.1).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: zero times infinity
@pytest.mark.parametrize("name", FORMATS)
def test_weights_in_few_bits(name):
    """Every byte of codes, many scales, and a number of blocks that no program divides.

    Results are fp32, because the interpreter does not round to bf16 but cuts off.
    """
    shapes = {"fp8": (3, 128, 128), "nf4_double": (3, 5, 64 * 110)}  # two groups and a part of one
    kind, shape = FORMATS[name], shapes.get(name, (3, 5, 64))
    torch.manual_seed(0)
    stored = tuple(
        torch.empty(each, dtype=kind)
        for each, kind in zip(kind.packed_shapes(shape), kind.dtypes, strict=True)
    )
    codes, scales, *others = stored
    every = codes.view(torch.uint8).view(-1)
    every.copy_(torch.arange(every.numel()) % 256)
    if scales.dtype == torch.uint8:
        scales.copy_(torch.arange(scales.numel()).view_as(scales) * 9 % 255)
    else:
        scales.uniform_(0.01, 2)
    for each in others:
        each.uniform_(0.01, 2)
    out = torch.empty(shape)
    packed_weights_triton.unpack(kind, stored, out)
    torch.testing.assert_close(
        out, kind.dequantize(stored, torch.float32), rtol=0, atol=0, equal_nan=name == "fp8"
    )
