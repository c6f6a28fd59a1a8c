"""Grouped GEMMs with SwiGLU in their epilogue, without a GPU: the op, and its kernels compiled."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from compiled import check, launch_compiler
from moe_graphs.kernels import grouped_gemm, swiglu, swiglu_gemms, swiglu_triton
from moe_graphs.kernels.gemm import launch_swiglu, tiles, variants
from moe_graphs.kernels.gemm.swiglu_gemm import _SwiGLUGemm

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from swiglu_gemm import BACKWARD, FORWARD

BF16, FP16 = torch.bfloat16, torch.float16
ENDS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)
# What the loops of a consumer and the producer carry, as in test_compiled_kernels. The tile loop:
# slot, phase (ping-pong: passed), first, tiles_m, start, end; backward also the tiles done.
CARRY = {"split": ([6, 2, 3], [7, 2]), "pingpong": ([5, 3], [7, 2])}


@pytest.fixture
def compiled(monkeypatch):
    return launch_compiler(monkeypatch)


def operands(dtype: torch.dtype = torch.float64, transposed: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(14, 8), torch.randn(4, 8, 12), torch.randn(4, 6, 8)
    if transposed:
        w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    return [t.to(dtype).requires_grad_() for t in (x, w1, w2)]


def separate(x: Tensor, w1: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    rows = swiglu(grouped_gemm(x, w1, ends, zero_tail=False))
    return grouped_gemm(rows, w2, ends, zero_tail=False)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
def test_bitwise_the_three_ops(dtype, transposed):
    """All gradients together, and of each subset of inputs that are not frozen."""
    leaves = operands(dtype, transposed)
    out, plain = swiglu_gemms(*leaves, ENDS), separate(*leaves, ENDS)
    grad = torch.randn(out.shape).to(dtype)
    expected = torch.autograd.grad(plain, leaves, grad)
    found = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(out, plain)
    assert all(map(torch.equal, found, expected))
    assert [g.stride() for g in found[1:]] == [w.stride() for w in leaves[1:]]
    for kept in range(3):
        one = [t if i == kept else t.detach() for i, t in enumerate(leaves)]
        (alone,) = torch.autograd.grad(swiglu_gemms(*one, ENDS), one[kept], grad)
        assert torch.equal(alone, expected[kept])


def test_inputs_first_and_weights_later():
    """As zero-bubble schedules run a backward; each part computes only what is its own."""
    leaves = operands()
    out = swiglu_gemms(*leaves, ENDS)
    grad = torch.randn(out.shape, dtype=torch.float64)
    expected = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for leaf, want in zip(leaves, expected, strict=True):
        (got,) = torch.autograd.grad(out, leaf, grad, retain_graph=True)
        assert torch.equal(got, want)


def test_no_gradient_of_the_product_is_made_up():
    x, w1, _ = operands()
    gate_up, product = _SwiGLUGemm.apply(x, w1, ENDS)
    assert not product.requires_grad
    assert torch.autograd.grad(gate_up.sum(), x)[0].shape == x.shape


def test_opcheck_and_shapes_that_do_not_fit():
    x, w1, w2 = (t.detach() for t in operands())
    ops = torch.ops.moe_graphs
    torch.library.opcheck(ops.swiglu_gemm_forward.default, (x, w1, ENDS))
    gate_up, product = ops.swiglu_gemm_forward(x, w1, ENDS)
    assert torch.equal(product, swiglu(gate_up))
    torch.library.opcheck(ops.swiglu_gemm_dgrad.default, (x, w2, gate_up, ENDS))
    with pytest.raises(ValueError, match=r"w1 \[E, D, 2F\]"):
        swiglu_gemms(x, w1, w2[:, :4], ENDS)
    with pytest.raises(ValueError, match="one dtype"):
        swiglu_gemms(x, w1, w2.float(), ENDS)


def test_autocast_casts_all_operands():
    leaves = operands(torch.float32)
    with torch.autocast("cpu", BF16):
        out, plain = swiglu_gemms(*leaves, ENDS), separate(*leaves, ENDS)
    assert out.dtype == BF16
    found, expected = (torch.autograd.grad(y.float().sum(), leaves) for y in (out, plain))
    assert all(map(torch.equal, (out, *found), (plain, *expected)))


def test_choice(monkeypatch):
    """Which tile, and where two kernels are the better choice."""
    monkeypatch.setattr(variants, "sm_count", lambda device: 132)
    hopper = {"hopper": None, "ampere": "pointer", "blackwell": "tma"}
    monkeypatch.setattr(variants, "without_wgmma", hopper.__getitem__)

    def tile(device: str, *shape: int, back: bool) -> tuple[str, int, int] | None:
        v = variants.choose_swiglu(device, *shape, back=back)  # type: ignore[arg-type]
        return v and (v.name, v.block_m, v.block_n)

    assert tile("hopper", 65536, 128, 2048, 768, back=False) is None  # off
    with variants.fused_swiglu():
        assert tile("hopper", 4096, 128, 2048, 768, back=False) == ("pingpong", 64, 128)
        assert tile("hopper", 4096, 128, 2048, 768, back=True) is None  # a few rows for each expert
        assert tile("hopper", 16384, 8, 4096, 14336, back=False) == ("pingpong", 128, 128)
        assert tile("hopper", 16384, 8, 4096, 14336, back=True) == ("pingpong", 64, 256)
        for back in (False, True):
            assert tile("hopper", 65536, 128, 2048, 768, back=back) == ("pingpong", 64, 256)
            assert tile("hopper", 65536, 128, 2048, 772, back=back) is None  # not whole 16 bytes
            assert tile("hopper", 2048, 8, 4096, 1024, back=back) is None  # cut along K instead
            for other in ("ampere", "blackwell"):
                assert tile(other, 65536, 128, 2048, 768, back=back) is None


def work() -> tiles.WorkList:
    return tiles.WorkList(torch.zeros(64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))


def forward_launch(variant, transposed=False, ffn=768, dtype=BF16):
    x, gate_up = torch.empty(4096, 512, dtype=dtype), torch.empty(4096, 2 * ffn, dtype=dtype)
    w = torch.empty((8, 2 * ffn, 512) if transposed else (8, 512, 2 * ffn), dtype=dtype)
    product = torch.empty(4096, ffn, dtype=dtype)
    return launch_swiglu.swiglu_launch(variant, x, w, gate_up, product, work(), transposed, 132)


def backward_launch(variant, transposed=False, ffn=768, dtype=BF16):
    dy, gate_up = torch.empty(4096, 512, dtype=dtype), torch.empty(4096, 2 * ffn, dtype=dtype)
    w = torch.empty((8, ffn, 512) if transposed else (8, 512, ffn), dtype=dtype)
    return launch_swiglu.swiglu_back_launch(
        variant, dy, w, gate_up, torch.empty_like(gate_up), work(), transposed, 132
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", [forward_launch, backward_launch])
def test_compiled(compiled, make, transposed):
    """Every tile that is chosen or timed; in fp16 and of transposed weights those chosen."""
    back = make is backward_launch
    chosen = [
        variants.swiglu_variant(name, columns, back=back)
        for columns in (1024, 384)
        for name in ("split", "pingpong", *(() if back else ("tall", "narrow")))
    ]
    candidates = BACKWARD if back else FORWARD
    assert set(chosen) <= set(candidates)
    for variant in chosen if transposed else candidates:
        (kernel,) = compiled(make(variant, transposed).run)
        check(kernel, wgmma=True)
        consumer, producer = CARRY[variant.name]
        assert kernel.carried == [consumer[0] + back, *consumer[1:]] * 2 + producer, variant
    if transposed:
        (kernel,) = compiled(make(chosen[0], transposed, ffn=712, dtype=FP16).run)
        check(kernel, wgmma=True)


def rounded_values(ptx: str) -> Counter:
    """What is computed of each number that is stored, as an expression of what was loaded."""
    found = {m[2]: (m[1], m[3]) for m in re.finditer(r"^\s*(\S*f32\S*)\s+(%\w+), (.*);", ptx, re.M)}

    def value(register: str) -> str:
        if register not in found:
            return register if register.startswith("0f") else "x"
        name, arguments = found[register]
        if name in ("cvt.rn.bf16.f32", "cvt.f32.bf16"):  # a stored number, read again
            return "x"
        return f"{name}({', '.join(value(a.strip()) for a in arguments.split(','))})"

    stored = re.findall(r"cvt\.rn\.bf16x2\.f32\s+%\w+, (%\w+), (%\w+);", ptx)
    return Counter(value(register) for pair in stored for register in pair)


def test_the_arithmetic_is_that_of_the_separate_kernels(compiled):
    """The same instructions on the same numbers, fused multiply-adds included: the same bits."""
    rows, grads = torch.empty(64, 1536, dtype=BF16), torch.empty(64, 768, dtype=BF16)
    for separate_kernel, make, candidates in (
        (lambda: swiglu_triton.swiglu_forward(rows), forward_launch, FORWARD),
        (lambda: swiglu_triton.swiglu_backward(rows, grads), backward_launch, BACKWARD),
    ):
        (plain,) = compiled(separate_kernel)
        expected = set(rounded_values(plain.ptx))
        assert any("ex2" in value for value in expected)
        for variant in candidates:
            (kernel,) = compiled(make(variant).run)
            assert set(rounded_values(kernel.ptx)) == expected, variant
