"""rms_norm on the CPU: the formula, gradients in their dtypes, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from moe_graphs.kernels.rms_norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("zero_centred", [False, True])
def test_formula_and_gradients(zero_centred):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def norm(x, weight):
        return rms_norm(x, weight, 0.1, zero_centred=zero_centred)

    want = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * (weight + zero_centred)
    torch.testing.assert_close(norm(x, weight), want)
    assert torch.autograd.gradcheck(norm, (x, weight))


def test_keeps_dtypes():
    """Wide weights of narrow rows, as under autocast."""
    x, weight = torch.randn(3, 8).bfloat16().requires_grad_(), torch.ones(8, requires_grad=True)
    y = rms_norm(x, weight, 0.1)
    grad_x, grad_weight = torch.autograd.grad(y.sum(), (x, weight))
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (x.dtype, x.dtype, weight.dtype)


@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 bfloat16", "float32 bfloat16"])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_a_sum_and_its_norm_are_those_of_two_ops(zero_centred, dtypes):
    """Bit for bit, gradients of both outputs too; under autocast an update is narrower."""
    torch.manual_seed(0)
    dtype, update_dtype = (getattr(torch, name) for name in dtypes.split())
    x = torch.randn(3, 8, dtype=dtype, requires_grad=True)
    update = torch.randn(3, 8, dtype=update_dtype, requires_grad=True)
    weight, grads = torch.randn(8, requires_grad=True), torch.randn(2, 3, 8, dtype=dtype)
    for given in (update, None):
        added = x if given is None else x + given
        expected = added, rms_norm(added, weight, 0.1, zero_centred=zero_centred)
        found = add_rms_norm(x, given, weight, 0.1, zero_centred=zero_centred)
        leaves = (x, weight) if given is None else (x, update, weight)
        runs = [
            (*out, *torch.autograd.grad(out, leaves, tuple(grads))) for out in (found, expected)
        ]
        assert all(map(torch.equal, *runs))


def test_an_update_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 8\), got \(8,\)"):
        add_rms_norm(torch.randn(3, 8), torch.randn(8), torch.ones(8), 0.1)


@pytest.mark.parametrize(
    ("shape", "weights"), [((3, 9), (8,)), ((3, 8), (1,)), ((), (8,)), ((), ()), ((4, 8), (4, 8))]
)
def test_refuses(shape, weights):
    with pytest.raises(ValueError, match=r"weights \[N\], got"):
        rms_norm(torch.randn(shape), torch.ones(weights), 0.1)
