"""Memory runs out in an audit: training goes on as without the audit, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import moe_graphs
from grids import by_turns
from moe_graphs import FullIteration, GraphConfig, GraphWarning
from moe_graphs.engine import audit
from moe_graphs.engine.audit import Comparison
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.tensors import tensor_leaves
from training_runs import DEVICES

WIDTH, WARM, STEPS = 8, 5, 9
ENGINES = ("scopes", "callables", "whole steps")
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 512.00 MiB is free. Process 1 has 78.61 GiB memory in use."
)
ran_out = r"memory ran out in an audit \(1.50 GiB were missing\)"
on_devices = pytest.mark.parametrize("device", DEVICES)
on_engines = pytest.mark.parametrize("engine", ENGINES)


class Counting(torch.autograd.Function):
    """The identity; its backward counts in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Tensor) -> Tensor:
        ctx.counter = counter
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.counter.add_(1.0)
        return gradient * 2.0, None


class Block(nn.Module):
    """A block that counts in buffers in both directions, draws random numbers and keeps a value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.calls = nn.Dropout(0.2), 0
        self.mean: Any = torch.zeros(())
        self.register_buffer("forwards", torch.zeros(()))
        self.register_buffer("backwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(self.up(x)).relu()
        self.forwards.add_(1.0)
        y = self.down(Counting.apply(h, self.backwards))
        self.mean = y.detach().mean()
        return x + y * F.dropout(y, 0.1)


class Training:
    """A training eagerly, or with an engine."""

    def __init__(self, engine: str | None, device: str, *, rows: int = 4, **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.engine, self.rows = device, engine, rows
        self.model = nn.Sequential(Block(), Block()).to(device)
        for block in self.model:
            block.mean = block.mean.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.handle: Any = None
        if engine == "scopes":
            self.handle = moe_graphs.graph(self.model, GraphConfig("*", warmup_steps=2, **options))
        elif engine == "callables":
            blocks = tuple(self.model)
            x = torch.zeros(rows, WIDTH, device=device, requires_grad=True)
            moe_graphs.make_graphed_callables(blocks, ((x,),) * len(blocks), **options)
            self.handle = blocks[0].graphs
        elif engine == "whole steps":
            state = {"model": self.model, "optimizer": self.optimizer}
            self.handle = FullIteration(self.train, warmup_steps=2, **state, **options)

    def train(self, x: Tensor) -> Tensor:
        loss = self.model(x.detach().requires_grad_()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def step(self) -> Tensor:
        x = torch.randn(self.rows, WIDTH, device=self.device)
        if self.engine == "whole steps":
            return self.handle(x)
        if self.engine != "scopes":
            return self.train(x)
        with self.handle.step():
            return self.train(x)

    def backend(self) -> Any:
        is_step = self.engine == "whole steps"
        return self.handle._definition.backend if is_step else self.handle.backend

    def left(self) -> list[Any]:
        blocks = [(block.calls, block.mean.item()) for block in self.model]
        state = self.optimizer.state.values()
        kept = [*self.model.state_dict().values(), *(each["momentum_buffer"] for each in state)]
        return [blocks, torch.rand(1).item(), *(each.tolist() for each in kept)]


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Lets memory run out at an operation of the next audit; returns names of operations so far."""
    seen, see = [], Comparison.see

    def failing(self: Comparison, func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(str(func))
        if len(seen) == number:
            raise torch.OutOfMemoryError(MESSAGE)
        return see(self, func, args, kwargs)

    monkeypatch.setattr(Comparison, "see", failing)
    return seen


def expected(device: str, steps: int) -> tuple[list[float], list[Any]]:
    run = Training(None, device)
    return [run.step().item() for _ in range(steps)], run.left()


def compare_with_failure(
    engine: str, device: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Trains with one audit in which memory runs out; returns the report."""
    losses, left = expected(device, STEPS)
    run = Training(engine, device, audit_every=10_000, on_mismatch="error", on_audit="error")
    found = [run.step().item() for _ in range(WARM)]
    with monkeypatch.context() as patch:
        fail_at(patch, number)
        run.handle.audit_soon()
        with pytest.warns(GraphWarning, match=ran_out):
            found.append(run.step().item())
    found += [run.step().item() for _ in range(STEPS - WARM - 1)]
    assert found == losses
    assert run.left() == left
    return run.handle.report()


# Operations of forward, backward and update; the last ones of a whole step have written parameters.
@on_devices
@pytest.mark.parametrize(("engine", "number"), by_turns(ENGINES, [1, 10, 21, 45]))
def test_training_goes_on_bit_for_bit(engine, number, device, monkeypatch):
    report = compare_with_failure(engine, device, number, monkeypatch)
    assert report.audits_skipped == {"memory": 1}
    assert report.audits_missed_bytes == 3 << 29
    assert report.state == "captured"
    assert "1.5 GiB were missing" in str(report)


@pytest.mark.long
@on_engines
def test_memory_may_run_out_in_any_operation(engine, monkeypatch):
    run = Training(engine, "cpu", audit_every=10_000)
    for _ in range(WARM):
        run.step()
    run.handle.audit_soon()
    with monkeypatch.context() as patch:
        operations = fail_at(patch, -1)
        run.step()
    assert len(operations) > 50
    for number in range(1, len(operations) + 1):
        compare_with_failure(engine, "cpu", number, monkeypatch)


@on_engines
def test_only_the_first_one_warns_and_windows_grow(engine, monkeypatch):
    """An audit that never fits takes its share of the time, and no more."""
    losses, _ = expected("cpu", 24)
    run, found, failed = Training(engine, "cpu"), [], []

    def failing(self: Comparison, *_: Any) -> Any:
        failed.append(self)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Comparison, "see", failing)
    with pytest.warns(GraphWarning) as caught:
        found += [run.step().item() for _ in range(24)]
    assert found == losses
    assert [str(each.message).split(": ")[1].split(". ")[0] for each in caught] == [
        "memory ran out in an audit"
    ]
    report = run.handle.report()
    assert report.audits_skipped == {"memory": len(failed)}
    assert report.audited == report.audits_missed_bytes == 0
    assert 0 < len(failed) < report.replayed


@on_engines
def test_what_cannot_be_put_back_raises_as_eager_does(engine, monkeypatch):
    monkeypatch.setattr(audit, "_MOST_KEPT", 0)
    run = Training(engine, "cpu", audit_every=10_000)
    for _ in range(WARM):
        run.step()
    fail_at(monkeypatch, 12)  # it has counted its forward by then
    run.handle.audit_soon()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step()
    assert re.search("memory ran out in an audit, .*cannot be put back", caught.value.__notes__[0])


@on_engines
def test_memory_of_the_audit_is_freed_before_training_goes_on(engine, monkeypatch):
    run, made = Training(engine, "cpu", audit_every=10_000), list[StorageWeakRef]()
    for _ in range(WARM):
        run.step()
    backend, see = run.backend(), Comparison.see
    alive: list[int] = []

    def failing(self: Comparison, func: Any, args: Any, kwargs: Any) -> Any:
        if len(made) > 8:
            raise torch.OutOfMemoryError(MESSAGE)
        out = see(self, func, args, kwargs)
        made.extend(StorageWeakRef(each.untyped_storage()) for each in tensor_leaves(out))
        return out

    def make_room() -> None:
        alive.append(sum(not each.expired() for each in made))

    monkeypatch.setattr(backend, "make_room", make_room)
    monkeypatch.setattr(Comparison, "see", failing)
    run.handle.audit_soon()
    with pytest.warns(GraphWarning, match=ran_out):
        run.step()
    kept = {each.untyped_storage().data_ptr() for each in run.model.state_dict().values()}
    assert alive[0] <= len(kept)


# ---- whole steps that do not fit beside their graph


def without_room(
    run: Training, monkeypatch: pytest.MonkeyPatch, *, free: int = 1 << 20, share: float = 1e9
) -> None:
    """Lets fewer bytes be free than the pool holds, and audits take this share of the time."""
    monkeypatch.setattr(run.backend(), "free_bytes", lambda: free)
    monkeypatch.setattr(run.backend(), "pool_bytes", lambda pool: 1 << 30)
    monkeypatch.setattr(audit, "_SHARE", share)


def audited_without_room(
    device: str, monkeypatch: pytest.MonkeyPatch, **limits: Any
) -> tuple[Any, Any]:
    """Trains with one audit that does not fit beside the graph; compares with eager training.

    Returns the reports from before the audit and from the end.
    """
    losses, left = expected(device, STEPS)
    options = {"audit_every": 10_000, "on_mismatch": "error", "on_audit": "error"}
    run = Training("whole steps", device, **options)
    found = [run.step().item() for _ in range(WARM)]
    without_room(run, monkeypatch, **limits)
    before = run.handle.report()
    run.handle.audit_soon()
    found += [run.step().item() for _ in range(STEPS - WARM)]
    assert found == losses
    assert run.left() == left
    return before, run.handle.report()


@on_devices
def test_a_step_without_room_is_audited_after_the_release_of_its_graph(device, monkeypatch):
    before, report = audited_without_room(device, monkeypatch)
    assert (report.state, report.captures) == ("captured", 2)
    assert (report.audited, report.audits_passed, report.audits_skipped) == (1, 1, {})
    assert report.last_audited_step == WARM + 1
    assert report.replayed == STEPS - 2 - 1  # without the warm-up and the audit
    assert report.eager_calls == {"warmup": 2}
    # The new capture is a part of what the audit costs.
    assert report.audit_seconds - before.audit_seconds > (
        report.capture_seconds - before.capture_seconds
    )


@on_devices
@pytest.mark.parametrize("limits", [{"share": 1e-9}, {"free": -(1 << 29)}])
def test_an_audit_without_room_waits_until_a_new_capture_is_paid_for(device, limits, monkeypatch):
    """The audit never runs if memory is missing even without the graph."""
    _, report = audited_without_room(device, monkeypatch, **limits)
    assert (report.captures, report.audited) == (1, 0)
    assert report.audits_skipped["memory"] >= 1
    assert report.audits_missed_bytes > 0


@on_devices
def test_a_difference_is_found_without_room_beside_the_graph(device, monkeypatch):
    run = Training("whole steps", device, audit_every=10_000)
    for _ in range(WARM):
        run.step()
    without_room(run, monkeypatch)
    # The Python that a step reads is guarded; torch's own is not.
    relu = torch.Tensor.relu
    monkeypatch.setattr(torch.Tensor, "relu", lambda self: relu(self) * 2.0)
    run.handle.audit_soon()
    with pytest.warns(GraphWarning, match=r"an audit in step 6 found"):
        run.step()
    report = run.handle.report()
    assert (report.state, report.captures, report.audits_passed) == ("found_by_audit", 1, 0)


@on_devices
def test_memory_runs_out_though_the_graph_has_been_released(device, monkeypatch):
    """The step is put back, captured again and replayed."""
    losses, left = expected(device, STEPS)
    run = Training("whole steps", device, audit_every=10_000, on_mismatch="error")
    found = [run.step().item() for _ in range(WARM)]
    with monkeypatch.context() as patch:
        without_room(run, patch)
        fail_at(patch, 9)
        run.handle.audit_soon()
        with pytest.warns(GraphWarning, match=ran_out):
            found.append(run.step().item())
    found += [run.step().item() for _ in range(STEPS - WARM - 1)]
    report = run.handle.report()
    assert found == losses
    assert run.left() == left
    assert (report.state, report.captures, report.audited) == ("captured", 2, 0)
    assert report.eager_calls == {"warmup": 2}


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        (MESSAGE, 3 << 29),
        ("Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1 GiB of which 24.00 KiB "
         "is free.", (20 << 20) - (24 << 10)),
        ("Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 1 GiB of which 1.00 GiB is "
         "free. 512 MiB allowed", None),
        ("something else", None),
    ],
)  # fmt: skip
def test_missing_bytes_are_read_from_the_message(message, missing):
    assert audit._missing_bytes(torch.OutOfMemoryError(message)) == missing


@pytest.mark.parametrize(("fraction", "free"), [(1.0, 300), (0.9, 300), (0.75, 50), (0.5, -200)])
def test_free_memory_is_what_the_process_may_still_take(fraction, free, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700 - 100 * (fraction > 0.8))
    assert Backend.free_bytes(SimpleNamespace(device=torch.device("cuda"))) == free


@pytest.mark.gpu
def test_a_gpu_without_room_gets_it_by_releasing_the_graph(monkeypatch):
    monkeypatch.setattr(audit, "_SHARE", 1e9)
    run, losses = limited("whole steps", lambda backend: None)
    assert losses[0] == losses[1]
    report = run.handle.report()
    assert (report.audits_passed, report.captures, report.state) == (1, 2, "captured")


@pytest.mark.gpu
@on_engines
def test_memory_of_a_gpu_that_may_not_be_taken(engine):
    """The process may take no more memory than replays need, so no call is audited."""
    run, losses = limited(engine, lambda backend: None)
    assert losses[0] == losses[1]
    assert run.handle.report().audits_skipped["memory"] >= 1
    assert run.handle.report().audits_missed_bytes > 0


@pytest.mark.gpu
def test_memory_of_a_gpu_that_runs_out_in_an_audit(monkeypatch):
    """Nobody knows how much memory is free, so the audit of a whole step begins."""

    def unknown(backend: Any) -> None:
        monkeypatch.setattr(backend, "free_bytes", lambda: None)

    with pytest.warns(GraphWarning, match="memory ran out in an audit"):
        run, losses = limited("whole steps", unknown)
    assert losses[0] == losses[1]
    assert run.handle.report().audits_skipped["memory"] >= 1


def limited(engine: str, prepare: Callable[[Any], None]) -> tuple[Training, list[list[float]]]:
    """Trains eagerly and with an engine, one step of which may take no more memory."""
    found = []
    for each in (None, engine):
        options = {} if each is None else {"audit_every": 10_000}
        run = Training(each, "cuda", rows=1 << 20, **options)
        losses = [run.step().item() for _ in range(WARM)]
        if each is not None:
            prepare(run.backend())
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            run.handle.audit_soon()
        try:
            losses.append(run.step().item())
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        found.append([*losses, *(run.step().item() for _ in range(3))])
    return run, found
