"""Weights in few bits on a GPU: the kernels' bits, poisoned scratch, replays, and memory.

Shapes: T tokens, D model, F ffn, E experts, K top-k.
"""

from __future__ import annotations

import pytest
import torch
from test_packed_weights import pack, weight
from torch import Tensor

from kernel_check import error, group_ends, group_sizes
from moe_graphs.kernels import RowOrder, packed_weights, route_rows
from moe_graphs.kernels.gemm import (
    add_beside,
    grouped_gemm_forward,
    grouped_gemm_with_lora,
    rows_of_experts,
)
from moe_graphs.kernels.packed_weights import FORMATS, PackedWeight, Scratch, packed_gemm
from moe_graphs.kernels.routed_experts.lora import LoRA, routed_experts_with_lora
from replays import check_replays

triton_kernels = pytest.importorskip(
    "moe_graphs.kernels.packed_weights.triton_kernels", reason="needs triton"
)
pytestmark = pytest.mark.gpu
T, D, F, E, K, RANK = 512, 512, 256, 8, 2, 16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = ((3, 128, 128), (5, 384, 1408), (128, 1536, 2048))
on_formats = pytest.mark.parametrize("name", FORMATS)


def every_code(name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Codes and scales of all values, but for NaN and infinity."""
    kind = FORMATS[name]
    stored = tuple(
        torch.empty(each, dtype=dtype, device="cuda")
        for each, dtype in zip(kind.packed_shapes(shape), kind.dtypes, strict=True)
    )
    codes, scales, *others = stored
    numbers = torch.arange(codes.numel(), device="cuda") * 7 + codes.numel() // 3
    numbers = numbers.remainder(256)
    if name == "fp8":
        numbers = torch.where(numbers % 128 == 127, 0, numbers)
    codes.view(torch.uint8).view(-1).copy_(numbers)
    if scales.dtype == torch.uint8:
        scales.view(-1).copy_(torch.arange(scales.numel(), device="cuda") * 11 % 252)
    else:
        scales.uniform_(1e-4, 3)
    for each in others:
        each.uniform_(1e-4, 3)
    return stored


@on_formats
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_kernel_has_the_bits_of_the_plain_path(name, shape, dtype):
    stored = every_code(name, shape)
    out = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    triton_kernels.unpack(FORMATS[name], stored, out)
    for *stored_MN, found_MN in zip(*stored, out, strict=True):
        expected = FORMATS[name].dequantize([each[None] for each in stored_MN], dtype)
        assert torch.equal(found_MN, expected[0])


@on_formats
def test_quantising_on_a_gpu_is_that_of_the_cpu(name):
    given = weight(3, 256, 256)
    ours, of_cpu = FORMATS[name].quantize(given.cuda()), FORMATS[name].quantize(given)
    if name == "nf4_double":  # whose means are added up otherwise
        assert (ours[1].cpu().int() - of_cpu[1].int()).abs().max() <= 1
    else:
        torch.testing.assert_close(ours[1].cpu(), of_cpu[1], rtol=1e-6, atol=0)
    apart = ours[0].cpu().view(torch.uint8) != of_cpu[0].view(torch.uint8)
    assert apart.float().mean() < 1e-3  # divisions may round otherwise


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((E, D, RANK), (E, RANK, 2 * F), (E, F, RANK), (E, RANK, D))
    factors = [0.05 * torch.randn(shape, device="cuda") for shape in shapes]
    given = [torch.randn(T, D, device="cuda").to(BF16), torch.rand(T, K, device="cuda"), *factors]
    return [each.requires_grad_() for each in given]


def experts(name: str) -> tuple[list[PackedWeight], list[Tensor], Scratch]:
    """Experts in few bits, and their weights dequantised before."""
    scratch, kind = Scratch(), FORMATS[name]
    given = [weight(E, 2 * F, D).cuda() * 0.05, weight(E, D, F, seed=1).cuda() * 0.05]
    packed = [pack(name, each, scratch, transposed=True) for each in given]
    dense = [kind.dequantize(each.stored, BF16).mT for each in packed]
    return packed, dense, scratch


def order() -> RowOrder:
    torch.manual_seed(3)
    return route_rows(torch.rand(T, E, device="cuda").argsort(1)[:, :K], E)


def results(given: list[Tensor], weights: list, rows: RowOrder, beside: bool) -> list[Tensor]:
    lora = (LoRA(*given[2:4]), LoRA(*given[4:])) if beside else (None, None)
    out = routed_experts_with_lora(given[0], rows, given[1], *weights, *lora)
    grad = torch.linspace(-1, 1, T * D, device="cuda").view(T, D).to(BF16)
    wanted = given if beside else given[:2]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


@on_formats
@pytest.mark.parametrize("at_once", [3, E])
@pytest.mark.parametrize("beside", [False, True], ids=["frozen", "LoRA"])
def test_experts_are_those_of_dequantised_weights_bit_for_bit(name, beside, at_once, monkeypatch):
    monkeypatch.setattr(packed_weights, "MOST_BYTES", at_once * 4 * F * D)
    packed, dense, _ = experts(name)
    found, expected = (results(leaves(), each, order(), beside) for each in (packed, dense))
    assert all(map(torch.equal, found, expected))
    assert all(error(a, b) == 0 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("rows", [1500, 30000])  # ping-pong, and cooperative
def test_products_of_some_experts_have_the_bits_of_all(rows, beside, transposed):
    torch.manual_seed(0)
    offsets = group_ends(group_sizes("zipf", rows, 16, 1))
    shapes = ((rows, D), (rows, RANK), (16, D, 2 * F), (16, RANK, 2 * F))
    x, low, w, b = (torch.randn(shape, device="cuda").to(BF16) for shape in shapes)
    if transposed:
        w, b = (each.mT.contiguous().mT for each in (w, b))
    out = torch.full((rows, 2 * F), float("nan"), device="cuda", dtype=BF16)
    for first in range(0, 16, 3):
        part = slice(first, min(first + 3, 16))
        rows_of_experts(x, w[part], offsets, first, out, (low, b) if beside else None)
    found = add_beside(out, offsets, (low, b) if beside else None)
    if beside:
        assert torch.equal(found, grouped_gemm_with_lora(x, w, low, b, offsets))
    else:
        assert torch.equal(found, grouped_gemm_forward(x, w, offsets, False))


@on_formats
def test_replays_over_a_poisoned_scratch_have_the_bits_of_eager(name, monkeypatch):
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 12 * F * D)  # three experts
    packed, _, scratch = experts(name)
    given, rows = leaves(), order()

    def change() -> None:
        for each in given:
            each.normal_()
        scratch.at((scratch.nbytes,), torch.uint8, given[0].device).fill_(255)

    check_replays(lambda: results(given, packed, rows, True), change)


def test_streams_wait_for_each_other():
    packed, dense, _ = experts("nf4")
    rows, given, streams = order(), leaves(), [torch.cuda.Stream() for _ in range(2)]
    expected = results(given, dense, rows, True)
    torch.cuda.synchronize()
    found = []
    for number in range(8):
        with torch.cuda.stream(streams[number % 2]):
            found.append(results(given, packed, rows, True))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for each in found for pair in zip(each, expected, strict=True))


def test_layers_share_one_memory():
    """Eight layers take the memory of packed weights and of one scratch."""
    scratch, kind = Scratch(), FORMATS["nf4"]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layers = [
        [pack("nf4", weight(*shape).cuda(), scratch, transposed=True) for shape in SHAPES[1:2] * 2]
        for _ in range(8)
    ]
    rows, ends = weight(5, 1408).cuda(), torch.arange(1, 6, dtype=torch.int32, device="cuda")
    for layer in layers:
        for packed in layer:
            packed_gemm(rows, packed, ends)
    bytes_packed = 16 * kind.nbytes(SHAPES[1])
    taken = torch.cuda.memory_allocated() - before
    assert taken <= bytes_packed + scratch.nbytes + (1 << 20), taken
