"""Memory that a capture of a whole step takes besides the step itself."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

from moe_graphs import FullIteration
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.backends.cpu import CpuRecorder
from moe_graphs.engine.snapshot import Snapshot, copies_on_host
from moe_graphs.engine.whole_step import capture_step


def some_tensors(device: str) -> list[torch.Tensor]:
    made = [
        torch.randn(37, 5),
        torch.randn(6, 4, 3).permute(2, 0, 1),
        torch.randn(9, 8)[::2, 1:7],
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.empty(0, 4),
        torch.arange(11),
        torch.randn(3, 3).bfloat16(),
    ]
    return [each.to(device) for each in made]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_come_back_from_the_host(device):
    class Owner: ...

    tensors = some_tensors(device)
    for owner in (Owner(), Owner()):  # the first block is given back
        for copy, tensor in zip(copies_on_host(tensors, owner), tensors, strict=True):
            assert copy.device.type == "cpu"
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy, tensor.cpu())
    before = [tensor.clone() for tensor in tensors]
    values = Snapshot(values=tensors, on_host=True)
    for tensor in tensors:
        tensor.zero_()
    values.put_back()
    for tensor, value in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.gpu
def test_a_capture_holds_no_second_copy_of_the_state():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    iteration = FullIteration(step, model=model, optimizer=optimizer, warmup_steps=3)
    batch = torch.randn(64, 2048, device="cuda")
    iteration(batch)
    peaks = []
    for calls in (1, 2):  # eager; and the last eager one with the one that captures
        torch.cuda.reset_peak_memory_stats()
        for _ in range(calls):
            iteration(batch)
        peaks.append(torch.cuda.max_memory_allocated())
    assert iteration.report().state == "captured"
    weights = sum(p.nbytes for p in model.parameters())
    assert peaks[1] - peaks[0] < weights  # cuBLAS workspaces; weights and states are three times
    iteration.release()


def a_step_with(model: nn.Module, optimizer: torch.optim.Optimizer, leaves: str = "nothing"):
    """A step that leaves gradients, which add up, or its output in garbage, or nothing."""

    def step(batch):
        output = model(batch)
        output.square().mean().backward()
        optimizer.step()
        if leaves != "gradients":
            optimizer.zero_grad(set_to_none=True)
        if leaves == "garbage":
            cycle = [output]
            cycle.append(cycle)

    return step


def with_gaps(leaves: str = "nothing") -> tuple[FullIteration, torch.Tensor]:
    """Activations and gradients of different sizes, which leave gaps in separate allocations."""
    gc.collect()  # tests before this one leave garbage, which would be freed within the calls
    torch.manual_seed(0)
    sizes = [(512 * (1 + i % 3), 512 * (1 + (i + 1) % 3)) for i in range(12)]
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    step, batch = a_step_with(model, optimizer, leaves), torch.randn(8192, 512, device="cuda")
    return FullIteration(step, model=model, optimizer=optimizer, audit_every=None), batch


@pytest.mark.gpu
def test_a_graph_takes_little_more_than_a_step_allocates():
    iteration, batch = with_gaps()
    for _ in range(2):
        iteration(batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    iteration(batch)
    needed = torch.cuda.max_memory_allocated() - before
    iteration(batch)
    assert iteration.report().state == "captured"
    assert needed <= iteration.report().pool_bytes <= 1.3 * needed
    iteration.release()


@pytest.mark.gpu
@pytest.mark.parametrize("leaves", ["nothing", "gradients", "garbage"])
def test_trial_runs_of_a_capture_reserve_no_more_than_its_graph(leaves):
    iteration, batch = with_gaps(leaves)
    with iteration:
        for _ in range(3):
            iteration(batch)
        gc.collect()
        torch.cuda.empty_cache()
        lasting = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        gc.disable()  # or garbage is collected at any time
        try:
            iteration(batch)
        finally:
            gc.enable()
        torch.cuda.synchronize()
        pool = iteration.report().pool_bytes
        gradients = (48 << 20) if leaves == "gradients" else 0  # and as much for their values
        workspaces = 160 << 20
        assert torch.cuda.max_memory_reserved() - lasting <= pool + workspaces + 2 * gradients
        assert torch.cuda.memory_reserved() - lasting <= pool + (96 << 20) + gradients


@pytest.mark.parametrize("tries", [1, 2])
def test_what_outlives_trial_runs_is_made_outside_of_their_memory(tries, monkeypatch):
    """Runs are tried again where they assign a tensor to an attribute."""
    made, is_cached = [], [False]

    def noted(owner, name, what=None, cached=None):
        function = getattr(owner, name)

        def call(*args):
            if cached is not None:
                is_cached[0] = cached
            if what is not None:
                made.append((what, is_cached[0]))
            return function(*args)

        monkeypatch.setattr(owner, name, call)

    noted(CpuRecorder, "cache_piece", cached=True)
    noted(CpuRecorder, "release", cached=False)  # `make_room` leaves what workspaces lie in
    noted(capture_step.StaticBatch, "of", "batch")
    noted(capture_step, "gradients_to_find", "gradients")
    noted(capture_step.StepVerification, "__init__", "values before")
    noted(capture_step.StepVerification, "expect", "a run")
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    plain = a_step_with(model, optimizer, "gradients")

    def step(batch):
        plain(batch)
        if tries > 1:
            model.last = batch * 2

    with FullIteration(step, model=model, optimizer=optimizer, audit_every=None) as iteration:
        for _ in range(5):
            iteration(torch.randn(2, 3))
        assert iteration.report().replayed
    *batches, gradients, before, run = made
    assert batches == [("batch", False)] * tries
    assert gradients == ("gradients", False)
    assert (before, run) == (("values before", False), ("a run", True))


@pytest.mark.gpu
def test_states_of_an_optimizer_lie_in_segments_of_their_own():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    step, batch = a_step_with(model, optimizer), torch.randn(2048, 1024, device="cuda")
    with FullIteration(step, model=model, optimizer=optimizer) as iteration:
        for _ in range(5):
            iteration(batch)
        states = {s["exp_avg"].data_ptr() for s in optimizer.state.values()}
        parameters = {p.data_ptr() for p in model.parameters()}
        for segment in torch.cuda.memory_snapshot():
            held = {b["address"] for b in segment["blocks"] if b["state"] == "active_allocated"}
            assert not (held & states and held & parameters)
            if held & states:
                assert tuple(segment["segment_pool_id"]) != (0, 0)
        assert iteration.report().replayed


def test_only_an_optimizers_first_update_has_memory_of_its_own(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def noted(self):
        entered.append("in")
        yield
        entered.append("out")

    monkeypatch.setattr(Backend, "memory_of_its_own", noted)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.register_step_post_hook(lambda *_: entered.append("after"))
    step = a_step_with(model, optimizer)
    iteration = FullIteration(step, model=model, optimizer=optimizer, audit_every=None)
    for _ in range(5):
        iteration(torch.randn(2, 3))
    assert entered[:3] == ["in", "after", "out"]
    assert set(entered[3:]) == {"after"}
    assert iteration.report().replayed == 2
