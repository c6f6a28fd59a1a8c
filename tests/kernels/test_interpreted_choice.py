"""The kernels of the choice of experts against plain torch in fp64, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from grids import grid
from moe_graphs.kernels.choose_experts import triton_kernels as choose_experts_triton
from moe_graphs.kernels.choose_experts.reference import choose
from routing_rules import PLAIN, RULES

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned_memory")


def random(experts: int, tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(experts)
    return 2 * torch.randn(tokens, experts), 0.1 * torch.randn(experts)


@pytest.mark.parametrize(("name", "tokens", "biased"), grid(list(RULES), [40, 1], [False, True]))
def test_forward_and_gradients(name, tokens, biased):
    experts, rule = RULES[name]
    logits, bias = random(experts, tokens)
    bias = bias if biased else None
    exact = logits.double().requires_grad_()
    want = choose(exact, bias, rule)
    weights, ids, loss, counts, ranks = choose_experts_triton.choose_experts(logits, bias, *rule)
    assert torch.equal(ids, want.experts_TK)
    assert torch.equal(counts, want.counts_E)
    torch.testing.assert_close(weights.double(), want.weights_TK, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss.double(), want.aux_loss, rtol=1e-5, atol=1e-7)

    grad, grad_loss = torch.randn_like(weights), torch.tensor(1.7)
    for grads in ((grad, grad_loss), (grad, None), (None, grad_loss)):
        total = 0 * exact.sum()
        if grads[0] is not None:
            total = total + (want.weights_TK * grad).sum()
        if grads[1] is not None:
            total = total + want.aux_loss * 1.7
        (dexact,) = torch.autograd.grad(total, exact, retain_graph=True)
        options = (rule.top_k, rule.sigmoid, rule.normalize, rule.scaling, *rule[-2:])
        saved = (logits, ranks, counts, *grads)
        plain = choose_experts_triton.choose_experts_backward(*saved, False, *options)
        torch.testing.assert_close(plain.double(), dexact, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("name", ["raw, losses", "deepseek", "one of many", "all of them"])
def test_given_experts_take_the_place_of_the_best(name):
    """The best ones, given again, are the plain choice bit for bit."""
    experts, rule = RULES[name]
    logits, bias = random(experts)
    plain = choose_experts_triton.choose_experts(logits, bias, *rule)
    again = choose_experts_triton.choose_experts(logits, bias, *rule, plain[1])
    assert all(map(torch.equal, plain, again))
    given = torch.rand(40, experts).topk(rule.top_k).indices
    weights, ids, loss, counts, ranks = choose_experts_triton.choose_experts(
        logits, bias, *rule, given
    )
    want = choose(logits.double(), bias, rule, given)
    assert torch.equal(ids, given)
    assert torch.equal(ranks, given.short())
    assert torch.equal(counts, want.counts_E)
    torch.testing.assert_close(weights.double(), want.weights_TK, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss.double(), want.aux_loss, rtol=1e-5, atol=1e-7)


def test_split_gradients_have_sixteen_bits():
    experts, rule = RULES["deepseek"]
    logits, bias = random(experts)
    *_, counts, ranks = choose_experts_triton.choose_experts(logits, bias, *rule)
    saved = (logits, ranks, counts, torch.randn(40, 5), torch.tensor(1.0))
    options = (rule.top_k, rule.sigmoid, rule.normalize, rule.scaling, *rule[-2:])
    whole = choose_experts_triton.choose_experts_backward(*saved, False, *options)
    parts = choose_experts_triton.choose_experts_backward(*saved, True, *options)
    high, low = parts.double().chunk(2, dim=1)
    # The interpreter cuts bf16 off where a GPU rounds it.
    assert ((high + low - whole).abs() <= 2**-15 * whole.abs()).all()
    assert (low.abs() <= 2**-7 * high.abs()).all()


def test_lowest_number_wins_a_tie():
    rule = PLAIN._replace(top_k=3, num_groups=4, top_k_groups=2)
    _, ids, _, counts, _ = choose_experts_triton.choose_experts(torch.zeros(9, 12), None, *rule)
    assert ids.tolist() == [[0, 1, 2]] * 9
    assert counts.tolist() == [9] * 3 + [0] * 9


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy
@pytest.mark.filterwarnings("ignore:invalid value|divide by zero")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["raw, losses", "deepseek", "groups of one"])
def test_no_number_leads_out_of_range(name, value):
    """Single ones, and tokens that have nothing else."""
    experts, rule = RULES[name]
    logits, bias = random(experts)
    logits[::3, experts // 2] = value
    logits[4] = value
    weights, ids, loss, counts, _ = choose_experts_triton.choose_experts(logits, bias, *rule)
    assert ((ids >= 0) & (ids < experts)).all()
    assert (ids.sort(-1).values.diff() > 0).all()
    assert counts.sum() == ids.numel()
    if value != value:
        assert weights[4].isnan().any()
        assert loss.isnan() == any(rule[-2:])


def test_no_tokens():
    _, rule = RULES["raw, losses"]
    weights, ids, loss, counts, _ = choose_experts_triton.choose_experts(
        torch.empty(0, 7), None, *rule
    )
    assert weights.shape == ids.shape == (0, 3)
    assert loss == 0
    assert counts.tolist() == [0] * 7


def test_more_tokens_than_programs_take_at_once(monkeypatch):
    monkeypatch.setattr(choose_experts_triton, "PROGRAMS", 3)
    experts, rule = 130, PLAIN._replace(aux_loss_coef=0.3, z_loss_coef=0.2)
    logits, _ = random(experts, 11)
    want = choose(logits.double(), None, rule)
    weights, ids, loss, counts, _ = choose_experts_triton.choose_experts(logits, None, *rule)
    assert torch.equal(ids, want.experts_TK)
    assert torch.equal(counts, want.counts_E)
    torch.testing.assert_close(weights.double(), want.weights_TK, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss.double(), want.aux_loss, rtol=1e-5, atol=1e-7)
