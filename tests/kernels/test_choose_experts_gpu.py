"""The router's kernels on a CUDA GPU, against plain torch in fp64.

An error may be at most twice that of the plain torch path in fp32 on the same operands.
"""

from __future__ import annotations

import pytest
import torch

from moe_graphs.kernels import RoutingRule, route
from moe_graphs.kernels.choose_experts.reference import choose
from moe_graphs.layers import MoEConfig, TopKRouter
from replays import check_replays
from routing_rules import LOSSES, PLAIN, RULES

pytestmark = pytest.mark.gpu

WIDE = RULES | {
    "qwen": (128, PLAIN._replace(top_k=8, aux_loss_coef=1e-3)),
    "deepseek-v3": (
        256,
        PLAIN._replace(
            top_k=8, sigmoid=True, scaling=2.5, num_groups=8, top_k_groups=4, aux_loss_coef=1e-4
        ),
    ),
    "most": (512, PLAIN._replace(top_k=32, sigmoid=True, **LOSSES)),
    "odd": (100, PLAIN._replace(top_k=3, num_groups=4, top_k_groups=2, **LOSSES)),
    "beyond": (520, PLAIN._replace(top_k=33, aux_loss_coef=1e-3)),
}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def check(got, plain, want) -> None:
    for ours, theirs, exact in zip(got, plain, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, exact) <= 2 * error(theirs, exact) + 1e-6


def operands(experts: int, dtype: torch.dtype, tokens: int = 500) -> tuple[torch.Tensor, ...]:
    """Operands hidden, weight (logits with a standard deviation of 1) and bias.

    There are few tokens where scores lie so close that fp32 would choose others than fp64.
    """
    torch.manual_seed(experts + 1)
    hidden = torch.randn(min(tokens, 20_000 // experts), 256).to(dtype)
    weight = (torch.randn(experts, 256) / 16).to(dtype)
    return hidden.cuda(), weight.cuda(), 0.1 * torch.randn(experts).cuda()


def results(run, hidden, weight, dtype: torch.dtype, losses: bool = True):
    """experts, counts | weights, loss, gradients, all rounded to ``dtype`` but weights and loss."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    weights, ids, loss, counts = run(hidden, weight)
    generator = torch.Generator(device="cuda").manual_seed(1)
    grad = torch.randn(weights.shape, device="cuda", generator=generator).to(weights.dtype)
    total = (weights * grad).sum() + (1.3 * loss if losses else 0)
    grads = torch.autograd.grad(total, (hidden, weight))
    return (ids, counts), (weights.detach(), loss.detach(), *(g.to(dtype) for g in grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_equals_fp64(name, biased, dtype):
    experts, rule = WIDE[name]
    hidden, weight, bias = operands(experts, dtype)
    bias = bias if biased else None

    def plain(h, w):
        return choose(torch.nn.functional.linear(h, w), bias, rule)

    got = results(lambda h, w: route(h, w, bias, rule), hidden, weight, dtype)
    again = results(lambda h, w: route(h, w, bias, rule), hidden, weight, dtype)
    theirs = results(plain, hidden.float(), weight.float(), dtype)
    want = results(plain, hidden.double(), weight.double(), torch.float64)
    assert all(map(torch.equal, got[0] + got[1], again[0] + again[1]))
    assert all(map(torch.equal, got[0], want[0]))
    check(got[1], theirs[1], want[1])


@pytest.mark.parametrize("name", WIDE)
def test_given_experts_equal_fp64(name):
    experts, rule = WIDE[name]
    hidden, weight, bias = operands(experts, torch.bfloat16)
    given = torch.rand(len(hidden), experts, device="cuda").topk(rule.top_k).indices

    def plain(h, w):
        return choose(torch.nn.functional.linear(h, w), bias, rule, given)

    got = results(lambda h, w: route(h, w, bias, rule, given), hidden, weight, torch.bfloat16)
    theirs = results(plain, hidden.float(), weight.float(), torch.bfloat16)
    want = results(plain, hidden.double(), weight.double(), torch.float64)
    assert all(map(torch.equal, got[0], want[0]))
    check(got[1], theirs[1], want[1])
    own = route(hidden, weight, bias, rule)
    again = route(hidden, weight, bias, rule, own.experts_TK)
    assert torch.equal(own.experts_TK, again.experts_TK)
    assert torch.equal(own.counts_E, again.counts_E)
    # Two kernels, which Triton lays out for itself: their sums over experts have other orders.
    torch.testing.assert_close(own.weights_TK, again.weights_TK, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(own.aux_loss, again.aux_loss, rtol=1e-5, atol=1e-7)
    once_more = route(hidden, weight, bias, rule, own.experts_TK)
    assert all(map(torch.equal, again, once_more))


@pytest.mark.parametrize("name", WIDE)
def test_only_one_of_the_results_is_used(name):
    experts, rule = WIDE[name]
    hidden, weight, _ = operands(experts, torch.bfloat16)

    def grads(function, dtype, result: int):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        return torch.autograd.grad(function(*leaves)[result].square().sum(), leaves)

    def plain(h, w):
        return choose(torch.nn.functional.linear(h, w), None, rule)

    for result in (0, 2) if any(rule[-2:]) else (0,):
        got = grads(lambda h, w: route(h, w, None, rule), torch.bfloat16, result)
        theirs = [g.bfloat16() for g in grads(plain, torch.float32, result)]
        check(got, theirs, grads(plain, torch.float64, result))


@pytest.mark.parametrize("name", ["qwen", "deepseek-v3", "odd"])
def test_many_tokens_on_poisoned_memory(name):
    """More tokens than the programs take at once; deterministic mode fills new memory with NaN."""
    from moe_graphs.kernels.choose_experts import triton_kernels as choose_experts_triton

    experts, rule = WIDE[name]
    logits = 2 * torch.randn(20_003, experts, device="cuda")
    grad = torch.randn(20_003, rule.top_k, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        weights, ids, loss, counts, ranks = choose_experts_triton.choose_experts(
            logits, None, *rule
        )
        saved = (logits, ranks, counts, grad, torch.ones_like(loss))
        options = (rule.top_k, rule.sigmoid, rule.normalize, rule.scaling, *rule[-2:])
        split = choose_experts_triton.choose_experts_backward(*saved, True, *options)
        whole = choose_experts_triton.choose_experts_backward(*saved, False, *options)
    finally:
        torch.use_deterministic_algorithms(False)
    want = choose(logits.double(), None, rule)
    same = (ids == want.experts_TK).all(1)
    assert same.float().mean() > 0.999  # a few scores of so many are equal in fp32
    assert error(weights[same], want.weights_TK[same]) < 1e-6
    assert error(loss, want.aux_loss) < 1e-5
    assert torch.equal(counts, ids.flatten().bincount(minlength=experts))
    high, low = split.double().chunk(2, dim=1)
    rounding = 4e-6 * whole.abs().max()  # the two compiled kernels round differently
    assert ((high + low - whole).abs() <= 2**-16 * whole.abs() + rounding).all()
    assert (low.abs() <= 2**-8 * high.abs()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", WIDE)
def test_no_number_leads_out_of_range(name, value):
    experts, rule = WIDE[name]
    hidden, weight, bias = operands(experts, torch.bfloat16)
    hidden[::3] = value
    hidden[4, 7] = value
    weights, ids, loss, counts = route(hidden, weight, bias, rule)
    assert ((ids >= 0) & (ids < experts)).all()
    assert (ids.sort(-1).values.diff() > 0).all()
    assert counts.sum() == ids.numel()
    assert weights[4].isnan().any() or value == value
    assert loss.isnan() or value == value or not any(rule[-2:])


def test_lowest_number_wins_a_tie():
    rule = PLAIN._replace(top_k=3, num_groups=4, top_k_groups=2)
    hidden, weight = torch.randn(9, 16, device="cuda"), torch.zeros(12, 16, device="cuda")
    assert route(hidden, weight, None, rule).experts_TK.tolist() == [[0, 1, 2]] * 9


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(tokens):
    experts, rule = WIDE["odd"]
    hidden, weight, bias = operands(experts, torch.bfloat16, tokens)
    weight.requires_grad_()
    chosen = route(hidden, weight, bias, rule)
    (grad,) = torch.autograd.grad(chosen.weights_TK.square().sum() + chosen.aux_loss, weight)
    assert grad.isfinite().all()
    assert chosen.counts_E.sum() == 3 * tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1024, 2048, 2880, 7168, 1021])
def test_wide_logits(width, dtype):
    from moe_graphs.kernels import choose_experts as module

    torch.manual_seed(width)
    hidden = torch.randn(300, width, device="cuda").to(dtype)
    weight = torch.randn(64, width, device="cuda").to(dtype)
    want = hidden.double() @ weight.double().t()
    theirs = hidden.float() @ weight.float().t()
    assert error(module._logits(hidden, weight), want) <= 2 * error(theirs, want) + 1.5e-6


def test_autocast_leaves_the_scores_in_fp32():
    hidden, weight, bias = operands(128, torch.float32)
    rule: RoutingRule = WIDE["qwen"][1]
    plain = results(lambda h, w: route(h, w, bias, rule), hidden, weight, torch.float32)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        cast = results(lambda h, w: route(h, w, bias, rule), hidden, weight, torch.float32)
    assert all(map(torch.equal, plain[0] + plain[1], cast[0] + cast[1]))


@pytest.mark.parametrize("groups", [None, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_captured_without_a_sync(groups, dtype):
    config = MoEConfig(
        num_experts=64, top_k=4, ffn_hidden_size=8, score_function="sigmoid", num_groups=groups,
        top_k_groups=groups and 4, aux_loss_coef=0.01, z_loss_coef=0.01, expert_bias=True,
    )  # fmt: skip
    router = TopKRouter(config, 256, device="cuda", dtype=dtype)
    hidden = torch.randn(300, 256, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn(300, 4, device="cuda")

    def step() -> list[torch.Tensor]:
        routing = router(hidden)
        total = (routing.weights_TK * grad).sum() + routing.aux_loss
        grads = torch.autograd.grad(total, (hidden, router.weight))
        results = (routing.weights_TK, routing.experts_TK, routing.tokens_per_expert_E, total)
        return [*(x.detach() for x in results), *grads]

    def change() -> None:
        hidden.normal_()
        router.expert_bias.normal_(std=0.1)

    check_replays(step, change)
