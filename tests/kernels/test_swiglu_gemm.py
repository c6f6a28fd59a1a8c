"""The experts' two GEMMs with the SwiGLU between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_graphs.kernels import grouped_gemm, swiglu, swiglu_gemms

BF16 = torch.bfloat16
ENDS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)


def operands(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (14, 8), (4, 8, 12), (4, 6, 8)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def test_autocast_casts_all_operands():
    x, w1, w2 = leaves = operands(torch.float32)
    with torch.autocast("cpu", BF16):
        out = swiglu_gemms(x, w1, w2, ENDS)
    rows = swiglu(grouped_gemm(x.to(BF16), w1.to(BF16), ENDS))
    plain = grouped_gemm(rows, w2.to(BF16), ENDS)
    assert out.dtype == BF16
    assert torch.equal(out[:12], plain[:12])
    kept = torch.arange(14)[:, None] < 12
    found, expected = (
        torch.autograd.grad(y.float().where(kept, 0).sum(), leaves) for y in (out, plain)
    )
    assert all(map(torch.equal, found[1:], expected[1:]))
    assert torch.equal(found[0][:12], expected[0][:12])


def test_shapes_that_do_not_fit():
    x, w1, w2 = operands(torch.float32)
    with pytest.raises(ValueError, match=r"w1 \[E, D, 2F\]"):
        swiglu_gemms(x, w1, w2[:, :4], ENDS)
    with pytest.raises(ValueError, match="one dtype"):
        swiglu_gemms(x, w1, w2.half(), ENDS)
