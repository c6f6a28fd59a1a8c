"""apply_rotary: what it refuses; on a GPU, the kernel against fp64."""

from __future__ import annotations

import pytest
import torch

from moe_graphs.kernels import apply_rotary
from moe_graphs.kernels.rotary import plain_rotary
from replays import check_replays

QUERY, KEY, TABLE = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 5, 6), torch.randn(1, 5, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((QUERY, KEY[:, :, :4], TABLE, TABLE), "differ in their heads only"),
        ((QUERY, KEY[..., :4], TABLE, TABLE), "differ in their heads only"),
        ((QUERY, KEY, TABLE[:, :4], TABLE[:, :4]), r"\[1 or 2, 5, an even number up to 6\]"),
        ((QUERY, KEY, TABLE[..., :5], TABLE[..., :5]), "even number"),
        ((QUERY, KEY, TABLE, TABLE[..., :4]), "even number"),
        ((QUERY, KEY, TABLE[0], TABLE[0]), r"\[1 or 2"),
        ((QUERY[..., :4], KEY[..., :4], TABLE, TABLE), "up to 4"),
        ((QUERY, KEY, TABLE, TABLE.clone().requires_grad_()), "no gradient"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        apply_rotary(*arguments)


def results(rotary, leaves, tables, gradients):
    leaves = [x.detach().requires_grad_() for x in leaves]
    found = rotary(*leaves, *tables)
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, gradients)]


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "S", "H", "G", "Q", "R", "tables"),
    [(4, 4096, 32, 4, 128, 128, 1), (2, 300, 12, 12, 96, 48, 2), (3, 7, 5, 1, 256, 64, 3)],
)
def test_against_fp64(B, S, H, G, Q, R, tables, dtype):
    torch.manual_seed(0)
    made = dict(device="cuda")
    angles = torch.rand(tables, S, R, **made) * 100
    tables = [x.to(dtype) for x in (angles.cos(), angles.sin())]
    leaves = [torch.randn(B, S, n, Q, **made).to(dtype).transpose(1, 2) for n in (H, G)]
    gradients = [torch.randn(B, n, S, Q, **made).to(dtype) for n in (H, G)]
    ours, again = (results(apply_rotary, leaves, tables, gradients) for _ in range(2))
    others = results(plain_rotary, leaves, tables, gradients)
    wide = [[x.double() for x in each] for each in (leaves, tables, gradients)]
    exact = results(plain_rotary, *wide)
    for got, twice, other, want in zip(ours, again, others, exact, strict=True):
        assert torch.equal(got, twice)
        error, theirs = ((x.double() - want).norm() / want.norm() for x in (got, other))
        assert error <= 2 * theirs + 1e-6
    assert ours[0].stride() == leaves[0].stride()


@pytest.mark.gpu
def test_replays_bitwise_on_other_numbers():
    leaves = [torch.randn(2, n, 50, 64, device="cuda").bfloat16() for n in (8, 2)]
    leaves = [x.requires_grad_() for x in leaves]
    tables = [torch.randn(1, 50, 64, device="cuda") for _ in range(2)]
    gradients = [torch.randn_like(x) for x in leaves]

    def step():
        found = apply_rotary(*leaves, *tables)
        return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, gradients)]

    check_replays(step, lambda: [x.normal_() for x in (*leaves, *gradients)])
