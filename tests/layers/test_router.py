"""The router against a per-token loop in fp64.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moe_graphs.layers import MoEConfig, Routing, TopKRouter, deepseek_v3_moe

BASE = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=4)
CONFIGS = {
    "mixtral": BASE,
    "olmoe": replace(BASE, top_k=3, normalize_top_k=False),
    "switch": replace(BASE, top_k=1, normalize_top_k=False),
    "all-experts": replace(BASE, top_k=8),
    "softmax-bias": replace(BASE, expert_bias=True),
    "softmax-groups": replace(BASE, num_groups=4, top_k_groups=2),
    "sigmoid": replace(BASE, score_function="sigmoid"),
    "sigmoid-raw": replace(BASE, score_function="sigmoid", normalize_top_k=False),
    "deepseek-v3": replace(
        deepseek_v3_moe(), num_experts=24, top_k=5, num_groups=6, top_k_groups=3
    ),
    "groups-of-one": replace(BASE, num_groups=8, top_k_groups=2, expert_bias=True),
    "odd": MoEConfig(num_experts=7, top_k=3, ffn_hidden_size=4, scaling_factor=0.7),
}


def _router(config: MoEConfig, hidden_size: int = 6, seed: int = 0) -> TopKRouter:
    torch.manual_seed(seed)
    router = TopKRouter(config, hidden_size)
    torch.nn.init.normal_(router.weight, std=0.7)
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.3)
    return router


def _route_one(config: MoEConfig, logits: list[float], bias: list[float]):
    """Choose the experts of one token in plain Python; best first, with their weights."""
    if config.score_function == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    biased = [score + shift for score, shift in zip(scores, bias, strict=True)]
    eligible = set(range(config.num_experts))
    if config.num_groups is not None:
        size = config.num_experts // config.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
        best_two = [sum(sorted(biased[e] for e in group)[-2:]) for group in groups]
        ranked = sorted(range(config.num_groups), key=lambda g: -best_two[g])
        eligible = {e for g in ranked[: config.top_k_groups] for e in groups[g]}
    chosen = sorted(eligible, key=lambda e: -biased[e])[: config.top_k]
    weights = [scores[e] for e in chosen]
    if config.normalize_top_k:
        weights = [weight / sum(weights) for weight in weights]
    return chosen, [weight * config.scaling_factor for weight in weights]


def _oracle(router: TopKRouter, hidden_TD: torch.Tensor):
    logits_TE = hidden_TD.double() @ router.weight.double().t()
    bias = [0.0] * router.config.num_experts
    if router.expert_bias is not None:
        bias = router.expert_bias.tolist()
    return [_route_one(router.config, logits, bias) for logits in logits_TE.tolist()]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_choice_and_weights_equal_the_oracle(name, num_tokens):
    router = _router(CONFIGS[name])
    hidden_TD = torch.randn(num_tokens, 6)
    routing = router(hidden_TD)
    want = _oracle(router, hidden_TD)
    assert routing.experts_TK.tolist() == [chosen for chosen, _ in want]
    weights_TK = torch.tensor([weights for _, weights in want])
    torch.testing.assert_close(routing.weights_TK, weights_TK, rtol=1e-5, atol=1e-6)
    assert (routing.weights_TK.dtype, routing.experts_TK.dtype) == (torch.float32, torch.int64)
    counts = [sum(e in chosen for chosen, _ in want) for e in range(router.config.num_experts)]
    assert routing.tokens_per_expert_E.tolist() == counts


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_autograd_in_fp64(name):
    """The reference is a dense formula whose selection is a constant mask."""
    router = _router(CONFIGS[name])
    config = router.config
    hidden_TD = torch.randn(20, 6, requires_grad=True)
    routing = router(hidden_TD)
    grad_TK = torch.randn_like(routing.weights_TK)
    got = torch.autograd.grad(routing.weights_TK, (hidden_TD, router.weight), grad_TK)

    hidden64 = hidden_TD.detach().double().requires_grad_()
    weight64 = router.weight.detach().double().requires_grad_()
    logits_TE = hidden64 @ weight64.t()
    softmax = config.score_function == "softmax"
    scores_TE = logits_TE.softmax(-1) if softmax else logits_TE.sigmoid()
    chosen_TE = torch.zeros(20, config.num_experts).double()
    chosen_TE[torch.arange(20)[:, None], routing.experts_TK] = 1
    weights_TE = scores_TE * chosen_TE
    if config.normalize_top_k:
        weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
    weights_TE = weights_TE * config.scaling_factor
    grad_TE = torch.zeros_like(chosen_TE)
    grad_TE[torch.arange(20)[:, None], routing.experts_TK] = grad_TK.double()
    want = torch.autograd.grad(weights_TE, (hidden64, weight64), grad_TE)
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "coefs", [(0.01, 0.0), (0.0, 0.001), (0.01, 0.001)], ids=["aux", "z", "both"]
)
def test_aux_loss_value_and_gradient(score_function, coefs):
    config = replace(BASE, score_function=score_function, top_k=3)
    config = replace(config, aux_loss_coef=coefs[0], z_loss_coef=coefs[1])
    router = _router(config)
    hidden_TD = torch.randn(21, 6, requires_grad=True)
    routing = router(hidden_TD)
    got = torch.autograd.grad(routing.aux_loss, (hidden_TD, router.weight))

    hidden64 = hidden_TD.detach().double().requires_grad_()
    weight64 = router.weight.detach().double().requires_grad_()
    balance = z_loss = 0.0
    num_chosen = routing.experts_TK.flatten().tolist()
    for expert in range(8):
        fraction = num_chosen.count(expert) / 21
        mean_probability = 0.0
        for token in range(21):
            logits_E = weight64 @ hidden64[token]
            scores_E = logits_E.exp() if score_function == "softmax" else logits_E.sigmoid()
            mean_probability = mean_probability + scores_E[expert] / scores_E.sum() / 21
        balance = balance + 8 * fraction * mean_probability / 3
    for token in range(21):
        z_loss = z_loss + (weight64 @ hidden64[token]).exp().sum().log() ** 2 / 21
    want = coefs[0] * balance + coefs[1] * z_loss
    torch.testing.assert_close(routing.aux_loss.double(), want, rtol=1e-5, atol=1e-8)
    assert (routing.aux_loss.dtype, routing.aux_loss.shape) == (torch.float32, ())
    for actual, expected in zip(got, torch.autograd.grad(want, (hidden64, weight64)), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-8)


def test_aux_loss_of_a_balanced_router_is_its_coefficient():
    router = TopKRouter(replace(BASE, aux_loss_coef=0.25), 8)
    with torch.no_grad():
        router.weight.copy_(torch.eye(8) * 1e-3)
    hidden_TD = torch.eye(8) + torch.eye(8).roll(1, 0)
    assert router(hidden_TD).aux_loss.item() == pytest.approx(0.25, rel=1e-4)


def test_without_losses_the_loss_is_zero():
    assert _router(BASE)(torch.randn(4, 6)).aux_loss.item() == 0


def test_bias_changes_the_choice_and_never_the_weights():
    config = replace(BASE, score_function="sigmoid", expert_bias=True, normalize_top_k=False)
    router = _router(config)
    hidden_TD = torch.randn(9, 6)
    router.expert_bias.zero_()
    router.expert_bias[3] = 10.0
    routing = router(hidden_TD)
    assert routing.experts_TK[:, 0].eq(3).all()
    scores_T = (hidden_TD @ router.weight.t()).sigmoid()[:, 3]
    torch.testing.assert_close(routing.weights_TK[:, 0], scores_T)


class TestCounter:
    def test_counts_training_forwards_in_place(self):
        router = _router(BASE)
        address = router.tokens_per_expert.data_ptr()
        first, second = router(torch.randn(5, 6)), router(torch.randn(7, 6))
        router.eval()
        router(torch.randn(3, 6))
        want = first.tokens_per_expert_E + second.tokens_per_expert_E
        assert router.tokens_per_expert.tolist() == want.tolist()
        assert router.tokens_per_expert.sum() == 2 * 12
        assert router.tokens_per_expert.data_ptr() == address

    def test_update_moves_the_bias_against_the_load(self):
        router = _router(replace(BASE, expert_bias=True, bias_update_rate=0.5))
        router.expert_bias.zero_()
        address = router.expert_bias.data_ptr()
        # The mean is 3.
        router.tokens_per_expert.copy_(torch.tensor([0, 1, 2, 3, 3, 4, 5, 6]))
        router.update_expert_bias()
        assert router.expert_bias.tolist() == [0.5, 0.5, 0.5, 0, 0, -0.5, -0.5, -0.5]
        assert router.tokens_per_expert.eq(0).all()
        assert router.expert_bias.data_ptr() == address

    def test_without_a_bias_update_only_starts_a_new_count(self):
        router = _router(BASE)
        router(torch.randn(5, 6))
        router.update_expert_bias()
        assert router.tokens_per_expert.eq(0).all()

    def test_a_bias_that_lost_its_precision_is_refused(self):
        router = _router(replace(BASE, expert_bias=True)).bfloat16()
        with pytest.raises(ValueError, match=r"expert_bias must stay float32.*dtype="):
            router.update_expert_bias()

    def test_buffers_are_saved(self):
        assert {"tokens_per_expert", "expert_bias"} < set(
            _router(replace(BASE, expert_bias=True)).state_dict()
        )

    def test_update_balances_a_skewed_router(self):
        config = replace(BASE, score_function="sigmoid", expert_bias=True, bias_update_rate=0.01)
        router = _router(config)
        router.expert_bias.zero_()
        hidden_TD = torch.randn(256, 6) + 1.0
        before = router(hidden_TD).tokens_per_expert_E.max()
        router.update_expert_bias()
        for _ in range(200):
            after = router(hidden_TD).tokens_per_expert_E.max()
            router.update_expert_bias()
        assert before > 2 * 64  # the mean is 64
        assert after < 1.25 * 64


class TestJitter:
    def test_only_in_training_and_only_within_its_bounds(self):
        router = _router(replace(BASE, input_jitter=0.1))
        hidden_TD = torch.randn(50, 6)
        jittered = [router(hidden_TD).weights_TK for _ in range(2)]
        assert not torch.equal(*jittered)
        router.eval()
        plain = _router(BASE)
        assert torch.equal(router(hidden_TD).weights_TK, plain(hidden_TD).weights_TK)

    def test_one_seed_one_result(self):
        router = _router(replace(BASE, input_jitter=0.1))
        hidden_TD = torch.randn(50, 6)
        results = []
        for _ in range(2):
            torch.manual_seed(3)
            results.append(router(hidden_TD).weights_TK)
        assert torch.equal(*results)


class TestPrecision:
    def test_autocast_leaves_the_scores_in_fp32(self):
        router = _router(replace(BASE, aux_loss_coef=0.1))
        hidden_TD = torch.randn(40, 6, requires_grad=True)
        plain = router(hidden_TD)
        with torch.autocast("cpu", torch.bfloat16):
            cast = router(hidden_TD)
            loss = (cast.weights_TK * torch.arange(2.0)).sum() + cast.aux_loss
            (got,) = torch.autograd.grad(loss, hidden_TD)
        assert torch.equal(cast.weights_TK, plain.weights_TK)
        assert cast.weights_TK.dtype == torch.float32
        loss = (plain.weights_TK * torch.arange(2.0)).sum() + plain.aux_loss
        assert torch.equal(got, torch.autograd.grad(loss, hidden_TD)[0])

    def test_bf16_operands_are_scored_and_differentiated_in_fp32(self):
        router = _router(BASE).bfloat16()
        hidden_TD = torch.randn(40, 6).bfloat16().requires_grad_()
        exact = _router(BASE)
        with torch.no_grad():
            exact.weight.copy_(router.weight)
        hidden32 = hidden_TD.detach().float().requires_grad_()
        got, want = router(hidden_TD), exact(hidden32)
        assert torch.equal(got.weights_TK, want.weights_TK)
        grad_TK = torch.randn_like(got.weights_TK)
        (got_grad,) = torch.autograd.grad(got.weights_TK, hidden_TD, grad_TK)
        (want_grad,) = torch.autograd.grad(want.weights_TK, hidden32, grad_TK)
        assert torch.equal(got_grad, want_grad.bfloat16())

    def test_saves_its_input_as_it_is(self):
        router = _router(BASE).bfloat16()
        hidden_TD = torch.randn(40, 6).bfloat16().requires_grad_()
        saved = []

        def pack(tensor):
            saved.append((tuple(tensor.shape), tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            router(hidden_TD)
        assert [dtype for shape, dtype in saved if shape == (40, 6)] == [torch.bfloat16]


def test_ties_are_broken_the_same_way_every_time():
    router = TopKRouter(replace(BASE, num_groups=4, top_k_groups=2), 6)
    torch.nn.init.zeros_(router.weight)
    hidden_TD = torch.randn(100, 6)
    first = router(hidden_TD)
    assert all(torch.equal(router(hidden_TD).experts_TK, first.experts_TK) for _ in range(3))
    assert (first.experts_TK.sort(-1).values.diff() > 0).all(), "an expert was chosen twice"


def test_no_tokens():
    routing: Routing = _router(replace(BASE, aux_loss_coef=0.0))(torch.zeros(0, 6))
    assert routing.experts_TK.shape == (0, 2)
    assert routing.tokens_per_expert_E.eq(0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, r"top_k \(9\) must not be above num_experts \(8\)"),
        ({"top_k": 0}, "top_k must be positive, got 0"),
        ({"num_groups": 4}, "go together"),
        ({"num_groups": 3, "top_k_groups": 1}, "must divide num_experts"),
        ({"num_groups": 4, "top_k_groups": 5}, "must not be above num_groups"),
        ({"num_groups": 8, "top_k_groups": 1}, "raise top_k_groups"),
        ({"score_function": "tanh"}, "choose softmax or sigmoid"),
        ({"recompute": "all"}, "recompute 'all' is unknown: choose none or experts"),
        (
            {"recompute": "experts", "experts": "megablocks"},
            "recompute='experts' needs experts='moe_graphs', got experts='megablocks'",
        ),
        ({"input_jitter": 1.0}, r"input_jitter must be in \[0, 1\)"),
        ({"shared_gate": True}, "set shared_ffn_hidden_size"),
        ({"aux_loss_coef": -1.0}, "aux_loss_coef must not be negative"),
        ({"scaling_factor": float("nan")}, "scaling_factor must be positive"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)
