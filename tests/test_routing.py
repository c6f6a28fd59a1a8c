"""Experts of one pass that are used in another: eagerly, in graphs, under checkpointing."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, routing
from moe_graphs.dispatch import LocalDispatcher
from moe_graphs.errors import CheckError
from moe_graphs.layers import MoEConfig, MoELayer
from moe_graphs.staged import recomputed_within
from training_runs import DEVICES, Trace, loss_of, microbatches, tiny_model

EXPERTS, TOP_K, TOKENS, LAYERS = 4, 2, 64, 2  # of the tiny model and its microbatches


def other_choices(seed: int, device: str = "cpu") -> torch.Tensor:
    """Choices that no router makes, ``[L, T, K]``."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(LAYERS, TOKENS, EXPERTS, generator=generator)
    return scores.topk(TOP_K, dim=-1).indices.to(device)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


# ---- what a replay computes


@pytest.mark.parametrize("device", DEVICES)
def test_own_choices_again_are_bitwise_the_plain_pass(device):
    model = tiny_model(device, "moe")
    (tokens, _), *_ = microbatches(device, 1)

    def run(block):
        torch.manual_seed(3)
        with block as choices:
            loss, output = loss_of(model, tokens)
        loss.backward()
        return [loss, output.logits_BSV, output.aux_loss, *gradients(model).values()], choices

    plain, _ = run(contextlib.nullcontext())
    recorded, choices = run(routing.record(model))
    replayed, _ = run(routing.replay(model, choices))
    assert [each.shape for each in choices] == [(TOKENS, TOP_K)] * LAYERS
    assert {each.dtype for each in choices} == {torch.int64}
    for found in (recorded, replayed):
        assert all(map(torch.equal, plain, found))
    changed, _ = run(routing.replay(model, other_choices(1, device)))
    assert not torch.equal(plain[1], changed[1])


@pytest.mark.parametrize("sigmoid", [False, True])
def test_weights_and_gradients_are_those_of_autograd_for_the_given_experts(sigmoid):
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=6,
        top_k=2,
        ffn_hidden_size=8,
        score_function="sigmoid" if sigmoid else "softmax",
        aux_loss_coef=0.1,
    )
    layer = MoELayer(config, 16, dtype=torch.float64)
    hidden = torch.randn(10, 16, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(10, 6).topk(2).indices
    with routing.replay(layer, [chosen]):
        output = layer(hidden)
    total = output.hidden.square().sum() + output.aux_loss
    found = torch.autograd.grad(total, [hidden, *layer.parameters()])

    logits = hidden @ layer.router.weight.t()
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    weights = scores * mask / (scores * mask).sum(-1, keepdim=True)
    w1, w2 = layer.experts.parameters()
    gate, up = torch.einsum("td,edf->tef", hidden, w1).chunk(2, -1)
    sums = torch.einsum("tef,efd,te->td", functional.silu(gate) * up, w2, weights)
    probs = scores / scores.sum(-1, keepdim=True)
    aux = 0.1 * 6 / (2 * 10) * (mask.sum(0) * probs.mean(0)).sum()
    want = torch.autograd.grad(sums.square().sum() + aux, [hidden, *layer.parameters()])
    torch.testing.assert_close(output.hidden, sums)
    torch.testing.assert_close(output.aux_loss, aux.to(output.aux_loss.dtype))
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected)
    assert layer.router.tokens_per_expert.tolist() == mask.sum(0).tolist()


class OwnBlock(nn.Module):
    """A block as people write it, with the choice in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden):
        scores, chosen = self.gate(hidden).softmax(-1).topk(2)
        outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
        return (scores[..., None] * outputs.gather(1, chosen[..., None].expand(-1, -1, 8))).sum(1)


def test_a_block_of_ones_own_that_chooses_by_topk():
    torch.manual_seed(0)
    model, hidden = nn.Sequential(OwnBlock(), OwnBlock()), torch.randn(6, 8)
    with routing.record(model) as choices:
        plain = model(hidden)
    with routing.replay(model, choices):
        assert torch.equal(model(hidden), plain)
    with routing.replay(model, (torch.stack(choices) + 1) % 4):
        assert not torch.equal(model(hidden), plain)
    with (
        pytest.raises(ValueError, match=r"choices \[5, 2\] and runs \[6, 2\]"),
        routing.replay(model, [each[:5] for each in choices]),
    ):
        model(hidden)


# ---- graphs


def train(device: str, scopes: str | None, *, late: bool, kind: str, **options) -> Trace:
    """Trains with choices that change, and notes everything.

    ``late``: both backwards come after both forwards.
    """
    model = tiny_model(device, "moe")
    graphs = None
    if scopes is not None:
        options = {"warmup_steps": 2, "on_mismatch": "error", "audit_every": 2, **options}
        config = GraphConfig(scopes, **options)
        graphs = moe_graphs.graph(model, config)
    optimizer, trace, numbers = torch.optim.AdamW(model.parameters()), Trace(), itertools.count()
    kept: list[list[torch.Tensor]] = []
    for batches in microbatches(device, 5):
        losses = []
        with contextlib.nullcontext() if graphs is None else graphs.step():
            for tokens in batches:
                given = other_choices(next(numbers), device)
                replaying = routing.replay(model, given)
                with replaying if kind == "replay" else routing.record(model) as recorded:
                    losses.append(loss_of(model, tokens)[0])
                kept += [] if recorded is None else [recorded]
                if not late:
                    losses[-1].backward()
            for loss in losses if late else []:
                loss.backward()
        for loss in losses:
            trace.note("loss", loss)
        for name, parameter in model.named_parameters():
            trace.note(f"gradient of {name}", parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    for choices in kept:
        for each in choices:
            trace.note("choice", each)
    if graphs is not None:
        report = graphs.report()
        assert report.captured == LAYERS * (2 if late else 1)
        assert report.audited == report.audits_passed > 0
    return trace


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "scopes", "late", "options"),
    [
        pytest.param("replay", "full", False, {}, marks=pytest.mark.long),
        pytest.param("replay", "full", True, {}, marks=pytest.mark.long),
        pytest.param("replay", "full", True, {"recompute": True}, marks=pytest.mark.long),
        ("replay", "attn,moe_router,moe_preprocess", True, {}),
        pytest.param("replay", "moe_router", False, {"recompute": True}, marks=pytest.mark.long),
        pytest.param("record", "full", True, {}, marks=pytest.mark.long),
        pytest.param("record", "full", False, {"recompute": True}, marks=pytest.mark.long),
        ("record", "moe_router,moe_preprocess", False, {}),
    ],
)
def test_graphs_are_bitwise_eager(device, kind, scopes, late, options):
    found = train(device, scopes, late=late, kind=kind, **options)
    found.assert_equal(train(device, None, late=late, kind=kind))


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_step_takes_choices_as_input_and_returns_them(device):
    def run(graphed: bool) -> Trace:
        model, trace = tiny_model(device, "moe"), Trace()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(batch):
            tokens, given = batch
            optimizer.zero_grad()
            with torch.no_grad(), routing.record(model) as own:
                model(tokens[:, :-1])
            with routing.replay(model, given):
                loss, _ = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            return loss.detach(), torch.stack(own)

        whole = FullIteration(step, model=model, optimizer=optimizer, on_mismatch="error")
        for number, (tokens, _) in enumerate(microbatches(device, 5)):
            batch = (tokens, other_choices(number, device))
            loss, own = (whole if graphed else step)(batch)
            trace.note("loss", loss)
            trace.note("choices", own)
            trace.note_state(model, f"step {number}")
        assert not graphed or whole.report().replayed > 0
        return trace

    run(True).assert_equal(run(False))


def test_a_call_outside_of_the_block_is_counted_and_right():
    """A graph that was captured within the block does not serve it, nor the other way round."""
    model, plain = tiny_model("cpu", "moe", dropout=0.0), tiny_model("cpu", "moe", dropout=0.0)
    graphs = moe_graphs.graph(model, GraphConfig("full", warmup_steps=2))
    for number, (tokens, _) in enumerate(microbatches("cpu", 5)):
        is_last = number == 4
        given = routing.replay(model, other_choices(number))
        with graphs.step(), contextlib.nullcontext() if is_last else given:
            torch.manual_seed(number)
            loss = loss_of(model, tokens)[0]
            loss.backward()
    torch.manual_seed(4)
    assert torch.equal(loss, loss_of(plain, tokens)[0])
    report = graphs.report()
    assert sum(report.eager_calls.values()) == 2 * LAYERS + LAYERS  # warm-up, and the last step
    assert model.layers[0].moe.experts_TK is None


# ---- checkpointing by the user's own call


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_takes_the_choices_of_its_forward(use_reentrant):
    """Two forwards with other choices, and the backwards after both blocks."""

    def run(wrap) -> list[torch.Tensor]:
        model = tiny_model("cpu", "moe", dropout=0.0)
        losses = []
        for number, (tokens, _) in enumerate(microbatches("cpu", 2)):
            torch.manual_seed(number)
            hidden = model.embedding(tokens[:, :-1])
            with routing.replay(model, other_choices(number)):
                for layer in model.layers:
                    hidden = wrap(layer, hidden)
                losses.append(hidden.square().sum())
        for loss in losses:
            loss.backward()
        return [*losses, *(g for g in gradients(model).values() if g is not None)]

    def checkpointed(layer, hidden):
        def forward(x):
            return layer(x).hidden_BSD

        return checkpoint(recomputed_within(forward), hidden, use_reentrant=use_reentrant)

    assert all(map(torch.equal, run(checkpointed), run(lambda layer, x: layer(x).hidden_BSD)))


def test_a_recomputation_without_the_choices_is_an_error():
    layer = MoELayer(MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8), 8)
    hidden = torch.randn(6, 8, requires_grad=True)
    with routing.replay(layer, [torch.rand(6, 4).topk(2).indices]):
        total = checkpoint(lambda x: layer(x).hidden.sum(), hidden, use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        total.backward()


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: good[:1], "choices of 1 layers for a model with 2"),
        (lambda good: good[..., :1], r"'layers.0.moe' are \[64, 1\], expected \[tokens, 2\]"),
        (lambda good: [good[0], good[1, 1:]], r"'layers.1.moe' are \[63, 2\]"),
        (lambda good: good.float(), "are torch.float32"),
        (lambda good: good.to("meta"), "on meta, the layer is on cpu"),
        (lambda good: good - 1, "a negative number"),
        (lambda good: good + 1, "above the last expert"),
        (lambda good: good * 0, "same expert twice"),
        (lambda good: good[:, :60], r"a layer got choices \[60, 2\] and runs \[64, 2\]"),
    ],
)
def test_wrong_choices_are_errors(change, message):
    model = tiny_model("cpu", "moe")
    (tokens, _), *_ = microbatches("cpu", 1)
    with pytest.raises(ValueError, match=message), routing.replay(model, change(other_choices(0))):
        model(tokens[:, :-1])
    assert model.layers[0].moe.routing_pass is None


def test_integers_of_any_width_are_taken():
    model = tiny_model("cpu", "moe", dropout=0.0).eval()
    (tokens, _), *_ = microbatches("cpu", 1)
    given, found = other_choices(0), []
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        with torch.no_grad(), routing.replay(model, given.to(dtype)):
            found.append(model(tokens[:, :-1]).logits_BSV)
    assert all(torch.equal(found[0], each) for each in found)


def test_blocks_do_not_nest_and_need_layers_and_calls():
    model = tiny_model("cpu", "moe")
    with (
        routing.replay(model, other_choices(0)),
        pytest.raises(ValueError, match="open for this model already"),
        routing.record(model),
    ):
        pass
    with pytest.raises(ValueError, match="has no layers with experts"), routing.record(model.head):
        pass
    with pytest.raises(ValueError, match="'layers.0.moe' was not called"), routing.record(model):
        pass
    with pytest.raises(KeyError, match="of the user"), routing.record(model):
        raise KeyError("of the user")


@pytest.mark.gpu
def test_numbers_on_a_gpu_are_read_late():
    config = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=64)
    layer = MoELayer(config, 64, LocalDispatcher(), device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    good = torch.tensor([[0, 1]] * 8, device="cuda")
    with pytest.raises(CheckError, match="above the last expert"):
        with routing.replay(layer, [good + 3]):
            layer(hidden)
        torch.cuda.synchronize()  # the outcome may have arrived before
        with routing.replay(layer, [good]):
            pass
    with routing.replay(layer, [good]):
        assert layer(hidden).hidden.isfinite().all()
