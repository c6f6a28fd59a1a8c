"""torch's checkpoint within scopes and whole steps: graphed is eager, bit for bit, or refused."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import moe_graphs
from distributed import run_distributed
from full_iterations import optimizer_of
from kept_bytes import kept_bytes
from moe_graphs import FullIteration, GraphConfig, GraphWarning
from training_runs import DEVICES, tiny_model, train

WIDTH, STEPS = 8, 7


def only_products(context, operation, *args, **kwargs):
    """The policy of torchtitan: products are kept, everything else is computed anew."""
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


contexts = partial(create_selective_checkpoint_contexts, only_products)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = 0.0

    def forward(self, x, scale=1.0):
        return functional.dropout(self.down(functional.silu(self.up(x * scale))), self.dropout)


class Layer(nn.Module):
    """A layer that recomputes a part of itself, as ``kind`` says; dropout is outside of it."""

    def __init__(self, kind="none"):
        super().__init__()
        self.norm, self.experts, self.kind = nn.LayerNorm(WIDTH), Experts(), kind

    def part(self, x):
        return self.experts(self.norm(x), scale=0.5)

    def forward(self, x):
        kind = self.kind
        if kind == "none":
            h = self.part(x)
        elif kind == "nested":
            h = checkpoint(lambda y: checkpoint(self.part, y, use_reentrant=False), x,
                           use_reentrant=False)  # fmt: skip
        elif kind == "selective":
            h = checkpoint(self.part, x, use_reentrant=False, context_fn=contexts)
        elif kind == "autocast":
            with torch.autocast(x.device.type, torch.bfloat16):
                h = checkpoint(self.part, x, use_reentrant=False).float()
        elif kind == "other random numbers":
            h = checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=False)
        else:
            h = checkpoint(self.part, x, use_reentrant=kind == "reentrant")
        return functional.dropout(x + h, 0.1)


class Model(nn.Module):
    def __init__(self, kind="none"):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


def build(kind, device, dropout=0.0):
    torch.manual_seed(0)
    model = Model(kind).to(device)
    for layer in model.layers:
        layer.experts.dropout = dropout
    return model


KINDS = ["plain", "nested", "selective", "autocast", "other random numbers"]


# ---- graphs of scopes


def in_scopes(model, config, device, microbatches=2, between=None):
    graphs, found = moe_graphs.graph(model, config), []
    torch.manual_seed(1)
    for number in range(STEPS):
        model.zero_grad()
        if between is not None:
            between(model, number)
        with graphs.step():
            for _ in range(microbatches):
                loss = model(torch.randn(16, WIDTH, device=device)).square().mean()
                loss.backward()
                found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return [*found, torch.rand(4, device=device)], graphs


def both(kind, device="cpu", dropout=0.0, between=None, reference=None, **options):
    off = GraphConfig(impl="none")
    eager = build(reference or kind, device, dropout)
    expected, _ = in_scopes(eager, off, device, between=between)
    model = build(kind, device, dropout)
    config = GraphConfig("layers.*", warmup_steps=2, **options)
    found, graphs = in_scopes(model, config, device, between=between)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return graphs.report(), graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("audit_every", [None, 2])
def test_a_scope_checkpoints_a_part_of_itself(kind, device, audit_every):
    dropout = 0.1 if kind == "other random numbers" else 0.0
    report, _ = both(kind, device, dropout, audit_every=audit_every)
    assert report.state == "captured"
    assert report.matched >= 2 * 2 * (STEPS - 3)
    # Contexts of torch's selective checkpoint serve one backward: the first capture has another.
    assert report.eager_calls.keys() <= {"warmup", "backward: not_captured"}
    if audit_every is not None:
        assert report.audited == report.audits_passed > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_scope_that_recomputes_checkpoints_a_part_of_itself(device):
    report, _ = both("plain", device, recompute=True)
    assert report.eager_calls == {"warmup": 8}
    assert all(scope.recomputed_bytes > 0 for scope in report.scopes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("plain", {"split_backward": True}, "leave out split_backward or checkpoint"),
        ("reentrant", {}, "use_reentrant=False"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kind, options, message, device):
    with pytest.warns(GraphWarning, match=f"'layers.0': .*{message}"):
        report, _ = both(kind, device, **options)
    assert report.state == "capture_failed"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "none"])
def test_random_numbers_within_are_refused_by_name(kind, device):
    recompute = {"recompute": "*.experts"} if kind == "none" else {}
    with pytest.warns(GraphWarning, match="random numbers are drawn within torch.utils.checkpoint"):
        report, _ = both(kind, device, 0.1, **recompute)
    assert report.state == "capture_failed"


def test_python_that_the_recomputation_reads_is_guarded():
    def between(model, number):
        model.layers[1].experts.dropout = float(number == 5)

    report, _ = both("plain", between=between, audit_every=None)
    assert report.scopes[1].eager_calls == {"warmup": 4, "attribute": 2}


# ---- modules within scopes, chosen by a pattern


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", ["*.experts", "*.norm", ["*.norm", "layers.1.experts"]])
def test_a_pattern_chooses_modules_within_scopes(recompute, device):
    report, graphs = both("none", device, recompute=recompute, audit_every=2)
    assert report.eager_calls == {"warmup": 8}
    assert report.matched == 2 * 2 * (STEPS - 2)
    assert report.audited == report.audits_passed > 0
    (chunk,) = graphs.plan().chunks
    _, plain = both("none", device)
    (of_plain,) = plain.plan().chunks
    pairs = list(zip(chunk.calls, of_plain.calls, strict=True))
    assert all(call.saved <= plainly.saved for call, plainly in pairs)
    assert any(call.saved < plainly.saved for call, plainly in pairs)


def test_eager_calls_recompute_as_well_and_release_ends_it():
    model = build("none", "cpu").eval()
    x = torch.randn(16, WIDTH, requires_grad=True)

    def kept():
        besides = [x, *model.parameters()]
        return kept_bytes(lambda: model.layers[0](x), besides=besides)

    plain = kept()
    graphs = moe_graphs.graph(model, GraphConfig("layers.*", recompute="*.experts"))
    with graphs.paused():
        assert kept() < plain
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert "forward" not in vars(copied.layers[0].experts)
    graphs.release()
    assert kept() == plain


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", ["*.moe", "*norm", "*.shared_expert"])
def test_parts_of_our_layers(recompute, device):
    found = []
    for warmup_steps in (2, 100):
        model = tiny_model(device, layers="moe")
        config = GraphConfig("full", warmup_steps=warmup_steps, recompute=recompute)
        graphs = moe_graphs.graph(model, config)
        found.append(train(model, graphs, device))
        assert set(graphs.report().eager_calls) == {"warmup"}
        assert (graphs.report().matched > 0) == (warmup_steps == 2)
    found[0].assert_equal(found[1])


def test_which_modules():
    def chosen(names, recompute):
        graphs = moe_graphs.graph(tiny_model("cpu"), GraphConfig(names, recompute=recompute))
        return [each.installed["forward"] is each and each._name for each in graphs._parts]

    assert chosen("full", "*.moe*") == ["module 'layers.1.moe', which is to be recomputed,"]
    assert chosen("full", "layers.*") == []  # whole scopes
    with pytest.raises(ValueError, match="may begin or end within it: choose a scope of the whole"):
        chosen("moe_router,moe_preprocess", "*.moe")
    with pytest.raises(ValueError, match=r"names a part of .*, such as '\*.moe'"):
        chosen("full", "moe")
    with pytest.raises(ValueError, match="no module within one"):
        chosen("full", "*.mamba")
    model = build("none", "cpu")
    model.layers[0].experts.forward = lambda x: x
    with pytest.raises(ValueError, match=r"module 'layers.0.experts', .*forward is patched"):
        moe_graphs.graph(model, GraphConfig("layers.*", recompute="*.experts"))
    assert "forward" not in vars(model.layers[0])


# ---- whole steps


def whole(model, device, graphed, steps=STEPS, rank=0, **options):
    optimizer = optimizer_of(model, device)

    def step(batch):
        losses = []
        for part in batch:
            loss = model(part).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    run = step
    if graphed:
        run = FullIteration(step, model=model, optimizer=optimizer, **options)
    torch.manual_seed(1 + rank)
    found = []
    for _ in range(steps):
        found += [loss.clone() for loss in run(torch.randn(2, 16, WIDTH, device=device))]
    found += [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    return [*found, torch.rand(4, device=device)], run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["reentrant", *KINDS])
def test_whole_steps_checkpoint(kind, device):
    dropout = 0.1 if kind == "other random numbers" else 0.0
    expected, _ = whole(build(kind, device, dropout), device, False)
    found, run = whole(build(kind, device, dropout), device, True, on_mismatch="error")
    assert all(map(torch.equal, found, expected))
    assert run.report().matched == STEPS - 3
    assert run.report().audited == run.report().audits_passed > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "reentrant", "nested", "selective", "autocast"])
def test_recomputations_of_whole_steps_draw_the_numbers_of_their_forwards(kind, device):
    expected, _ = whole(build(kind, device, 0.3), device, False)
    found, run = whole(build(kind, device, 0.3), device, True, on_mismatch="error", audit_every=2)
    assert all(map(torch.equal, found, expected))
    assert run.report().matched == STEPS - 3
    assert run.report().audited == run.report().audits_passed > 0
    without, _ = whole(build("none", device, 0.3), device, False)
    if kind != "autocast":
        assert all(map(torch.allclose, without, expected))  # what recomputing must not change


@pytest.mark.parametrize("device", DEVICES)
def test_only_parts_that_draw_are_followed(device):
    """Layers that draw, and draw nothing, by turns, in two microbatches a step."""

    def built():
        model = build("plain", device, 0.3)
        model.layers[0].experts.dropout = 0.0
        model.layers.append(Layer("plain").to(device))
        model.layers[2].experts.dropout = 0.5
        return model

    expected, _ = whole(built(), device, False)
    found, run = whole(built(), device, True, on_mismatch="error")
    assert all(map(torch.equal, found, expected))
    assert run.report().matched == STEPS - 3


def shard(rank, world_size, device, wrapped):
    """Whole steps of a model by FSDP2 whose layers are checkpointed, with graphs and without."""
    runs = []
    for graphed in (False, True):
        model = build("none" if wrapped else "plain", device, 0.1)
        if wrapped:
            chosen = lambda module: isinstance(module, Experts)  # noqa: E731
            apply_activation_checkpointing(model, check_fn=chosen)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        found, run = whole(model, device, graphed, rank=rank)
        runs.append(found)
    assert all(map(torch.equal, *runs))
    report = run.report()
    run.release()
    return report.matched, report.audited - report.audits_passed, [x.sum().item() for x in found]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
@pytest.mark.parametrize("wrapped", [pytest.param(False, marks=pytest.mark.long), True])
def test_whole_steps_of_sharded_models_checkpoint(backend, wrapped):
    device = "cuda" if backend == "nccl" else "cpu"
    for matched, missed, _ in run_distributed(shard, 2, backend, arguments=(device, wrapped)):
        assert (matched, missed) == (STEPS - 3, 0)
