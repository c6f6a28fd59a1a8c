"""MegaBlocks' experts and layers in our layout and back, on a stand-in for MegaBlocks.

Shapes: D model, F ffn, e experts, R rows.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import moe_graphs
from grids import by_turns
from megablocks_stand_in import MODULES, megablocks  # noqa: F401
from moe_graphs import GraphConfig
from moe_graphs.dispatch import LocalDispatcher, PaddedDispatcher
from moe_graphs.integrations.megablocks import MegaBlocksExperts, to_megablocks
from moe_graphs.layers import GroupedExperts, LanguageModel, MoEConfig, MoELayer, TransformerConfig
from stand_in_experts import run_on_rows

MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=128, aux_loss_coef=0.02, z_loss_coef=0.01)
ROWS = {"some": (3, 130, 1, 40), "empty": (0, 128, 0, 5), "one": (0, 0, 300, 0), "none": (0,) * 4}
needs_stand_in = pytest.mark.usefixtures("megablocks")


def test_without_megablocks_it_says_what_to_install(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, f"megablocks.{name}", None)
    config = replace(MOE, experts="megablocks")
    with pytest.raises(ImportError, match=r"pip install \"moe_graphs\[megablocks\]\""):
        MoELayer(config, 128, dtype=torch.bfloat16)
    with pytest.raises(ImportError, match=r"to_megablocks needs MegaBlocks"):
        to_megablocks(MoELayer(MOE, 128))


def test_without_grouped_gemm_it_says_so(megablocks, monkeypatch):  # noqa: F811
    library = sys.modules["megablocks.grouped_gemm_util"]
    monkeypatch.setattr(library, "grouped_gemm_is_available", lambda: False)
    with pytest.raises(ImportError, match="grouped_gemm is not installed"):
        MegaBlocksExperts(2, 8, 16, dtype=torch.bfloat16)


@needs_stand_in
def test_weights_lie_as_megablocks_keeps_them_and_come_back_bitwise():
    torch.manual_seed(0)
    ours = GroupedExperts(3, 128, 256, first_expert=1, num_experts=4, dtype=torch.bfloat16)
    torch.manual_seed(0)
    theirs = MegaBlocksExperts(3, 128, 256, first_expert=1, num_experts=4, dtype=torch.bfloat16)
    assert list(theirs.state_dict()) == ["mlp.w1", "mlp.w2", "mlp.v1"]
    assert torch.equal(theirs.mlp.w1[256:512], ours.w1[1, :, :256].t())
    assert torch.equal(theirs.mlp.v1[256:512], ours.w1[1, :, 256:].t())
    assert torch.equal(theirs.mlp.w2[256:512], ours.w2[1])
    for found, expected in zip(theirs.stacked_weights(), (ours.w1, ours.w2), strict=True):
        assert torch.equal(found, expected)
        assert not found.requires_grad
    ours.init_weights()
    theirs.load_stacked_weights(*ours.stacked_weights())
    assert all(map(torch.equal, theirs.stacked_weights(), ours.stacked_weights()))


@needs_stand_in
@pytest.mark.parametrize("rows_e", ROWS.values(), ids=ROWS)
def test_output_and_gradients_are_as_exact_as_ours(rows_e):
    torch.manual_seed(0)
    kinds = (MegaBlocksExperts, GroupedExperts)
    theirs, ours = (kind(4, 128, 256, dtype=torch.bfloat16) for kind in kinds)
    theirs.init_weights(0.2, 0.2)
    ours.load_stacked_weights(*theirs.stacked_weights())
    exact = GroupedExperts(4, 128, 256, dtype=torch.float64)
    exact.load_stacked_weights(*(weight.double() for weight in theirs.stacked_weights()))
    rows_RD = torch.randn(sum(rows_e), 128).bfloat16()
    offsets_e = torch.tensor(rows_e).cumsum(0).int()
    runs = [_forward_and_backward(each, rows_RD, offsets_e) for each in (theirs, ours, exact)]
    for found, usual, right in zip(*runs, strict=True):
        error, usual = ((each.double() - right).norm() for each in (found, usual))
        assert error <= 2 * usual


def _forward_and_backward(experts, rows_RD, offsets_e) -> list[torch.Tensor]:
    """Output, gradient of the rows, gradients of the weights in our layout."""
    torch.manual_seed(1)
    dtype = next(experts.parameters()).dtype
    rows_RD = rows_RD.to(dtype, copy=True).requires_grad_()
    out_RD = run_on_rows(experts, rows_RD, offsets_e)
    out_RD.backward(torch.randn(out_RD.shape, dtype=torch.float64).bfloat16().to(dtype))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(parameter.grad)
    return [out_RD.detach(), rows_RD.grad, *experts.stacked_weights()]


@needs_stand_in
def test_what_megablocks_does_not_multiply_is_refused():
    with pytest.raises(ValueError, match=r"multiply bfloat16 only, got torch.float32: build"):
        MegaBlocksExperts(2, 8, 16)
    offsets = torch.tensor([1, 2], dtype=torch.int32)
    grouped = MegaBlocksExperts(2, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"got rows of torch.float32"):
        run_on_rows(grouped, torch.randn(2, 8), offsets)
    with pytest.raises(ValueError, match=r"weights of torch.float32: keep both"):
        run_on_rows(grouped.float(), torch.randn(2, 8).bfloat16(), offsets)


def _model(dispatcher=None) -> LanguageModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, num_layers=2, num_heads=2, vocab_size=32)
    config = TransformerConfig(**sizes, moe=replace(MOE, experts="megablocks"))
    return LanguageModel(config, dispatcher, dtype=torch.bfloat16)


def _trained(model: LanguageModel, graphs: moe_graphs.Graphs) -> tuple[list, list[str]]:
    """Losses and gradients, and what was refused."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    seen, refused = [], []
    for _ in range(4):
        try:
            with graphs.step():
                for tokens in torch.randint(32, (2, 2, 8)):
                    output = model(tokens)
                    loss = output.logits_BSV.float().square().mean() + output.aux_loss
                    loss.backward()
                    seen.append(loss.detach())
        except moe_graphs.GraphError as error:
            refused.append(str(error))
        seen += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen, refused


def _eager(dispatcher=None) -> list[torch.Tensor]:
    model = _model(dispatcher)
    return _trained(model, moe_graphs.graph(model, GraphConfig(impl="none")))[0]


@needs_stand_in
@pytest.mark.parametrize(
    ("scopes", "dispatcher"),
    by_turns(
        ["attn,moe_router,moe_preprocess", "*.router", "layers.*"],  # up to the experts
        [LocalDispatcher(), PaddedDispatcher(1.0)],
    ),
)
def test_graphed_training_is_bitwise_eager_training(scopes, dispatcher):
    model = _model(dispatcher)
    graphs = moe_graphs.graph(model, GraphConfig(scopes, warmup_steps=2, on_mismatch="error"))
    seen, refused = _trained(model, graphs)
    assert not refused
    assert all(map(torch.equal, seen, _eager(dispatcher)))
    assert graphs.report().matched == 2 * 2 * 2


@needs_stand_in
@pytest.mark.parametrize("scopes", ["moe", "attn,moe", "full"])
def test_scopes_that_would_read_on_the_host_are_refused(scopes):
    with pytest.raises(ValueError, match=r"host \(experts='megablocks' read their numbers of rows"):
        moe_graphs.graph(_model(), GraphConfig(scopes))


@needs_stand_in
def test_the_experts_alone_are_no_scope():
    model = _model()
    graphs = moe_graphs.graph(model, GraphConfig("*.experts", warmup_steps=1))
    message = r"MegaBlocksExperts \(experts='megablocks' read their numbers of rows on the host\)"
    with pytest.raises(moe_graphs.GraphError, match=message), graphs.step():
        model(torch.randint(32, (2, 8)))
