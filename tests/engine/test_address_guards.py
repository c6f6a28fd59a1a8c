"""Addresses and layouts of tensors: each change is noticed, before and after the check in C."""

import pytest
import torch

from moe_graphs.engine.guards.guards import AddressGuards


def swap_strides(tensor):
    tensor.data = tensor.data.t().contiguous().t()


CHANGES = {
    "requires_grad": lambda t: t.requires_grad_(False),
    "address": lambda t: t.set_(t.detach().clone()),
    "strides": swap_strides,
    "shape": lambda t: t.set_(t.untyped_storage(), 0, (2, 2), (4, 1)),
    "offset": lambda t: t.set_(t.untyped_storage(), 1, (3, 4), (4, 1)),
    "dtype": lambda t: setattr(t, "data", t.data.view(torch.float16)),
}


@pytest.mark.parametrize("checked_before", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_is_noticed(change, checked_before):
    tensors = [torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    tensors[1] = torch.nn.Parameter(torch.randn(17, dtype=torch.bfloat16)[:12].view(3, 4))
    where = AddressGuards(tensors)
    for _ in range(checked_before):
        assert where.is_same()
    CHANGES[change](tensors[1])
    assert not where.is_same()
    mismatch = where.mismatch(["a", "b", "c"])
    assert "'b'" in mismatch.message
    assert mismatch.reason == ("requires_grad" if change == "requires_grad" else "moved")


def test_modes_do_not_matter():
    where = AddressGuards([torch.randn(2, requires_grad=True)])
    assert where.is_same()
    with torch.no_grad():
        assert where.is_same()
    with torch.inference_mode():
        assert where.is_same()
    assert where.is_same()


def test_nothing_is_the_same():
    assert AddressGuards([]).is_same()
