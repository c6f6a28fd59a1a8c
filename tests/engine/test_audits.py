"""Audits: calls that run eagerly in place of their replay find whatever has changed.

In most of these tests nothing else looks: guards are switched off.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moe_graphs
from grids import by_turns
from moe_graphs import FullIteration, GraphConfig, GraphError, GraphWarning
from moe_graphs.engine import audit as audit_module
from moe_graphs.engine.audit import MEETING, Audits, Comparison, Schedule, Stream
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.ranks import Ranks
from moe_graphs.engine.tracing import Operations, Origins
from training_runs import DEVICES

WIDTH, EVERY, WARM = 8, 3, 6
SETTINGS = {"gain": 1.0}
OTHER = r"other memory: its tensor . is parameter .(blocks|1)[.].* and was parameter"
ENGINES = ("scopes", "callables", "whole steps")

on_devices = pytest.mark.parametrize("device", DEVICES)
on_engines = pytest.mark.parametrize("engine", ENGINES)


class Scaled(torch.autograd.Function):
    """A function whose backward reads a global that its forward does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * SETTINGS["gain"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.activation: nn.Module = nn.Tanh()
        self.dropout = nn.Dropout(0.2)
        self.scale, self.config, self.teacher = 1.0, {"use": "first"}, self.first
        self.now = self.first
        self.register_buffer("calls", torch.zeros(()))
        factor = 1.0

        def inner(x: Tensor) -> Tensor:
            return x * factor

        self.inner = inner

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        self.calls.add_(1.0)
        h = getattr(self, self.config["use"])(x) * self.scale + other
        for layer in self.layers:
            h = self.activation(layer(h))
        h = self.inner(Scaled.apply(self.dropout(h) + self.now(x)))
        result = h + x
        return result if self.config.get("residual", True) else h


class Model(nn.Module):
    """Two scopes; each gets two parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(*self.begin(x).chunk(2, -1))
        return x


class Run:
    """Training of the model, eager or with one of the engines."""

    def __init__(self, engine: str, device: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.engine = device, engine
        self.model = Model().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.graphs = self.whole = self.callables = None
        if engine == "scopes":
            config = GraphConfig("blocks.*", warmup_steps=2, **options)
            self.graphs = moe_graphs.graph(self.model, config)
        if engine == "callables":
            blocks, wide = tuple(self.model.blocks), torch.zeros(4, 2 * WIDTH, device=device)
            samples = tuple(tuple(p.requires_grad_() for p in wide.chunk(2, -1)) for _ in blocks)
            moe_graphs.make_graphed_callables(blocks, samples, **options)
            self.callables = self.model.blocks[0].graphs
        if engine == "whole steps":
            state = {"model": self.model, "optimizer": self.optimizer}
            self.whole = FullIteration(self.train, warmup_steps=2, **state, **options)

    def train(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def batch(self) -> Tensor:
        return torch.randn(4, WIDTH, device=self.device)

    def step(self) -> Tensor:
        if self.whole is not None:
            return self.whole(self.batch())
        if self.graphs is None:
            return self.train(self.batch())
        with self.graphs.step():
            loss = self.model(self.batch()).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def state(self) -> list[Tensor]:
        made = [*self.model.parameters(), *self.model.buffers()]
        return [t.detach().clone() for t in (*made, torch.rand(1, device=self.device))]

    def report(self) -> Any:
        return self.handle().report()

    def handle(self) -> Any:
        return self.whole or self.graphs or self.callables


def warmup(engine: str) -> set[str]:
    """The reasons for eager calls of a run that goes well."""
    return set() if engine == "callables" else {"warmup"}


def set_cell(model: Model) -> None:
    model.blocks[1].inner.__closure__[0].cell_contents = 0.5


def add_hook(model: Model) -> None:
    model.blocks[1].second.register_forward_hook(lambda *given: given[-1] * 0.5)
    model.blocks[1].layers[0].register_forward_hook(lambda *given: given[-1] * 0.5)


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "attribute": (lambda m: setattr(m.blocks[1], "scale", 0.5), r"aten.mul.*0.5\) and was aten"),
    "dict value": (lambda m: m.blocks[1].config.update(use="second"), OTHER),
    "order": (lambda m: m.blocks[1].layers._modules.update({"0": m.blocks[1].layers[1],
                                                           "1": m.blocks[1].layers[0]}),
              OTHER),
    "activation": (lambda m: setattr(m.blocks[1], "activation", nn.ReLU()), "aten.relu"),
    "reference": (lambda m: setattr(m.blocks[1], "now", m.blocks[1].second), OTHER),
    "hook": (add_hook, r"aten.mul.*0.5\)"),
    "cell": (set_cell, r"aten.mul.*0.5\)"),
    "result": (lambda m: m.blocks[1].config.update(residual=False), "returns|gradients go|aten"),
    "backward": (lambda _: SETTINGS.update(gain=0.5), r"aten.mul.*0.5\)"),
}  # fmt: skip


@pytest.fixture
def no_guards(monkeypatch):
    monkeypatch.setattr(Guards, "mismatch", lambda self: None)
    monkeypatch.setitem(SETTINGS, "gain", 1.0)


@on_devices
@pytest.mark.parametrize(("engine", "change"), by_turns(ENGINES, list(CHANGES)))
def test_audits_alone_find_a_change_that_lasts(engine, change, device, no_guards):
    make, message = CHANGES[change]
    run = Run(engine, device, audit_every=EVERY)
    run.steps(WARM)
    before = run.report()
    assert before.audits_passed == before.audited > 0
    make(run.model)
    with pytest.warns(GraphWarning, match="an audit in step .* found") as caught:
        run.steps(2 * EVERY + 1)
    text = str(caught[0].message)
    assert re.search(message, text), text
    assert f"in step {before.last_audited_step}, so replays in the steps after" in text
    report = run.report()
    assert report.eager_calls["found_by_audit"] > 0
    assert report.audits_passed < report.audited


@on_devices
def test_audits_alone_find_another_buffer_that_only_the_backward_reads(device, no_guards):
    class Hooked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("factor", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x) * 1.0
            h.register_hook(lambda gradient: gradient * self.factor)
            return h

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hooked()).to(device)
    graphs = moe_graphs.graph(model, GraphConfig("*1", warmup_steps=2, audit_every=1))

    def train() -> None:
        for _ in range(6):
            with graphs.step():
                model(torch.randn(2, WIDTH, device=device)).sum().backward()

    train()
    assert graphs.report().audits_passed == graphs.report().audited > 0
    model[1].factor = torch.full((WIDTH,), 0.5, device=device)
    other = r"in its backward, operation .* is buffer '1[.]factor' .* and was memory at 0x"
    with pytest.warns(GraphWarning, match=other):
        train()


@on_devices
@on_engines
def test_without_audits_and_guards_nothing_finds_them(engine, device, no_guards):
    """Nothing but the audits finds the changes of the test before."""
    run = Run(engine, device, audit_every=None)
    run.steps(WARM)
    for make, _ in CHANGES.values():
        make(run.model)
    run.steps(2 * EVERY + 1)
    report = run.report()
    assert (report.audited, report.eager_calls.keys()) == (0, warmup(engine))


@on_devices
@on_engines
def test_the_audited_call_itself_is_right(engine, device, no_guards):
    of_device = torch.cuda if device == "cuda" else torch.random
    run, twin = Run(engine, device, audit_every=EVERY), Run("eager", device)
    run.steps(WARM)
    run.model.blocks[1].scale = twin.model.blocks[1].scale = 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)
        while not run.report().eager_calls.get("found_by_audit"):
            audited, state = run.report().audited, copy.deepcopy(run.model.state_dict())
            random = of_device.get_rng_state()
            twin.model.load_state_dict(state)
            loss = run.step()
            if run.report().audited > audited and run.report().audits_passed < run.report().audited:
                after = run.state()
                of_device.set_rng_state(random)
                assert torch.equal(twin.step(), loss)
                assert all(map(torch.equal, twin.state(), after))
                return
    raise AssertionError("no audit found it")


@on_devices
@pytest.mark.parametrize(("engine", "every"), by_turns(ENGINES, [1, 2, "auto"]))
def test_audited_training_is_bitwise_eager(engine, every, device):
    eager, run = Run("eager", device), None
    losses = [eager.step().item() for _ in range(14)]
    state = eager.state()
    run = Run(engine, device, audit_every=every, on_mismatch="error", on_audit="error")
    assert [run.step().item() for _ in range(14)] == losses
    assert all(map(torch.equal, run.state(), state))
    report = run.report()
    assert report.audits_passed == report.audited > 2
    assert report.replayed > 0
    assert report.last_audited_step <= 14
    assert report.audit_seconds > 0
    assert report.eager_calls.keys() == warmup(engine)


@on_devices
@on_engines
def test_a_difference_is_an_error_on_request(engine, device, no_guards):
    run = Run(engine, device, audit_every=1, on_audit="error")
    run.steps(WARM)
    SETTINGS["gain"] = 0.5
    with pytest.raises(GraphError, match="an audit in step .* found.*0.5"):
        run.steps(3)


@on_devices
def test_a_backward_that_runs_twice_and_gradients_that_are_asked_for(device):
    found = []
    for engine in ("eager", "scopes"):
        run = Run(engine, device, **({} if engine == "eager" else {"audit_every": 1}))
        for _ in range(WARM):
            run.step()
        for _ in range(3):
            x = run.batch().requires_grad_()
            with run.graphs.step() if run.graphs else contextlib.nullcontext():
                loss = run.model(x).square().mean()
                weight = run.model.blocks[0].first.weight
                first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
                loss.backward()
            found += [*first, weight.grad.clone(), x.grad]
            run.optimizer.zero_grad()
    assert all(map(torch.equal, found[: len(found) // 2], found[len(found) // 2 :]))


@on_devices
def test_a_frozen_scope_is_audited_without_a_backward(device):
    losses = []
    for engine in ("eager", "scopes"):
        options = {} if engine == "eager" else {"audit_every": 1, "on_audit": "error"}
        run = Run(engine, device, **options)
        for frozen in (run.model.begin, run.model.blocks[0]):
            frozen.requires_grad_(False)
        losses.append([run.step().item() for _ in range(8)])
    assert losses[0] == losses[1]
    report = run.report()
    assert [scope.backward_graphs for scope in report.scopes] == [0, 1]
    assert all(scope.audited > 1 < scope.replayed for scope in report.scopes)
    assert report.audits_passed == report.audited


@on_devices
def test_an_input_that_code_compares_by_identity_is_not_captured(device):
    """A graph has other objects, so the comparison would be another one."""
    known = [torch.ones((), device=device)]

    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if mask is known[0] else 1.0)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Masked(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, known[0])

    model = Caller().to(device)
    graphs = moe_graphs.graph(model, GraphConfig("inn*", warmup_steps=1, audit_every=1))
    x = torch.randn(2, WIDTH, device=device)

    def train() -> Tensor:
        for _ in range(5):
            with graphs.step():
                y = model(x)
                y.sum().backward()
        return y

    with pytest.warns(GraphWarning, match="input 'mask' is an object that the code knows"):
        y = train()
    assert torch.equal(y, F.linear(x, model.inner.weight, model.inner.bias) * 2.0)


@on_devices
def test_inputs_that_lie_in_memory_of_the_model_are_told_apart(device):
    """A parameter and a buffer are inputs of the scope that also reads them by itself."""

    class Tied(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("mask", torch.rand(WIDTH))

        def forward(self, x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
            return F.linear(x * mask * self.mask, weight + self.weight, self.bias)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tied()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.inner.weight, self.inner.mask)

    torch.manual_seed(0)
    model = Caller().to(device)
    config = GraphConfig("inn*", warmup_steps=1, audit_every=1, on_audit="error")
    graphs, found = moe_graphs.graph(model, config), []
    x = torch.randn(2, WIDTH, device=device)
    for _ in range(6):
        model.zero_grad()
        with graphs.step():
            model(x).sum().backward()
        found.append(model.inner.weight.grad.clone())
    assert all(torch.equal(found[0], each) for each in found)
    assert graphs.report().audits_passed == graphs.report().audited == 2


@on_devices
@on_engines
def test_an_audit_can_be_asked_for(engine, device):
    run = Run(engine, device, audit_every=10_000)
    run.steps(WARM)
    assert run.report().audited == 0
    run.handle().audit_soon()
    run.step()
    report = run.report()
    assert report.audits_passed == report.audited == (1 if engine == "whole steps" else 2)
    assert report.last_audited_step == WARM + 1
    run.step()
    assert run.report().audited == report.audited


class Attention(nn.Module):
    """Attention that draws dropout in its kernel, under autocast where there is a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (1, 64)).transpose(1, 2) for part in self.three(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(*parts, dropout_p=0.1, is_causal=True)
        return x + self.out(h.transpose(1, 2).flatten(2))


@on_devices
@on_engines
def test_attention_with_dropout_and_a_sharp_loss(engine, device):
    losses = []
    for options in ({"audit_every": None}, {"audit_every": 1, "on_audit": "error"}):
        torch.manual_seed(0)
        model = nn.Sequential(Attention(), Attention(), nn.Linear(64, 16)).to(device)
        on_gpu, rate = device == "cuda", torch.tensor(1e-3, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=on_gpu)

        def train(x: Tensor, model=model, optimizer=optimizer) -> Tensor:
            with torch.autocast(device, torch.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(model(x).flatten(0, 1), x.argmax(-1).flatten() % 16)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        graphs = moe_graphs.graph(model, GraphConfig("[01]", **options))
        step: Any = train
        if engine == "whole steps":
            graphs.release()
            step = FullIteration(train, model=model, optimizer=optimizer, **options)
        found = []
        for _ in range(10):
            x = torch.randn(2, 32, 64, device=device)
            with graphs.step() if step is train else contextlib.nullcontext():
                found.append(step(x).item())
        losses.append(found)
        report = (graphs if step is train else step).report()
        assert report.state == "captured"
        assert report.audits_passed == report.audited
        assert (report.audited > 2) == (options["audit_every"] == 1)
    if device == "cpu":
        assert losses[0] == losses[1]


@on_engines
def test_an_audit_that_does_not_fit_is_left_out_and_counted(engine, monkeypatch):
    run = Run(engine, "cpu", audit_every=1)
    backend = run.whole._definition.backend if run.whole else run.handle().backend
    monkeypatch.setattr(backend, "free_bytes", lambda: -1, raising=False)
    for _ in range(WARM + 4):
        run.step()
    report = run.report()
    assert report.audits_skipped["memory"] > 1
    assert report.audited == 0 < report.replayed


def test_scopes_in_two_parts_are_never_audited_and_counted():
    run = Run("scopes", "cpu", audit_every=1, split_backward=True)
    run.steps(WARM)
    assert run.report().audits_skipped == {"split_backward": 2}
    assert run.report().audited == 0


@pytest.mark.parametrize("every", [0, -1, True, "often", 1.5])
def test_other_distances_are_refused(every):
    with pytest.raises(ValueError, match="audit_every="):
        GraphConfig("*", audit_every=every)
    with pytest.raises(ValueError, match="audit_every="):
        FullIteration(print, model=nn.Linear(1, 1), audit_every=every)
    with pytest.raises(ValueError, match="on_audit="):
        GraphConfig("*", on_audit="never")


def written_past_versions(engine: str, device: str, what: str, since: int, **options: Any) -> Any:
    """Losses and gradients of steps from ``since`` on in which ``.data`` writes behind a forward.

    It writes into the input or the output of a block.
    """

    class Saving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x).exp() * x)

    torch.manual_seed(0)
    model, begin = Saving(WIDTH, WIDTH).to(device), nn.Linear(WIDTH, WIDTH).to(device)
    both = nn.ModuleList([begin, model])
    handle: Any = None
    if engine == "scopes":
        handle = moe_graphs.graph(both, GraphConfig("*1", warmup_steps=2, **options))
    elif engine == "callables":
        x = torch.zeros(4, WIDTH, device=device, requires_grad=True)
        moe_graphs.make_graphed_callables(model, (x,), **options)
        handle = model.graphs
    found = []
    for number in range(12):
        with handle.step() if engine == "scopes" else contextlib.nullcontext():
            h = begin(torch.randn(4, WIDTH, device=device))
            y = model(h)
            if number >= since:
                {"input": h, "output": y}[what].data.mul_(0.5)
            y.square().mean().backward()
        found.append([each.grad.tolist() for each in both.parameters()])
        both.zero_grad()
    return found, None if handle is None else handle.report()


@on_devices
@pytest.mark.parametrize("since", [0, 6])
def test_an_input_that_data_writes_before_the_backward_is_found(since, device):
    """A scope finds it at its capture, or an audit does; the calls that find it are right."""
    expected, _ = written_past_versions("eager", device, "input", since)
    with pytest.warns(GraphWarning, match="input 'x' was written between forward and backward"):
        found, report = written_past_versions("scopes", device, "input", since, audit_every=1)
    assert found == expected
    assert report.eager_calls["input_written" if since == 0 else "found_by_audit"] > 2


@on_devices
def test_an_audit_finds_what_data_writes_into_an_input_of_a_callable(device):
    expected, _ = written_past_versions("eager", device, "input", 0)
    with pytest.warns(GraphWarning, match="input 'x' was written between forward and backward"):
        found, _ = written_past_versions("callables", device, "input", 0, audit_every=1)
    assert found[-4:] == expected[-4:]


@on_devices
@pytest.mark.parametrize("engine", ["scopes", "callables"])
@pytest.mark.parametrize("every", [None, 1])
def test_an_output_that_data_writes_before_the_backward_is_right(engine, every, device):
    """The backward reads the output where the caller has it, in audits, too."""
    expected, _ = written_past_versions("eager", device, "output", 0)
    options = {"audit_every": every, "on_audit": "error", "on_mismatch": "error"}
    found, report = written_past_versions(engine, device, "output", 0, **options)
    assert found == expected
    assert report.replayed + report.audited > 8


# ---- when


def dues(audits: Audits, count: int, *, cost: float = 0.0) -> list[int]:
    schedule, found = Schedule(audits, "a scope"), []
    schedule.begin(0)
    for _ in range(count):
        found.append(schedule.due)
        schedule.took(cost)
        schedule.audited(schedule.due)
    return found


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is a second later."""
    now = iter(range(1, 1_000_000))
    monkeypatch.setattr(audit_module.time, "perf_counter", lambda: next(now))


def test_windows_double_until_audits_take_their_share(clock):
    found = dues(Audits("auto", "eager"), 9, cost=1e9)
    windows = [(2**n, 2 ** (n + 1)) for n in range(9)]
    assert all(first <= due < end for due, (first, end) in zip(found, windows, strict=True))
    assert found != [first for first, _ in windows]  # the place within a window is random
    assert found == dues(Audits("auto", "eager"), 9, cost=1e9)  # and the same on all ranks


def test_call_sites_take_turns(monkeypatch):
    """Two audits of each of 48 scopes are enough to know what they may cost."""
    now = iter(range(10**9))
    monkeypatch.setattr(audit_module.time, "perf_counter", lambda: 0.003 * next(now))
    audits = Audits("auto", "eager")
    schedules = [Schedule(audits, f"layers.{n}") for n in range(48)]
    firsts, lengths = [], []
    for schedule in schedules:
        schedule.begin(0)
        firsts.append(schedule.due)
        schedule._count, schedule._began = 0, 0.003 * next(now) - 0.15 * schedule.due
        schedule.took(0.026)
        before = schedule._end
        schedule.audited(schedule.due)
        lengths.append(schedule._end - before)
    assert min(firsts) >= 1
    assert max(firsts) <= 48
    assert len(set(firsts)) > 24  # at random places
    share = 0.026 / (0.01 / 48 * 0.15)  # calls from one audit of a scope to the next
    assert all(0.9 * share < length < 1.1 * share for length in lengths)


def test_windows_stay_where_audits_take_their_share(clock):
    found = dues(Audits("auto", "eager"), 200, cost=0.0)
    assert found == list(range(1, 201))  # audits cost nothing here


class TwoRanks(Ranks):
    """Ranks the other of which always wants windows of ``length`` calls, and ``asks`` or not."""

    group: Any = "two ranks"
    length, asks = 64, 0

    def __init__(self) -> None:
        pass

    def highest(self, here: Sequence[int]) -> list[int]:
        return list(map(max, here, (self.asks, self.length)))


def meet(audits: Audits, schedule: Schedule, count: int = MEETING) -> bool:
    return audits.are_asked_for(count, list, lambda: [schedule])


@pytest.mark.parametrize("cost", [0.0, 1e9])
def test_ranks_that_communicate_do_not_look_at_their_own_clocks(cost):
    schedule = Schedule(Audits("auto", "eager", TwoRanks()), "a scope")
    schedule.begin(0)
    ends = []
    for _ in range(8):
        ends.append(schedule._end)
        schedule.took(cost)
        schedule.audited(schedule.due)
    assert ends == list(itertools.accumulate([1, 2, 4, 8, 16, MEETING, MEETING, MEETING]))


def test_ranks_meet_to_agree_on_the_length_of_windows():
    audits = Audits("auto", "eager", TwoRanks())
    schedule = Schedule(audits, "a scope")
    schedule.begin(0)
    for _ in range(6):
        schedule.audited(schedule.due)
    assert not meet(audits, schedule, MEETING - 1)
    before = schedule._end
    schedule.audited(schedule.due)
    assert schedule._end - before == MEETING
    assert not meet(audits, schedule)
    before = schedule._end
    schedule.audited(schedule.due)
    assert schedule._end - before == 64


def test_ranks_are_asked_for_an_audit_by_any_of_them_where_they_meet():
    audits = Audits("auto", "eager", TwoRanks())
    schedule = Schedule(audits, "a scope")
    TwoRanks.asks = 1
    try:
        assert not meet(audits, schedule, MEETING + 1)
        assert meet(audits, schedule, MEETING)
    finally:
        TwoRanks.asks = 0
    assert not meet(audits, schedule, 2 * MEETING)


def test_windows_shrink_where_audits_have_become_cheap(monkeypatch):
    now = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(audit_module.time, "perf_counter", lambda: next(now))
    schedule = Schedule(Audits("auto", "eager"), "a scope")
    schedule.begin(0)
    lengths = []
    for cost in (*[1e9] * 6, *[0.0] * 6):
        before = schedule._end
        schedule.took(cost)
        schedule.audited(schedule.due)
        lengths.append(schedule._end - before)
    assert lengths == [2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1]


def test_few_occasions_are_audited_at_once_and_later_ones_in_so_many_calls():
    audits = Audits("auto", "eager")
    schedule = Schedule(audits, "a scope")
    assert not schedule.soon(0)  # nothing is captured yet
    schedule.begin(0)
    honoured = [count for count in range(2000) if schedule.soon(count)]
    assert honoured == [*range(8), 256, 512, 768, 1024, 1280, 1536, 1792]
    assert audits.skipped == {"often": 2000 - len(honoured)}


def evaluated(run: Run) -> None:
    run.model.eval()
    run.model.train()


def loaded(run: Run) -> None:
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))


def optimizer_loaded(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


@on_devices
@pytest.mark.parametrize(
    ("engine", "occasion"),
    [
        *itertools.product(ENGINES, [evaluated, loaded]),
        ("whole steps", optimizer_loaded),
    ],
)
def test_an_occasion_lets_the_next_call_be_audited(engine, occasion, device):
    run = Run(engine, device, audit_every=10_000, on_mismatch="error", on_audit="error")
    run.steps(WARM)
    assert run.report().audited == 0
    occasion(run)
    run.step()
    report = run.report()
    assert report.audits_passed == report.audited == (1 if engine == "whole steps" else 2)
    run.steps(3)
    assert run.report().audited == report.audited


@on_engines
def test_what_is_no_occasion(engine):
    run, other = Run(engine, "cpu", audit_every=10_000), Run("eager", "cpu")
    run.steps(WARM)
    for _ in range(3):
        run.model.train()  # it is in this mode already
        evaluated(other)
        loaded(other)
        optimizer_loaded(other)
        run.step()
    assert run.report().audited == 0
    assert run.report().audits_skipped == {}


def test_models_in_step_functions_may_be_switched_in_torch_compile():
    model = nn.Dropout()

    @torch.compile(backend="eager", fullgraph=True)
    def switched(x: Tensor) -> Tensor:
        model.eval()
        y = model(x)
        model.train()
        return y

    Audits("auto", "eager")
    x = torch.randn(4)
    assert torch.equal(switched(x), x)
    assert model.training


def test_a_fixed_distance_has_a_random_phase():
    found = dues(Audits(5, "eager"), 50)
    assert all(5 * n < due <= 5 * (n + 1) for n, due in enumerate(found))
    assert len({due % 5 for due in found}) == 5


# ---- what is compared


def stream_of(function: Callable[..., Tensor], *given: Tensor) -> Stream:
    operations = Operations(Origins(by_address=True))
    with operations:
        out = function(*given)
    return Stream.of(operations, [out])


def difference(captured: Stream, function: Callable[..., Tensor], *given: Tensor) -> str | None:
    comparison = Comparison(captured, Origins(by_address=True))
    with comparison:
        out = function(*given)
    comparison.finish([out])
    return comparison.difference


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (lambda x, y: x + y, lambda x, y: y + x, "other memory"),
        (lambda x, y: x + y, lambda x, y: x - y, "aten.sub"),
        (lambda x, y: x * 1.0, lambda x, y: x * -1.0, "-1.0"),
        (lambda x, y: x + 1, lambda x, y: x + 1.0, "1.0"),
        (lambda x, y: x + y, lambda x, y: (x + y).sin(), "no further one"),
        (lambda x, y: (x + y).sin(), lambda x, y: x + y, "ends before operation 1"),
        (lambda x, y: (x.sin(), x.cos())[0], lambda x, y: (x.sin(), x.cos())[1], "returns"),
        (lambda x, y: x[:2] + 1, lambda x, y: x[2:] + 1, "aten.slice"),
        (lambda x, y: x.t().sin(), lambda x, y: x.t().contiguous().sin(), "aten.clone"),
        (lambda x, y: x * torch.tensor(2.0), lambda x, y: x * torch.tensor(3.0), "other memory"),
        (lambda x, y: x.sin() + x.cos(), lambda x, y: x.sin() + x.sin(), "aten.sin"),
    ],
)  # fmt: skip
def test_every_kind_of_difference_is_seen(first, second, message):
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    captured = stream_of(first, x, y)
    assert difference(captured, first, x, y) is None
    found = difference(captured, second, x, y)
    assert found is not None
    assert message in found


def test_freed_memory_that_is_used_again_is_not_taken_for_what_was_there():
    def many(x: Tensor) -> Tensor:
        for _ in range(50):  # the allocator gives the same addresses again and again
            x = (x * 2).sin()
        return x

    x = torch.randn(64)
    captured, kept = stream_of(many, x), []
    assert difference(captured, many, x) is None
    kept.append(torch.empty(64))
    assert difference(captured, many, x) is None


def test_a_difference_names_the_line_of_the_user():
    x = torch.randn(4)
    found = difference(stream_of(torch.sin, x), lambda x: x.cos(), x)
    assert found is not None
    assert "test_audits.py" in found
    assert "lambda x: x.cos()" in found


def test_an_input_stands_for_static_memory():
    x, static, y = torch.randn(4, 4)[1:], torch.randn(3, 4), torch.randn(3, 4)
    captured = stream_of(lambda a: a[1:] + y[1:], static)
    origins = Origins(by_address=True)
    origins.stands_in(x, static)
    comparison = Comparison(captured, origins)
    with comparison:
        out = x[1:] + y[1:]
    comparison.finish([out])
    assert comparison.difference is None
    assert difference(captured, lambda a: a[1:] + y[1:], x) is not None


def test_functional_losses_have_the_same_operations_twice():
    weight, target = torch.randn(4, 4, requires_grad=True), torch.tensor([0, 1, 2, 3])

    def train(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(F.cross_entropy(x @ weight, target), [weight])
        return gradient

    x = torch.randn(4, 4)
    assert difference(stream_of(train, x), train, x) is None


def test_an_incoming_gradient_may_lie_anywhere_in_larger_memory():
    """Gradients of losses that a step stacks are parts of one tensor."""
    stacked, found = torch.zeros(4), []
    for part in stacked.unbind():
        origins = Origins(by_address=False)
        origins.call(part, "incoming gradient 0")
        found.append(origins.of(part))
    assert len(set(found)) == 1
