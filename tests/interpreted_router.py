"""The router's kernels against plain torch in fp64, run by Triton's interpreter on the CPU.

Not collected by itself: test_kernels_interpreter runs it with TRITON_INTERPRET=1, which has to be
set before the kernels are imported.
"""

from __future__ import annotations

import pytest
import torch

from interpreted_kernels import _scalars_of_numpy_2_4  # noqa: F401
from moe_graphs.kernels import router_triton
from moe_graphs.kernels.router import RoutingRule, choose

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PLAIN = RoutingRule(
    top_k=2,
    sigmoid=False,
    normalize=True,
    scaling=1.0,
    num_groups=1,
    top_k_groups=1,
    aux_loss_coef=0.0,
    z_loss_coef=0.0,
)
LOSSES = {"aux_loss_coef": 0.3, "z_loss_coef": 0.2}
RULES = {
    "plain": (8, PLAIN),
    "raw, losses": (7, PLAIN._replace(top_k=3, normalize=False, scaling=0.7, **LOSSES)),
    "one of many": (130, PLAIN._replace(top_k=1, normalize=False, aux_loss_coef=0.1)),
    "all of them": (5, PLAIN._replace(top_k=5, z_loss_coef=0.1)),
    "sigmoid": (24, PLAIN._replace(sigmoid=True, normalize=False, z_loss_coef=0.1)),
    "deepseek": (
        24,
        PLAIN._replace(
            top_k=5, sigmoid=True, scaling=2.5, num_groups=6, top_k_groups=3, aux_loss_coef=0.2
        ),
    ),
    "groups of one": (8, PLAIN._replace(num_groups=8, top_k_groups=3, **LOSSES)),
    "one expert": (1, PLAIN._replace(top_k=1, normalize=False, **LOSSES)),
}


def random(experts: int, tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(experts)
    return 2 * torch.randn(tokens, experts), 0.1 * torch.randn(experts)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [40, 1])
@pytest.mark.parametrize("name", RULES)
def test_forward_and_gradients(name, tokens, biased):
    experts, rule = RULES[name]
    logits, bias = random(experts, tokens)
    bias = bias if biased else None
    exact = logits.double().requires_grad_()
    want = choose(exact, bias, rule)
    weights, ids, loss, counts, ranks = router_triton.choose_experts(logits, bias, *rule)
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
        plain = router_triton.choose_experts_backward(*saved, False, *options)
        torch.testing.assert_close(plain.double(), dexact, rtol=1e-5, atol=2e-7)


def test_split_gradients_have_sixteen_bits():
    experts, rule = RULES["deepseek"]
    logits, bias = random(experts)
    *_, counts, ranks = router_triton.choose_experts(logits, bias, *rule)
    saved = (logits, ranks, counts, torch.randn(40, 5), torch.tensor(1.0))
    options = (rule.top_k, rule.sigmoid, rule.normalize, rule.scaling, *rule[-2:])
    whole = router_triton.choose_experts_backward(*saved, False, *options)
    parts = router_triton.choose_experts_backward(*saved, True, *options)
    high, low = parts.double().chunk(2, dim=1)
    # The interpreter cuts bf16 off where a GPU rounds it.
    assert ((high + low - whole).abs() <= 2**-15 * whole.abs()).all()
    assert (low.abs() <= 2**-7 * high.abs()).all()


def test_lowest_number_wins_a_tie():
    rule = PLAIN._replace(top_k=3, num_groups=4, top_k_groups=2)
    _, ids, _, counts, _ = router_triton.choose_experts(torch.zeros(9, 12), None, *rule)
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
    weights, ids, loss, counts, _ = router_triton.choose_experts(logits, bias, *rule)
    assert ((ids >= 0) & (ids < experts)).all()
    assert (ids.sort(-1).values.diff() > 0).all()
    assert counts.sum() == ids.numel()
    if value != value:
        assert weights[4].isnan().any()
        assert loss.isnan() == any(rule[-2:])


def test_no_tokens():
    _, rule = RULES["raw, losses"]
    weights, ids, loss, counts, _ = router_triton.choose_experts(torch.empty(0, 7), None, *rule)
    assert weights.shape == ids.shape == (0, 3)
    assert loss == 0
    assert counts.tolist() == [0] * 7


def test_more_tokens_than_programs_take_at_once(monkeypatch):
    monkeypatch.setattr(router_triton, "PROGRAMS", 3)
    experts, rule = 130, PLAIN._replace(aux_loss_coef=0.3, z_loss_coef=0.2)
    logits, _ = random(experts, 11)
    want = choose(logits.double(), None, rule)
    weights, ids, loss, counts, _ = router_triton.choose_experts(logits, None, *rule)
    assert torch.equal(ids, want.experts_TK)
    assert torch.equal(counts, want.counts_E)
    torch.testing.assert_close(weights.double(), want.weights_TK, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss.double(), want.aux_loss, rtol=1e-5, atol=1e-7)
