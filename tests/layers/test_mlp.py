"""The dense feed-forward network: what it keeps for the backward, and when it calls ``w2``.

Shapes: B batch, S sequence, D model, F ffn.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import moe_graphs
from kept_bytes import kept_bytes
from moe_graphs import GraphConfig
from moe_graphs.engine.autograd import SplitBackward
from moe_graphs.kernels import swiglu, swiglu_linear
from moe_graphs.layers import SwiGLU
from training_runs import loss_of, microbatches, tiny_model

B, S, D, F = 2, 5, 8, 6
BF16, FP32 = torch.bfloat16, torch.float32


def leaves(dtype: torch.dtype = FP32) -> list[Tensor]:
    """Gate and up, and the weight behind them."""
    torch.manual_seed(0)
    return [torch.randn(*s).to(dtype).requires_grad_() for s in ((B, S, 2 * F), (D, F))]


def apart(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear(swiglu(x), w)


@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=["both", "rows", "weight"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_op_has_the_bits_of_the_two_ops(dtype, wanted):
    given, grad = leaves(dtype), torch.randn(B, S, D).to(dtype)
    for i, leaf in enumerate(given):
        leaf.requires_grad_(i in wanted)
    found = []
    for run in (swiglu_linear, apart):
        out = run(*given)
        found.append((out, *torch.autograd.grad(out, [given[i] for i in wanted], grad)))
    assert all(map(torch.equal, *found))


def test_split_backward_has_the_same_bits():
    (x, w), grad = leaves(), torch.randn(B, S, D)
    whole = torch.autograd.grad(swiglu_linear(x, w), (x, w), grad)
    split = SplitBackward([swiglu_linear(x, w)], [x], [w])
    assert torch.equal(*split.input_gradients([grad]), whole[0])
    assert torch.equal(*split.parameter_gradients(), whole[1])


def test_autocast_casts_both_operands():
    (x, w), found = leaves(), []
    for run in (swiglu_linear, apart):
        with torch.autocast("cpu", BF16):
            out = run(x.to(BF16), w)
        found.append((out, *torch.autograd.grad(out.sum(), (x, w))))
    assert all(map(torch.equal, *found))
    assert found[0][0].dtype == BF16


def test_a_double_backward_is_refused():
    x, w = leaves()
    (slope,) = torch.autograd.grad(swiglu_linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def mlp(dtype: torch.dtype = FP32) -> tuple[SwiGLU, Tensor]:
    torch.manual_seed(0)
    return SwiGLU(D, F, dtype=dtype), torch.randn(B, S, D).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_input_and_first_product_are_kept(dtype):
    network, x = mlp(dtype)
    kept = kept_bytes(lambda: network(x), network.parameters())
    assert kept == dtype.itemsize * B * S * (D + 2 * F)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def patch(network: SwiGLU) -> None:
    plain = network.w2.forward
    network.w2.forward = lambda x: 2 * plain(x)


def replace_class(network: SwiGLU) -> None:
    network.w2.__class__ = Doubled


def hook(network: SwiGLU) -> None:
    network.w2.register_forward_hook(lambda module, args, output: 2 * output)


def hook_before(network: SwiGLU) -> None:
    network.w2.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def add_bias(network: SwiGLU) -> None:
    network.w2.bias = nn.Parameter(network.w2.weight.new_ones(D))


@pytest.mark.parametrize("change", [patch, replace_class, hook, hook_before, add_bias])
def test_a_projection_that_does_more_is_called(change):
    network, x = mlp()
    plain = network(x)
    change(network)
    changed = network(x)
    assert torch.equal(changed, plain + 1 if change is add_bias else 2 * plain)
    kept = kept_bytes(lambda: network(x), network.parameters())
    assert kept == FP32.itemsize * B * S * (D + 3 * F)


@pytest.mark.parametrize(
    ("change", "reason"), [(hook, "hooks"), (patch, "attribute"), (replace_class, "attribute")]
)
@pytest.mark.filterwarnings("ignore::moe_graphs.GraphWarning")
def test_a_graph_is_not_replayed_once_the_projection_does_more(change, reason):
    results = []
    for impl in ("none", "local"):
        model = tiny_model("cpu", "dense", dropout=0.0)
        config = GraphConfig(impl="none") if impl == "none" else GraphConfig("mlp", warmup_steps=2)
        graphs = moe_graphs.graph(model, config)
        for number, batches in enumerate(microbatches("cpu", 6)):
            if number == 4:
                change(model.layers[0].mlp)
            with graphs.step():
                for tokens in batches:
                    loss_of(model, tokens)[0].backward()
        results.append([parameter.grad for parameter in model.parameters()])
    report = graphs.report()
    assert report.matched == 2 * 2 * 2 + 2 * 2  # one of two layers stays graphed
    assert report.eager_calls == {"warmup": 2 * 2 * 2, reason: 2 * 2}
    assert all(map(torch.equal, *results))


def test_a_hook_on_every_module_sees_the_projection():
    network, x = mlp()
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(m))
    try:
        network(x)
    finally:
        handle.remove()
    assert seen == [network.w1, network.w2, network]


def test_a_hook_on_the_backward_sees_the_projection():
    network, x = mlp()
    seen = []
    network.w2.register_full_backward_hook(lambda m, before, after: seen.append(m))
    network(x).sum().backward()
    assert seen == [network.w2]
