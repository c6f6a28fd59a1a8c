"""Experts in FP8 on the CPU: blocks, products, errors, gradients and training.

Shapes: T tokens, D model, F ffn, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_routed_experts import padded
from torch import Tensor

from kept_bytes import kept_bytes
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels import RowOrder, fp8, route_rows, routed_experts
from moe_graphs.kernels.packed_weights import FORMATS
from moe_graphs.kernels.routed_experts.fp8 import routed_experts_fp8
from moe_graphs.layers import MoEConfig, MoELayer
from training_runs import loss_of, microbatches, tiny_model

T, D, F, E, K = 48, 256, 128, 5, 2
BF16, FP32 = torch.bfloat16, torch.float32
ROUTINGS = {
    "random": lambda: torch.rand(T, E).topk(K).indices,
    "one takes all": lambda: torch.arange(K).expand(T, K).contiguous(),
    "half empty": lambda: torch.rand(T, 3).topk(K).indices + 2,
}
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=128, precision="fp8")


def leaves(dtype: torch.dtype = FP32) -> list[Tensor]:
    """Tokens, routing weights, w1 and w2."""
    torch.manual_seed(0)
    made = [torch.randn(T, D), torch.randn(E, D, 2 * F) * D**-0.5, torch.randn(E, F, D) * F**-0.5]
    made = [x.to(dtype) for x in made]
    made.insert(1, torch.rand(T, K))
    return [x.requires_grad_() for x in made]


def results(run, order: RowOrder, given: list[Tensor], **options: bool) -> list[Tensor]:
    torch.manual_seed(2)
    out = run(given[0], order, *given[1:], **options)
    return [out, *torch.autograd.grad(out, given, torch.randn(T, D).to(out.dtype))]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.detach() - want.detach()).float().norm() / want.detach().float().norm())


def in_blocks_of_rows(x: Tensor) -> Tensor:
    """The numbers that blocks of rows stand for, written plainly."""
    blocks = x.detach().float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def in_square_blocks(w: Tensor) -> Tensor:
    """The numbers that blocks of 128x128 stand for."""
    rows, columns = w.shape
    blocks = w.detach().float().view(rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(rows, columns)


def in_fp8_by_powers(x: Tensor) -> Tensor:
    """`in_blocks_of_rows` by the least powers of two that keep codes in range."""
    blocks = x.detach().float().unflatten(-1, (-1, 128))
    scale = (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448).log2().ceil().exp2()
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def plain(
    order: RowOrder, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, all_in_fp8: bool
) -> list[Tensor]:
    """Output and gradients by torch in fp32, whose operands were rounded to FP8 one by one."""
    of_weights = in_fp8_by_powers if all_in_fp8 else lambda x: x
    in_fp8 = in_fp8_by_powers if all_in_fp8 else in_blocks_of_rows
    rows = order.order_R.long()
    token, weight = tokens.detach()[rows // K], weights.detach().view(-1, 1)[rows]
    torch.manual_seed(2)
    grad = torch.randn(T, D)
    out, dtokens, dweights = torch.zeros(T, D), torch.zeros(T, D), torch.zeros(T * K)
    dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
    ends = order.offsets_E.tolist()
    for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        own, up, down = slice(start, end), in_square_blocks(w1[e]), in_square_blocks(w2[e])
        x, s, at = token[own], weight[own], rows[own] // K
        h = (in_fp8(x) @ up).requires_grad_()
        gate, linear = h.chunk(2, -1)
        a = torch.nn.functional.silu(gate) * linear
        out.index_add_(0, at, s * (in_fp8(a) @ down))
        dy = grad[at]
        da = in_fp8(dy) @ down.t()
        (dh,) = torch.autograd.grad(a, h, da * s)
        dweights[rows[own]] = (a.detach() * da).sum(1)
        dw2[e] = of_weights(s * a.detach()).t() @ of_weights(dy)
        dw1[e] = of_weights(x).t() @ of_weights(dh)
        dtokens.index_add_(0, at, in_fp8(dh) @ up.t())
    return [out, dtokens, dweights.view(T, K), dw1, dw2]


@pytest.mark.parametrize("all_in_fp8", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_errors_are_those_of_plain_fp8(routing, all_in_fp8):
    torch.manual_seed(1)
    order, given = route_rows(ROUTINGS[routing](), E), leaves()
    exact = results(routed_experts, order, given)
    names = ("output", "tokens", "routing weights", "w1", "w2")
    found = results(routed_experts_fp8, order, given, weight_gradients=all_in_fp8)
    others = plain(order, *given, all_in_fp8)
    for name, got, want, other in zip(names, found, exact, others, strict=True):
        assert 0.01 < error(got, want) < 1.1 * error(other, want), name
        assert got.dtype == want.dtype


@pytest.mark.parametrize("all_in_fp8", [False, True])
@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gaps_tails_and_sorted_rows_change_no_bit(dtype, powers, all_in_fp8):
    torch.manual_seed(1)
    order, given = route_rows(ROUTINGS["random"](), E), leaves(dtype)
    options = dict(powers=powers, weight_gradients=all_in_fp8)
    found = results(routed_experts_fp8, order, given, **options)
    gapped = results(routed_experts_fp8, padded(order, T, tail=3), given, **options)
    again = results(routed_experts_fp8, order, given, **options, recompute=True)
    kept = results(routed_experts_fp8, order, given, **options, keep_codes=True)
    transposed = [*given[:2], *(w.detach().mT.contiguous().mT.requires_grad_() for w in given[2:])]
    for other in (again, kept, results(routed_experts_fp8, order, transposed, **options)):
        assert all(map(torch.equal, found, other))
    for got, want in zip(gapped, found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-2 if dtype == BF16 else 1e-5)
    rows = given[0].detach()[order.order_R.long() // K].requires_grad_()
    torch.manual_seed(2)
    out = routed_experts_fp8(rows, order, *given[1:], is_sorted=True, **options)
    assert torch.equal(out, found[0])
    grads = torch.autograd.grad(out, [rows, *given[1:]], torch.randn(T, D).to(dtype))
    assert all(map(torch.equal, grads[1:], found[2:]))


def test_autocast_casts_tokens_alone():
    order, given = route_rows(ROUTINGS["random"](), E), leaves()
    with torch.autocast("cpu", BF16):
        found = results(routed_experts_fp8, order, given)
    tokens = given[0].detach().to(BF16).requires_grad_()
    expected = results(routed_experts_fp8, order, [tokens, *given[1:]])
    assert all(map(torch.equal, (x.float() for x in found), (x.float() for x in expected)))
    assert [x.dtype for x in found] == [BF16, FP32, FP32, FP32, FP32]


def test_rows_may_lie_in_any_way():
    x = torch.randn(256, 6)
    assert torch.equal(
        fp8.quantized(x.t()).codes.float(), fp8.quantized(x.t().contiguous()).codes.float()
    )


def test_weights_have_the_codes_of_frozen_ones_and_of_their_transpose():
    w = torch.randn(3, 256, 384)
    codes, scales = FORMATS["fp8"].quantize(w)
    lying, flipped = fp8.quantized_weights(w.mT), fp8.quantized_weights(w)
    assert torch.equal(lying.codes.float(), codes.float())
    assert torch.equal(lying.scales, scales)
    assert torch.equal(flipped.codes.float(), codes.mT.float())
    assert torch.equal(flipped.scales, scales.mT)


@pytest.mark.parametrize("powers", [False, True])
def test_blocks_of_every_size_keep_their_largest_number(powers):
    x = torch.randn(40, 256) * torch.logspace(-36, 30, 40).unsqueeze(1)
    x[3], x[5, :128] = 0, 0
    codes, scales = fp8.quantized(x, powers)
    assert torch.isfinite(scales).all()
    assert codes.float().abs().max() <= 448
    found = (codes.float().unflatten(1, (2, 128)) * scales.t().unsqueeze(-1)).flatten(1)
    large = x.abs().amax(1) > 1e-29
    off = (found - x).unflatten(1, (2, 128)).abs().amax(-1)
    assert (off <= x.unflatten(1, (2, 128)).abs().amax(-1) * (0.0625 if powers else 0.036))[
        large
    ].all()
    if powers:
        assert (scales.log2() == scales.log2().round()).all()
    largest = x.unflatten(1, (2, 128)).abs().amax(-1)[large]
    top = codes.float().unflatten(1, (2, 128)).abs().amax(-1)[large]
    top = top[largest > 0]
    assert (top > 223).all() if powers else (top == 448).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_nan(value):
    """A block does not swallow it, so a scaler or a check of gradients sees it."""
    torch.manual_seed(1)
    order, given = route_rows(ROUTINGS["random"](), E), leaves()
    with torch.no_grad():
        given[0][7, 11] = value
    out, dtokens, *_ = results(routed_experts_fp8, order, given)
    finite = torch.isfinite(out).all(1)
    assert finite.tolist() == [t != 7 for t in range(T)]
    assert torch.isfinite(dtokens[0]).all()


@pytest.mark.parametrize("all_in_fp8", [False, True])
def test_a_split_backward_gives_the_same_gradients(all_in_fp8):
    torch.manual_seed(1)
    order, given = route_rows(ROUTINGS["random"](), E), leaves()
    expected = results(routed_experts_fp8, order, given, weight_gradients=all_in_fp8)
    torch.manual_seed(2)
    out = routed_experts_fp8(given[0], order, *given[1:], weight_gradients=all_in_fp8)
    split = SplitBackward([out], given[:2], given[2:])
    found = split.input_gradients([torch.randn(T, D)])
    assert all(map(torch.equal, [*found, *split.parameter_gradients()], expected[1:]))


@pytest.mark.parametrize("precision", ["fp8", "fp8_rows"])
def test_the_layer_keeps_codes_of_its_weights_besides_what_it_keeps_in_bf16(precision):
    """A layer that keeps nothing but tokens keeps none, nor does one whose weights FSDP2 frees."""
    tokens, kept = torch.randn(T, D, dtype=BF16, requires_grad=True), []
    for name, recompute, keeps_codes in (
        ("weights", "none", True),
        (precision, "none", True),
        (precision, "none", False),
        ("weights", "experts", True),
        (precision, "experts", True),
    ):
        layer = MoELayer(replace(MOE, precision=name, recompute=recompute), D, dtype=BF16)
        layer.experts.keeps_codes = keeps_codes
        kept.append(kept_bytes(lambda layer=layer: layer(tokens), layer.parameters()))
    in_bf16, in_fp8, without, lean, lean_in_fp8 = kept
    blocks = MOE.num_experts * (D * 2 * F + F * D) // 128**2
    assert in_fp8 - in_bf16 == blocks * (128**2 + 4)
    assert without == in_bf16
    assert lean_in_fp8 == lean < in_bf16


def test_training_in_fp8_stays_close_to_training_without():
    losses = {}
    for precision in ("weights", "fp8"):
        model = tiny_model("cpu", "moe", precision="fp8", dropout=0.0, count=1)
        for layer in model.layers:
            layer.moe.experts.precision = precision
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = losses[precision] = []
        batch = next(iter(microbatches("cpu", 1)))[0]
        for _ in range(30):
            loss, _ = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    plain, ours = losses["weights"], losses["fp8"]
    assert ours != plain
    assert plain[-1] < 0.5 * plain[0]
    assert abs(ours[-1] - plain[-1]) < 0.03 * plain[0]


def test_refusals():
    given, order = leaves(), route_rows(ROUTINGS["random"](), E)
    with pytest.raises(ValueError, match=r"wants w1 \[E, D, 2F\] and w2 \[E, F, D\], got"):
        routed_experts_fp8(given[0], order, *given[1:3], given[3][:, :64])
    with pytest.raises(ValueError, match="128 must divide ffn_hidden_size, got 64: choose another"):
        MoELayer(replace(MOE, ffn_hidden_size=64), D)
    with pytest.raises(ValueError, match="128 must divide hidden_size, got 200"):
        MoELayer(MOE, 200)
    with pytest.raises(
        ValueError, match="precision 'fp4' is unknown: choose weights, fp8, fp8_powers or"
    ):
        replace(MOE, precision="fp4")
    with pytest.raises(ValueError, match="precision='fp8' needs experts='moe_graphs', got"):
        replace(MOE, experts="transformer_engine")
