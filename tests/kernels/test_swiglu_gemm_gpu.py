"""Grouped GEMMs with SwiGLU in their epilogue on a GPU: the bits of the separate kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_graphs.kernels import grouped_gemm, swiglu, swiglu_gemms, swiglu_reference
from moe_graphs.kernels.availability import has_triton
from moe_graphs.kernels.gemm.variants import fused_swiglu

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kernel_check as check
from replays import check_replays
from swiglu_gemm import BACKWARD, FORWARD

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
TILES = [("forward", n) for n in range(len(FORWARD))] + [
    ("backward", n) for n in range(len(BACKWARD))
]


@pytest.fixture(autouse=True)
def fused():
    with fused_swiglu():
        yield


@pytest.fixture
def _on_hopper():
    if not has_triton() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("waits for a Hopper GPU with Triton")


@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize(("op", "number"), TILES)
def test_tile(op, number):
    """Poisoned outputs, twelve routings, both layouts of weights, both dtypes, fp32 as judge."""
    command = [sys.executable, str(ROOT / "tests/support/fused_swiglu.py"), op, str(number)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stdout.endswith("ok\n"), done.stdout[-200:] + done.stderr[-2000:]


def operands(rows: int, experts: int, D: int, F: int, transposed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (rows, D), (experts, D, 2 * F), (experts, F, D)
    x, *weights = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    weights = [w * w.shape[1] ** -0.5 for w in weights]
    if transposed:
        weights = [w.mT.contiguous().mT for w in weights]
    return [x, *weights]


def results(run, inputs: list[Tensor], ends: Tensor) -> list[Tensor]:
    """Output and gradients; of rows, those that belong to an expert."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves, ends)
    generator = torch.Generator(device="cuda").manual_seed(3)
    grad = torch.randn(out.shape, device="cuda", generator=generator).bfloat16().to(out.dtype)
    out, dx, *rest = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return [out[: ends[-1]], dx[: ends[-1]], *rest]


def plain(x: Tensor, w1: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    parts, start = [], 0
    for e, end in enumerate(ends.tolist()):
        parts.append(swiglu_reference.swiglu(x[start:end] @ w1[e]) @ w2[e])
        start = end
    return torch.cat([*parts, x.new_zeros(len(x) - start, x.shape[1])])


def three_ops(x: Tensor, w1: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    rows = swiglu(grouped_gemm(x, w1, ends, zero_tail=False))
    return grouped_gemm(rows, w2, ends, zero_tail=False)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "D", "F"), [(9000, 16, 512, 768), (3000, 64, 768, 384), (900, 5, 72, 200)]
)
def test_experts(rows, experts, D, F, transposed):
    """Fused, not fused and three ops: the same bits; against fp32 at most twice torch's error."""
    inputs = operands(rows + 33, experts, D, F, transposed)
    ends = check.group_ends(check.group_sizes("empty", rows, experts, 1))
    found = results(swiglu_gemms, inputs, ends)
    expected = results(three_ops, inputs, ends)
    with fused_swiglu(False):
        apart = results(swiglu_gemms, inputs, ends)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # every fresh tensor is full of NaN
    try:
        again = results(swiglu_gemms, inputs, ends)
    finally:
        torch.use_deterministic_algorithms(False)
    exact = results(plain, [x.float() for x in inputs], ends)
    others = results(plain, inputs, ends)
    for got, twice, want, other, wide, torchs in zip(
        found, again, expected, apart, exact, others, strict=True
    ):
        assert torch.equal(got, twice)
        assert torch.equal(got, want)
        assert torch.equal(got, other)
        assert check.error(got, wide) <= 2 * check.error(torchs.float(), wide) + 1e-6


@pytest.mark.parametrize("rows", [2048, 16384])
def test_replays_with_other_routings_bitwise(rows):
    leaves = [x.requires_grad_() for x in operands(rows, 16, 512, 384, False)]
    ends = check.group_ends(check.group_sizes("uniform", rows, 16, 1))
    grad = torch.randn_like(leaves[0])

    def step() -> list[Tensor]:
        out = swiglu_gemms(*leaves, ends)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def change() -> None:
        routing = ("zipf", "empty", "one")[torch.randint(3, ()).item()]
        ends.copy_(check.group_ends(check.group_sizes(routing, rows, 16, 9)))

    check_replays(step, change)
