"""LoRA beside the experts' weights: values, all gradients, and the bytes that are kept.

Shapes: T tokens, D model, F ffn, E experts, K top-k, r rank.
"""

from __future__ import annotations

import functools

import pytest
import torch
from test_routed_experts import BF16, FP32, FP64, GATES, ROUTINGS, D, E, F, K, T, error, orders
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kept_bytes import kept_bytes
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels import RowOrder, permute, route_rows, routed_experts
from moe_graphs.kernels.gemm import grouped_gemm_with_lora, reference
from moe_graphs.kernels.ops import is_made_again
from moe_graphs.kernels.routed_experts import down_projection
from moe_graphs.kernels.routed_experts.lora import (
    LoRA,
    down_projection_with_lora,
    routed_experts_with_lora,
    up_projection_with_lora,
)

RANKS = (4, 8, 16)
BESIDE = {
    "both": (True, True),
    "first": (True, False),
    "second": (False, True),
    "none": (False,) * 2,
}
on_orders = pytest.mark.parametrize(
    ("name", "order"), [pytest.param(*each, id=each[0]) for each in orders()]
)


def leaves(top_k: int = K, rank: int = 8, dtype: torch.dtype = FP64) -> list[Tensor]:
    """Tokens and routing weights, the factors, and two frozen weights."""
    torch.manual_seed(0)
    shapes = ((T, D), (E, D, rank), (E, rank, 2 * F), (E, F, rank), (E, rank, D))
    tokens, *factors = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    wide = dtype if dtype == FP64 else FP32
    weights = torch.rand(T, top_k).to(wide).requires_grad_()
    frozen = [torch.randn(shape).to(dtype) for shape in ((E, D, 2 * F), (E, F, D))]
    return [tokens, weights, *factors, *frozen]


def ours(order: RowOrder, given: list[Tensor], beside: str = "both", **options: bool) -> Tensor:
    tokens, weights, a1, b1, a2, b2, w1, w2 = given
    first, second = BESIDE[beside]
    return routed_experts_with_lora(
        tokens,
        order,
        weights,
        w1,
        w2,
        LoRA(a1, b1) if first else None,
        LoRA(a2, b2) if second else None,
        **options,
    )


def materialised(order: RowOrder, given: list[Tensor], beside: str = "both") -> Tensor:
    tokens, weights, a1, b1, a2, b2, w1, w2 = given
    first, second = BESIDE[beside]
    w1 = w1 + a1 @ b1 if first else w1
    w2 = w2 + a2 @ b2 if second else w2
    return routed_experts(tokens, order, weights, w1, w2)


def gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)
    return [out.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("beside", BESIDE)
@on_orders
def test_values_and_gradients_are_those_of_summed_weights(name, order, beside):
    given, grad = leaves(order.inverse_R.numel() // T), torch.randn(T, D, dtype=FP64)
    found = gradients(ours(order, given, beside), given[:6], grad)
    expected = gradients(materialised(order, given, beside), given[:6], grad)
    assert len(found) == 3 + 2 * sum(BESIDE[beside])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("gate", GATES)
def test_other_activations_have_factors_as_well(gate):
    order, grad = route_rows(ROUTINGS["half empty"](), E), torch.randn(T, D, dtype=FP64)
    _, weights, _, _, a2, b2, _, w2 = leaves()
    gate_up = torch.randn(T * K, 2 * F, dtype=FP64, requires_grad=True)
    wanted, results = [gate_up, weights, a2, b2], []
    for out in (
        down_projection_with_lora(gate_up, order, weights, w2, LoRA(a2, b2), gate=gate),
        down_projection(gate_up, order, weights, w2 + a2 @ b2, gate=gate),
    ):
        results.append(gradients(out, wanted, grad))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rank", [None, *RANKS])
@on_orders
def test_a_frozen_bias_is_in_the_same_sum(name, order, rank):
    top_k, bias = order.inverse_R.numel() // T, torch.randn(E, 2 * F, dtype=FP64)
    given, results = leaves(top_k, rank or 8), []
    tokens, _, a1, b1, _, _, w1, _ = given
    wanted = [tokens] if rank is None else [tokens, a1, b1]
    for within in (bias, None):
        lora = None if rank is None else LoRA(a1, b1)
        out = up_projection_with_lora(tokens, order, top_k, w1, lora, bias_E2F=within)
        if within is None:
            rows = torch.arange(len(out), dtype=torch.int32)
            expert_R = torch.searchsorted(order.offsets_E, rows, right=True).clamp(max=E - 1)
            out = out + bias[expert_R]
        out = out[: order.offsets_E[-1]]
        results.append(gradients(out, wanted, torch.ones_like(out)))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


def test_a_bias_within_the_sum_is_frozen():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    bias = torch.zeros(E, 2 * F, requires_grad=True)
    with pytest.raises(ValueError, match="a bias within the sum, and its weight, are frozen"):
        up_projection_with_lora(given[0], order, K, given[6], None, bias_E2F=bias)


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_is_right_in_fp32(rank):
    order, grad = route_rows(ROUTINGS["half empty"](), E), torch.randn(T, D)
    given = leaves(rank=rank, dtype=FP32)
    found = gradients(ours(order, given), given[:6], grad)
    expected = gradients(materialised(order, given), given[:6], grad)
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert all(error(*pair) < 1e-5 for pair in zip(found, expected, strict=True))


def test_gradients_of_finite_differences():
    order, given = route_rows(ROUTINGS["half empty"](), E), leaves()
    assert torch.autograd.gradcheck(lambda *first: ours(order, [*first, *given[6:]]), given[:6])


def test_bf16_sums_are_rounded_once():
    torch.manual_seed(1)
    ends = torch.tensor([40, 40, 100], dtype=torch.int32)
    x, low, w, b = (torch.randn(s).to(BF16) for s in ((100, 64), (100, 8), (3, 64, 32), (3, 8, 32)))
    found = grouped_gemm_with_lora(x, w, low, b, ends)
    exact = grouped_gemm_with_lora(*(each.to(FP64) for each in (x, w, low, b)), ends)
    apart = reference.grouped_gemm(x, w, ends) + reference.grouped_gemm(low, b, ends)
    assert error(found, exact) < 0.8 * error(apart, exact)


def test_bf16_is_no_worse_than_summed_weights():
    """Adapters stay in fp32, as PEFT keeps them; both are held against fp64."""
    torch.manual_seed(1)
    order, grad = route_rows(ROUTINGS["random"](), E), torch.randn(T, D).to(BF16)
    given = leaves(dtype=BF16)
    given[2:6] = [each.detach().float().requires_grad_() for each in given[2:6]]
    exact = [x.detach().to(FP64).requires_grad_(x.requires_grad) for x in given]
    found = gradients(ours(order, given), given[:6], grad)
    rounded = [*given[:2], *(each.to(BF16) for each in given[2:6]), *given[6:]]
    others = gradients(materialised(order, rounded), given[:6], grad)
    wants = gradients(materialised(order, exact), exact[:6], grad)
    for got, other, want, leaf in zip(found[1:], others[1:], wants[1:], given, strict=False):
        assert got.dtype == leaf.dtype
        assert error(got, want) <= 2 * error(other, want)
    assert error(found[0], wants[0]) <= 2 * error(others[0], wants[0])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tokens_one_product_and_short_rows_are_kept(dtype):
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=dtype)
    kept = kept_bytes(lambda: ours(order, given), given[2:])
    indices = 2 * 4 * T * K + 4 * E
    rows = T * D + T * K * (2 * F + 8)
    assert kept == dtype.itemsize * rows + 4 * T * K + indices


class Products(TorchDispatchMode):
    """Counts products of rows."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        counts = {"grouped_gemm_forward": 1, "grouped_gemm_with_lora": 1, "lora_gemm": 2}
        self.count += counts.get(func._schema.name.removeprefix("moe_graphs::"), 0)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("beside", BESIDE)
def test_checkpointing_repeats_the_first_product_alone(beside):
    order, given, counts, found = route_rows(ROUTINGS["random"](), E), leaves(), [], []
    for run in (lambda f: f(), functools.partial(checkpoint, use_reentrant=False)):
        with Products() as products:
            out = run(lambda: ours(order, given, beside))
            found.append(gradients(out, given[:6], torch.ones_like(out)))
        counts.append(products.count)
    assert all(map(torch.equal, *found))
    assert counts[1] - counts[0] == 1 + BESIDE[beside][0]  # beside it stands the one with A


@pytest.mark.parametrize("number", range(6))
def test_each_gradient_alone_is_the_one_of_all(number):
    order, given = route_rows(ROUTINGS["half empty"](), E), leaves(dtype=FP32)
    grad = torch.randn(T, D)
    every = torch.autograd.grad(ours(order, given), given[:6], grad)
    for i, leaf in enumerate(given[:6]):
        leaf.requires_grad_(i == number)
    (alone,) = torch.autograd.grad(ours(order, given), given[number], grad)
    assert torch.equal(alone, every[number])


def test_split_backward_has_the_same_bits():
    order, given = route_rows(ROUTINGS["half empty"](), E), leaves(dtype=FP32)
    grad = torch.randn(T, D)
    whole = torch.autograd.grad(ours(order, given), given[:6], grad)
    split = SplitBackward([ours(order, given)], given[:2], given[2:6])
    found = [*split.input_gradients([grad]), *split.parameter_gradients()]
    assert all(map(torch.equal, found, whole))


def test_transposed_operands_are_read_as_they_lie():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    turned = [x.detach().mT.contiguous().mT.requires_grad_(x.requires_grad) for x in given[2:]]
    grad = torch.randn(T, D)
    expected = gradients(ours(order, given), given[:6], grad)
    same = [*given[:2], *turned]
    found = gradients(ours(order, same), same[:6], grad)
    assert all(error(*pair) < 1e-5 for pair in zip(found, expected, strict=True))
    assert all(each.mT.is_contiguous() for each in found[3:])


@on_orders
def test_rows_that_are_sorted_already(name, order):
    given = leaves(order.inverse_R.numel() // T)
    rows = permute(given[0], order).detach().requires_grad_()
    grad = torch.randn(T, D, dtype=FP64)
    of_rows = [rows, *given[1:]]
    found = gradients(ours(order, of_rows, is_sorted=True), of_rows[:6], grad)
    expected = gradients(ours(order, given), given[:6], grad)
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found[2:], expected[2:]))
    (back,) = torch.autograd.grad(permute(given[0], order), given[0], found[1])
    torch.testing.assert_close(back, expected[1])


def test_autocast_casts_all_operands():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    with torch.autocast("cpu", BF16):
        out = ours(order, given)
    cast = [x if number == 1 else x.to(BF16) for number, x in enumerate(given)]
    assert out.dtype == BF16
    assert torch.equal(out, ours(order, cast))
    assert all(g.dtype == FP32 for g in torch.autograd.grad(out.float().sum(), given[:6]))


def test_what_does_not_fit_is_an_error():
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype=FP32)
    short = [*given[:3], given[3][:, :4], *given[4:]]
    with pytest.raises(ValueError, match=r"LoRA beside w1 .* got \(5, 8, 8\) and \(5, 4, 12\)"):
        ours(order, short)
    other = [*given[:7], given[7].detach().to(BF16)]
    with pytest.raises(ValueError, match=r"one dtype, got x torch.float32 and w torch.bfloat16"):
        ours(order, other)
    given[7].requires_grad_()
    with pytest.raises(ValueError, match="w2 has LoRA beside it and requires a gradient"):
        ours(order, given)
    with torch.no_grad():
        ours(order, given)


def test_only_what_a_checkpoint_makes_for_one_backward_may_be_overwritten():
    found: list[bool] = []

    def look(x: Tensor) -> Tensor:
        found.append(is_made_again())
        return x * x

    x, same = torch.ones(3, requires_grad=True), (lambda each: each,) * 2
    look(x)
    checkpoint(look, x, use_reentrant=False).sum().backward()  # and in its recomputation
    checkpoint(look, x, use_reentrant=True)
    with torch.autograd.graph.saved_tensors_hooks(*same):
        look(x)
        checkpoint(look, x, use_reentrant=False)

    def kept_by_others(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(*same):
            return look(x)

    checkpoint(kept_by_others, x, use_reentrant=False)
    assert found == [False, True, False, False, False, True, False]
