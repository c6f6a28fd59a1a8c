"""The kernels behind rms_norm and add_rms_norm on a CUDA GPU: errors, gradients, graphs.

Everything is held against fp64; an error may be at most twice that of torch's op in the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from moe_graphs.kernels.rms_norm import (
    LONGEST,
    add_rms_norm,
    plain_add_rms_norm,
    plain_rms_norm,
    rms_norm,
)
from replays import check_replays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
EPS = 1e-6
SHAPES = [
    (4, 4096, 2048),
    (4096, 32, 128),
    (77, 3, 64),
    (3, 77),
    (5, 2, 16),
    (1000, 2880),
    (500, 7168),
    (400, LONGEST),
    (300, LONGEST + 8),
]


def operands(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor]:
    """Operands x and weights, to which gradients flow, and y's gradient."""
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    weight = (torch.rand(shape[-1], device="cuda") - 0.4).to(weight_dtype)
    return [x.requires_grad_(), weight.requires_grad_(), dy]


def results(norm, x: Tensor, weight: Tensor, dy: Tensor, zero_centred: bool) -> list[Tensor]:
    y = norm(x, weight, EPS, zero_centred=zero_centred)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_fp64(shape, dtype, zero_centred):
    for weight_dtype in {dtype, torch.float32}:
        given = operands(shape, dtype, weight_dtype)
        ours = results(rms_norm, *given, zero_centred)
        again = results(rms_norm, *given, zero_centred)
        others = results(plain_rms_norm, *given, zero_centred)
        exact = results(plain_rms_norm, *(x.double() for x in given), zero_centred)
        for got, twice, other, want in zip(ours, again, others, exact, strict=True):
            assert (got.dtype, got.shape) == (other.dtype, other.shape)
            assert torch.equal(got, twice)
            assert error(got, want) <= 2 * error(other, want) + 1e-6


def test_gradients_asked_for_one_by_one():
    """Zero-bubble schedules and frozen parameters ask so."""
    x, weight, dy = operands((777, 2048), torch.bfloat16, torch.float32)
    y = rms_norm(x, weight, EPS)
    together = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    for leaf, want in zip((x, weight), together, strict=True):
        (got,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        assert torch.equal(got, want)


def test_strided_rows_and_gradients():
    """A row that is part of a wider one; heads before tokens; the gradient of a sum."""
    x, weight, _ = operands((4, 50, 6, 128), torch.bfloat16, torch.float32)
    x = x.detach()
    wide = torch.cat([x, x], -1)[..., :128]
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for leaf in (x.clone(), wide, turned):
        leaf.requires_grad_()
        y = rms_norm(leaf, weight, EPS)
        found.append([y, *torch.autograd.grad(y.sum(), (leaf, weight))])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_no_rows():
    x, weight, dy = operands((0, 2048), torch.bfloat16, torch.float32)
    y, grad_x, grad_weight = results(rms_norm, x, weight, dy, False)
    assert y.shape == grad_x.shape == (0, 2048)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


@pytest.mark.parametrize("shape", [(777, 2048), (777, 12, 64)])
def test_replays_bitwise_on_other_numbers(shape):
    x, weight, dy = operands(shape, torch.bfloat16, torch.float32)
    check_replays(lambda: results(rms_norm, x, weight, dy, True), x.normal_)


def test_under_autocast_it_keeps_the_dtype():
    """The op of torch would make it fp32."""
    x, weight, dy = operands((8, 64), torch.bfloat16, torch.float32)
    for norm in (rms_norm, plain_rms_norm):
        with torch.autocast("cuda", torch.bfloat16):
            y, grad_x, grad_weight = results(norm, x, weight, dy, False)
        assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (x.dtype, x.dtype, weight.dtype)


Sums = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]


def fused(x: Tensor, update: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, update, weight, EPS)


def apart(x: Tensor, update: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    added = x if update is None else x + update
    return added, rms_norm(added, weight, EPS)


def of_torch(x: Tensor, update: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    return plain_add_rms_norm(x, weight, update, EPS)


def sum_results(function: Sums, tensors: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list:
    """The sum, its norm, and the gradients of what was given."""
    outputs = function(*tensors)
    leaves = [x for x in tensors if x is not None]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def sum_operands(shape, dtype, update_dtype, weight_dtype):
    x, weight, grad = operands(shape, dtype, weight_dtype)
    update, other = torch.randn_like(x).to(update_dtype).requires_grad_(), torch.randn_like(grad)
    return (x, update, weight), (grad, other)


NARROW, WIDE = (torch.bfloat16,) * 2, (torch.float32,) * 2
MIXED = (torch.float32, torch.bfloat16)  # the residual is wider under autocast


@pytest.mark.parametrize("dtypes", [NARROW, (torch.float16,) * 2, WIDE, MIXED], ids=str)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != (4096, 32, 128)], ids=str)
def test_sum_and_norm_against_fp64(shape, dtypes):
    for weight_dtype in {dtypes[0], torch.float32}:
        given, grads = sum_operands(shape, *dtypes, weight_dtype)
        for tensors in (given, (given[0], None, given[2])):
            ours, again = (sum_results(fused, tensors, grads) for _ in range(2))
            others = sum_results(of_torch, tensors, grads)
            doubles = [x if x is None else x.double() for x in tensors]
            exact = sum_results(of_torch, doubles, [grad.double() for grad in grads])
            for got, twice, other, want in zip(ours, again, others, exact, strict=True):
                assert (got.dtype, got.shape) == (other.dtype, other.shape)
                assert torch.equal(got, twice)
                assert error(got, want) <= 2 * error(other, want) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 4096, 2048), (77, 3, 64), (3, 77), (500, 7168)], ids=str)
def test_sum_and_norm_are_bit_for_bit_two_kernels(shape, dtype):
    given, grads = sum_operands(shape, dtype, dtype, torch.float32)
    for tensors in (given, (given[0], None, given[2])):
        runs = (sum_results(function, tensors, grads) for function in (fused, apart))
        assert all(map(torch.equal, *runs))


def test_sum_and_norm_replay_bitwise_on_other_numbers():
    given, grads = sum_operands((777, 2048), torch.bfloat16, torch.bfloat16, torch.bfloat16)
    check_replays(lambda: sum_results(fused, given, grads), given[1].normal_)


def test_gradients_of_one_output_of_a_sum_and_of_one_leaf():
    """A layer that is cut behind the sum; zero-bubble schedules."""
    given, grads = sum_operands((777, 2048), torch.bfloat16, torch.bfloat16, torch.float32)
    outputs = fused(*given)
    together = torch.autograd.grad(outputs, given, grads, retain_graph=True)
    for leaf, want in zip(given, together, strict=True):
        (got,) = torch.autograd.grad(outputs, leaf, grads, retain_graph=True)
        assert torch.equal(got, want)
    for output, other, grad in zip(outputs, apart(*given), grads, strict=True):
        options = dict(retain_graph=True, allow_unused=True)
        runs = (torch.autograd.grad(each, given, grad, **options) for each in (output, other))
        for got, want in zip(*runs, strict=True):
            assert got is want is None or torch.equal(got, want)
