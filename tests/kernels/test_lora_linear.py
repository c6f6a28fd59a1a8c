"""A frozen linear layer with LoRA as one op, beside the products one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moe_graphs.kernels.lora_linear import lora_linear

SCALE = 2.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def operands(device, dtype, rank=8, rows=(3, 37), inputs=64, outputs=96):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, like=torch.float32):
        return torch.randn(*shape, generator=generator).to(device, like)

    x = drawn(*rows, inputs, like=dtype).requires_grad_()
    weight, bias = drawn(outputs, inputs, like=dtype) / 8, drawn(outputs, like=dtype)
    a, b = drawn(rank, inputs) / 8, drawn(outputs, rank) / 4
    return x, weight, bias, a.requires_grad_(), b.requires_grad_()


def by_peft(x, weight, bias, a, b):
    low = functional.linear(functional.linear(x.to(a.dtype), a), b)
    return (functional.linear(x, weight, bias) + low * SCALE).to(x.dtype)


def by_one_op(x, weight, bias, a, b):
    return lora_linear(x, weight, bias, a, b, SCALE)


def results(run, given, incoming):
    given = [each.detach().requires_grad_(each.requires_grad) for each in given]
    y = run(*given)
    trained = [each for each in given if each.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, trained, incoming.to(y.dtype))]


@pytest.mark.parametrize("rank", [1, 8, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_in_fp64_it_equals_the_products(device, rank):
    given = [each.double() for each in operands(device, torch.float32, rank)]
    given = [each.detach().requires_grad_(i not in (1, 2)) for i, each in enumerate(given)]
    incoming = torch.randn(3, 37, 96, device=device)
    for found, expected in zip(
        results(by_one_op, given, incoming), results(by_peft, given, incoming), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [4, 16, 128])
@pytest.mark.parametrize("device", DEVICES)
def test_in_bf16_its_error_is_at_most_twice_that_of_fp32_factors(device, rank):
    given = operands(device, torch.bfloat16, rank, rows=(512,), inputs=256, outputs=384)
    incoming = torch.randn(512, 384, device=device).bfloat16()
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in given]
    oracle = results(by_peft, exact, incoming)
    ours, theirs = results(by_one_op, given, incoming), results(by_peft, given, incoming)
    materialised = results(in_bf16, given, incoming)
    for name, true, *found in zip(
        ("y", "x", "a", "b"), oracle, ours, theirs, materialised, strict=True
    ):
        one, fp32, summed = ((each.double() - true).norm() / true.norm() for each in found)
        assert one <= 2 * max(fp32, summed), name
    assert [each.dtype for each in ours[2:]] == [torch.float32] * 2


def in_bf16(x, weight, bias, a, b):
    """The sum of the weights, rounded, as merged adapters are."""
    return functional.linear(x, (weight.float() + SCALE * b @ a).to(x.dtype), bias)


def test_rows_that_were_dropped_are_multiplied_by_the_factors_alone():
    x, weight, bias, a, b = operands("cpu", torch.float32)
    dropped = (x * 2).detach().requires_grad_()
    y = lora_linear(x, weight, bias, a, b, SCALE, dropped)
    expected = functional.linear(x, weight, bias) + SCALE * (dropped @ a.t()) @ b.t()
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y.square().sum(), (x, dropped, a, b))
    wanted = torch.autograd.grad(expected.square().sum(), (x, dropped, a, b))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_gradient_is_made_that_nobody_wants():
    x, weight, _, a, b = operands("cpu", torch.float32)
    y = lora_linear(x.detach(), weight, None, a, b, SCALE)
    da, db = torch.autograd.grad(y.sum(), (a, b))
    assert da.shape == a.shape
    assert db.shape == b.shape
    assert not lora_linear(x.detach(), weight, None, a.detach(), b.detach(), 1.0).requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_rows_and_weight(device):
    x, weight, bias, a, b = operands(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        y = lora_linear(x, weight, bias, a, b, SCALE)
        found = torch.autograd.grad(y.float().sum(), (x, a, b))
    assert y.dtype == torch.bfloat16
    assert [each.dtype for each in found] == [torch.float32] * 3
    assert torch.isfinite(torch.cat([each.flatten() for each in found])).all()


def test_what_does_not_fit_is_an_error():
    x, weight, bias, a, b = operands("cpu", torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        lora_linear(x, weight, bias, a[:, :-1], b, SCALE)
    with pytest.raises(ValueError, match="the weight is"):
        lora_linear(x.double(), weight, bias, a, b, SCALE)
    with pytest.raises(ValueError, match="frozen"):
        lora_linear(x, weight.requires_grad_(), bias, a, b, SCALE)
