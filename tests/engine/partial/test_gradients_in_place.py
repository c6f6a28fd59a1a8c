"""Gradients that autograd takes where a graph has left them: no copy, and still the user's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.engine.report import Report
from poisoned_gradients import in_place, poison
from training_runs import DEVICES
from two_scopes import WIDTH, both, build, data, scopes, train_step, update, warm

on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch, request):
    """Poisons memory that graphs may write; CUDA's graphs do so by themselves.

    On CUDA a gradient may lie where its own backward still reads something else.
    """
    if "cuda" not in request.node.name:
        poison(monkeypatch)


def static_gradients(graphs: moe_graphs.Graphs) -> set[int]:
    return {lease._static.data_ptr() for lease in in_place(graphs.captured.sites)}


def copied(report: Report) -> Counter[str]:
    return sum((Counter(scope.copied_gradients) for scope in report.scopes), Counter())


def backward_alone(model, graphs, x) -> Tensor:
    """Runs forward and backward, with the backward on this thread."""
    with graphs.step():
        output = model(x)
        output.square().mean().backward()
    return output


# ---- without a copy


@on_devices
def test_the_plain_loop_copies_no_gradient(device, monkeypatch):
    """One function makes the memory of copies; a copy by autograd would lie elsewhere."""
    model = build(device)
    made, empty_like = Counter(), torch.empty_like

    def counted(tensor, **options):
        made[tensor.numel()] += 1
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", counted)
    graphs = warm(model, device, on_mismatch="error", audit_every=None)
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    assert set(addresses) == static_gradients(graphs)  # the very step that captured them
    for _ in range(3):
        model.zero_grad()
        made.clear()
        backward_alone(model, graphs, data(device))
        assert made == {4 * WIDTH: 1}  # the gradient of the second scope's input
        assert [p.grad.data_ptr() for p in model.parameters()] == addresses
        update(model)
    report = graphs.report()
    assert [scope.gradients_in_place for scope in report.scopes] == [2, 2]
    assert not copied(report)


@on_devices
def test_only_the_engine_holds_what_is_not_out(device):
    """A reference of a user would go unseen if the engine counted any other one as its own."""
    model = build(device)
    graphs = warm(model, device)
    model.zero_grad()
    for lease in in_place(graphs.captured.sites):
        assert lease._known == lease._references()
        kept = lease._static.data
        assert lease.is_held()
        del kept
        storage = lease._static.untyped_storage()
        assert lease.is_held()
        del storage
        assert not lease.is_held()
        if device == "cuda":  # no recorder that holds what it runs again
            assert torch._C._storage_Use_Count(lease._storage._cdata) == 2


@on_devices
def test_zero_grad_in_place_and_none(device):
    def scenario(model, graphs):
        found = []
        for set_to_none in (True, False, False, True, True):
            model.zero_grad(set_to_none=set_to_none)
            backward_alone(model, graphs, data(device))
            found += [p.grad.clone() for p in model.parameters()]
            update(model)
        return found

    report = both(device, scenario, on_mismatch="error")
    assert copied(report) == {"still_held": 4}  # moved once, and then it is added to


@on_devices
def test_zero_grad_between_forward_and_backward(device):
    def scenario(model, graphs):
        for _ in range(3):
            with graphs.step():
                loss = model(data(device)).square().mean()
                model.zero_grad()
                loss.backward()
            update(model)
        return []

    report = both(device, scenario, on_mismatch="error", audit_every=None)
    assert copied(report) == {"still_held": 3 * 4}


@on_devices
def test_accumulated_only_after_the_capture(device):
    def scenario(model, graphs):
        found = []
        for microbatches in (1, 3, 1, 2):
            model.zero_grad()
            with graphs.step():
                for _ in range(microbatches):
                    model(data(device)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
            update(model)
        return found

    report = both(device, scenario, on_mismatch="error", audit_every=None)
    assert copied(report) == {"still_held": 2 * 4}


@on_devices
@pytest.mark.parametrize("accumulating", [False, True])
def test_a_weight_gets_gradients_from_elsewhere_in_a_later_microbatch(device, accumulating):
    """Autograd adds up the gradients of one backward, and then adds the sum to ``.grad``.

    A graph that added to ``.grad`` by itself would add in another order, and it cannot know.
    """

    def step(model, graphs, microbatches):
        model.zero_grad()
        with graphs.step():
            for number in range(microbatches):
                loss = model(data(device)).square().mean()
                if number > 0:
                    loss = loss + 0.1 * model.first.linear.weight.pow(2).sum()
                loss.backward()
        update(model)

    found = []
    for config in (GraphConfig(impl="none"), scopes(warmup_steps=2, on_mismatch="error")):
        model = build(device)
        graphs = moe_graphs.graph(model, config)
        for _ in range(3):
            step(model, graphs, 2 if accumulating else 1)
        for _ in range(3):
            step(model, graphs, 4)
        found.append([*(p.grad for p in model.parameters()), *model.parameters()])
    assert all(map(torch.equal, *found))


# ---- references that outlive the step


@on_devices
def test_gradients_that_are_kept_do_not_change(device):
    """Every ``.grad`` of every step, as the same objects."""

    def scenario(model, graphs):
        kept, values = [], []
        for _ in range(4):
            model.zero_grad()
            backward_alone(model, graphs, data(device))
            own = [p.grad for p in model.parameters()]
            kept += own
            values += [gradient.clone() for gradient in own]
            update(model)
        assert all(map(torch.equal, kept, values))
        return kept

    report = both(device, scenario, on_mismatch="error", audit_every=None)
    assert copied(report) == {"still_held": 3 * 4}


@on_devices
@pytest.mark.parametrize("view", [Tensor.detach, Tensor.untyped_storage], ids=lambda f: f.__name__)
def test_views_of_gradients_do_not_change(device, view):
    def scenario(model, graphs):
        views, values = [], []
        for _ in range(2):
            model.zero_grad()
            backward_alone(model, graphs, data(device))
            views.append(view(model.first.linear.weight.grad))
            values.append(model.first.linear.weight.grad.clone())
            update(model)
        if isinstance(views[0], torch.UntypedStorage):
            views = [torch.empty(0, device=device).set_(v, 0, (WIDTH, WIDTH)) for v in views]
        values += views
        assert torch.equal(torch.stack(values[:2]), torch.stack(values[2:]))
        found = [value.clone() for value in values]
        values.clear(), views.clear()
        for _ in range(2):
            train_step(model, graphs, data(device))
        return found

    report = both(device, scenario)
    assert report.eager_calls["gradient_held"] == 2  # both scopes, in the second step
    assert copied(report) == {"view_held": 1}
    assert [scope.gradients_in_place for scope in report.scopes] == [1, 2]


@on_devices
def test_what_is_added_to_a_gradient_is_seen_in_its_views(device):
    def scenario(model, graphs):
        model.zero_grad()
        backward_alone(model, graphs, data(device))
        flat = [p.grad.view(-1) for p in model.parameters()]
        backward_alone(model, graphs, data(device))
        return [each.clone() for each in flat]

    assert both(device, scenario).eager_calls["gradient_held"] == 2


@on_devices
def test_a_gradient_that_autograd_has_saved(device):
    """A gradient has a version of its own, which the next gradient does not change."""

    def scenario(model, graphs):
        scale = torch.ones((), device=device, requires_grad=True)
        model.zero_grad()
        backward_alone(model, graphs, data(device))
        of_first = (model.first.linear.weight.grad * scale).sum()
        train_step(model, graphs, data(device))
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        train_step(model, graphs, data(device))
        of_first.backward()
        return [scale.grad]

    both(device, scenario, on_mismatch="error")


@on_devices
def test_gradients_outlive_their_graphs(device):
    model = build(device)
    graphs = warm(model, device)
    model.zero_grad()
    backward_alone(model, graphs, data(device))
    gradients = [p.grad for p in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    graphs.recapture()
    for _ in range(3):
        train_step(model, graphs, data(device))
    graphs.release()
    made = [torch.full((WIDTH, WIDTH), float("nan"), device=device) for _ in range(64)]
    assert len(made) == 64
    assert all(map(torch.equal, gradients, values))


@on_devices
def test_other_layouts_and_memory_of_others_are_copied(device):
    """One gradient has another layout, and one is the very gradient that came in."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.shift = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t().contiguous() + self.shift

    found = []
    for config in (GraphConfig(impl="none"), GraphConfig(["[01]"], warmup_steps=1)):
        torch.manual_seed(0)
        model = nn.Sequential(Transposed(), Transposed()).to(device)
        graphs = moe_graphs.graph(model, config)
        for _ in range(4):
            train_step(model, graphs, data(device))
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    reasons = copied(graphs.report())
    assert sum(reasons.values()) > 0, reasons
    assert set(reasons) <= {"shared_memory", "other_layout"}


@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_with_and_without_views_of_its_buckets(as_view):
    """DDP's hooks read ``.grad`` into its buckets, or replace it by views of them, on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for config in (GraphConfig(impl="none"), scopes(warmup_steps=2, on_mismatch="error")):
            model = build("cpu")
            parallel = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            graphs = moe_graphs.graph(model, config)
            values = []
            for number in range(7):
                parallel.zero_grad(set_to_none=number != 5)
                with graphs.step():
                    if number == 4:
                        with parallel.no_sync():
                            parallel(data("cpu")).square().mean().backward()
                    parallel(data("cpu")).square().mean().backward()
                values += [p.grad.clone() for p in model.parameters()]
                update(model)
            found.append(values)
            del parallel
            graphs.release()
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, *found))
