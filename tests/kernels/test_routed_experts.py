"""The experts from tokens to tokens: values, all gradients, and the bytes that are kept.

Shapes: T tokens, D model, F ffn, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kept_bytes import kept_bytes
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels import (
    RowOrder,
    grouped_gemm,
    permute,
    route_rows,
    routed_experts,
    swiglu,
    unpermute,
)
from moe_graphs.kernels.routed_experts import down_projection
from moe_graphs.kernels.swiglu import ClampedGate

T, D, F, E, K = 17, 8, 6, 5, 2
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ROUTINGS = {
    "random": lambda: torch.rand(T, E).topk(K).indices,
    "one takes all": lambda: torch.arange(K).expand(T, K).contiguous(),
    "half empty": lambda: torch.rand(T, 3).topk(K).indices + 2,
    "every expert": lambda: torch.rand(T, E).topk(E).indices,
}


def leaves(top_k: int = K, dtype: torch.dtype = FP64) -> list[Tensor]:
    """Tokens, routing weights, w1 and w2."""
    torch.manual_seed(0)
    made = [torch.randn(s).to(dtype) for s in ((T, D), (E, D, 2 * F), (E, F, D))]
    wide = dtype if dtype == FP64 else FP32
    made.insert(1, torch.rand(T, top_k).to(wide))
    return [x.requires_grad_() for x in made]


def ours(order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return routed_experts(tokens, order, weights, w1, w2)


def recomputed(order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return routed_experts(tokens, order, weights, w1, w2, recompute=True)


def apart(order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    ends = order.offsets_E
    rows = swiglu(grouped_gemm(permute(tokens, order), w1, ends, zero_tail=False))
    return unpermute(grouped_gemm(rows, w2, ends, zero_tail=False), order, weights)


def padded(order: RowOrder, capacity: int, tail: int) -> RowOrder:
    """Every expert has ``capacity`` rows, some without a pair, and rows of no expert follow."""
    starts = [0, *order.offsets_E.tolist()[:-1]]
    rows = []
    for start, end in zip(starts, order.offsets_E.tolist(), strict=True):
        pairs = order.order_R[start:end][:capacity].tolist()
        rows += pairs + [-1] * (capacity - len(pairs))
    order_R = torch.tensor(rows + [-1] * tail, dtype=torch.int32)
    inverse_R = torch.full_like(order.inverse_R, -1)
    row_R = torch.arange(len(order_R), dtype=torch.int32)
    inverse_R[order_R[order_R >= 0]] = row_R[order_R >= 0]
    offsets_E = torch.arange(1, E + 1, dtype=torch.int32) * capacity
    return RowOrder(order_R, inverse_R, offsets_E, has_gaps=True)


def orders() -> Iterator[tuple[str, RowOrder]]:
    for name, make in ROUTINGS.items():
        torch.manual_seed(1)
        order = route_rows(make(), E)
        yield name, order
        yield f"{name}, gaps", padded(order, 7, tail=3)


@pytest.mark.parametrize(("name", "order"), [pytest.param(*o, id=o[0]) for o in orders()])
def test_values_and_gradients_are_those_of_the_ops(name, order):
    given = leaves(order.inverse_R.numel() // T)
    grad = torch.randn(T, D, dtype=FP64)
    results = []
    for run in (ours, apart):
        out = run(order, *given)
        results.append((out, *torch.autograd.grad(out, given, grad)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_gradients_of_finite_differences():
    order = route_rows(ROUTINGS["half empty"](), E)
    assert torch.autograd.gradcheck(lambda *given: ours(order, *given), leaves())


GATES = [
    ClampedGate(1.7, 0.8),
    ClampedGate(1.0, 0.8, 0.0, by_turns=False),
    ClampedGate(1.7, 0.8, by_turns=False),
]


def clamped(
    order: RowOrder, gate_up: Tensor, weights: Tensor, w2: Tensor, gate: ClampedGate
) -> Tensor:
    """The formula of gpt-oss and its relatives in torch's operations."""
    limit, apart = gate.limit, (F, 2) if gate.by_turns else (2, F)
    g, up = gate_up.unflatten(1, apart).unbind(2 if gate.by_turns else 1)
    g, up = g.clamp(max=limit), up.clamp(-limit, limit)
    rows = g * torch.sigmoid(gate.alpha * g) * (up + gate.offset)
    return unpermute(grouped_gemm(rows, w2, order.offsets_E, zero_tail=False), order, weights)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("name", "order"), [pytest.param(*o, id=o[0]) for o in orders()])
def test_a_clamped_gate_has_values_and_gradients_of_its_formula(name, order, gate):
    _, weights, _, w2 = leaves(order.inverse_R.numel() // T)
    gate_up = torch.randn(len(order.order_R), 2 * F, dtype=FP64, requires_grad=True)
    given = (gate_up, weights, w2)
    grad, results = torch.randn(T, D, dtype=FP64), []
    for out in (
        down_projection(gate_up, order, weights, w2, gate=gate),
        clamped(order, gate_up, weights, w2, gate),
    ):
        results.append((out, *torch.autograd.grad(out, given, grad)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_bf16_rounds_forward_like_the_ops_and_backward_no_worse():
    torch.manual_seed(1)
    order = route_rows(ROUTINGS["random"](), E)
    given, grad = leaves(dtype=BF16), torch.randn(T, D).to(BF16)
    exact = [x.detach().to(FP64).requires_grad_() for x in given]
    results = []
    for run, inputs in ((ours, given), (apart, given), (apart, exact)):
        out = run(order, *inputs)
        results.append((out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))))
    found, others, want = results
    assert torch.equal(found[0], others[0])
    for got, other, true in zip(found, others, want, strict=True):
        assert got.dtype == other.dtype
        assert error(got, true) <= 2 * error(other, true)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.detach().to(FP64) - want.detach()).norm() / want.detach().norm())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tokens_and_one_product_are_kept(dtype):
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=dtype)
    kept = kept_bytes(lambda: ours(order, *given), given[2:])
    indices = 2 * 4 * T * K + 4 * E
    assert kept == dtype.itemsize * (T * D + T * K * 2 * F) + 4 * T * K + indices


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tokens_alone_are_kept_if_the_product_is_computed_again(dtype):
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=dtype)
    kept = kept_bytes(lambda: recomputed(order, *given), given[2:])
    assert kept == dtype.itemsize * T * D + 4 * T * K + 2 * 4 * T * K + 4 * E


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("name", "order"), [pytest.param(*o, id=o[0]) for o in orders()])
def test_a_product_computed_again_changes_no_bit(name, order, is_sorted, autocast):
    tokens, *given = leaves(order.inverse_R.numel() // T, FP32)
    given.insert(0, permute(tokens, order).detach().requires_grad_() if is_sorted else tokens)
    grad, results = torch.randn(T, D), []
    for recompute in (False, True):
        with torch.autocast("cpu", BF16, enabled=autocast):
            options = dict(is_sorted=is_sorted, recompute=recompute)
            out = routed_experts(given[0], order, *given[1:], **options)
        results.append((out, *torch.autograd.grad(out, given, grad.to(out.dtype))))
    assert all(map(torch.equal, *results))


def test_frozen_experts_keep_one_product_and_no_tokens():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    given[2:] = [weight.detach() for weight in given[2:]]
    kept = kept_bytes(lambda: ours(order, *given), given[2:])
    assert kept == 4 * (T * K * 2 * F + T * K + E) + 2 * 4 * T * K


@pytest.mark.parametrize("number", range(4))
def test_each_gradient_alone_is_the_one_of_all(number):
    order, given = route_rows(ROUTINGS["half empty"](), E), leaves(dtype=FP32)
    grad = torch.randn(T, D)
    every = torch.autograd.grad(ours(order, *given), given, grad)
    for i, leaf in enumerate(given):
        leaf.requires_grad_(i == number)
    (alone,) = torch.autograd.grad(ours(order, *given), given[number], grad)
    assert torch.equal(alone, every[number])


@pytest.mark.parametrize(("run", "again"), [(ours, []), (recomputed, ["forward"])])
def test_split_backward_repeats_no_product(run, again):
    """The part for the weights runs two products, which are the weights' gradients.

    A first product that is not kept is computed again in either part.
    """
    order, given = route_rows(ROUTINGS["half empty"](), E), leaves(dtype=FP32)
    grad = torch.randn(T, D)
    whole = torch.autograd.grad(ours(order, *given), given, grad)
    out = run(order, *given)
    split = SplitBackward([out], given[:2], given[2:])
    products: list[str] = []

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "grouped_gemm" in func.name():
                products.append(func.name().split("_")[-1])
            return func(*args, **(kwargs or {}))

    with Counts():
        of_inputs = split.input_gradients([grad])
        assert products == [*again, "dgrad", "dgrad"]
        products.clear()
        of_weights = split.parameter_gradients()
        assert products == [*again, "wgrad", "wgrad"]
    assert all(map(torch.equal, (*of_inputs, *of_weights), whole))


def test_a_second_backward_has_the_same_bits_and_a_double_backward_is_refused():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    out, grad = ours(order, *given), torch.randn(T, D)
    first = torch.autograd.grad(out, given, grad, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, given, grad, retain_graph=True)))
    (slope,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_transposed_weights_are_read_as_they_lie():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    turned = [w.detach().mT.contiguous().mT.requires_grad_() for w in given[2:]]
    grad = torch.randn(T, D)
    out, same = ours(order, *given), ours(order, *given[:2], *turned)
    torch.testing.assert_close(out, same)
    for got, want in zip(
        torch.autograd.grad(same, turned, grad),
        torch.autograd.grad(out, given[2:], grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
        assert got.mT.is_contiguous()


def test_autocast_casts_all_operands():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    with torch.autocast("cpu", BF16):
        out = ours(order, *given)
        plain = apart(order, *given)
    assert out.dtype == BF16
    assert torch.equal(out, plain)
    assert all(g.dtype == FP32 for g in torch.autograd.grad(out.float().sum(), given))


def test_no_tokens():
    order = route_rows(torch.zeros(0, K, dtype=torch.int64), E)
    tokens, weights, w1, w2 = leaves(dtype=FP32)
    given = tokens[:0].detach().requires_grad_(), weights[:0].detach().requires_grad_(), w1, w2
    out = ours(order, *given)
    grads = torch.autograd.grad(out, given, torch.zeros(0, D))
    assert out.shape == (0, D)
    assert [g.shape for g in grads] == [x.shape for x in given]
    assert all(g.eq(0).all() for g in grads)


@pytest.mark.parametrize(("name", "order"), [pytest.param(*o, id=o[0]) for o in orders()])
def test_rows_that_are_sorted_already(name, order):
    tokens, *given = leaves(order.inverse_R.numel() // T)
    rows = permute(tokens, order).detach().requires_grad_()
    grad = torch.randn(T, D, dtype=FP64)
    out = routed_experts(rows, order, *given, is_sorted=True)
    of_rows, *found = torch.autograd.grad(out, (rows, *given), grad)
    want = ours(order, tokens, *given)
    of_tokens, *expected = torch.autograd.grad(want, (tokens, *given), grad)
    assert torch.equal(out, want)
    assert all(map(torch.equal, found, expected))
    (back,) = torch.autograd.grad(permute(tokens, order), tokens, of_rows)
    torch.testing.assert_close(back, of_tokens)


def test_shapes_that_do_not_fit():
    order, (tokens, weights, w1, w2) = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    with pytest.raises(ValueError, match=r"w1 \[E, D, 2F\]"):
        routed_experts(tokens, order, weights, w1, w2[:, :4])
    with pytest.raises(ValueError, match="one dtype"):
        routed_experts(tokens, order, weights, w1, w2.half())
    with pytest.raises(ValueError, match="whole multiples of 18 tokens"):
        routed_experts(torch.cat([tokens, tokens[:1]]), order, weights, w1, w2)
