"""The ops against oracles written here: values, every gradient, what is saved, what is recorded.

Sizes: R rows, E experts, K and N the sides of a GEMM.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moe_graphs.kernels import (
    RowOrder,
    gather_gemm,
    grouped_gemm,
    permute,
    route_rows,
    swiglu,
    unpermute,
)

# Half a unit in the last of bf16's eight significant bits, and a little for fp32's own error.
BF16_ROUNDING = 2**-7.99

COUNTS = [
    pytest.param((4, 4, 4), id="even"),
    pytest.param((7, 1, 5), id="odd"),
    pytest.param((0, 6, 0, 3), id="empty-experts"),
    pytest.param((0, 0, 9), id="first-empty"),
    pytest.param((9, 0, 0), id="one-takes-all"),
    pytest.param((0, 0), id="no-rows"),
]


def _offsets(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def _operands(counts: tuple[int, ...], tail: int = 0, size_k: int = 5, size_n: int = 3):
    generator = torch.Generator().manual_seed(sum(counts) + tail)
    rows, experts = sum(counts) + tail, len(counts)
    x = torch.randn(rows, size_k, dtype=torch.float64, generator=generator)
    w = torch.randn(experts, size_k, size_n, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), w.requires_grad_(), _offsets(counts)


def _plain_grouped_gemm(x, w, counts):
    """The grouped GEMM, one row at a time, with autograd's own gradients."""
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = [x[row] @ w[expert] for row, expert in enumerate(experts)]
    tail = x.shape[0] - len(experts)
    return torch.stack([*rows, *[x.new_zeros(w.shape[2]) for _ in range(tail)]])


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class TestGroupedGemm:
    @pytest.mark.parametrize("tail", [0, 4])
    @pytest.mark.parametrize("counts", COUNTS[:-1])
    def test_equals_row_by_row_products(self, counts, tail):
        x, w, offsets = _operands(counts, tail)
        grad = torch.randn(x.shape[0], w.shape[2], dtype=torch.float64)
        got = grouped_gemm(x, w, offsets)
        want = _plain_grouped_gemm(x, w, counts)
        torch.testing.assert_close(got, want)
        for actual, expected in zip(
            torch.autograd.grad(got, (x, w), grad),
            torch.autograd.grad(want, (x, w), grad),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected)

    @pytest.mark.parametrize("counts", COUNTS)
    def test_gradcheck(self, counts):
        x, w, offsets = _operands(counts)
        assert torch.autograd.gradcheck(lambda x, w: grouped_gemm(x, w, offsets), (x, w))

    def test_tail_is_never_read_and_comes_out_zero(self):
        x, w, offsets = _operands((2, 3), tail=2)
        with torch.no_grad():
            x[5:] = float("nan")
        out = grouped_gemm(x, w, offsets)
        grad = torch.ones_like(out)
        grad[5:] = float("nan")
        grad_x, grad_w = torch.autograd.grad(out, (x, w), grad)
        assert out[5:].eq(0).all()
        assert grad_x[5:].eq(0).all()
        assert grad_w.isfinite().all()

    def test_empty_experts_get_zero_weight_gradients(self):
        x, w, offsets = _operands((0, 6, 0))
        grouped_gemm(x, w, offsets).sum().backward()
        assert w.grad[[0, 2]].eq(0).all()
        assert w.grad[1].ne(0).all()

    def test_only_what_a_gradient_needs_is_saved(self):
        x, w, offsets = _operands((3, 3))
        assert _saved(lambda: grouped_gemm(x.detach(), w, offsets)) == {(6, 5), (2,)}
        assert _saved(lambda: grouped_gemm(x, w.detach(), offsets)) == {(2, 5, 3), (2,)}

    def test_autocast_casts_both_operands_and_gradients_come_back(self):
        x, w, offsets = _operands((3, 3))
        x32, w32 = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = grouped_gemm(x32, w32, offsets)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert (x32.grad.dtype, w32.grad.dtype) == (torch.float32, torch.float32)
        torch.testing.assert_close(out.double(), grouped_gemm(x, w, offsets), rtol=0.02, atol=0.05)

    def test_a_recorder_sees_one_op_each(self):
        x, w, offsets = _operands((3, 0, 2))
        with Recorder() as recorder:
            out = grouped_gemm(x, w, offsets)
            torch.autograd.grad(out, (x, w), torch.ones_like(out))
        ours = [name for name in recorder.names if name.startswith("moe_graphs")]
        assert ours == [
            "moe_graphs.grouped_gemm_forward.default",
            "moe_graphs.grouped_gemm_dgrad.default",
            "moe_graphs.grouped_gemm_wgrad.default",
        ]
        assert not [name for name in recorder.names if "mm" in name and name not in ours]

    @pytest.mark.parametrize("counts", COUNTS)
    def test_opcheck(self, counts):
        x, w, offsets = _operands(counts, tail=1)
        grad = torch.randn(x.shape[0], w.shape[2], dtype=torch.float64)
        ops = torch.ops.moe_graphs
        x, w = x.detach(), w.detach()
        torch.library.opcheck(ops.grouped_gemm_forward.default, (x, w, offsets, True))
        torch.library.opcheck(ops.grouped_gemm_dgrad.default, (grad, w, offsets, True))
        torch.library.opcheck(ops.grouped_gemm_wgrad.default, (x, grad, offsets))
        low, b = x[:, :3].contiguous(), w[:, :3].contiguous()
        torch.library.opcheck(ops.grouped_gemm_with_lora.default, (x, w, low, b, offsets))
        torch.library.opcheck(ops.lora_gemm.default, (x, w, w[:, :, :3].contiguous(), b, offsets))
        torch.library.opcheck(ops.transpose.default, (x, 0.5, torch.float64))
        order = torch.arange(len(x), dtype=torch.int32)
        for transposed in (False, True):
            given = x, order, grad, offsets, transposed
            torch.library.opcheck(ops.gather_gemm_wgrad.default, given)

    def test_arguments_that_do_not_fit_are_named(self):
        x, w, offsets = _operands((3, 3))
        with pytest.raises(ValueError, match=r"x \[R, K\] and w \[E, K, N\]"):
            grouped_gemm(x[:, :4], w, offsets)
        with pytest.raises(ValueError, match=r"offsets int32 \[2\].*torch.int64"):
            grouped_gemm(x, w, offsets.long())
        with pytest.raises(ValueError, match="one dtype"):
            grouped_gemm(x.float(), w, offsets)


class TestRouteRows:
    def test_worked_example(self):
        order = route_rows(torch.tensor([[2, 0], [0, 1], [2, 1]]), 3)
        assert order.order_R.tolist() == [1, 2, 3, 5, 0, 4]
        assert order.inverse_R.tolist() == [4, 0, 1, 2, 5, 3]
        assert order.offsets_E.tolist() == [2, 4, 6]
        assert order.offsets_E.dtype == torch.int32

    @settings(max_examples=60, deadline=None)
    @given(data=st.data(), num_experts=st.integers(1, 40), num_tokens=st.integers(0, 50))
    def test_invariants(self, data, num_experts, num_tokens):
        top_k = data.draw(st.integers(1, min(num_experts, 4)))
        ids = st.lists(st.integers(0, num_experts - 1), min_size=top_k, max_size=top_k, unique=True)
        rows = data.draw(st.lists(ids, min_size=num_tokens, max_size=num_tokens))
        experts_TK = torch.tensor(rows, dtype=torch.int64).reshape(num_tokens, top_k)
        order = route_rows(experts_TK, num_experts)
        flat = experts_TK.flatten().tolist()
        assert order.order_R.tolist() == sorted(range(len(flat)), key=flat.__getitem__)
        assert order.inverse_R[order.order_R].tolist() == list(range(len(flat)))
        ends = [sum(id <= expert for id in flat) for expert in range(num_experts)]
        assert order.offsets_E.tolist() == ends

    def test_more_experts_than_narrow_keys_hold(self):
        experts_TK = torch.tensor([[40_000], [3], [39_999]])
        assert route_rows(experts_TK, 40_001).order_R.tolist() == [1, 2, 0]


def _random_order(num_tokens: int, top_k: int, num_experts: int, seed: int = 0) -> RowOrder:
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    return route_rows(scores.topk(top_k).indices, num_experts)


# Capacity 2 of 2 experts: pairs 0 and 3 go to expert 0, pair 2 to expert 1, pair 1 to nobody.
GAPS = RowOrder(
    torch.tensor([0, 3, 2, -1]), torch.tensor([0, -1, 2, 1]), torch.tensor([2, 4]).int(), True
)


class TestPermute:
    order = route_rows(torch.tensor([[2, 0], [0, 1], [2, 1]]), 3)

    def test_worked_example(self):
        rows = permute(torch.tensor([[1.0], [2.0], [3.0]]), self.order)
        assert rows.flatten().tolist() == [1, 2, 2, 3, 1, 3]

    def test_gaps_are_zero_rows_without_gradient(self):
        hidden = torch.tensor([[1.0], [2.0]], requires_grad=True)
        rows = permute(hidden, GAPS)
        assert rows.flatten().tolist() == [1, 2, 2, 0]
        rows.backward(torch.tensor([[1.0], [10.0], [100.0], [float("nan")]]))
        assert hidden.grad.flatten().tolist() == [1, 110]

    @pytest.mark.parametrize("order", [_random_order(7, 3, 5), _random_order(5, 1, 3), GAPS])
    def test_gradcheck(self, order):
        num_tokens = {21: 7, 5: 5, 4: 2}[order.inverse_R.numel()]
        hidden = torch.randn(num_tokens, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: permute(x, order), hidden)

    def test_gradient_is_summed_in_fp32_and_rounded_once(self):
        # In bf16, 256 + 1 is 256: summed in bf16, the ones would be lost one by one.
        hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        order = route_rows(torch.tensor([[0, 1, 2, 3]]), 4)
        grad = torch.tensor([[256.0], [1.0], [1.0], [2.0]], dtype=torch.bfloat16)
        permute(hidden, order).backward(grad)
        assert hidden.grad.item() == 260

    def test_saves_the_order_only(self):
        hidden = torch.randn(3, 8, requires_grad=True)
        assert _saved(lambda: permute(hidden, self.order)) == {(6,)}

    def test_no_tokens(self):
        hidden = torch.zeros(0, 4, requires_grad=True)
        rows = permute(hidden, _random_order(0, 2, 3))
        rows.sum().backward()
        assert rows.shape == (0, 4)
        assert hidden.grad.shape == (0, 4)


class TestUnpermute:
    order = route_rows(torch.tensor([[2, 0], [0, 1], [2, 1]]), 3)

    def test_worked_example(self):
        rows = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0], [60.0]])
        weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
        assert unpermute(rows, self.order, weights).flatten().tolist() == [30, 20, 40]

    def test_pairs_without_a_row_add_nothing(self):
        rows = torch.tensor([[1.0], [2.0], [3.0], [float("nan")]], requires_grad=True)
        weights = torch.tensor([[0.5, 9.0], [1.0, 2.0]], requires_grad=True)
        hidden = unpermute(rows, GAPS, weights)
        assert hidden.flatten().tolist() == [0.5, 3 + 4]
        hidden.sum().backward()
        assert rows.grad.flatten().tolist() == [0.5, 2, 1, 0]
        assert weights.grad.tolist() == [[1, 0], [3, 2]]

    @pytest.mark.parametrize("order", [_random_order(7, 3, 5), _random_order(5, 1, 3), GAPS])
    def test_gradcheck(self, order):
        num_tokens = {21: 7, 5: 5, 4: 2}[order.inverse_R.numel()]
        rows = torch.randn(order.order_R.numel(), 3, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(num_tokens, order.inverse_R.numel() // num_tokens).double()
        weights.requires_grad_()
        assert torch.autograd.gradcheck(lambda r, w: unpermute(r, order, w), (rows, weights))

    def test_bf16_rows_are_weighted_and_summed_in_fp32(self):
        order = _random_order(50, 4, 9)
        rows = torch.randn(200, 16).bfloat16().requires_grad_()
        weights = torch.rand(50, 4, requires_grad=True)
        hidden = unpermute(rows, order, weights)
        grad = torch.randn(50, 16).bfloat16()
        grad_rows, grad_weights = torch.autograd.grad(hidden, (rows, weights), grad)

        rows_TKD = rows.double()[order.inverse_R.view(50, 4)]
        want = (rows_TKD * weights.double().unsqueeze(-1)).sum(1)
        # Rounded once, from an fp32 value: half a unit of bf16's last place.
        torch.testing.assert_close(hidden.double(), want, rtol=BF16_ROUNDING, atol=1e-6)
        want_rows = torch.zeros(200, 16).double()
        want_rows[order.inverse_R] = (grad.double()[:, None] * weights[..., None]).reshape(-1, 16)
        torch.testing.assert_close(grad_rows.double(), want_rows, rtol=BF16_ROUNDING, atol=1e-6)
        assert grad_weights.dtype == torch.float32
        want_weights = (rows_TKD * grad.double().unsqueeze(1)).sum(-1)
        torch.testing.assert_close(grad_weights.double(), want_weights, rtol=1e-5, atol=1e-5)

    def test_saves_rows_as_they_are(self):
        order = _random_order(4, 2, 3)
        rows = torch.randn(8, 6).bfloat16().requires_grad_()
        weights = torch.rand(4, 2, requires_grad=True)
        assert _saved_bytes(lambda: unpermute(rows, order, weights)) == (
            rows.nbytes + weights.nbytes + order.order_R.nbytes + order.inverse_R.nbytes
        )


class TestSwiGLU:
    def test_gradcheck(self):
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(swiglu, x)

    def test_equals_plain_torch(self):
        x = torch.randn(5, 3, 8, requires_grad=True)
        gate, up = x.chunk(2, dim=-1)
        want = gate / (1 + (-gate).exp()) * up
        got = swiglu(x)
        torch.testing.assert_close(got, want)
        grad = torch.randn_like(want)
        torch.testing.assert_close(
            torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(want, x, grad)[0]
        )

    def test_bf16_is_rounded_once_and_saves_its_input_only(self):
        x = torch.randn(64, 32).bfloat16().requires_grad_()
        got = swiglu(x)
        grad = torch.randn(64, 16).bfloat16()
        (got_grad,) = torch.autograd.grad(got, x, grad, retain_graph=True)
        exact = x.detach().double().requires_grad_()
        want = swiglu(exact)
        (want_grad,) = torch.autograd.grad(want, exact, grad.double())
        torch.testing.assert_close(got.double(), want, rtol=BF16_ROUNDING, atol=1e-6)
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=BF16_ROUNDING, atol=1e-6)
        assert _saved_bytes(lambda: swiglu(x)) == x.nbytes

    def test_odd_width_is_refused(self):
        with pytest.raises(ValueError, match="even last dimension"):
            swiglu(torch.zeros(2, 5))


def _saved(call) -> set[tuple[int, ...]]:
    return {tuple(tensor.shape) for tensor in _saved_tensors(call)}


def _saved_bytes(call) -> int:
    return sum(tensor.nbytes for tensor in _saved_tensors(call))


def _saved_tensors(call) -> list[torch.Tensor]:
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return saved


class TestGatherGemm:
    """One op instead of permute and grouped_gemm."""

    @staticmethod
    def _case():
        torch.manual_seed(0)
        order = route_rows(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
        hidden = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        return hidden, order, torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)

    def test_equals_the_two_ops(self):
        hidden, order, w = self._case()
        grad = torch.randn(6, 3, dtype=torch.float64)
        apart = grouped_gemm(permute(hidden, order), w, order.offsets_E)
        together = gather_gemm(hidden, order, w)
        torch.testing.assert_close(together, apart)
        for got, want in zip(
            torch.autograd.grad(together, (hidden, w), grad),
            torch.autograd.grad(apart, (hidden, w), grad),
            strict=True,
        ):
            torch.testing.assert_close(got, want)

    def test_saves_tokens_and_not_rows(self):
        hidden, order, w = self._case()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            gather_gemm(hidden, order, w)
        shapes = sorted(tuple(t.shape) for t in saved)
        assert shapes == [(3, 2), (3, 5), (4,), (4, 5, 3), (6,)]

    def test_gaps_are_rows_of_zeros(self):
        hidden, order, w = self._case()
        inverse = order.inverse_R.clone()
        inverse[5] = -1
        rows = order.order_R.clone()
        rows[3] = -1
        gapped = RowOrder(rows, inverse, order.offsets_E, True)
        want = grouped_gemm(permute(hidden, gapped), w, order.offsets_E)
        torch.testing.assert_close(gather_gemm(hidden, gapped, w), want)

    def test_an_order_of_other_tokens_is_refused(self):
        hidden, order, w = self._case()
        with pytest.raises(ValueError, match="whole multiples of 4 tokens"):
            gather_gemm(torch.cat([hidden, hidden[:1]]), order, w)


@pytest.mark.parametrize(
    ("given", "expected"), [("none", "ieee"), ("ieee", "ieee"), ("tf32", "tf32")]
)
def test_products_of_fp32_have_the_precision_that_torch_is_told(given, expected):
    pytest.importorskip("triton")
    from moe_graphs.kernels.gemm.portable_pointer import _precision

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = given
    try:
        assert _precision(torch.empty(1)) == expected
        assert _precision(torch.empty(1, dtype=torch.bfloat16)) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
