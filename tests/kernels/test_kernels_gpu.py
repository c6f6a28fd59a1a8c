"""The kernels on a CUDA GPU: every variant, every op with its gradients, captured and replayed.

Variants run in kernel_check's child processes, so that a kernel that hangs fails one test and the
rest still run. Ops are compared with fp32: an error may be at most twice that of the plain torch
path in the same dtype.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import kernel_check as check
from moe_graphs.kernels import (
    RowOrder,
    gather_gemm,
    grouped_gemm,
    permute,
    route_rows,
    swiglu,
    swiglu_linear,
    unpermute,
)
from moe_graphs.kernels.gemm import reference
from moe_graphs.kernels.swiglu import reference as swiglu_reference
from replays import check_replays

pytestmark = pytest.mark.gpu
ROUTINGS = ["uniform", "zipf", "empty", "one"]


@pytest.mark.parametrize("kind", check.KINDS)
def test_variant(kind):
    """Poisoned outputs, eight routings, both dtypes, deterministic, no sync, capture and replay."""
    verdict = check.run_check(kind)
    assert verdict["ok"], verdict["failures"]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def results(run, dtype: torch.dtype, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of the inputs, for a fixed output gradient rounded to `dtype`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    generator = torch.Generator(device="cuda").manual_seed(3)
    grad = torch.randn(out.shape, device="cuda", generator=generator).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def compare(ours, plain, inputs: tuple[torch.Tensor, ...]) -> None:
    """`ours` has at most twice the error of `plain` in the inputs' dtype, against a wider one."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    exact = results(plain, dtype, *(x.to(wide) for x in inputs))
    others = results(plain, dtype, *inputs)
    for got, other, want in zip(results(ours, dtype, *inputs), others, exact, strict=True):
        assert got.dtype == other.dtype
        assert check.error(got, want) <= 2 * check.error(other.float(), want) + 1e-6


def plain_gemm(ends: list[int]):
    def run(x, w):
        starts = [0, *ends[:-1]]
        parts = [x[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, ends, strict=True))]
        return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], w.shape[2])])

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("rows", "experts", "K", "N"), [(3000, 16, 512, 768), (5000, 512, 256, 64)]
)
def test_grouped_gemm(rows, experts, K, N, routing, dtype):
    torch.manual_seed(0)
    ends = torch.cumsum(check.group_sizes(routing, rows, experts, 1), 0)
    offsets = ends.to(torch.int32).cuda()
    inputs = random(rows + 33, K, dtype=dtype), random(experts, K, N, dtype=dtype)
    compare(lambda x, w: grouped_gemm(x, w, offsets), plain_gemm(ends.tolist()), inputs)
    transposed = inputs[1].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(grouped_gemm(inputs[0], transposed, offsets), grouped_gemm(*inputs, offsets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("experts", "D", "N"), [(16, 512, 768), (5, 72, 320)])
def test_gather_gemm(experts, D, N, dtype):
    """Equal to permute and grouped_gemm; 72 columns take that path."""
    torch.manual_seed(0)
    hidden, w = random(300, D, dtype=dtype), random(experts, D, N, dtype=dtype)
    order = route_rows(torch.rand(300, experts, device="cuda").topk(4, dim=1).indices, experts)

    def apart(h, w):
        return grouped_gemm(permute(h, order), w, order.offsets_E)

    ours = results(lambda h, w: gather_gemm(h, order, w), dtype, hidden, w)
    again = results(lambda h, w: gather_gemm(h, order, w), dtype, hidden, w)
    for got, twice, want in zip(ours, again, results(apart, dtype, hidden, w), strict=True):
        assert torch.equal(got, twice)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    compare(
        lambda h, w: gather_gemm(h, order, w),
        lambda h, w: plain_gemm(order.offsets_E.tolist())(h[order.order_R // 4], w),
        (hidden, w),
    )


@pytest.mark.parametrize(("precision", "most"), [("highest", 1e-6), ("high", 2e-3)])
def test_products_of_fp32_have_the_precision_of_torchs(precision, most):
    torch.manual_seed(0)
    offsets = check.group_ends(check.group_sizes("empty", 1000, 8, 2))
    x, w, before = (
        random(1000, 512, dtype=torch.float32),
        random(8, 512, 256, dtype=torch.float32),
        torch.get_float32_matmul_precision(),
    )
    torch.set_float32_matmul_precision(precision)
    try:
        found = grouped_gemm(x, w, offsets)
    finally:
        torch.set_float32_matmul_precision(before)
    error = check.error(found, reference.grouped_gemm(x.double(), w.double(), offsets))
    assert error < most
    assert (error > 1e-5) == (precision == "high")


def test_main_grad_adds_in_fp32():
    torch.manual_seed(0)
    offsets = check.group_ends(check.group_sizes("empty", 4000, 8, 2))
    x, w = random(4000, 256), random(8, 256, 512).requires_grad_()
    main_grad = torch.ones(w.shape, device="cuda")
    grad = random(4000, 512)
    for _ in range(2):
        grouped_gemm(x, w, offsets, main_grad_EKN=main_grad).backward(grad)
    want = 1 + 2 * reference.grouped_gemm_wgrad(x.float(), grad.float(), offsets)
    assert w.grad is None
    assert check.error(main_grad, want) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(1, 1, 1), (3, 2, 3), (4096, 8, 128), (16384, 10, 512), (32768, 8, 1024), (777, 6, 64)],
)
def test_route_rows(tokens, top_k, experts):
    torch.manual_seed(0)
    scores = torch.rand(tokens, experts)
    ids = scores.topk(top_k, dim=1).indices
    ours, want = route_rows(ids.cuda(), experts), route_rows(ids, experts)
    assert torch.equal(ours.order_R.cpu(), want.order_R)
    assert torch.equal(ours.inverse_R.cpu(), want.inverse_R)
    assert torch.equal(ours.offsets_E.cpu(), want.offsets_E)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(700, 8, 2880), (64, 1, 8), (33, 3, 7168)])
def test_permute_and_unpermute(tokens, top_k, width, gaps, dtype):
    """Against the same functions on the CPU in fp32 and in the dtype."""
    torch.manual_seed(0)
    order = row_order(tokens, top_k, gaps)
    on_gpu = RowOrder(order.order_R.cuda(), order.inverse_R.cuda(), order.offsets_E.cuda(), gaps)
    hidden, rows = random(tokens, width, dtype=dtype), random(tokens * top_k, width, dtype=dtype)
    weights = torch.rand(tokens, top_k, device="cuda")

    def on_cpu(function):
        return lambda *inputs: function(*(x.cpu() for x in inputs)).cuda()

    ours = results(lambda h: permute(h, on_gpu), dtype, hidden)
    plain = results(on_cpu(lambda h: permute(h, order)), dtype, hidden)
    assert torch.equal(ours[0], plain[0])
    torch.testing.assert_close(ours[1], plain[1])
    compare(
        lambda r, w: unpermute(r, on_gpu, w),
        on_cpu(lambda r, w: unpermute(r, order, w)),
        (rows, weights),
    )


def row_order(tokens: int, top_k: int, gaps: bool) -> RowOrder:
    inverse = torch.randperm(tokens * top_k)
    if gaps:
        inverse[torch.randperm(len(inverse))[: len(inverse) // 5]] = -1
    order = torch.full((len(inverse),), -1)
    order[inverse[inverse >= 0]] = torch.arange(len(inverse))[inverse >= 0]
    return RowOrder(order, inverse, torch.tensor([len(inverse)], dtype=torch.int32), gaps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "ffn"), [(1000, 768), (33, 1408), (5, 20)])
def test_swiglu(rows, ffn, dtype):
    torch.manual_seed(0)
    compare(swiglu, swiglu_reference.swiglu, (random(rows, 2 * ffn, dtype=dtype),))


@pytest.mark.parametrize("shape", [(512, 4, 768), (33, 1408)])
@pytest.mark.parametrize("autocast", [False, True])
def test_swiglu_linear_has_the_bits_of_the_two_ops(shape, autocast):
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype).requires_grad_()
    w = random(640, shape[-1], dtype=dtype).requires_grad_()
    grad, found = random(*shape[:-1], 640, dtype=torch.bfloat16), []
    for run in (swiglu_linear, lambda x, w: functional.linear(swiglu(x), w)):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = run(x.to(torch.bfloat16), w)
        found.append((out, *torch.autograd.grad(out, (x, w), grad)))
    assert all(map(torch.equal, *found))


def experts_layer(hidden, weights, ids, w1, w2):
    """The whole dropless path, as LocalDispatcher and GroupedExperts take it."""
    order = route_rows(ids, w1.shape[0])
    rows = permute(hidden, order)
    rows = grouped_gemm(
        swiglu(grouped_gemm(rows, w1, order.offsets_E)), w2, order.offsets_E, zero_tail=False
    )
    return unpermute(rows, order, weights)


@pytest.mark.parametrize("used", [32, 20, 1])
@pytest.mark.parametrize("tokens", [512, 8192])
def test_nothing_depends_on_memory_that_nobody_wrote(used, tokens):
    """Results are bitwise the same when every fresh tensor is full of NaN and largest integers.

    The experts are those of the preset `small`, and only `used` of them get rows.
    """
    x, w1, w2 = random(tokens, 768), random(32, 768, 768), random(32, 384, 768)
    experts_TK = torch.stack(
        [torch.randperm(used, device="cuda")[: min(4, used)] for _ in range(8)]
    )
    experts_TK = experts_TK.repeat(tokens // 8, 1)

    def layer(x, w1, w2):
        order = route_rows(experts_TK, 32)
        weights = torch.full(experts_TK.shape, 0.25, device="cuda")
        rows = permute(x, order)
        rows = swiglu(grouped_gemm(rows, w1, order.offsets_E))
        return unpermute(grouped_gemm(rows, w2, order.offsets_E), order, weights)

    expected = results(layer, torch.bfloat16, x, w1, w2)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        found = results(layer, torch.bfloat16, x, w1, w2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, expected))


def test_layer_replays_with_other_routings_bitwise():
    """Forward and backward captured once; deterministic, and without a host sync."""
    torch.manual_seed(0)
    T, D, F, E, K = 512, 256, 384, 32, 4
    hidden, w1, w2 = random(T, D), random(E, D, 2 * F), random(E, F, D)
    leaves = [x.requires_grad_() for x in (hidden, torch.rand(T, K, device="cuda"), w1, w2)]
    ids = torch.rand(T, E, device="cuda").topk(K, dim=1).indices
    grad = random(T, D)

    def step():
        out = experts_layer(leaves[0], leaves[1], ids, *leaves[2:])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def change() -> None:
        ids.copy_(torch.rand(T, E, device="cuda").topk(K, dim=1).indices)

    check_replays(step, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, o: (x.double(), w.double(), o), "bfloat16"),
        (lambda x, w, o: (x, w.to(torch.float16), o), "one dtype"),
        (lambda x, w, o: (x, w, o.cpu()), "one device"),
        (lambda x, w, o: (x, w, o.long()), "int32"),
        (lambda x, w, o: (x, w, o[:-1]), "offsets"),
        (lambda x, w, o: (x[:, :60].contiguous(), w[:, :60].contiguous(), o), "multiples of 8"),
    ],
)
def test_bad_input_raises_before_launch(change, message):
    offsets = torch.tensor([4, 8], dtype=torch.int32, device="cuda")
    x, w, offsets = change(random(8, 64), random(2, 64, 64), offsets)
    with pytest.raises(ValueError, match=message):
        grouped_gemm(x, w, offsets)
