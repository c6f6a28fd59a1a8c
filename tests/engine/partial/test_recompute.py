"""Scopes that keep their inputs only: training is bitwise that under torch's checkpoint."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moe_graphs
from kept_bytes import kept_bytes
from moe_graphs import GraphConfig, GraphError, GraphWarning
from training_runs import DEVICES, tiny_model, train
from two_scopes import WIDTH, Model, data, scopes, update

STEPS = 6


class Checkpointed(Model):
    """The model as somebody writes it with torch's checkpoint."""

    reentrant = False

    def forward(self, x, scale=1.0):
        def around(block, x):
            return checkpoint(lambda given: block(given, scale), x, use_reentrant=self.reentrant)

        return around(self.second, around(self.first, x).sin())


def build(kind, device):
    torch.manual_seed(0)
    return kind().to(device)


def trained(model, graphs, device, microbatches=1, steps=STEPS):
    """All that training leaves: outputs, gradients, parameters, buffers and random numbers."""
    torch.manual_seed(1)
    left = []
    for _ in range(steps):
        model.zero_grad()
        with graphs.step():
            for _ in range(microbatches):
                x = data(device).requires_grad_()
                output = model(x)
                output.square().mean().backward()
                left += [output, x.grad]
        left += [parameter.grad.clone() for parameter in model.parameters()]
        update(model)
    left += [*model.parameters(), *model.buffers(), torch.rand(4, device=device)]
    return [tensor.detach().clone() for tensor in left]


def both(device, microbatches=1, **options):
    """The graphs and their report, after a training that was compared with eager."""
    eager = build(Checkpointed, device)
    off = moe_graphs.graph(eager, GraphConfig(impl="none"))
    expected = trained(eager, off, device, microbatches)
    model = build(Model, device)
    options = {
        "warmup_steps": 2,
        "on_mismatch": "error",
        "recompute": True,
        "audit_every": None,
        **options,
    }
    graphs = moe_graphs.graph(model, scopes(**options))
    found = trained(model, graphs, device, microbatches)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return graphs, graphs.report()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_training_is_that_under_checkpoint(device, microbatches):
    _, report = both(device, microbatches)
    assert report.matched == 2 * microbatches * (STEPS - 2)
    assert report.eager_calls == {"warmup": 2 * 2 * microbatches}


@pytest.mark.parametrize("device", DEVICES)
def test_several_microbatches_in_flight(device):
    def train(model, graphs):
        torch.manual_seed(1)
        left = []
        for _ in range(STEPS):
            model.zero_grad()
            with graphs.step():
                losses = [model(data(device)).square().mean() for _ in range(2)]
                for order in (0, 1):
                    losses[order].backward()
            left += [parameter.grad.clone() for parameter in model.parameters()]
            update(model)
        return [*left, *(tensor.detach() for tensor in [*model.parameters(), *model.buffers()])]

    eager = build(Checkpointed, device)
    expected = train(eager, moe_graphs.graph(eager, GraphConfig(impl="none")))
    model = build(Model, device)
    graphs = moe_graphs.graph(
        model, scopes(warmup_steps=2, recompute=True, on_mismatch="error", audit_every=2)
    )
    found = train(model, graphs)
    assert all(map(torch.equal, found, expected))
    report = graphs.report()
    assert report.slots == (2,)
    assert report.matched == 2 * 2 * (STEPS - 2)
    assert report.audited == report.audits_passed > 0


@pytest.mark.parametrize("device", DEVICES)
def test_audited_calls_recompute_as_well(device):
    graphs, report = both(device, microbatches=2, audit_every=1)
    assert report.audited == report.audits_passed > 0
    assert report.replayed + report.audited == report.matched
    assert all(site.audit.backward is not None for site in graphs.captured.sites)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "names",
    [
        "attn,moe_router,moe_preprocess",
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in ("full", "attn", "attn,moe", "moe_router,moe_preprocess")
        ),
    ],
)
def test_scopes_of_a_language_model(device, names):
    """Graphs that end in the middle of a layer keep the boundary, which the eager rest reads."""
    found = []
    for warmup_steps in (2, 100):  # the reference runs under torch's checkpoint from end to end
        model = tiny_model(device, layers="moe")
        config = GraphConfig(names, warmup_steps=warmup_steps, recompute=True)
        graphs = moe_graphs.graph(model, config)
        found.append(train(model, graphs, device))
        eager = {"warmup"}
        assert set(graphs.report().eager_calls) == eager
        assert (graphs.report().matched > 0) == (warmup_steps == 2)
    found[0].assert_equal(found[1])


def test_the_report_and_the_plan_count_what_is_not_kept():
    plain, _ = moe_graphs_of(False)
    graphs, model = moe_graphs_of(True)
    x = torch.randn(4, WIDTH, requires_grad=True)
    kept = kept_bytes(lambda: model.first.linear(x), besides=[x, *model.parameters()])
    assert kept == 0
    for scope, of_plain in zip(graphs.report().scopes, plain.report().scopes, strict=True):
        assert of_plain.recomputed_bytes == 0
        assert scope.recomputed_bytes > 0
    assert "2 keep inputs only" in str(graphs.report())
    for call, of_plain in zip(calls_of(graphs), calls_of(plain), strict=True):
        assert call.saved == call.outputs < of_plain.saved
        assert call.recomputed == of_plain.saved - of_plain.outputs


def moe_graphs_of(recompute):
    model = build(Model, "cpu")
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2, recompute=recompute))
    trained(model, graphs, "cpu")
    return graphs, model


def calls_of(graphs):
    (chunk,) = graphs.plan().chunks
    return chunk.calls


@pytest.mark.gpu
def test_pools_are_smaller_and_shared():
    """Eight layers keep eight inputs; one layer's activations are there at a time."""
    width, rows, count = 256, 8192, 8

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(functional.dropout(functional.gelu(self.up(x)), 0.1))

    def run(recompute):
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(count))).cuda()
        config = GraphConfig(["[0-9]"], warmup_steps=2, recompute=recompute, on_mismatch="error")
        graphs = moe_graphs.graph(model, config)
        found = []
        gc.collect()
        torch.cuda.reset_peak_memory_stats()  # replays allocate nothing: captures show the peak
        before = torch.cuda.memory_allocated()
        for _ in range(STEPS):
            model.zero_grad()
            with graphs.step():
                loss = model(torch.randn(rows, width, device="cuda")).square().mean()
                loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            update(model)
        peak, report = torch.cuda.max_memory_allocated() - before, graphs.report()
        pools = {slot.backward_pool.pool for slot in graphs.captured.slots}
        graphs.release()
        return found, peak, report, pools

    expected, plain_peak, plain, _ = run(False)
    found, peak, report, pools = run(True)
    assert all(map(torch.equal, found, expected))
    assert len(pools) == 1
    spared = sum(scope.recomputed_bytes for scope in report.scopes)
    assert spared > count * rows * 4 * width * 4  # what the activation saves, at least
    assert report.pool_bytes < plain.pool_bytes - spared // 2
    assert peak < plain_peak - spared // 2


# ---- what cannot be, by name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", ["an input", "a parameter or buffer"])
def test_a_changed_input_or_parameter_is_an_error_before_the_backward(device, what):
    model = build(Model, device)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2, recompute=True, audit_every=None))
    trained(model, graphs, device, steps=3)
    with graphs.step():
        x = data(device).requires_grad_()
        output = model(x)
        with torch.no_grad():
            (x if what == "an input" else model.second.linear.bias).add_(1)
        with pytest.raises(GraphError, match=f"{what} was modified in place"):
            output.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_python_that_changes_before_the_backward_is_found(device):
    model = build(Model, device)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2, recompute=True, audit_every=None))
    trained(model, graphs, device, steps=3)
    with graphs.step():
        output = model(data(device).requires_grad_())
        model.second.dropout.p = 0.9
        with pytest.raises(GraphError, match=r"'second': .*computed anew, differs"):
            output.square().mean().backward()
    assert graphs.report().scopes[1].eager_calls == {"warmup": 2, "backward: attribute": 1}


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_that_draws_random_numbers_is_refused(device):
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient + torch.rand_like(gradient)

    model = build(Model, device)
    model.second.inside = Noisy.apply
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2, recompute=["s*d"]))
    with pytest.warns(GraphWarning, match="'second': .*its backward draws random numbers"):
        trained(model, graphs, device)
    assert graphs.report().state == "capture_failed"


@pytest.mark.parametrize("device", DEVICES)
def test_other_losses_and_second_backwards_run_eagerly_and_are_counted(device):
    def run(kind, config):
        model = build(kind, device)
        graphs = moe_graphs.graph(model, config)
        found = trained(model, graphs, device, steps=4)
        model.zero_grad()
        with graphs.step():
            loss = model(data(device).requires_grad_()).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        return [*found, *(p.grad.clone() for p in model.parameters())], graphs.report()

    expected, _ = run(Checkpointed, GraphConfig(impl="none"))
    found, report = run(Model, scopes(warmup_steps=2, recompute=True, audit_every=None))
    assert all(map(torch.equal, found, expected))
    assert report.eager_calls == {"warmup": 4, "backward: second_backward": 2}


def test_which_scopes():
    def chosen(names, recompute):
        model = tiny_model("cpu")  # a dense and an MoE layer
        graphs = moe_graphs.graph(model, GraphConfig(names, recompute=recompute))
        return [each.scope.name for each in graphs.scopes if each.use_reentrant is not None]

    assert chosen("attn", False) == []
    assert chosen("attn", True) == ["layers.0.attn", "layers.1.attn"]
    assert chosen("attn,mlp", "layers.0.*") == ["layers.0.attn+mlp"]
    assert chosen("full", ["full"]) == chosen("full", True)
    with pytest.raises(ValueError, match=r"names a part of 'layers.0.attn\+mlp'.*\['mlp'\]"):
        chosen("attn,mlp", "attn")
    with pytest.raises(ValueError, match="names none of the scopes, .* scopes are layers.0"):
        chosen("attn", "mlp")
    with pytest.raises(ValueError, match="choose one of the two"):
        GraphConfig(recompute=True, split_backward=True)
    with pytest.raises(ValueError, match="impl='none'"):
        GraphConfig(impl="none", recompute=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_addends_of_an_input_come_in_the_order_of_either_checkpoint(device, reentrant):
    """An input is used twice in a scope and once more behind it: three addends, in two orders."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x).tanh() + x.exp()

    def run(graphed):
        torch.manual_seed(0)
        model, found = Twice().to(device), []
        owner = nn.ModuleList([model])
        graphs = moe_graphs.graph(owner, GraphConfig(["[0-9]"], warmup_steps=2, audit_every=2))
        graphs.scopes[0].use_reentrant = reentrant
        if not graphed:
            graphs.release()
        for _ in range(STEPS):
            x = torch.randn(64, WIDTH, device=device, requires_grad=True)
            with graphs.step() if graphed else contextlib.nullcontext():
                y = model(x) if graphed else checkpoint(model, x, use_reentrant=reentrant)
                (y * x.sin()).sum().backward()
            found += [x.grad, *(p.grad.clone() for p in model.parameters())]
        return found, graphs

    expected, _ = run(graphed=False)
    found, graphs = run(graphed=True)
    assert all(map(torch.equal, found, expected))
    assert graphs.report().matched == STEPS - 2


def test_a_weight_of_several_scopes_under_reentrant_checkpoint_is_refused():
    model = build(Model, "cpu")
    model.second.linear.weight = model.first.linear.weight
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2))
    for each in graphs.scopes:
        each.use_reentrant = True
    with pytest.warns(GraphWarning, match="take use_reentrant=False"):
        trained(model, graphs, "cpu")
    assert graphs.report().state == "capture_failed"
