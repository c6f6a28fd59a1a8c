"""Cross entropy on the CPU: torch's own, to the bit, and the arguments it refuses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from moe_graphs.kernels import cross_entropy


def example(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(12, 50, generator=generator)).to(dtype)
    targets = torch.randint(50, (12,), generator=generator)
    targets[::4] = -100
    return logits, targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_torchs_bit_for_bit(dtype, reduction):
    def results(function):
        logits, targets = example(dtype)
        loss = function(logits.requires_grad_(), targets)
        loss.backward(torch.ones_like(loss))
        return loss, logits.grad

    ours = results(lambda logits, targets: cross_entropy(logits, targets, reduction=reduction))
    plain = results(
        lambda x, targets: functional.cross_entropy(x.float(), targets, reduction=reduction)
    )
    assert all(map(torch.equal, ours, plain))


def test_other_ignored_targets_and_none_that_count():
    logits, targets = example()
    assert torch.equal(
        cross_entropy(logits, targets.clamp(min=0), ignore_index=0),
        functional.cross_entropy(logits, targets.clamp(min=0), ignore_index=0),
    )
    assert cross_entropy(logits, torch.full_like(targets, -100)).isnan()


def test_fp64_stays_fp64():
    logits, targets = example(torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, targets, reduction="none"), logits.requires_grad_()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, t: (x.view(3, 4, 50), t.view(3, 4)), "flatten"),
        (lambda x, t: (x, t[:-1]), "targets"),
        (lambda x, t: (x, t.int()), "int64"),
        (lambda x, t: (x.long(), t), "floating-point"),
        (lambda x, t: (x, t.to("meta")), "one device"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(*change(*example()))


def test_unknown_reduction():
    with pytest.raises(ValueError, match=r"'max'.*mean, sum, none"):
        cross_entropy(*example(), reduction="max")


@pytest.mark.parametrize(("reduction", "shape"), [("mean", ()), ("sum", ()), ("none", (64,))])
def test_fake_cuda_tensors_see_static_shapes(reduction, shape):
    with FakeTensorMode(), torch.no_grad():
        logits = torch.empty(64, 100, device="cuda", dtype=torch.bfloat16)
        targets = torch.zeros(64, dtype=torch.int64, device="cuda")
        loss = cross_entropy(logits, targets, reduction=reduction)
    assert (loss.shape, loss.dtype, loss.device.type) == (shape, torch.float32, "cuda")
