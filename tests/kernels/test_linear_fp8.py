"""``linear_fp8``: products of a projection in FP8, and the layers that have them.

Shapes: T rows, K in features, N out features.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_fp8_blocks import BF16, FP32, error, in_blocks_of_rows, in_fp8_by_powers, in_square_blocks
from torch import Tensor
from torch.nn import functional

import moe_graphs
from kept_bytes import kept_bytes
from moe_graphs import GraphConfig
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels.fp8.linear import linear_fp8
from moe_graphs.kernels.gpu_architectures import architecture_of
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.layers.linear import FP8Linear
from training_runs import DEVICES, train

K, N = 256, 384
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=128, shared_ffn_hidden_size=128)
CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=128, num_layers=4, num_heads=4, ffn_hidden_size=128,
    max_sequence_length=32, moe=MOE, moe_layers=2, precision="fp8",
)  # fmt: skip


def operands(rows: int, dtype: torch.dtype = FP32, device: str = "cpu") -> tuple[Tensor, ...]:
    """Rows, a weight and a gradient."""
    torch.manual_seed(0)
    made = torch.randn(rows, K), torch.randn(N, K) * K**-0.5, torch.randn(rows, N)
    x, weight, grad = (value.to(device, dtype) for value in made)
    return x.requires_grad_(), weight.requires_grad_(), grad


def results(run, x: Tensor, weight: Tensor, grad: Tensor, **options: bool) -> list[Tensor]:
    out = run(x, weight, **options)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad.to(out.dtype))]


def skip_unless_hopper(device: str) -> None:
    if device == "cuda" and "fp8" not in architecture_of(torch.device("cuda")).gemms:
        pytest.skip("waits for a Hopper GPU")


@pytest.mark.parametrize("rows", [1, 100, 128, 300])
@pytest.mark.parametrize("all_in_fp8", [False, True])
def test_errors_are_those_of_plain_fp8(all_in_fp8, rows):
    x, weight, grad = operands(rows)
    exact = results(functional.linear, x, weight, grad)
    found = results(linear_fp8, x, weight, grad, weight_gradients=all_in_fp8)
    in_fp8 = in_fp8_by_powers if all_in_fp8 else in_blocks_of_rows
    of_weights = in_fp8_by_powers if all_in_fp8 else (lambda value: value.detach())
    w = in_square_blocks(weight)
    plain = in_fp8(x) @ w.t(), in_fp8(grad) @ w, of_weights(grad).t() @ of_weights(x)
    for name, got, want, other in zip(
        ("output", "rows", "weight"), found, exact, plain, strict=True
    ):
        assert error(got, want) < 1.1 * error(other, want) + 1e-6, name
    assert error(found[0], exact[0]) > 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("all_in_fp8", [False, True])
def test_any_shape_and_layout_of_rows_has_the_same_bits(all_in_fp8, device):
    skip_unless_hopper(device)
    x, weight, grad = operands(96, BF16, device)
    options = dict(weight_gradients=all_in_fp8)
    out, *others = results(linear_fp8, x, weight, grad, **options)
    turned = x.detach().t().contiguous().t().unflatten(0, (2, 48)).requires_grad_()
    found = results(linear_fp8, turned, weight, grad.view(2, 48, N), **options)
    turned_grad = grad.t().contiguous().t()
    again = results(linear_fp8, x.detach().requires_grad_(), weight, turned_grad, **options)
    assert all(map(torch.equal, again, (out, *others)))
    assert torch.equal(found[0].flatten(0, 1), out)
    assert torch.equal(found[1].flatten(0, 1), others[0])
    assert torch.equal(found[2], others[1])
    assert [len(value) for value in results(linear_fp8, x[:0], weight, grad[:0])] == [0, 0, N]


def test_autocast_casts_rows_alone():
    x, weight, grad = operands(64)
    with torch.autocast("cpu", BF16):
        found = results(linear_fp8, x, weight, grad)
    expected = results(linear_fp8, x.detach().to(BF16).requires_grad_(), weight, grad)
    assert all(map(torch.equal, (v.float() for v in found), (v.float() for v in expected)))
    assert [value.dtype for value in found] == [BF16, FP32, FP32]


def test_codes_are_kept_in_place_of_rows():
    x, weight, _ = operands(256, BF16)
    codes, rows = (
        kept_bytes(lambda each=each: linear_fp8(x, weight, weight_gradients=each), [weight])
        for each in (True, False)
    )
    assert codes - 4 == 256 * K + 256 * K // 128 * 4
    assert rows - 4 == 2 * 256 * K


@pytest.mark.parametrize("all_in_fp8", [False, True])
def test_a_split_backward_gives_the_same_gradients(all_in_fp8):
    x, weight, grad = operands(64)
    expected = results(linear_fp8, x, weight, grad, weight_gradients=all_in_fp8)
    out = linear_fp8(x, weight, weight_gradients=all_in_fp8)
    split = SplitBackward([out], [x], [weight])
    found = [*split.input_gradients([grad]), *split.parameter_gradients()]
    assert all(map(torch.equal, found, expected[1:]))


def model(device: str, **changes) -> LanguageModel:
    torch.manual_seed(0)
    dtype = BF16 if device == "cuda" else FP32
    return LanguageModel(replace(CONFIG, **changes), device=device, dtype=dtype)


def in_fp8(of: LanguageModel) -> set[str]:
    return {name for name, module in of.named_modules() if isinstance(module, FP8Linear)}


def test_projections_of_the_layers_between_are_in_fp8():
    attention, dense, shared = ("attention.qkv", "attention.out"), "mlp.", "moe.shared_expert."
    expected = {f"layers.{i}.{name}" for i in (1, 2) for name in attention}
    expected |= {f"layers.1.{shared}{w}" for w in ("w1", "w2")}
    expected |= {f"layers.2.{dense}{w}" for w in ("w1", "w2")}
    assert in_fp8(model("cpu")) == expected
    of_one = in_fp8(model("cpu", precision=("fp8_rows", *("weights",) * 3)))
    assert of_one == {f"layers.0.{name}" for name in (*attention, "mlp.w1", "mlp.w2")}
    assert not in_fp8(model("cpu", precision="weights"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "precision", ["fp8", pytest.param("fp8_powers", marks=pytest.mark.long), "fp8_rows"]
)
def test_graphs_are_bitwise_eager(device, precision):
    skip_unless_hopper(device)
    graphed = model(device, precision=precision)
    config = GraphConfig("full", warmup_steps=2, on_mismatch="error")
    graphs = moe_graphs.graph(graphed, config)
    found = train(graphed, graphs, device)
    assert graphs.report().matched > 0
    eager = model(device, precision=precision)
    without = moe_graphs.graph(eager, GraphConfig(impl="none"))
    found.assert_equal(train(eager, without, device))


def test_training_stays_close_to_training_without():
    losses = {}
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))
    for precision in ("weights", "fp8"):
        trained = model("cpu", precision=precision)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
        found = losses[precision] = []
        for _ in range(20):
            loss = trained(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    plain, ours = losses["weights"], losses["fp8"]
    assert ours != plain
    assert plain[-1] < 0.5 * plain[0]
    assert abs(ours[-1] - plain[-1]) < 0.03 * plain[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"precision": "fp4"},
            "precision 'fp4' is unknown: choose weights, fp8, fp8_powers or fp8_rows",
        ),
        ({"linear": "transformer_engine"}, "precision='fp8' needs linear='torch', got"),
        ({"precision": ("fp8", "fp4")}, "precision 'fp4' is unknown"),
        ({"precision": ("fp8",)}, r"must have one word per layer \(4\), got"),
        ({"num_layers": 2}, "leaves out the first and the last layer, and there are 2: give"),
        ({"ffn_hidden_size": 200}, "128 must divide out_features, got 400: choose another size"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_refusals(changes, words):
    with pytest.raises(ValueError, match=words):
        model("meta", **changes)


def test_other_shapes_are_refused():
    x, weight, _ = operands(4)
    with pytest.raises(ValueError, match=r"wants a weight \[N, K\] and rows of K numbers, got"):
        linear_fp8(x[:, :128], weight)
