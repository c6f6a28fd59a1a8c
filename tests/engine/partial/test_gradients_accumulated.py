"""Accumulated gradients, added up in eager's order.

The graph of the first microbatch leaves its gradients where they are. Autograd adds those of later
microbatches to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moe_graphs
from moe_graphs import GraphConfig, GraphWarning
from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.plan import CallMemory, Plan, PlannedChunk, memory_plan
from moe_graphs.engine.partial.slots import Slot
from moe_graphs.engine.report import Report
from poisoned_gradients import in_place, poison
from training_runs import DEVICES
from two_scopes import WIDTH, Model, build, data, scopes, update

on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch, request):
    """Poisons memory that graphs may write; CUDA's graphs do so by themselves."""
    if "cuda" not in request.node.name:
        poison(monkeypatch)


@pytest.fixture
def firsts(monkeypatch) -> Counter[str]:
    """Counts the backwards of first microbatches that have left gradients in place."""
    count, reclaim = Counter[str](), Slot.reclaim_in_place

    def counted(slot, site=None):
        free = reclaim(slot, site)
        count["backwards"] += free and site is not None
        return free

    monkeypatch.setattr(Slot, "reclaim_in_place", counted)
    return count


def accumulate(model: nn.Module, graphs: moe_graphs.Graphs, microbatches: int = 3) -> None:
    device = next(model.parameters()).device.type
    with graphs.step():
        for _ in range(microbatches):
            model(data(device)).square().mean().backward()


def train(model: nn.Module, graphs: moe_graphs.Graphs, microbatches: int = 3) -> list[Tensor]:
    """Runs a step; returns its gradients."""
    model.zero_grad()
    accumulate(model, graphs, microbatches)
    found = [p.grad.clone() for p in model.parameters()]
    update(model)
    return found


def both(
    device: str, scenario: Callable, make: Callable = build, steps: int = 3, **options
) -> Report:
    """Runs ``scenario(model, graphs) -> tensors`` eagerly, and after a warm-up that accumulates."""
    found = []
    for config in (GraphConfig(impl="none"), scopes(warmup_steps=2, **options)):
        model = make(device)
        graphs = moe_graphs.graph(model, config)
        for _ in range(steps):
            train(model, graphs)
        tensors = [*scenario(model, graphs), *model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        found.append([t.detach().clone() for t in (*tensors, torch.rand(1, device=device))])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
    report = graphs.report()
    graphs.release()
    return report


def copied(report: Report) -> Counter[str]:
    return sum((Counter(scope.copied_gradients) for scope in report.scopes), Counter())


@on_devices
def test_no_gradient_of_a_first_microbatch_is_copied(device):
    def scenario(model, graphs):
        found = [each for _ in range(3) for each in train(model, graphs)]
        if graphs.captured is not None:
            static = {lease._static.data_ptr() for lease in in_place(graphs.captured.sites)}
            assert {p.grad.data_ptr() for p in model.parameters()} == static
        return found

    report = both(device, scenario, on_mismatch="error")
    assert not copied(report)
    assert [scope.gradients_in_place for scope in report.scopes] == [2, 2]


@on_devices
def test_in_steps_of_other_numbers_of_microbatches(device, firsts):
    def scenario(model, graphs):
        firsts.clear()
        return [each for n in (1, 4, 2, 1) for each in train(model, graphs, n)]

    both(device, scenario, on_mismatch="error", audit_every=None)
    assert firsts["backwards"] == 2 * 4


@on_devices
def test_however_gradients_are_zeroed(device, firsts):
    def scenario(model, graphs):
        found = []
        for set_to_none in (False, False, True, False):
            model.zero_grad(set_to_none=set_to_none)
            accumulate(model, graphs)
            found += [p.grad.clone() for p in model.parameters()]
            update(model)
        model.zero_grad()
        accumulate(model, graphs)
        model.second.zero_grad()  # whose new ones may lie where the first one's backward worked
        accumulate(model, graphs)
        found += [p.grad.clone() for p in model.parameters()]
        model.first.linear.weight.grad = None  # that of one weight alone
        accumulate(model, graphs)
        found += [p.grad.clone() for p in model.parameters()]
        with graphs.step():
            loss = model(data(device)).square().mean()
            model.zero_grad()
            loss.backward()
        return found

    both(device, scenario, on_mismatch="error", audit_every=None)
    assert firsts["backwards"] == 2 + 2 + 1 + 2


@on_devices
def test_gradients_that_are_kept(device):
    """A kept gradient of this step is added to, as in eager; one of an earlier step is not."""

    def scenario(model, graphs):
        kept = []
        for step in range(3):
            model.zero_grad()
            accumulate(model, graphs, 1)
            kept += [p.grad for p in model.parameters()]
            accumulate(model, graphs, 2)
            kept += [p.grad.view(-1) for p in model.parameters() if step == 1]
            update(model)
        return kept

    report = both(device, scenario, audit_every=None)
    assert copied(report)["view_held"] == 4


@on_devices
@pytest.mark.parametrize("kind", ["tensor", "accumulated", "node"])
def test_hooks_see_what_they_see_eagerly(device, kind):
    def scenario(model, graphs):
        seen, weight = [], model.first.linear.weight
        model.zero_grad()
        accumulate(model, graphs, 1)  # graphs may add from now on
        if kind == "node":
            node = weight.view_as(weight).grad_fn.next_functions[0][0]
            node.register_prehook(lambda gradients: seen.extend(g.clone() for g in gradients))
        elif kind == "tensor":
            weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        else:
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        accumulate(model, graphs, 2)
        train(model, graphs)
        assert len(seen) == 5
        return seen

    both(device, scenario)


@on_devices
def test_gradients_that_are_asked_for_instead(device, firsts):
    def scenario(model, graphs):
        model.zero_grad()
        accumulate(model, graphs, 2)
        firsts.clear()
        with graphs.step():
            loss = model(data(device)).square().mean()
            asked = torch.autograd.grad(loss, list(model.parameters()))
        assert not firsts["backwards"]
        accumulate(model, graphs, 2)
        return asked

    both(device, scenario, on_mismatch="error")


@on_devices
def test_gradients_that_are_never_unset(device, firsts):
    """Gradients that exist at the first capture do not lie in the graphs' memory."""
    found = []
    for config in (GraphConfig(impl="none"), scopes(warmup_steps=2, on_mismatch="error")):
        model = build(device)
        graphs = moe_graphs.graph(model, config)
        for _ in range(5):
            model.zero_grad(set_to_none=False)
            accumulate(model, graphs)
            update(model)
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert copied(graphs.report()) == {"grad_never_none": 4}
    assert not firsts["backwards"]


@on_devices
def test_only_the_engine_holds_what_is_not_out(device):
    """A reference of a user would go unseen if the engine counted any other one as its own."""
    model = build(device)
    graphs = moe_graphs.graph(model, scopes(warmup_steps=2))
    for _ in range(4):
        train(model, graphs)
    model.zero_grad()
    leases = list(in_place(graphs.captured.sites))
    assert len(leases) == 4
    for lease in leases:
        assert lease._known == lease._references()
        kept = lease._static.data
        assert lease.is_held()
        del kept
        assert not lease.is_held()


class Tied(Model):
    """A weight of two scopes is in none of their totals; the second has no other weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.linear.weight = self.first.linear.weight


@on_devices
def test_a_weight_of_two_scopes(device, firsts):
    def make(device):
        torch.manual_seed(0)
        return Tied().to(device)

    both(device, train, make, on_mismatch="error")
    assert firsts["backwards"] == 1  # of the first scope, for its bias


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = torch.full_like(x, 2.0)
        return x * ctx.factor

    @staticmethod
    def backward(ctx, gradient):
        factor = ctx.factor
        del ctx.factor
        return gradient * factor


@on_devices
def test_a_backward_that_can_be_run_once(device, firsts):
    def make(device):
        model = build(device)
        model.first.inside = Once.apply
        return model

    both(device, train, make, steps=4, audit_every=None)
    assert firsts["backwards"] % 2 == 0


@on_devices
def test_a_first_microbatch_that_replays_something_else_is_found(device, monkeypatch):
    record = Recorder._record_backward

    def wrong(recorder, slot, site, *rest):
        record(recorder, slot, site, *rest)
        replay, gradient = site.first.graph.replay, site.first.gradients[-1]

        def replayed():
            replay()
            gradient.add_(1.0)

        monkeypatch.setattr(site.first.graph, "replay", replayed)

    monkeypatch.setattr(Recorder, "_record_backward", wrong)
    with pytest.warns(GraphWarning, match=r"stays eager: .* the gradient of (first|second)"):
        report = both(device, train)
    assert report.eager_calls["differs_from_eager"] > 0


def test_what_it_takes_is_planned():
    first = call("a", outputs=1, saved=10, forward=12, backward=30, weights=7)
    second = call("b", outputs=2, saved=20, forward=21, backward=25, weights=20)
    measured, plan = {0: first, 1: second}, Plan((PlannedChunk((0, 1), slots=1),))
    made = memory_plan(plan, measured, False, copied=(), accumulates=True)
    # These are all gradients of weights, and 30 - 7 besides; the slot's are as if they were copied.
    assert made.chunks[0].first_gradients == 7 + 20 + 23
    assert made.pool_bytes == 55 + 50
    assert "; gradients 50 B" in str(made)
    several = Plan((PlannedChunk((0, 1), slots=2),))
    assert memory_plan(several, measured, False, copied=(), accumulates=True).chunks[0].slots == 2


def call(name: str, **sizes: int) -> CallMemory:
    values = dict(inputs=0, linked=0, outputs=0, saved=0, forward=0, backward=0, gradients=0)
    return CallMemory(scope=name, **(values | sizes))
