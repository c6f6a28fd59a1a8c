"""The experts from tokens to tokens on a GPU: fp32 oracle, poisoned memory, replays, kept bytes.

Shapes: T tokens, D model, F ffn, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernel_check import error
from moe_graphs.dispatch import PaddedDispatcher
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels import RowOrder, gather_gemm, permute, route_rows, routed_experts
from moe_graphs.kernels.routed_experts import down_projection
from moe_graphs.kernels.swiglu import ClampedGate
from moe_graphs.layers import MoEConfig, MoELayer
from replays import check_replays

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T, D, F, E, K = 1024, 512, 384, 32, 4
NAMES = ("output", "tokens", "routing weights", "w1", "w2")


def distinct(tokens: int, experts: int, top_k: int, weight_E: Tensor | None = None) -> Tensor:
    """Random experts of each token, in proportion to ``weight_E``."""
    weight_E = torch.ones(experts) if weight_E is None else weight_E
    return torch.multinomial(weight_E.expand(tokens, experts), top_k).cuda()


ROUTINGS: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: distinct(T, E, K),
    "zipf": lambda: distinct(T, E, K, 1.0 / torch.arange(1, E + 1)),
    "empty experts": lambda: distinct(T, E // 4, K) * 4 + 1,
    "one takes all": lambda: torch.arange(K, device="cuda").expand(T, K).contiguous(),
    "every expert": lambda: distinct(T, E, E),
    "few tokens": lambda: distinct(8, E, K),
    "no tokens": lambda: distinct(1, E, K)[:0],
}


def leaves(experts_TK: Tensor, dtype: torch.dtype = BF16) -> list[Tensor]:
    """Tokens, routing weights, w1 and w2."""
    torch.manual_seed(0)
    tokens, top_k = experts_TK.shape
    made = [torch.randn(s, device="cuda") for s in ((tokens, D), (E, D, 2 * F), (E, F, D))]
    made = [x.to(dtype) for x in (made[0], made[1] * D**-0.5, made[2] * F**-0.5)]
    made.insert(1, torch.rand(tokens, top_k, device="cuda"))
    return [x.requires_grad_() for x in made]


def plain(order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Each expert by itself in torch, in the dtype of its operands; the sum in fp32."""
    rows, ends = tokens[order.order_R.long() // weights.shape[1]], order.offsets_E.tolist()
    parts = []
    for start, end, up, down in zip([0, *ends[:-1]], ends, w1, w2, strict=True):
        gate, linear = (rows[start:end] @ up).chunk(2, dim=-1)
        parts.append((functional.silu(gate) * linear) @ down)
    rows = torch.cat(parts)[order.inverse_R.long()].view(*weights.shape, -1)
    return (rows.float() * weights.unsqueeze(2)).sum(1).to(tokens.dtype)


def ours(order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return routed_experts(tokens, order, weights, w1, w2)


def results(run, order: RowOrder, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = run(order, *given)
    return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_errors_of_values_and_all_gradients(routing, dtype):
    """An error is at most twice that of torch in the same dtype, both against fp32."""
    experts_TK = ROUTINGS[routing]()
    order, given = route_rows(experts_TK, E), leaves(experts_TK, dtype)
    grad = torch.randn(len(experts_TK), D, device="cuda").to(dtype)
    exact = [x.detach().float().requires_grad_() for x in given]
    found = results(ours, order, given, grad)
    if not len(experts_TK):
        assert all(x.eq(0).all() for x in found)
        return
    others, wants = results(plain, order, given, grad), results(plain, order, exact, grad)
    for name, got, other, want in zip(NAMES, found, others, wants, strict=True):
        assert got.dtype == other.dtype
        allowed = 2 * error(other.float(), want) + 1e-6
        assert error(got, want) <= allowed, f"{name}: {error(got, want)} of {allowed}"


@pytest.mark.parametrize(
    "gate", [ClampedGate(1.702, 0.8), ClampedGate(1.0, 0.8, 0.0, by_turns=False)]
)
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "no tokens"])
def test_errors_of_a_clamped_gate(routing, gate):
    """Gate and up by turns, as gpt-oss has them, or side by side, in bf16 and against fp32."""
    experts_TK = ROUTINGS[routing]()
    order, given = route_rows(experts_TK, E), leaves(experts_TK)

    def by_formula(order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor):
        rows, ends = tokens[order.order_R.long() // weights.shape[1]], order.offsets_E.tolist()
        parts = []
        for start, end, up, down in zip([0, *ends[:-1]], ends, w1, w2, strict=True):
            apart, dim = ((F, 2), 2) if gate.by_turns else ((2, F), 1)
            g, u = (rows[start:end] @ up).unflatten(1, apart).unbind(dim)
            g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
            parts.append((g * torch.sigmoid(gate.alpha * g) * (u + gate.offset)) @ down)
        rows = torch.cat(parts)[order.inverse_R.long()].view(*weights.shape, -1)
        return (rows.float() * weights.unsqueeze(2)).sum(1).to(tokens.dtype)

    def in_kernels(order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor):
        gate_up = gather_gemm(tokens, order, w1, zero_tail=False)
        return down_projection(gate_up, order, weights, w2, gate=gate)

    grad = torch.randn(len(experts_TK), D, device="cuda").to(BF16)
    exact = [x.detach().float().requires_grad_() for x in given]
    found = results(in_kernels, order, given, grad)
    others, wants = (results(by_formula, order, x, grad) for x in (given, exact))
    for name, got, other, want in zip(NAMES, found, others, wants, strict=True):
        allowed = 2 * error(other.float(), want) + 1e-6
        assert error(got, want) <= allowed, f"{name}: {error(got, want)} of {allowed}"
    torch.use_deterministic_algorithms(True)  # fresh tensors are full of NaN
    try:
        assert all(map(torch.equal, results(in_kernels, order, given, grad), found))
    finally:
        torch.use_deterministic_algorithms(False)


def padded(experts_TK: Tensor, factor: float, tail: int) -> RowOrder:
    """Rows without a pair within the experts, pairs without a row, and rows of no expert."""
    weights_TK = torch.ones(experts_TK.shape, device="cuda")
    tokens_TD = torch.zeros(len(experts_TK), 8, device="cuda")
    order = PaddedDispatcher(factor).preprocess(tokens_TD, weights_TK, experts_TK, E).order
    order_R = torch.cat([order.order_R, order.order_R.new_full((tail,), -1)])
    return RowOrder(order_R, order.inverse_R, order.offsets_E, has_gaps=True)


@pytest.mark.parametrize(
    ("routing", "gaps"),
    [*((name, False) for name in ROUTINGS), *((n, True) for n in ROUTINGS if n != "no tokens")],
)
def test_nothing_depends_on_memory_that_nobody_wrote(routing, gaps):
    """Results have the same bits if every fresh tensor is full of NaN and largest integers."""
    torch.manual_seed(1)
    experts_TK = ROUTINGS[routing]()
    order = padded(experts_TK, 1.1, 100) if gaps else route_rows(experts_TK, E)
    given = leaves(experts_TK)
    grad = torch.randn(len(experts_TK), D, device="cuda").to(BF16)
    expected = results(ours, order, given, grad)
    torch.use_deterministic_algorithms(True)
    try:
        found = results(ours, order, given, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in found)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("gaps", [False, True])
def test_rows_that_are_sorted_already(gaps):
    experts_TK = ROUTINGS["zipf"]()
    order = padded(experts_TK, 1.1, 100) if gaps else route_rows(experts_TK, E)
    tokens, *given = leaves(experts_TK)
    grad = torch.randn(T, D, device="cuda").to(BF16)
    out = routed_experts(tokens, order, *given)
    want = [out, *torch.autograd.grad(out, given, grad)]
    rows = permute(tokens, order).detach().requires_grad_()
    out = routed_experts(rows, order, *given, is_sorted=True)
    assert all(map(torch.equal, [out, *torch.autograd.grad(out, given, grad)], want))


def test_replays_with_other_routings_bitwise():
    """Captured once, forward and backward; deterministic, and without a host sync."""
    ids = ROUTINGS["uniform"]()
    given = leaves(ids)
    grad = torch.randn(T, D, device="cuda").to(BF16)

    def step() -> list[Tensor]:
        return results(ours, route_rows(ids, E), given, grad)

    def change() -> None:
        names = ("zipf", "one takes all", "empty experts", "uniform")
        ids.copy_(ROUTINGS[names[torch.randint(4, ()).item()]]())
        given[0].normal_()

    check_replays(step, change)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("routing", ["zipf", "empty experts", "every expert"])
def test_a_product_computed_again_changes_no_bit(routing, gaps):
    ids = ROUTINGS[routing]()
    order = padded(ids, 1.1, 100) if gaps else route_rows(ids, E)
    given, grad = leaves(ids), torch.randn(T, D, device="cuda").to(BF16)

    def again(order: RowOrder, *given: Tensor) -> Tensor:
        return routed_experts(given[0], order, *given[1:], recompute=True)

    expected = results(ours, order, given, grad)
    assert all(map(torch.equal, results(again, order, given, grad), expected))
    _, *whole = expected
    split = SplitBackward([again(order, *given)], given[:2], given[2:])
    found = [*split.input_gradients([grad]), *split.parameter_gradients()]
    assert all(map(torch.equal, found, whole))


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2, 3), (0, 1), (3,)])
def test_gradients_do_not_depend_on_which_are_wanted(frozen):
    ids = ROUTINGS["zipf"]()
    order, given = route_rows(ids, E), leaves(ids)
    grad = torch.randn(T, D, device="cuda").to(BF16)
    every = results(ours, order, given, grad)
    for number in frozen:
        given[number].requires_grad_(False)
    wanted = [x for x in given if x.requires_grad]
    found = torch.autograd.grad(ours(order, *given), wanted, grad)
    left = [g for g, x in zip(every[1:], given, strict=True) if x.requires_grad]
    assert all(map(torch.equal, found, left))


def test_split_backward_has_the_same_bits():
    ids = ROUTINGS["zipf"]()
    order, given = route_rows(ids, E), leaves(ids)
    grad = torch.randn(T, D, device="cuda").to(BF16)
    _, *whole = results(ours, order, given, grad)
    split = SplitBackward([ours(order, *given)], given[:2], given[2:])
    found = [*split.input_gradients([grad]), *split.parameter_gradients()]
    assert all(map(torch.equal, found, whole))


SIZES = {  # tokens, hidden, ffn, experts, top-k: MiB that the whole layer may keep
    (16384, 2048, 768, 128, 8): 400,
    (2048, 2048, 768, 128, 8): 51,
    (16384, 2048, 1024, 64, 8): 524,
    (8192, 4096, 14336, 8, 2): 900,
    (32768, 4096, 1024, 128, 8): 1045,
}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bytes_that_the_whole_layer_keeps(size):
    """The router's, too; the tokens themselves are the caller's."""
    kept, product = kept_by_layer(size), 4 * size[0] * size[4] * size[2]
    assert kept >= product  # it is there, so this measures the forward
    assert kept <= SIZES[size] * 2**20, f"{kept / 2**20:.2f} MiB"
    without = kept_by_layer(size, recompute="experts")
    assert abs(without - (kept - product)) <= 2**21  # the allocator rounds a block up by a MiB


def kept_by_layer(size: tuple[int, ...], **options: Any) -> int:
    tokens, hidden_size, ffn, experts, top_k = size
    config = MoEConfig(num_experts=experts, top_k=top_k, ffn_hidden_size=ffn, **options)
    layer = MoELayer(config, hidden_size, device="cuda", dtype=BF16)
    hidden = torch.randn(tokens, hidden_size, device="cuda").to(BF16).requires_grad_()
    layer(hidden).hidden.sum().backward()  # buffers that live on are made
    layer.zero_grad()
    hidden.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = layer(hidden)
    return torch.cuda.memory_allocated() - before - output.hidden.untyped_storage().nbytes()


def test_a_layer_errs_no_more_than_torch_in_all_gradients():
    """Router included: the gradient of its weight goes through the routing weights."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=E, top_k=K, ffn_hidden_size=F, aux_loss_coef=0.01)
    layer = MoELayer(config, D, device="cuda", dtype=BF16)
    layer.init_weights(std=0.05, out_std=0.05)
    hidden = torch.randn(T, D, device="cuda").to(BF16)
    grad = torch.randn(T, D, device="cuda").to(BF16)
    with torch.no_grad():
        experts_TK = layer.router(hidden).experts_TK

    def torch_layer(hidden: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        logits_TE = hidden.float() @ gate.float().T
        weights_TK = logits_TE.softmax(-1).gather(1, experts_TK)
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        return plain(route_rows(experts_TK, E), hidden, weights_TK, w1, w2)

    def our_layer(hidden: Tensor, *_: Tensor) -> Tensor:
        return layer(hidden).hidden

    parameters = [layer.router.weight, layer.experts.w1, layer.experts.w2]
    every = []
    for run, dtype in ((our_layer, BF16), (torch_layer, BF16), (torch_layer, FP32)):
        given = [hidden.to(dtype, copy=True).requires_grad_(), *parameters]
        if dtype == FP32:
            given[1:] = [p.detach().float().requires_grad_() for p in parameters]
        out = run(*given)
        every.append([out.detach(), *torch.autograd.grad(out, given, grad.to(dtype))])
    for name, got, other, want in zip(
        ("output", "hidden", "router", "w1", "w2"), *every, strict=True
    ):
        allowed = 2 * error(other.float(), want) + 1e-6
        assert error(got, want) <= allowed, f"{name}: {error(got, want)} of {allowed}"


def test_a_token_of_nan_touches_no_other_token():
    torch.manual_seed(0)
    config = MoEConfig(num_experts=E, top_k=K, ffn_hidden_size=F)
    layer = MoELayer(config, D, device="cuda", dtype=BF16)
    hidden = torch.randn(T, D, device="cuda").to(BF16)
    other_T = torch.arange(T, device="cuda") != 7
    want = layer(hidden).hidden
    hidden[7] = torch.nan
    hidden.requires_grad_()
    found = layer(hidden).hidden
    torch.testing.assert_close(found[other_T], want[other_T])
    (grad,) = torch.autograd.grad(found, hidden, torch.ones_like(found))
    assert grad[other_T].isfinite().all()
