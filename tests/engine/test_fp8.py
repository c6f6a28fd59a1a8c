"""FP8 state that no dispatcher sees: a stand-in for Transformer Engine, on the CPU recorder.

On a GPU ``test_transformer_engine.py`` does the same with the real one.
"""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch
from torch import nn

import fake_transformer_engine
import moe_graphs
from grids import by_pairs
from moe_graphs import CaptureError, FullIteration, GraphConfig, make_graphed_callables
from moe_graphs.engine.guards.torch_state import TorchState

WIDTH, ROWS, STEPS, MICROBATCHES = 6, 4, 8, 2


@pytest.fixture
def te(monkeypatch):
    return fake_transformer_engine.install(monkeypatch)


class Scope(nn.Module):
    """A scope with two modules in FP8, and something between them that is not in FP8."""

    def __init__(self, te) -> None:
        super().__init__()
        self.first, self.second = te.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)

    def forward(self, x, is_first_microbatch=None):
        hidden = torch.tanh(self.first(x, is_first_microbatch=is_first_microbatch))
        return self.second(hidden, is_first_microbatch=is_first_microbatch)


class Model(nn.Module):
    def __init__(self, te) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scope_a, self.scope_b = Scope(te), Scope(te)

    def forward(self, x, is_first_microbatch=None):
        for scope in (self.scope_a, self.scope_b):
            x = scope(self.inner(x), is_first_microbatch=is_first_microbatch)
        return x


def build(te):
    torch.manual_seed(0)
    model = Model(te)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(te, kind, place, engine, *, cached, in_flight=False):
    """All results of training, step by step, with the state of FP8; and the report."""
    te.FP8GlobalStateManager.quantization_state = te.GlobalState()
    model, optimizer = build(te)
    recipe = te.Recipe(kind)
    around = {name: lambda: contextlib.nullcontext() for name in ("step", "call")}
    around[place] = lambda: te.autocast(recipe=recipe)
    generator = torch.Generator().manual_seed(1)

    def forward(x, number):
        with around["call"]():
            return model(x, is_first_microbatch=number == 0 if cached else None).square().mean()

    def step(batch):
        losses = []
        if in_flight:
            losses = [forward(x, number) for number, x in enumerate(batch)]
            for loss in reversed(losses):
                loss.backward()
            return torch.stack(losses).detach()
        for number, x in enumerate(batch):
            losses.append(forward(x, number))
            losses[-1].backward()
        return torch.stack(losses).detach()

    run, graphs = step, None
    if engine == "scopes":
        graphs = moe_graphs.graph(model, GraphConfig("scope_*", warmup_steps=2))
        run = lambda batch: _in_step(graphs, step, batch)  # noqa: E731
    elif engine == "whole steps":
        graphs = run = FullIteration(step, model=model, warmup_steps=2)
    elif engine == "callables":
        sample = torch.zeros(ROWS, WIDTH, requires_grad=True)
        with te.autocast(recipe=recipe):
            kwargs = {"is_first_microbatch": True} if cached else {"is_first_microbatch": None}
            make_graphed_callables(
                (model.scope_a, model.scope_b), ((sample,),) * 2, sample_kwargs=(kwargs,) * 2
            )
        graphs = model.scope_a.graphs
    seen = []
    for number in range(STEPS):
        batch = torch.randn(MICROBATCHES, ROWS, WIDTH, generator=generator) * 2**number
        with around["step"]():
            seen.append(run(batch).clone())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [tensor.clone() for tensor in state_of(model)]
    return seen, None if graphs is None else graphs.report()


def _in_step(graphs, step, batch):
    with graphs.step():
        return step(batch)


def state_of(model):
    for module in model.modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in getattr(module, "fp8_meta", {}):
                yield module.fp8_meta[key].scale
                yield module.fp8_meta[key].amax_history
        if getattr(module, "_fp8_workspaces", None):
            yield module._fp8_workspaces["weight"]._data


@pytest.mark.parametrize(
    ("kind", "place", "engine", "cached"),
    by_pairs(
        ["delayed", "current"],
        ["step", "call"],
        ["scopes", "whole steps", "callables"],
        [False, True],  # weights are cast every time, or cached
    ),
)
def test_graphed_is_bitwise_eager_with_its_state(te, kind, place, engine, cached):
    expected, _ = train(te, kind, place, None, cached=cached)
    found, report = train(te, kind, place, engine, cached=cached)
    differing = [i for i, pair in enumerate(zip(found, expected, strict=True))
                 if not torch.equal(*pair)]  # fmt: skip
    assert not differing, (differing[:5], report)
    # The backward of these modules can be run only once, so the second microbatch is captured.
    assert not report.eager_calls.keys() - {"warmup", "backward: not_captured"}, report
    assert report.replayed


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_two_microbatches_in_flight(te, kind):
    expected, _ = train(te, kind, "step", None, cached=True, in_flight=True)
    found, report = train(te, kind, "step", "scopes", cached=True, in_flight=True)
    assert all(map(torch.equal, found, expected)), report
    assert not report.eager_calls.keys() - {"warmup", "backward: not_captured"}, report


@pytest.mark.filterwarnings("ignore:.*ran eagerly 3 times .context:moe_graphs.GraphWarning")
def test_a_recipe_that_changes_runs_eagerly(te):
    def run(graphed):
        te.FP8GlobalStateManager.quantization_state = te.GlobalState()
        model, _ = build(te)
        graphs = (
            moe_graphs.graph(model, GraphConfig("scope_*", warmup_steps=1)) if graphed else None
        )
        generator, seen = torch.Generator().manual_seed(1), []
        for kind in ["delayed"] * 4 + ["current"] * 2 + [None]:
            x = torch.randn(ROWS, WIDTH, generator=generator)
            recipe = te.autocast(kind is not None, te.Recipe(kind))
            with recipe, graphs.step() if graphs else contextlib.nullcontext():
                loss = model(x).square().mean()
                loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return seen, graphs.report() if graphs else None

    expected, _ = run(False)
    found, report = run(True)
    assert all(map(torch.equal, found, expected))
    assert report.eager_calls == {"warmup": 2, "context": 6}, report


def test_an_autocast_of_a_library_that_is_imported_after_the_capture_is_noticed(monkeypatch):
    state = TorchState("cpu")
    assert state.mismatch() is None
    te = fake_transformer_engine.install(monkeypatch)
    assert state.mismatch() is None  # it was imported, and nothing else has changed
    with te.autocast(recipe=te.Recipe("current")):
        assert state.mismatch().reason == "context"
    assert state.mismatch() is None


def test_an_autocast_within_a_scope_is_refused_by_name(te):
    class Enters(Scope):
        def forward(self, x):
            with te.autocast(recipe=te.Recipe("current")):
                return super().forward(x)

    model = nn.Sequential(Enters(te))
    graphs = moe_graphs.graph(model, GraphConfig("0*", warmup_steps=1, on_capture_error="error"))
    with pytest.raises(CaptureError, match="around the whole step"), graphs.step():
        model(torch.randn(ROWS, WIDTH)).sum().backward()


class Store:
    def delay_wgrad_compute(self):
        return True


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("fuse_wgrad_accumulation", True), ("wgrad_store", Store()), ("primary_weights_in_fp8", True)],
)
@pytest.mark.parametrize("engine", ["scopes", "whole steps"])
def test_what_writes_past_the_dispatcher_is_refused_by_name(te, attribute, value, engine):
    model = nn.Sequential(Scope(te))
    setattr(model[0].second, attribute, value)
    check_refused(model, engine, "second.*build it")


def check_refused(model, engine, match):
    """Checks that the capture is refused by an error, after which the model trains on."""

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    x = torch.randn(ROWS, WIDTH)
    if engine == "scopes":
        graphs = moe_graphs.graph(
            model, GraphConfig("0*", warmup_steps=1, on_capture_error="error")
        )
        with pytest.raises(CaptureError, match=match), graphs.step():
            step(x)
    else:
        graphs = FullIteration(step, model=model, warmup_steps=1, on_capture_error="error")
        expected = graphs(x)
        with pytest.raises(CaptureError, match=match):
            graphs(x)
        assert torch.equal(graphs(x), expected)


@pytest.mark.parametrize("engine", ["scopes", "whole steps"])
def test_their_checkpoint_is_refused_by_name(te, monkeypatch, engine):
    source = "def checkpoint(function, x):\n    return function(x)\n"
    theirs = types.ModuleType("transformer_engine.pytorch.distributed")
    exec(compile(source, te.__file__.replace("quantization", "distributed"), "exec"), vars(theirs))
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)

    class Checkpointed(Scope):
        def forward(self, x):
            return theirs.checkpoint(super().forward, x)

    check_refused(nn.Sequential(Checkpointed(te)), engine, "checkpoint around it")


def test_their_operations_are_refused_in_fp8(te):
    kind = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.ops.basic"})
    with te.autocast(recipe=te.Recipe("current")):
        check_refused(nn.Sequential(kind(WIDTH, WIDTH)), "scopes", "te.ops")


def test_another_loss_computes_its_forward_anew_with_the_scales_it_had(te):
    """The autocast has ended and the scales have changed when the backward runs."""

    def run(graphed):
        te.FP8GlobalStateManager.quantization_state = te.GlobalState()
        model, _ = build(te)
        graphs = (
            moe_graphs.graph(model, GraphConfig("scope_a*", warmup_steps=1)) if graphed else None
        )
        generator, seen = torch.Generator().manual_seed(1), []
        for number in range(6):
            x = torch.randn(ROWS, WIDTH, generator=generator) * 3**number
            with graphs.step() if graphs else contextlib.nullcontext():
                with te.autocast(recipe=te.Recipe("delayed")):
                    y = model.scope_a(x)
                (y.expand(2, *y.shape).sum() if number < 4 else (y * x).sum()).backward()
            seen += [p.grad.clone() for p in model.scope_a.parameters()]
            seen += [tensor.clone() for tensor in state_of(model)]
        return seen, graphs.report() if graphs else None

    expected, _ = run(False)
    found, report = run(True)
    assert all(map(torch.equal, found, expected)), report


def test_the_helper_enters_the_autocast_that_it_is_given(te, monkeypatch):
    module = types.ModuleType("transformer_engine.pytorch")
    module.autocast = lambda enabled, recipe, amax_reduction_group: te.autocast(enabled, recipe)
    sample = torch.zeros(ROWS, WIDTH, requires_grad=True)
    recipe = te.Recipe("delayed")
    with pytest.raises(ValueError, match="needs transformer_engine"):
        make_graphed_callables(Scope(te), (sample,), enabled=True, recipe=recipe)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scope = Scope(te)
    make_graphed_callables(scope, (sample,), enabled=True, recipe=recipe)
    with te.autocast(recipe=recipe):
        scope(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert scope.graphs.report().matched == 1
