"""LoRA beside the experts' weights on a GPU: fp32 oracle, poisoned memory, replays, kept bytes.

Shapes: T tokens, D model, F ffn, E experts, K top-k, r rank.
"""

from __future__ import annotations

import pytest
import torch
from test_routed_experts_gpu import BF16, ROUTINGS, D, E, F, T, padded, plain
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernel_check import error, group_ends, group_sizes
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels import RowOrder, route_rows
from moe_graphs.kernels.gemm import (
    grouped_gemm_forward,
    grouped_gemm_wgrad,
    grouped_gemm_with_lora,
    lora_gemm,
    reference,
)
from moe_graphs.kernels.gemm.gather import gather_gemm_wgrad
from moe_graphs.kernels.routed_experts.lora import (
    LoRA,
    routed_experts_with_lora,
    up_projection_with_lora,
)
from replays import check_replays

pytestmark = pytest.mark.gpu
NAMES = ("output", "tokens", "routing weights", "a1", "b1", "a2", "b2")
RANKS = (4, 8, 16, 64, 128)


def leaves(experts_TK: Tensor, rank: int = 16) -> list[Tensor]:
    """Tokens and routing weights, fp32 factors, and two frozen weights."""
    torch.manual_seed(0)
    tokens, top_k = experts_TK.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda") * shape[-2] ** -0.5

    shapes = ((E, D, rank), (E, rank, 2 * F), (E, F, rank), (E, rank, D))
    given = [torch.randn(tokens, D, device="cuda").to(BF16)]
    given += [torch.rand(tokens, top_k, device="cuda"), *(normal(*shape) for shape in shapes)]
    frozen = [normal(E, D, 2 * F).to(BF16), normal(E, F, D).to(BF16)]
    return [*(each.requires_grad_() for each in given), *frozen]


def ours(order: RowOrder, given: list[Tensor]) -> Tensor:
    tokens, weights, a1, b1, a2, b2, w1, w2 = given
    lora1, lora2 = LoRA(a1, b1), LoRA(a2, b2)
    return routed_experts_with_lora(tokens, order, weights, w1, w2, lora1, lora2)


def materialised(order: RowOrder, given: list[Tensor]) -> Tensor:
    """The summed weights in the dtype of the frozen ones, as PEFT makes them."""
    tokens, weights, a1, b1, a2, b2, w1, w2 = given
    dtype = w1.dtype
    w1, w2 = w1 + a1.to(dtype) @ b1.to(dtype), w2 + a2.to(dtype) @ b2.to(dtype)
    return plain(order, tokens, weights, w1, w2)


def results(run, order: RowOrder, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = run(order, given)
    return [out.detach(), *torch.autograd.grad(out, given[:6], grad.to(out.dtype))]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "no tokens"])
def test_errors_are_no_worse_than_those_of_summed_weights(routing, rank):
    experts_TK = ROUTINGS[routing]()
    order, given = route_rows(experts_TK, E), leaves(experts_TK, rank)
    grad = torch.randn(len(experts_TK), D, device="cuda").to(BF16)
    exact = [x.detach().float().requires_grad_(x.requires_grad) for x in given]
    found = results(ours, order, given, grad)
    others, wants = (results(materialised, order, x, grad) for x in (given, exact))
    for name, got, other, want in zip(NAMES, found, others, wants, strict=True):
        assert got.dtype == other.dtype
        allowed = 2 * error(other.float(), want) + 1e-6
        assert error(got, want) <= allowed, f"{name}: {error(got, want)} of {allowed}"


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("routing", ["zipf", "empty experts", "few tokens"])
def test_nothing_depends_on_memory_that_nobody_wrote(routing, gaps):
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


def test_replays_with_other_routings_bitwise():
    ids = ROUTINGS["uniform"]()
    given = leaves(ids)
    grad = torch.randn(T, D, device="cuda").to(BF16)

    def step() -> list[Tensor]:
        return results(ours, route_rows(ids, E), given, grad)

    def change() -> None:
        names = ("zipf", "one takes all", "empty experts", "uniform")
        ids.copy_(ROUTINGS[names[torch.randint(4, ()).item()]]())
        given[0].detach().normal_()

    check_replays(step, change)


def test_split_backward_has_the_same_bits():
    ids = ROUTINGS["zipf"]()
    order, given = route_rows(ids, E), leaves(ids)
    grad = torch.randn(T, D, device="cuda").to(BF16)
    _, *whole = results(ours, order, given, grad)
    split = SplitBackward([ours(order, given)], given[:2], given[2:6])
    found = [*split.input_gradients([grad]), *split.parameter_gradients()]
    assert all(map(torch.equal, found, whole))


@pytest.mark.parametrize("rank", [8, 16, 64, 128])
@pytest.mark.parametrize("rows", [1500, 30000])  # ping-pong, and cooperative
def test_a_sum_is_rounded_once_and_layouts_have_the_same_bits(rows, rank):
    torch.manual_seed(0)
    offsets = group_ends(group_sizes("zipf", rows, 16, 1))
    shapes = ((rows, D), (rows, rank), (16, D, 2 * F), (16, rank, 2 * F))
    x, low, w, b = (torch.randn(shape, device="cuda").to(BF16) for shape in shapes)
    exact = reference.grouped_gemm_with_lora(*(each.float() for each in (x, w, low, b)), offsets)
    found = grouped_gemm_with_lora(x, w, low, b, offsets)
    parts = ((x, w), (low, b))
    first, second = (grouped_gemm_forward(*pair, offsets, False) for pair in parts)
    assert error(found, exact) < 0.9 * error(first + second, exact)
    w_turned, b_turned = (each.mT.contiguous().mT for each in (w, b))
    for w_given, b_given in ((w_turned, b_turned), (w_turned, b), (w, b_turned)):
        assert torch.equal(grouped_gemm_with_lora(x, w_given, low, b_given, offsets), found)


@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize(("sizes", "rows"), [("zipf", 30000), ("uniform", 30011), ("one", 9000)])
def test_one_pass_over_the_rows_has_the_bits_of_two(sizes, rows, rank):
    torch.manual_seed(0)
    offsets = group_ends(group_sizes(sizes, rows, 16, 1))
    x = torch.randn(rows + 100, D, device="cuda").to(BF16)  # some of them behind the last end
    shapes = ((D, 2 * F), (D, rank), (rank, 2 * F))
    matrices = [torch.randn(16, *shape, device="cuda").mul(shape[0] ** -0.5).to(BF16)
                for shape in shapes]  # fmt: skip
    for w, a, b in (matrices, [each.mT.contiguous().mT for each in matrices]):
        out, low = lora_gemm(x, w, a, b, offsets)
        alone = grouped_gemm_forward(x, a, offsets, False)
        assert torch.equal(low[:rows], alone[:rows])
        second = grouped_gemm_with_lora(x, w, alone, b, offsets)
        assert torch.equal(out[:rows], second[:rows])


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "no tokens"])
def test_gathered_gradients_are_those_of_copied_rows(routing, rank):
    experts_TK = ROUTINGS[routing]()
    order, top_k = route_rows(experts_TK, E), experts_TK.shape[1]
    tokens = torch.randn(len(experts_TK), D, device="cuda").to(BF16)
    grad = torch.randn(experts_TK.numel(), rank, device="cuda").to(BF16)
    rows = tokens[order.order_R.long() // top_k]
    exact = reference.grouped_gemm_wgrad(rows.float(), grad.float(), order.offsets_E)
    copied = grouped_gemm_wgrad(rows, grad, order.offsets_E)
    for transposed in (False, True):
        found = gather_gemm_wgrad(tokens, order.order_R, grad, order.offsets_E, transposed)
        found = found.mT if transposed else found
        assert error(found, exact) <= 1.1 * error(copied, exact) + 1e-6
        empty = order.offsets_E.diff(prepend=order.offsets_E.new_zeros(1)) == 0
        assert bool((found[empty] == 0).all())


@pytest.mark.parametrize(("M", "N"), [(1, 1), (24576, 128), (1000, 60)])
@pytest.mark.parametrize("dtypes", [(torch.float32, BF16), (BF16, torch.float32), (BF16, BF16)])
def test_a_transposed_factor_has_the_bits_of_torchs_product(M, N, dtypes):
    x = torch.randn(M, N, device="cuda").to(dtypes[0])
    found = torch.ops.moe_graphs.transpose(x, 0.7, dtypes[1])
    assert torch.equal(found, (x.mT.float() * 0.7).to(dtypes[1]))


@pytest.mark.parametrize("rank", [0, 16, 64])
@pytest.mark.parametrize("routing", ["zipf", "empty experts", "every expert"])
def test_a_frozen_bias_is_in_the_same_sum(routing, rank):
    experts_TK = ROUTINGS[routing]()
    order, given = route_rows(experts_TK, E), leaves(experts_TK, rank or 16)
    tokens, _, a, b, _, _, w1, _ = (each.detach() for each in given)
    bias, top_k = torch.randn(E, 2 * F, device="cuda").to(BF16), experts_TK.shape[1]
    lora = LoRA(a, b) if rank else None
    found = up_projection_with_lora(tokens, order, top_k, w1, lora, bias_E2F=bias)
    rows = tokens[order.order_R.long() // top_k]
    numbers = torch.arange(len(rows), device="cuda", dtype=torch.int32)
    expert_R = torch.searchsorted(order.offsets_E, numbers, right=True)

    def plain(dtype: torch.dtype) -> Tensor:
        w = w1.to(dtype) + (a.to(BF16).to(dtype) @ b.to(BF16).to(dtype) if rank else 0)
        return reference.grouped_gemm(rows.to(dtype), w, order.offsets_E) + bias[expert_R].to(dtype)

    exact = plain(torch.float32)
    assert error(found, exact) <= 2 * error(plain(BF16), exact)


def test_no_summed_weight_is_made():
    """A forward of these sizes takes less memory than a copy of the weights."""
    ids = ROUTINGS["uniform"]()
    order, given = route_rows(ids, E), leaves(ids)
    ours(order, given)  # what lives on is made
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(order, given)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < sum(each.nbytes for each in given[6:])


@pytest.mark.parametrize("beside", [False, True], ids=["frozen", "LoRA"])
def test_checkpointed_gradients_take_the_place_of_rows_and_have_the_same_bits(beside):
    """A second backward of the same graph has them, too."""
    ids = ROUTINGS["zipf"]()
    order, given = route_rows(ids, E), leaves(ids)
    wanted, grad = given[: 6 if beside else 2], torch.randn(T, D, device="cuda").to(BF16)

    def run(*leaves: Tensor) -> Tensor:
        tokens, weights, a1, b1, a2, b2, w1, w2 = leaves
        lora = (LoRA(a1, b1), LoRA(a2, b2)) if beside else (None, None)
        return routed_experts_with_lora(tokens, order, weights, w1, w2, *lora)

    expected = torch.autograd.grad(run(*given), wanted, grad)
    out = checkpoint(run, *given, use_reentrant=False)
    for keeps in (True, False):
        found = torch.autograd.grad(out, wanted, grad, retain_graph=keeps)
        assert all(map(torch.equal, found, expected))
