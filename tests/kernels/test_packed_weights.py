"""Weights in few bits: what formats store, the scratch, and experts with and without LoRA.

Shapes: T tokens, D model, F ffn, E experts, K top-k, r rank.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kept_bytes import kept_bytes
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels import RowOrder, packed_weights, route_rows
from moe_graphs.kernels.packed_weights import (
    FORMATS,
    PackedWeight,
    Scratch,
    format_named,
    packed_gemm,
)
from moe_graphs.kernels.packed_weights.reference import DYNAMIC_VALUES, E2M1_VALUES, NF4_VALUES
from moe_graphs.kernels.routed_experts.lora import LoRA, routed_experts_with_lora

T, D, F, E, K, RANK = 17, 256, 128, 5, 2, 8
BF16, FP32 = torch.bfloat16, torch.float32
FORMAT_ERRORS = {"nf4": 0.1, "nf4_double": 0.1, "mxfp4": 0.13, "fp8": 0.03}
on_formats = pytest.mark.parametrize("name", FORMATS)


def weight(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(BF16)


@on_formats
def test_packed_weights_are_near_and_have_the_bytes_that_the_format_says(name):
    kind, given = FORMATS[name], weight(3, 128, 256)
    stored = kind.quantize(given)
    found = kind.dequantize(stored, BF16)
    assert kind.shape_of(stored[0]) == found.shape == given.shape
    assert (found - given).norm() / given.norm() < FORMAT_ERRORS[name]
    assert sum(each.nbytes for each in stored) == kind.nbytes(given.shape)
    of_meta = kind.quantize(given.to("meta"))
    for ours, meta in zip(stored, of_meta, strict=True):
        assert (ours.shape, ours.dtype) == (meta.shape, meta.dtype)


@on_formats
def test_what_came_from_a_format_is_kept_by_it(name):
    kind = FORMATS[name]
    given = kind.dequantize(kind.quantize(weight(2, 128, 256)), FP32)
    found = kind.dequantize(kind.quantize(given), FP32)
    if name == "fp8":  # whose largest number times its scale is rounded
        assert (found - given).abs().max() <= 2e-7 * given.abs().max()
    elif name == "nf4_double":  # whose scales have another mean
        assert (found - given).abs().max() <= 0.05 * given.abs().max()
    else:
        assert torch.equal(found, given)


@on_formats
def test_zeros_and_blocks_of_zeros_stay_zero(name):
    kind, given = FORMATS[name], weight(1, 128, 256)
    given[:, :, :128] = 0
    found = kind.dequantize(kind.quantize(given), BF16)
    assert not found[:, :, :128].any()
    assert found.isfinite().all()


def test_nf4_is_a_table_times_the_largest_number_of_64():
    kind, given = FORMATS["nf4"], weight(2, 4, 128)
    codes, absmax = kind.quantize(given)
    assert torch.equal(absmax, given.float().view(2, 4, 2, 64).abs().amax(-1))
    high, low = codes >> 4, codes & 15
    numbers = torch.tensor(NF4_VALUES)[torch.stack([high, low], -1).flatten(-2).int()]
    expected = (numbers.view(2, 4, 2, 64) * absmax[..., None]).view(2, 4, 128)
    assert torch.equal(kind.dequantize((codes, absmax), FP32), expected)
    apart = (expected - given.float()).view(2, 4, 2, 64).abs().amax(-1) / absmax
    assert apart.max() <= max(b - a for a, b in pairwise(NF4_VALUES)) / 2


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    for dtype in (BF16, FP32):
        given = weight(3, 64, 192).to(dtype)
        given[0, 0, :64] = 0
        packed, state = functional.quantize_4bit(given, blocksize=64, quant_type="nf4")
        codes, absmax = FORMATS["nf4"].quantize(given)
        assert torch.equal(codes.view(-1), packed.view(-1))
        assert torch.equal(absmax.view(-1), state.absmax)
        found = FORMATS["nf4"].dequantize((codes, absmax), dtype)
        assert torch.equal(found, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shape", [(1, 512, 128), (3, 96, 192)])
def test_double_nf4_is_that_of_bitsandbytes(shape):
    """One matrix has one offset there, and its last group may be a part of one."""
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    given = weight(*shape) * torch.rand(*shape[:2], 1)
    stored = FORMATS["nf4_double"].quantize(given)
    options = dict(blocksize=64, quant_type="nf4", compress_statistics=True)
    for number, matrix in enumerate(given):
        packed, state = functional.quantize_4bit(matrix, **options)
        nested = state.state2
        codes, absmax, largest, offset = (each[number] for each in stored)
        assert torch.equal(torch.tensor(DYNAMIC_VALUES), nested.code)
        assert torch.equal(codes.view(-1), packed.view(-1))
        torch.testing.assert_close(offset, state.offset.expand_as(offset), rtol=1e-6, atol=0)
        torch.testing.assert_close(largest, nested.absmax, rtol=1e-5, atol=0)
        apart = absmax.view(-1).int() - state.absmax.int()
        assert apart.abs().max() <= 1  # means that were added up otherwise
        assert apart.ne(0).float().mean() < 0.01
        theirs = packed.view_as(codes), state.absmax.view_as(absmax), nested.absmax
        theirs = tuple(each[None] for each in (*theirs, state.offset.expand_as(offset)))
        found = FORMATS["nf4_double"].dequantize(theirs, FP32)
        assert torch.equal(found[0], functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_mxfp4_is_that_of_transformers_for_every_byte_and_every_scale(dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="needs the extra hf")
    every = torch.arange(256, dtype=torch.uint8).expand(255, 256).contiguous().view(1, 255, 256)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    expected = mxfp4.convert_moe_packed_tensors(every.view(1, 255, 16, 16), scales, dtype=dtype)
    found = FORMATS["mxfp4"].dequantize((every, scales), dtype)
    assert torch.equal(found, expected.transpose(1, 2))


def test_mxfp4_takes_the_nearest_number_and_the_even_code_between_two():
    between = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0]
    nearest = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -4.0, 6.0]
    given = torch.zeros(1, 1, 32)
    given[0, 0, : len(between)] = torch.tensor(between)
    stored = FORMATS["mxfp4"].quantize(given)
    assert stored[1].item() == 127
    found = FORMATS["mxfp4"].dequantize(stored, FP32)
    assert found[0, 0, : len(nearest)].tolist() == nearest
    assert {*E2M1_VALUES} >= {*found.unique().tolist()}


def test_fp8_is_that_of_transformers():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="needs hf")
    if not hasattr(fp8, "Fp8Dequantize") or not hasattr(fp8.Fp8Quantize, "_quantize_one"):
        pytest.skip("this transformers quantises by other functions")

    class Quantizer:
        quantization_config = type("Config", (), dict(weight_block_size=(128, 128), scale_fmt=""))

    given = weight(2, 256, 128)
    expected = fp8.Fp8Quantize(Quantizer())._quantize_one("w.weight", given)
    codes, scales = FORMATS["fp8"].quantize(given)
    assert torch.equal(codes.float(), expected["w.weight"].float())
    assert torch.equal(scales, expected["w.weight_scale_inv"])
    for dtype in (BF16, FP32):
        theirs = fp8.Fp8Dequantize(Quantizer())._dequantize_one(codes, scales, dtype)
        assert torch.equal(FORMATS["fp8"].dequantize((codes, scales), dtype), theirs)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(
        ValueError, match="no format 'int3' .* known are nf4, nf4_double, mxfp4, fp8"
    ):
        format_named("int3")
    for name, shape in (("nf4", (2, 8, 96)), ("mxfp4", (2, 8, 48)), ("fp8", (2, 96, 128))):
        with pytest.raises(ValueError, match=rf"{name} packs blocks of .*\(2, .* does not divide"):
            FORMATS[name].quantize(weight(*shape))
    codes, scales = (packed := pack("nf4", weight(2, 8, 64), Scratch())).stored
    rows, ends = weight(3, 64), torch.tensor([1, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="nf4 has codes and scales of .*float32, got .*bfloat16"):
        packed_gemm(rows, replace(packed.mT, stored=(codes, scales.to(BF16))), ends)
    with pytest.raises(ValueError, match="do not fit codes"):
        replaced = replace(packed.mT, stored=(codes, scales[:1]))
        packed_gemm(rows, replaced, ends)


def pack(name: str, stored: Tensor, scratch: Scratch, transposed: bool = False) -> PackedWeight:
    return PackedWeight(FORMATS[name].quantize(stored), name, stored.dtype, transposed, scratch)


def test_the_scratch_has_room_for_the_largest_part_of_a_weight(monkeypatch):
    scratch, small, large = Scratch(), weight(2, 8, 64), weight(5, 4, 64)
    for each in (small, large):
        scratch.announce(each.shape, BF16)
    assert scratch.nbytes == large.nbytes
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 2 * large[0].nbytes)
    parts = Scratch()
    for each in (large, small):
        parts.announce(each.shape, BF16)
    assert parts.nbytes == 2 * large[0].nbytes  # of two experts, and of one with more rows


def test_outgrown_memory_keeps_its_address():
    scratch, cpu = Scratch(), torch.device("cpu")
    before, after = (scratch.at((n, 8, 64), BF16, cpu) for n in (1, 4))
    assert before.data_ptr() != after.data_ptr()
    before.fill_(3)
    after.fill_(7)
    assert before.eq(3).all()
    assert scratch.at((1, 8, 64), BF16, cpu).data_ptr() == after.data_ptr()


def test_copies_of_a_scratch_are_scratches_of_their_own():
    scratch = Scratch(64)
    for made in (copy.deepcopy(scratch), pickle.loads(pickle.dumps(scratch))):
        assert made.number != scratch.number
        assert made.nbytes == 64
    pair = copy.deepcopy([scratch, scratch])
    assert pair[0] is pair[1]


# ---- experts


def leaves(rank: int = RANK) -> list[Tensor]:
    """Tokens, routing weights, and the factors, which PEFT keeps in fp32."""
    torch.manual_seed(0)
    shapes = ((E, D, rank), (E, rank, 2 * F), (E, F, rank), (E, rank, D))
    factors = [0.1 * torch.randn(shape) for shape in shapes]
    found = [torch.randn(T, D).to(BF16), torch.rand(T, K), *factors]
    return [each.requires_grad_() for each in found]


def stored() -> list[Tensor]:
    """Weights as transformers has them: ``[E, 2F, D]`` and ``[E, D, F]``."""
    return [0.06 * weight(E, 2 * F, D), 0.06 * weight(E, D, F, seed=1)]


def results(leaves: list[Tensor], weights: list, beside: bool, **options: bool) -> list[Tensor]:
    tokens, routing, a1, b1, a2, b2 = leaves
    order: RowOrder = route_rows(torch.rand(T, E).argsort(1)[:, :K], E)
    factors = (LoRA(a1, b1), LoRA(a2, b2)) if beside else (None, None)
    out = routed_experts_with_lora(tokens, order, routing, *weights, *factors, **options)
    wanted = [each for each in leaves[: 6 if beside else 2] if each.requires_grad]
    grad = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(BF16)
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def both(name: str) -> tuple[list[PackedWeight], list[Tensor], Scratch]:
    """Experts in few bits, and their weights dequantised before."""
    scratch, kind = Scratch(), FORMATS[name]
    packed = [pack(name, each, scratch, transposed=True) for each in stored()]
    dense = [kind.dequantize(each.stored, BF16).mT for each in packed]
    return packed, dense, scratch


@on_formats
@pytest.mark.parametrize("at_once", [1, 2, E])
@pytest.mark.parametrize("beside", [False, True], ids=["frozen", "LoRA"])
def test_experts_are_those_of_dequantised_weights_bit_for_bit(name, beside, at_once, monkeypatch):
    """However many experts are dequantised at once."""
    monkeypatch.setattr(packed_weights, "MOST_BYTES", at_once * stored()[0][0].nbytes)
    packed, dense, scratch = both(name)
    scratch.announce(packed[0].shape, BF16)
    assert scratch.nbytes <= -(-E // -(-E // at_once)) * stored()[0][0].nbytes
    torch.manual_seed(2)
    found = results(leaves(), packed, beside)
    torch.manual_seed(2)
    expected = results(leaves(), dense, beside)
    assert len(found) == (7 if beside else 3)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("number", range(6))
def test_each_gradient_alone_is_the_one_of_all(number):
    packed, _, _ = both("nf4")
    every, given = leaves(), leaves()
    torch.manual_seed(2)
    expected = results(every, packed, True)[1 + number]
    for i, leaf in enumerate(given):
        leaf.requires_grad_(i == number)
    torch.manual_seed(2)
    assert torch.equal(results(given, packed, True)[1], expected)


@pytest.mark.parametrize("beside", [False, True], ids=["frozen", "LoRA"])
def test_nobody_reads_the_scratch_between_products(beside, monkeypatch):
    """Whatever lies there when a weight is asked for, and after each product, changes nothing."""
    packed, _, scratch = both("nf4")
    torch.manual_seed(2)
    expected = results(leaves(), packed, beside)
    product = packed_weights.rows_of_experts

    def poisoning(*args):
        product(*args)
        scratch.at((scratch.nbytes,), torch.uint8, args[0].device).fill_(255)

    monkeypatch.setattr(packed_weights, "rows_of_experts", poisoning)
    torch.manual_seed(2)
    assert all(map(torch.equal, results(leaves(), packed, beside), expected))


def test_split_backward_has_the_same_bits():
    packed, _, _ = both("nf4")
    given, order = leaves(), route_rows(torch.rand(T, E).argsort(1)[:, :K], E)
    lora1, lora2 = LoRA(*given[2:4]), LoRA(*given[4:6])

    def out() -> Tensor:
        return routed_experts_with_lora(given[0], order, given[1], *packed, lora1, lora2)

    grad = torch.randn(T, D).to(BF16)
    whole = torch.autograd.grad(out(), given, grad)
    split = SplitBackward([out()], given[:2], given[2:])
    found = [*split.input_gradients([grad]), *split.parameter_gradients()]
    assert all(map(torch.equal, found, whole))


def test_no_weight_is_kept_for_the_backward():
    packed, _, scratch = both("nf4")
    scratch.announce(packed[0].shape, BF16)
    given, order = leaves(), route_rows(torch.rand(T, E).argsort(1)[:, :K], E)
    kept = kept_bytes(
        lambda: routed_experts_with_lora(given[0], order, given[1], *packed, None, None)
    )
    indices, weights = 2 * 8 * T * K + 4 * E, 4 * T * K
    assert kept <= 2 * T * K * 2 * F + weights + indices
    assert kept < scratch.nbytes


def test_autocast_dequantises_to_its_dtype():
    packed, dense, _ = both("nf4")
    given, order = leaves(), route_rows(torch.rand(T, E).argsort(1)[:, :K], E)
    with torch.autocast("cpu", BF16):
        wide = [each.to(FP32) for each in packed]
        out = routed_experts_with_lora(given[0].float(), order, given[1], *wide, None, None)
    expected = routed_experts_with_lora(given[0], order, given[1], *dense, None, None)
    assert torch.equal(out, expected)


def test_operands_that_do_not_fit_are_errors():
    packed, _, _ = both("nf4")
    given, order = leaves(), route_rows(torch.rand(T, E).argsort(1)[:, :K], E)
    with pytest.raises(ValueError, match=r"wants w1 \[E, D, 2F\] and w2 \[E, F, D\]"):
        routed_experts_with_lora(given[0], order, given[1], *packed[::-1], None, None)
    with pytest.raises(ValueError, match="one dtype"):
        routed_experts_with_lora(given[0].float(), order, given[1], *packed, None, None)
    short = LoRA(given[2], given[3][:, :4])
    with pytest.raises(ValueError, match=r"LoRA beside w1 \(5, 256, 256\)"):
        routed_experts_with_lora(given[0], order, given[1], *packed, short, None)
