"""Experts in FP8 on a Hopper GPU: against the CPU and fp32, poisoned memory, replays.

Products and what kernels quantize are held by `benchmarks/fp8_products.py`, case by case.
Shapes: T tokens, D model, F ffn, E experts, K top-k.
"""

from __future__ import annotations

import pytest
import torch
from test_routed_experts_gpu import BF16, FP16, FP32, NAMES, ROUTINGS, D, E, T, leaves, padded
from torch import Tensor

import fp8_products
from kernel_check import error
from moe_graphs.kernels import RowOrder, route_rows, routed_experts
from moe_graphs.kernels.gpu_architectures import architecture_of
from moe_graphs.kernels.routed_experts.fp8 import routed_experts_fp8
from replays import check_replays

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if "fp8" not in architecture_of(torch.device("cuda")).gemms:
        pytest.skip("waits for a Hopper GPU")


def results(
    order: RowOrder, given: list[Tensor], grad: Tensor, run=routed_experts_fp8, **options: bool
) -> list[Tensor]:
    out = run(given[0], order, *given[1:], **options)
    return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]


@pytest.mark.parametrize("case", fp8_products.CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_products(case):
    assert not list(fp8_products.product_failures(case, seed=1))


@pytest.mark.parametrize("case", fp8_products.CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_gradients_of_weights(case):
    assert not list(fp8_products.gradient_failures(case, seed=1))


def test_columns_have_the_bits_of_the_cpu():
    assert not list(fp8_products.columns_failures())


@pytest.mark.parametrize("powers", [False, True])
def test_what_is_quantized_has_the_bits_of_the_cpu(powers):
    assert not list(fp8_products.quantisation_failures(powers))


def test_a_product_is_replayed_with_other_routings_and_weights():
    assert not list(fp8_products.replay_failures())


@pytest.mark.parametrize(("dtype", "all_in_fp8"), [(BF16, False), (BF16, True), (FP16, True)])
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "every expert"])
def test_errors_of_values_and_all_gradients(routing, dtype, all_in_fp8):
    """An error against fp32 is at most 1.1 times that of the plain path on the CPU."""
    experts_TK = ROUTINGS[routing]()
    order, given = route_rows(experts_TK, E), leaves(experts_TK, dtype)
    grad = torch.randn(len(experts_TK), D, device="cuda").to(dtype)
    found = results(order, given, grad, weight_gradients=all_in_fp8)
    if not len(experts_TK):
        assert all(x.eq(0).all() for x in found)
        return
    on_cpu = [x.detach().cpu().requires_grad_() for x in given]
    exact = [x.detach().float().requires_grad_() for x in on_cpu]
    their_order = route_rows(experts_TK.cpu(), E)
    plain = results(their_order, on_cpu, grad.cpu(), weight_gradients=all_in_fp8)
    wants = results(their_order, exact, grad.cpu(), routed_experts)
    for name, got, other, want in zip(NAMES, found, plain, wants, strict=True):
        assert got.dtype == other.dtype
        allowed = 1.1 * error(other, want)
        assert error(got.cpu(), want) <= allowed, f"{name}: {error(got.cpu(), want)} of {allowed}"
        assert error(got.cpu(), other.float()) < 0.02, name


@pytest.mark.parametrize("all_in_fp8", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("routing", ["zipf", "empty experts", "one takes all"])
def test_nothing_depends_on_memory_that_nobody_wrote(routing, gaps, all_in_fp8):
    """Results have the same bits if every fresh tensor is full of NaN and largest integers."""
    torch.manual_seed(1)
    experts_TK = ROUTINGS[routing]()
    order = padded(experts_TK, 1.1, 100) if gaps else route_rows(experts_TK, E)
    given, grad = leaves(experts_TK), torch.randn(len(experts_TK), D, device="cuda").to(BF16)
    options = dict(weight_gradients=all_in_fp8)
    expected = results(order, given, grad, **options)
    torch.use_deterministic_algorithms(True)
    try:
        found = results(order, given, grad, **options)
        again = results(order, given, grad, **options, recompute=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in found)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, again, expected))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_nan(value):
    experts_TK = ROUTINGS["uniform"]()
    order, given = route_rows(experts_TK, E), leaves(experts_TK)
    with torch.no_grad():
        given[0][7, 11] = value
    out = routed_experts_fp8(given[0], order, *given[1:])
    assert torch.isfinite(out).all(1).tolist() == [t != 7 for t in range(T)]


@pytest.mark.parametrize("all_in_fp8", [False, True])
def test_replays_with_other_routings_and_weights_bitwise(all_in_fp8):
    """Captured once, forward and backward; deterministic, and without a host sync."""
    ids = ROUTINGS["uniform"]()
    given, grad = leaves(ids), torch.randn(T, D, device="cuda").to(BF16)

    def step() -> list[Tensor]:
        options = dict(keep_codes=True, weight_gradients=all_in_fp8)
        return results(route_rows(ids, E), given, grad, **options)

    def change() -> None:
        names = ("zipf", "one takes all", "empty experts", "uniform")
        ids.copy_(ROUTINGS[names[torch.randint(4, ()).item()]]())
        given[0].normal_()
        for w in given[2:]:
            w.normal_().mul_(0.04)

    check_replays(step, change)


def test_tokens_in_fp32_are_refused_by_name():
    experts_TK = ROUTINGS["uniform"]()
    given = leaves(experts_TK, FP32)
    with pytest.raises(ValueError, match=r"bfloat16 or float16 on CUDA, got torch.float32"):
        routed_experts_fp8(given[0], route_rows(experts_TK, E), *given[1:])
    with torch.autocast("cuda", BF16, cache_enabled=False):
        out = routed_experts_fp8(given[0], route_rows(experts_TK, E), *given[1:])
    out.sum().backward()
    assert out.dtype == BF16
    assert all(x.grad.dtype == FP32 for x in given)
