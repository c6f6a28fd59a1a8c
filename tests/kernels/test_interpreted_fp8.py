"""Kernels that write FP8 against the plain path, bit for bit, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moe_graphs.kernels import fp8, route_rows
from moe_graphs.kernels.fp8 import reference
from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton
from moe_graphs.kernels.permute import triton_kernels as permute_triton
from moe_graphs.kernels.routed_experts import triton_kernels as routed_experts_triton
from moe_graphs.kernels.swiglu import NO_CLAMP
from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton

BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = [
    pytest.mark.usefixtures("interpreted", "poisoned_memory"),
    pytest.mark.parametrize("powers", [False, True]),
]


def assert_bits(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        got, want = (
            x.contiguous().view(torch.uint8 if x.element_size() == 1 else FP32) for x in (got, want)
        )
        assert torch.equal(got, want)


def rows_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different size, of which one is zero and one has a block of zeros."""
    torch.manual_seed(0)
    x = torch.randn(rows, columns) * torch.logspace(-30, 20, rows).unsqueeze(1)
    x[0], x[1, :128] = 0, 0
    return x.to(dtype)


@pytest.mark.parametrize(("rows", "dtype"), [(1, FP32), (37, BF16), (16, FP32)])
def test_rows(rows, dtype, powers):
    x = rows_of(max(rows, 2), 384, dtype)[:rows]
    assert_bits(fp8_triton.fp8_quantize(x, powers), reference.quantized_rows(x, powers))


# Rows of the experts, and those of all; the last ones belong to none.
SIZES = [([130, 0, 5, 128, 0], 270), ([3], 3), ([0, 256], 256)]


def some_order(sizes: list[int], rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of rows, their inverse for 2 pairs of a token, ends, and which columns are written."""
    torch.manual_seed(0)
    tokens = -(-rows // 2)
    order_R = torch.randperm(2 * tokens)[:rows].int()
    inverse = torch.full((2 * tokens,), -1, dtype=torch.int32)
    inverse[order_R.long()] = torch.arange(rows, dtype=torch.int32)
    ends = torch.tensor(sizes).cumsum(0).int()
    return order_R, inverse.view(-1, 2), ends, sum(-(-size // 128) for size in sizes)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("sizes", "rows"), SIZES)
def test_columns(sizes, rows, is_sorted, spread, powers):
    """Scales of rows are powers of two whatever `powers` says."""
    order_R, inverse, ends, blocks = some_order(sizes, rows)
    order_R[1] = -1
    order_R[int(ends[-1]) :] = 1 << 30  # memory that nobody wrote
    source = rows_of(rows if is_sorted else len(inverse), 256, BF16)
    codes, scales = reference.quantized_rows(source, True)
    given = codes, scales, None if is_sorted else order_R, ends, rows, 1 if is_sorted else 2
    found = fp8._columns_like(codes, scales, ends, rows, spread and not is_sorted)
    fp8_triton.columns(*given, spread and not is_sorted, found)
    expected = fp8.fp8_columns(*given, spread and not is_sorted)
    live = int(ends[-1])
    got, want = ((of[0][:, : 128 * blocks], of[1][:, :blocks]) for of in (found, expected))
    assert_bits(got, want)
    assert_bits((found[2][:live], found[3][:, :live]), (expected[2][:live], expected[3][:, :live]))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_weights(flip, dtype, powers):
    w = rows_of(2 * 256, 384, dtype).view(2, 256, 384)
    expected = reference.quantized_weights(w, flip, powers)
    both = fp8_triton.fp8_weights(w, True, True, powers)
    alone = fp8_triton.fp8_weights(w, not flip, flip, powers)
    own, others = slice(2, 4) if flip else slice(2), slice(2) if flip else slice(2, 4)
    assert_bits(both[own], expected)
    assert_bits(alone[own], expected)
    assert not any(x.numel() for x in alone[others])


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "gaps"), [(9, 384, False), (5, 2176, True)])
def test_spread(tokens, hidden, gaps, with_rows, powers):
    x, order = rows_of(tokens, hidden, BF16), route_rows(torch.rand(tokens, 4).topk(3).indices, 4)
    inverse = order.inverse_R.view(tokens, 3).clone()
    if gaps:
        inverse[2, 1] = -1
    given = x, inverse, 3 * tokens, gaps
    codes, scales, rows = fp8_triton.fp8_spread(*given, with_rows, powers)
    expected = permute_triton.spread_rows(x, inverse, None, 3 * tokens, gaps)
    if with_rows:
        assert torch.equal(rows, expected)
    live = inverse.view(-1)[inverse.view(-1) >= 0].long()
    want = reference.quantized_rows(expected, powers)
    assert_bits((codes[live], scales[:, live]), (want[0][live], want[1][:, live]))
    dead = torch.ones(3 * tokens, dtype=torch.bool).index_fill(0, live, False)
    assert not codes[dead].float().any()
    assert not scales[:, dead].any()


@pytest.mark.parametrize(("rows", "ffn", "dtype"), [(37, 256, BF16), (3, 128, FP32)])
def test_swiglu(rows, ffn, dtype, powers):
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * ffn).to(dtype)
    h = swiglu_triton.swiglu_forward(x, *NO_CLAMP)
    assert_bits(fp8_triton.fp8_swiglu(x, powers), reference.quantized_rows(h, powers))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("tokens", "ffn", "dtype"), [(9, 256, BF16), (3, 128, FP32)])
def test_weighted_swiglu_backward(tokens, ffn, dtype, gaps, powers):
    torch.manual_seed(0)
    order, weights = route_rows(torch.rand(tokens, 4).topk(3).indices, 4), torch.rand(tokens, 3)
    x = torch.randn(3 * tokens, 2 * ffn).to(dtype)
    dh, order_R = torch.randn(3 * tokens, ffn).to(dtype), order.order_R.clone()
    if gaps:
        order_R[4] = -1
        x[4], dh[4] = float("nan"), float("nan")
    given = x, dh, weights, order_R, gaps
    *found, codes, scales, _, _ = fp8_triton.fp8_weighted_swiglu_backward(*given, "values", powers)
    of_x, result = torch.empty_like(x), dh.clone()
    of_op = x, result, weights, order_R, of_x, gaps, True, *NO_CLAMP
    expected = of_x, routed_experts_triton.weighted_swiglu_backward(*of_op), result
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    torch.testing.assert_close(found[1], expected[1])  # added up in other parts
    assert_bits((codes, scales), reference.quantized_rows(expected[0], powers))
    for result in ("none", "codes"):
        alone = fp8_triton.fp8_weighted_swiglu_backward(*given, result, powers)
        assert not alone[0].numel()
        assert not alone[2].numel()
        assert torch.equal(alone[1], found[1])
        assert_bits(alone[3:5], (codes, scales))
    assert_bits(alone[5:], reference.quantized_rows(expected[2], powers))
