"""Cross entropy's kernels on a CUDA GPU, against fp64 and against torch's path in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe_graphs.kernels import cross_entropy
from replays import check_replays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def example(
    rows: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits, of rows that lie `padding` apart, and targets of which one in five does not count."""
    generator = torch.Generator(device="cuda").manual_seed(rows + vocabulary)
    shape = (rows, vocabulary + padding)
    logits = (3 * torch.randn(shape, device="cuda", generator=generator)).to(dtype)
    logits[:, vocabulary:] = 1e4
    targets = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
    targets[1::5] = -100
    return logits[:, :vocabulary], targets


def plain(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction=reduction)


def results(function: Callable[..., Tensor], logits: Tensor, *arguments) -> list[Tensor]:
    """The loss, and the gradient of the logits for a fixed gradient of the loss."""
    logits = logits.detach().requires_grad_()
    loss = function(logits, *arguments)
    generator = torch.Generator(device="cuda").manual_seed(3)
    grad = torch.rand(loss.shape, device="cuda", generator=generator)
    return [loss.detach(), *torch.autograd.grad(loss, logits, grad.to(loss.dtype))]


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocabulary", "padding"),
    [(1000, 256, 0), (300, 32768, 0), (60, 151936, 0), (100, 50257, 0), (33, 1000, 24), (7, 1, 0)],
)
def test_against_fp64(rows, vocabulary, padding, dtype, reduction):
    """Loss and gradient have at most twice the error of torch's fp32 path."""
    logits, targets = example(rows, vocabulary, dtype, padding)

    def exact(logits, targets):
        return functional.cross_entropy(logits, targets, reduction=reduction)

    ours = results(lambda x, t: cross_entropy(x, t, reduction=reduction), logits, targets)
    others = results(lambda x, t: plain(x, t, reduction), logits, targets)
    wanted = results(exact, logits.double(), targets)
    for found, other, want in zip(ours, others, wanted, strict=True):
        assert (found.dtype, found.shape) == (other.dtype, other.shape)
        if want.any():
            assert error(found, want) <= 2 * error(other, want) + 1e-7
        else:  # a vocabulary of one
            assert not found.any()


def test_columns_that_lie_apart_and_one_gradient_for_all():
    logits, targets = example(64, 500)
    expected = results(cross_entropy, logits, targets)
    assert all(
        map(torch.equal, expected, results(cross_entropy, logits.t().contiguous().t(), targets))
    )

    def summed(logits, targets):  # its gradient arrives with a stride of zero
        return cross_entropy(logits, targets, reduction="none").sum()

    sums = results(summed, logits, targets)
    expected = results(lambda x, t: cross_entropy(x, t, reduction="sum"), logits, targets)
    assert all(map(torch.equal, sums, expected))


@pytest.mark.parametrize("target", [-1, 500, 1 << 40])
def test_a_target_outside_the_vocabulary_is_nan(target):
    logits, targets = example(64, 500)
    expected = results(cross_entropy, logits, targets)[1]
    targets[2] = target
    loss, grad = results(cross_entropy, logits, targets)
    assert loss.isnan()
    assert grad[2].isnan().all()
    grad[2] = expected[2]
    assert torch.equal(grad, expected)


def test_no_rows_that_count():
    logits, targets = example(64, 500)
    loss, grad = results(cross_entropy, logits, targets.fill_(-100))
    assert loss.isnan()
    assert not grad.any()
    assert cross_entropy(logits[:0], targets[:0]).isnan()


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -torch.inf])
def test_logits_that_are_not_finite(value):
    """A masked logit has no probability; any other shows in the loss, as with torch."""
    logits, targets = example(64, 500)
    logits[3, 100:200], targets[3] = value, 300
    loss, grad = results(cross_entropy, logits, targets)
    assert loss.isnan() == (value != -torch.inf)
    assert grad[3].isnan().any() == (value != -torch.inf)
    if value == -torch.inf:
        assert not grad[3, 100:200].any()


def test_more_than_2_to_the_31_logits():
    rows, vocabulary = 8500, 262144
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (rows,), device="cuda")

    def summed(logits, targets):
        return cross_entropy(logits, targets, reduction="none")

    loss, grad = results(lambda x, t: summed(x, t).sum(), logits, targets)
    assert loss.isfinite()
    (last,) = results(lambda x, t: summed(x, t).sum(), logits[-20:], targets[-20:])[1:]
    assert torch.equal(grad[-20:], last)


def test_replays_bitwise_without_a_sync():
    logits, targets = example(777, 3000)
    logits.requires_grad_()

    def step():
        loss = cross_entropy(logits, targets)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    def change() -> None:
        logits.normal_()
        targets.random_(-1, 3000).masked_fill_(targets < 0, -100)

    check_replays(step, change)


def test_holds_nothing_beside_the_logits_and_leaves_them_alone():
    logits, targets = example(2048, 32768)
    before = logits.clone()
    logits.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    loss = cross_entropy(logits, targets)
    assert torch.cuda.max_memory_allocated() - held < 1 << 20
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.cuda.max_memory_allocated() - held < first.nbytes + (1 << 20)
    assert torch.equal(*torch.autograd.grad(loss, logits), first)
    assert torch.equal(logits, before)
