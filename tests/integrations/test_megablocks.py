"""MegaBlocks' experts behind ``MoELayer`` on a GPU: their error against ours, and under graphs.

Tolerance: of the error against fp64, twice ours. Both multiply bfloat16 and add up in fp32;
MegaBlocks rounds ``silu`` to bfloat16 before it multiplies, ours does not.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace

import pytest
import torch

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphError
from moe_graphs.dispatch import AllToAllDispatcher, LocalDispatcher, PaddedDispatcher
from moe_graphs.integrations.megablocks import MegaBlocksExperts
from moe_graphs.layers import GroupedExperts, LanguageModel, MoEConfig, MoELayer, TransformerConfig
from stand_in_experts import run_on_rows
from training_runs import SEQUENCE, VOCABULARY, Trace, loss_of, microbatches, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("megablocks") is None,
        reason="waits for megablocks (../shared/peers brings it to the GPU machine)",
    ),
    pytest.mark.filterwarnings("ignore"),  # MegaBlocks' own: names that torch has deprecated
]

DEVICE, HALF = "cuda", torch.bfloat16
DISPATCHERS = {
    "local": LocalDispatcher(),
    "padded": PaddedDispatcher(1.0),
    "all_to_all": AllToAllDispatcher(),
}
ROWS = {
    "even": (128, 128, 128, 128),
    "odd": (1, 127, 300, 66),
    "empty": (0, 70, 0, 0),
    "one-row": (0, 0, 0, 1),
    "none": (0, 0, 0, 0),
}
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=256,
    aux_loss_coef=0.01,
    z_loss_coef=0.001,
    shared_ffn_hidden_size=128,
)
SCOPES = ["attn", "attn,moe_router", "attn,moe_router,moe_preprocess", "moe_router",
          "moe_router,moe_preprocess", "layers.*"]  # fmt: skip


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rows_e", ROWS.values(), ids=ROWS)
def test_output_and_gradients_are_as_exact_as_ours(rows_e):
    torch.manual_seed(0)
    ours, theirs = (
        kind(4, 128, 256, device=DEVICE, dtype=HALF) for kind in (GroupedExperts, MegaBlocksExperts)
    )
    ours.init_weights(0.2, 0.2)
    theirs.load_stacked_weights(*ours.stacked_weights())
    exact = GroupedExperts(4, 128, 256, dtype=torch.float64)
    exact.load_stacked_weights(*(weight.double().cpu() for weight in ours.stacked_weights()))
    rows_RD = torch.randn(sum(rows_e), 128).bfloat16()
    offsets_e = torch.tensor(rows_e).cumsum(0).int()
    runs = [_experts_run(each, rows_RD, offsets_e) for each in (theirs, ours, exact)]
    _assert_as_exact(*runs)


def _experts_run(experts, rows_RD, offsets_e) -> dict[str, torch.Tensor]:
    weight = next(experts.parameters())
    rows_RD = rows_RD.to(weight.device, weight.dtype, copy=True).requires_grad_()
    out_RD = run_on_rows(experts, rows_RD, offsets_e.to(weight.device))
    generator = torch.Generator().manual_seed(1)
    out_RD.backward(torch.randn(out_RD.shape, generator=generator).bfloat16().to(out_RD))
    return {"output": out_RD.detach(), "rows": rows_RD.grad, **_in_our_layout(experts)}


@torch.no_grad()
def _in_our_layout(experts) -> dict[str, torch.Tensor]:
    """Gradients of the experts, by way of their weights."""
    for parameter in experts.parameters():
        parameter.copy_(parameter.grad)
    return dict(zip(("w1", "w2"), experts.stacked_weights(), strict=True))


def _assert_as_exact(theirs, ours, exact) -> None:
    for name, right in exact.items():
        error, usual = ((each[name].double().cpu() - right).norm() for each in (theirs, ours))
        assert error <= 2 * usual, (name, error, usual, right.norm())
        assert right.norm() == 0 or error < 0.02 * right.norm(), name


@pytest.mark.parametrize("dispatcher", ["local", "padded"])
def test_a_layer_is_as_exact_as_with_our_experts(dispatcher):
    runs = []
    for kind, device, dtype in (
        ("megablocks", DEVICE, HALF),
        ("moe_graphs", DEVICE, HALF),
        ("moe_graphs", "cpu", torch.float64),
    ):
        torch.manual_seed(0)  # drawn in bfloat16 on the device, for all of them
        drawn = MoELayer(MOE, 128, DISPATCHERS[dispatcher], device=DEVICE, dtype=HALF)
        config = replace(MOE, experts=kind)
        layer = MoELayer(config, 128, DISPATCHERS[dispatcher], device=device, dtype=dtype)
        rest = {k: v for k, v in drawn.state_dict().items() if not k.startswith("experts.")}
        assert not layer.load_state_dict(rest, strict=False).unexpected_keys
        layer.experts.load_stacked_weights(*(w.to(device) for w in drawn.experts.stacked_weights()))
        runs.append(_layer_run(layer, device, dtype))
    _assert_as_exact(*runs)


def _layer_run(layer, device, dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden, grad = (torch.randn(300, 128, generator=generator).bfloat16() for _ in range(2))
    hidden = hidden.to(device, dtype).requires_grad_()
    output = layer(hidden)
    ((output.hidden * grad.to(device, dtype)).to(torch.float64).sum() + output.aux_loss).backward()
    found = {"output": output.hidden.detach(), "hidden": hidden.grad}
    for name, parameter in layer.named_parameters():
        if not name.startswith("experts."):
            found[name] = parameter.grad
    return {**found, **_in_our_layout(layer.experts)}


def test_weights_come_back_bitwise():
    ours = GroupedExperts(4, 128, 384, device=DEVICE, dtype=HALF)
    theirs = MegaBlocksExperts(4, 128, 384, device=DEVICE, dtype=HALF)
    assert {name: each.shape for name, each in theirs.named_parameters()} == dict.fromkeys(
        ("mlp.w1", "mlp.w2", "mlp.v1"), (4 * 384, 128)
    )
    theirs.load_stacked_weights(*ours.stacked_weights())
    assert all(map(torch.equal, theirs.stacked_weights(), ours.stacked_weights()))


def tiny(dispatcher: str) -> LanguageModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        hidden_dropout=0.1,
        moe=replace(MOE, experts="megablocks", input_jitter=0.01),
    )
    return LanguageModel(config, DISPATCHERS[dispatcher], device=DEVICE, dtype=HALF)


@functools.cache
def reference(dispatcher: str) -> Trace:
    model = tiny(dispatcher)
    return train(model, moe_graphs.graph(model, GraphConfig(impl="none")), DEVICE)


@pytest.mark.parametrize("scopes", SCOPES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_graphed_training_is_bitwise_eager_training(dispatcher, scopes):
    model = tiny(dispatcher)
    graphs = moe_graphs.graph(model, GraphConfig(scopes, warmup_steps=2, on_mismatch="error"))
    train(model, graphs, DEVICE).assert_equal(reference(dispatcher))
    report = graphs.report()
    assert report.captured == len(report.scopes)
    assert report.matched == 2 * 5 * report.captured
    assert report.eager_calls == {"warmup": 2 * 2 * report.captured}


@pytest.mark.parametrize("scopes", ["moe", "attn,moe", "full"])
def test_scopes_that_would_read_on_the_host_are_refused(scopes):
    with pytest.raises(ValueError, match=r"host \(experts='megablocks' read their numbers of rows"):
        moe_graphs.graph(tiny("local"), GraphConfig(scopes))


def _whole_steps(graphed: bool) -> tuple[list[torch.Tensor], list[str], int]:
    """Losses and parameters; what was refused; replays."""
    model = tiny("local")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss, _ = loss_of(model, tokens)
        loss.backward()
        return loss.detach()

    options = {"warmup_steps": 2, "on_mismatch": "eager", "on_capture_error": "error"}
    run = FullIteration(step, model=model, **options) if graphed else step
    seen, refused = [], []
    for tokens, _ in microbatches(DEVICE, 6):
        try:
            seen.append(run(tokens).clone())
        except GraphError as error:  # before anything was launched
            refused.append(str(error))
            seen.append(step(tokens))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    replayed = run.report().replayed if graphed else 0
    return [*seen, *(p.detach().clone() for p in model.parameters())], refused, replayed


def test_whole_steps_are_refused_and_bitwise_eager():
    expected, _, _ = _whole_steps(graphed=False)
    found, refused, replayed = _whole_steps(graphed=True)
    assert all(map(torch.equal, found, expected))
    assert "host" in refused[0]
    assert replayed == 0
