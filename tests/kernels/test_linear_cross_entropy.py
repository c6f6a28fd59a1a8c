"""Cross entropy of a projection, chunk by chunk, against the plain one with whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from grids import grid
from moe_graphs.kernels import LossRule, linear_cross_entropy
from replays import check_replays
from training_runs import DEVICES

ROWS, WIDTH, VOCABULARY = 700, 64, 500
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def example(device: str, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    weight = 0.3 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (rows,), generator=generator)
    targets[::5] = -100
    operands = [each.to(device, dtype).requires_grad_() for each in (hidden, weight)]
    return [*operands, targets.to(device)]


RULES = {
    "scale": LossRule(logit_scale=0.3),
    "cap": LossRule(logit_cap=3.0),
    "label smoothing": LossRule(label_smoothing=0.2),
    "z-loss": LossRule(z_loss=0.01),
    "all": LossRule(logit_scale=0.7, logit_cap=2.5, label_smoothing=0.1, z_loss=0.01),
}


def plain(hidden, weight, targets, reduction="mean", rule=None, **_):
    """The loss with whole logits, as other libraries write it."""
    rule = rule or LossRule()
    logits = functional.linear(hidden, weight)
    logits = rule.logit_scale * (logits if logits.dtype == torch.float64 else logits.float())
    if rule.logit_cap is not None:
        logits = rule.logit_cap * torch.tanh(logits / rule.logit_cap)
    losses = functional.cross_entropy(
        logits, targets, reduction="none", label_smoothing=rule.label_smoothing
    )
    squares = logits.logsumexp(-1).square().masked_fill(targets == -100, 0)
    losses = losses + rule.z_loss * squares
    if reduction == "none":
        return losses
    return losses.sum() / ((targets != -100).sum() if reduction == "mean" else 1)


def results(function, hidden, weight, targets, **options) -> list[Tensor]:
    loss = function(hidden, weight, targets, **options)
    grad = torch.linspace(0.3, 1, max(1, loss.numel()), device=loss.device).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad.to(loss.dtype))]


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def chunks_of(rows: int, dtype: torch.dtype) -> dict[str, int]:
    return {"chunk_bytes": rows * VOCABULARY * dtype.itemsize}


@pytest.mark.parametrize("rows", [128, 256, ROWS])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(device, dtype, reduction, rows):
    check_against_fp64(device, dtype, reduction, rows, LossRule())


def check_against_fp64(device, dtype, reduction, rows, rule):
    """Loss and gradients have at most twice the error of the path with whole logits."""
    given = example(device, dtype)
    exact = [each.detach().double().requires_grad_() for each in given[:2]]
    wanted = results(plain, *exact, given[2], reduction=reduction, rule=rule)
    others = results(plain, *given, reduction=reduction, rule=rule)
    options = {"reduction": reduction, "rule": rule, **chunks_of(rows, dtype)}
    for found, other, want in zip(
        results(linear_cross_entropy, *given, **options), others, wanted, strict=True
    ):
        assert (found.dtype, found.shape) == (other.dtype, other.shape)
        assert error(found, want) <= 2 * error(other, want) + 1e-6


@pytest.mark.parametrize(
    ("rule", "dtype", "reduction", "rows"),
    grid(list(RULES), DTYPES, ["mean", "none"], [256, ROWS]),
)
def test_rules_against_fp64(device, rule, dtype, reduction, rows):
    check_against_fp64(device, dtype, reduction, rows, RULES[rule])


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_scale": float("nan")},
        {"logit_cap": 0.0},
        {"label_smoothing": 1.0},
        {"z_loss": -1e-4},
    ],
)
def test_wrong_rules(device, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LossRule(**wrong)


@pytest.mark.parametrize("rule", [None, *RULES])
def test_fp64_gradients_are_exact(device, rule):
    hidden, weight, targets = example(device, torch.float64, rows=5)
    hidden, weight, targets = hidden[:, :8], weight[:20, :8], targets % 20
    targets[0] = -100
    options = {"chunk_bytes": 1, "rule": RULES.get(rule, LossRule())}
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, targets, **options), (hidden, weight)
    )


class _Sums(TorchDispatchMode):
    """Notes the names of operations whose result is as large as the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == (VOCABULARY, WIDTH):
            self.names.append(func.overloadpacket.__name__)
        return out


def test_the_first_chunk_begins_the_sum_without_a_fill(device):
    given = example(device, torch.bfloat16, rows=600)
    with _Sums() as sums:
        linear_cross_entropy(*given, **chunks_of(256, torch.bfloat16))
    views = ("t", "detach", "_to_copy", "empty")
    made = [name for name in sums.names if name not in views]
    assert made == ["mm", "addmm", "addmm"]


class _Largest(TorchDispatchMode):
    """Notes the most elements that a tensor has which an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("rule", [LossRule(), RULES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_are_never_whole(device, reduction, rule):
    given = example(device, rows=4096)
    options = {"reduction": reduction, "rule": rule, **chunks_of(256, given[0].dtype)}
    with _Largest() as largest:
        results(linear_cross_entropy, *given, **options)
    assert largest.elements <= max(256 * VOCABULARY, 4096 * WIDTH)


def test_a_frozen_head_gets_no_gradient_and_costs_no_product(device):
    hidden, weight, targets = example(device)
    expected = results(linear_cross_entropy, hidden, weight, targets)[1]
    loss = linear_cross_entropy(hidden, weight.detach(), targets)
    with _Largest() as largest:
        (found,) = torch.autograd.grad(loss, hidden, torch.tensor(0.3).to(loss))
    assert torch.equal(found, expected)
    assert largest.elements <= hidden.numel()


def test_without_gradients_none_are_computed(device):
    hidden, weight, targets = example(device)
    expected = linear_cross_entropy(hidden, weight, targets)
    with torch.no_grad(), _Products() as products:
        assert torch.equal(linear_cross_entropy(hidden, weight, targets), expected)
    assert products.count == 1


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_a_second_backward_gives_the_same(device):
    hidden, weight, targets = example(device)
    loss = linear_cross_entropy(hidden, weight, targets, **chunks_of(256, hidden.dtype))
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (hidden, weight))))


@pytest.mark.parametrize("rows", [256, ROWS])
def test_under_autocast_it_computes_as_linear_does(device, rows):
    hidden, weight, targets = example(device)
    given = [each.detach().bfloat16().requires_grad_() for each in (hidden, weight)]
    options = chunks_of(rows, torch.bfloat16)
    expected = results(linear_cross_entropy, *given, targets, **options)
    with torch.autocast(device, torch.bfloat16):
        found = results(linear_cross_entropy, hidden, weight, targets, **options)
    assert [each.dtype for each in found] == [torch.float32] * 3
    assert all(torch.equal(a, b.float()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("rule", [LossRule(), RULES["all"]], ids=["plain", "all"])
def test_no_target_that_counts(device, rule):
    hidden, weight, targets = example(device)
    targets.fill_(-100)
    options = {"reduction": "sum", "rule": rule}
    loss, *gradients = results(linear_cross_entropy, hidden, weight, targets, **options)
    assert not loss.any()
    assert not any(each.any() for each in gradients)
    assert linear_cross_entropy(hidden, weight, targets).isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, t: (x[None], w, t), "flatten what is in front of D"),
        (lambda x, w, t: (x, w[:, 1:], t), "flatten what is in front of D"),
        (lambda x, w, t: (x, w, t.int()), "targets.long()"),
        (lambda x, w, t: (x, w, t.to("meta")), "on one device"),
    ],
)
def test_bad_input(device, change, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*change(*example(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [LossRule(), RULES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_replay_equals_eager(device, reduction, rule, poisoned_memory):
    if device != "cuda":
        pytest.skip("graphs of kernels are on GPUs")
    given = example(device, torch.bfloat16)
    options = {"reduction": reduction, "rule": rule, **chunks_of(256, torch.bfloat16)}

    def change() -> None:
        for each in given[:2]:
            each.normal_()
        given[2].random_(VOCABULARY)

    check_replays(lambda: results(linear_cross_entropy, *given, **options), change)
