"""Leaving a forward at a boundary and resuming it: records, frames, nesting, exceptions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import CaptureError, GraphConfig, GraphError, Staged
from moe_graphs import staged as interrupts
from moe_graphs.dispatch import AllToAllDispatcher
from moe_graphs.layers import MoEConfig, MoELayer
from moe_graphs.layers.transformer import LayerPrepared
from moe_graphs.staged import Boundary, Stage, Stop, end_capture_here, record, resuming, run_until
from training_runs import DEVICES, loss_of, microbatches, tiny_model, train

RECIPE = "attn,moe_router,moe_preprocess"


@record
class Hidden:
    hidden: torch.Tensor


@record
class WithResidual:
    residual: torch.Tensor
    hidden: torch.Tensor


class Dynamic(nn.Module):
    """Stands for dispatch: cannot be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end_capture_here("sizes live on the host")
        return x * x.abs().sum().item()


class Inner(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.dynamic = nn.Linear(8, 8), Dynamic()

    def stages(self) -> tuple[Stage, ...]:
        return Stage("before", self._before), Stage("rest", self._rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_stages(Hidden(x))

    def _before(self, entered: Hidden) -> Hidden:
        return Hidden(torch.tanh(self.before(entered.hidden)))

    def _rest(self, entered: Hidden) -> torch.Tensor:
        return self.dynamic(entered.hidden) + entered.hidden


class Outer(Staged):
    """Keeps a residual across the inner module that is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), Inner()
        self.drop = nn.Dropout(0.2)

    def stages(self) -> tuple[Stage, ...]:
        return Stage("norm", self._norm), Stage("inner", self._inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_stages(Hidden(x))

    def _norm(self, entered: Hidden) -> WithResidual:
        residual = self.drop(entered.hidden) * 2
        return WithResidual(residual, self.norm(residual))

    def _inner(self, entered: WithResidual) -> torch.Tensor:
        return entered.residual + self.inner(entered.hidden)


def test_an_ordinary_forward_runs_through():
    torch.manual_seed(0)
    outer, x = Outer().eval(), torch.randn(4, 8)
    residual = x * 2
    hidden = torch.tanh(outer.inner.before(outer.norm(residual)))
    expected = residual + (hidden * hidden.abs().sum() + hidden)
    torch.testing.assert_close(outer(x), expected)


def test_an_interrupt_from_a_nested_frame_carries_the_residual_of_the_outer_one():
    outer, x = Outer(), torch.randn(4, 8)
    value, boundary = run_until(Stop(capturing=True), lambda: outer(x))
    assert value is None
    assert boundary.reason == "sizes live on the host"
    assert [(f.module, f.stage) for f in boundary.frames] == [
        (outer, "inner"),
        (outer.inner, "rest"),
    ]
    assert isinstance(boundary.frames[0].record, WithResidual)
    assert isinstance(boundary.frames[1].record, Hidden)
    with resuming(boundary) as store:
        assert not store.is_empty
        resumed = outer(torch.full((4, 8), torch.nan))  # arguments are not looked at again
        assert store.is_empty
    residual, hidden = boundary.frames[0].record.residual, boundary.frames[1].record.hidden
    torch.testing.assert_close(resumed, residual + hidden * hidden.abs().sum() + hidden)


@pytest.mark.parametrize("device", DEVICES)
def test_training_through_a_nested_interrupt_is_bitwise_eager(device):
    def run(scopes: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Outer(), Outer()).to(device)
        config = GraphConfig(scopes, warmup_steps=2, on_mismatch="error")
        graphs = moe_graphs.graph(model, config if scopes else GraphConfig(impl="none"))
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-3), []
        for _ in range(6):
            with graphs.step():
                loss = model(torch.randn(4, 8, device=device)).square().mean()
                loss.backward()
            seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        if scopes:
            assert {s.interrupted for s in graphs.report().scopes} == {"sizes live on the host"}
            assert graphs.report().matched == 8
        return seen

    expected, found = run(None), run("[01]*")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_the_recipe_is_one_forward_and_one_backward_graph_per_layer(device):
    model = tiny_model(device, "moe", dispatcher=AllToAllDispatcher())
    graphs = moe_graphs.graph(model, GraphConfig(RECIPE, warmup_steps=1))
    train(model, graphs, device, steps=2)
    for scope in graphs.report().scopes:
        assert (scope.forward_graphs, scope.backward_graphs) == (1, 1)
        assert scope.interrupted == "the scope ends before stage 'moe_experts'"
        assert scope.kernels > 0
    assert graphs.captured.sites[0].forward.exit.frames == ((model.layers[0], "moe_experts"),)


def test_the_boundary_record_is_named_and_typed():
    layer = tiny_model("cpu", "moe", dispatcher=AllToAllDispatcher()).layers[0]
    hidden = torch.randn(1, 4, 32)
    _, boundary = run_until(Stop(layer, "moe_experts", True), lambda: layer(hidden))
    (frame,) = boundary.frames
    assert isinstance(frame.record, LayerPrepared)
    fields = [field.name for field in dataclasses.fields(frame.record.prepared.plan)]
    assert fields == ["tokens", "weights_TK", "order", "dropped", "rows_needed", "handle"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        frame.record.residual_BSD = hidden


def test_the_dispatcher_declares_the_boundary_itself():
    """The dispatcher all_to_all ends a capture without a stop of the scope list; local does not."""
    layer = MoELayer(MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8), 8)
    value, boundary = run_until(Stop(capturing=True), lambda: layer(torch.randn(4, 8)))
    assert boundary is None
    assert value.hidden.shape == (4, 8)
    layer.dispatcher = AllToAllDispatcher()
    _, boundary = run_until(Stop(capturing=True), lambda: layer(torch.randn(4, 8)))
    assert boundary.frames[0].stage == "moe_experts"
    assert "split sizes" in boundary.reason


@pytest.mark.parametrize("device", DEVICES)
def test_an_exception_in_the_experts_leaves_the_store_empty_and_the_next_step_right(
    device, monkeypatch
):
    def run(scopes: str | None) -> list[torch.Tensor]:
        model = tiny_model(device, "moe", dispatcher=AllToAllDispatcher())
        config = GraphConfig(scopes, warmup_steps=2) if scopes else GraphConfig(impl="none")
        graphs = moe_graphs.graph(model, config)
        train(model, graphs, device, steps=3)
        with monkeypatch.context() as patched:
            patched.setattr(model.layers[1].moe.experts, "forward", fail)
            (tokens, *_), *_ = microbatches(device, 1, seed=9)
            with pytest.raises(ArithmeticError, match="inside the experts"), graphs.step():
                loss_of(model, tokens)[0].backward()
        assert stores[-1] is None or stores[-1].is_empty
        assert interrupts._store.get() is None
        abandoned.append(graphs.report().abandoned)
        return [value for _, value in train(model, graphs, device, steps=2).values]

    def fail(*arguments):
        stores.append(interrupts._store.get())
        raise ArithmeticError("inside the experts")

    stores, abandoned = [], []
    expected, found = run(None), run(RECIPE)
    assert all(a is b or torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stores[1] is not None
    assert abandoned == [0, 2]  # the forwards of both layers: their backward never came


def test_a_plain_module_between_boundary_and_root_is_refused_by_name():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    model = nn.Sequential(Plain())
    graphs = moe_graphs.graph(model, GraphConfig("[0]", warmup_steps=1))
    with (
        pytest.raises(CaptureError, match="ended inside Plain .*derive Plain from"),
        graphs.step(),
    ):
        model(torch.randn(2, 8)).sum().backward()


def test_a_rest_that_never_resumes_is_an_error():
    outer = Outer()
    _, boundary = run_until(Stop(capturing=True), lambda: outer(torch.randn(4, 8)))
    with pytest.raises(GraphError, match="Outer at 'inner', Inner at 'rest' was never entered"):
        with resuming(boundary):
            pass
    assert interrupts._store.get() is None


def test_an_interrupt_is_not_swallowed_by_handlers_of_exceptions():
    class Careful(Staged):
        def stages(self) -> tuple[Stage, ...]:
            return (Stage("only", self._only),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run_stages(Hidden(x))

        def _only(self, entered: Hidden) -> torch.Tensor:
            try:
                end_capture_here("dynamic")
            except Exception:
                return entered.hidden
            return entered.hidden + 1

    module = Careful()
    _, boundary = run_until(Stop(capturing=True), lambda: module(torch.zeros(1)))
    assert isinstance(boundary, Boundary)
    assert module(torch.zeros(1)).item() == 1
