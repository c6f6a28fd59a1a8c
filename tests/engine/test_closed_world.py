"""Python whose effect nobody can compare later is refused by name, or counted when it begins.

Eager training has the same numbers in every test. The numbers in names are those of the table of
causes: 15 unseeded generators, 16 threads, 19 shared memory, 20 identity, 21 returned containers,
28 tensors that become None.
"""

from __future__ import annotations

import abc
import importlib.util
import random
import secrets
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphError
from refusal_runs import ENGINES, STEPS, WIDTH, Model, Scope, both, check
from training_runs import DEVICES

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def doubled(x, out, n: tl.constexpr):
        where = tl.arange(0, n)
        tl.store(out + where, tl.load(x + where) * 2)


pytestmark = pytest.mark.filterwarnings("ignore")
POOL = ThreadPoolExecutor(1)
CHANGE_AT = 4


# ---- 15: generators that are made within the call and have no seed

UNSEEDED = {
    "numpy": lambda: np.random.default_rng().random(),
    "numpy's old generator": lambda: np.random.RandomState().rand(),
    "random.Random": lambda: random.Random().random(),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "secrets": lambda: secrets.randbelow(1000),
    "uuid": lambda: uuid.uuid4().int,
}


@both(ENGINES)
@pytest.mark.parametrize("draw", UNSEEDED.values(), ids=UNSEEDED)
def test_a_generator_without_a_seed_is_refused_by_name(draw, engine):
    named, report = check(
        lambda: Scope(forward=lambda s, x: s.linear(x) * (1 if draw() >= 0 else 0)), engine
    )
    assert len(named) == 1
    assert "asks the system for random numbers" in named[0] or "uuid4" in named[0]
    assert report is None or not report.replayed


@pytest.mark.parametrize("device", DEVICES)
@both(ENGINES)
def test_a_generator_with_a_seed_is_replayed(engine, device):
    def forward(s, x):
        return s.linear(x) * random.Random(3).random() * np.random.default_rng(3).random()

    named, report = check(lambda: Scope(forward=forward), engine, device)
    assert not named
    assert report.replayed


# ---- 16: other threads


class Preset(abc.ABC):  # noqa: B024 (its bookkeeping in C is what matters)
    gain = 1.0


@both(ENGINES)
def test_an_object_of_an_abstract_class_that_is_read_whole_is_replayed(engine):
    preset = Preset()
    preset.bias = 0.5

    def forward(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return s.linear(x) * preset.gain + vars(preset)["bias"]

    named, report = check(lambda: Scope(forward=forward), engine)
    assert not named
    assert report.replayed > 0


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


THREADS = {
    "thread": in_thread,
    "pool": lambda function: POOL.submit(function).result(),
    "map of a pool": lambda function: next(POOL.map(lambda _: function(), [0])),
}


@both(ENGINES)
@pytest.mark.parametrize("run", THREADS.values(), ids=THREADS)
def test_work_in_another_thread_is_refused_by_name(run, engine):
    named, report = check(
        lambda: Scope(forward=lambda s, x: run(lambda: s.linear(x).tanh())), engine
    )
    assert len(named) == 1
    assert "thread" in named[0] or "iterator" in named[0]
    assert report is None or not report.replayed


@pytest.mark.parametrize("device", DEVICES)
@both(ENGINES)
def test_threads_beside_the_call_are_no_business_of_it(engine, device):
    done = threading.Event()
    other = threading.Thread(target=lambda: [torch.ones(2).add(1) for _ in iter(done.is_set, True)])
    other.start()
    try:
        named, report = check(lambda: Scope(nn.Tanh()), engine, device)
    finally:
        done.set()
        other.join()
    assert not named
    assert report.replayed


@both(("scopes", "callables"))
def test_an_output_that_no_operation_made_is_refused_by_name(engine):
    def forward(s, x):
        with _disable_current_modes():  # what another thread computes is not seen, either
            return s.linear(x).tanh()

    named, _ = check(lambda: Scope(forward=forward), engine)
    assert len(named) == 1
    assert "no operation that was seen has made the output (2, 3, 4)" in named[0]


@pytest.mark.gpu
@both(ENGINES)
def test_a_kernel_of_the_users_own_and_queries_of_the_device_are_replayed(engine):
    """The launch and its helpers in C belong to triton and torch, which are taken for granted."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.empty_like(x)
            doubled[(1,)](x, out, 16)
            return out

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def forward(s, x):
        assert torch.cuda.get_device_properties(x.device).multi_processor_count
        return Doubled.apply(s.linear(x).contiguous().view(-1)[:16]).mean() + s.linear(x)

    named, report = check(lambda: Scope(forward=forward), engine, "cuda")
    assert not named
    assert report.replayed


# ---- 19, 20: inputs whose memory or identity others know


class Masked(Scope):
    """A scope with a buffer that it modifies or compares with its input."""

    def __init__(self, run) -> None:
        super().__init__(forward=run)
        self.register_buffer("mask", torch.ones(1))

    def forward(self, x, mask):
        return self.run(self, x, mask)


def _counts(s, x, mask):
    s.mask.add_(1)
    return s.linear(x).tanh() * (mask + 0)


def _asks(s, x, mask):
    return s.linear(x).tanh() * (3.0 if mask is s.mask else mask)


def _with_mask(mask_of):
    def backward(model, x):
        loss = model.post(model.scope(model.pre(x), mask_of(model))).square().mean()
        loss.backward()
        return loss.detach()

    return backward


@pytest.mark.parametrize("forward", [_counts, _asks], ids=["19", "20"])
def test_an_input_that_the_scope_knows_by_another_name_is_counted_when_it_comes(forward):
    steps = []

    def mask_of(model):
        return model.scope.mask if steps[-1] >= CHANGE_AT else model.scope.mask.clone()

    _, report = check(
        lambda: Masked(forward),
        "scopes",
        backward=_with_mask(mask_of),
        before=lambda _, number: steps.append(number),
    )
    assert report.replayed + report.audited == CHANGE_AT - 2
    assert report.eager_calls["aliases"] == STEPS - CHANGE_AT


@pytest.mark.parametrize("forward", [_counts, _asks], ids=["19", "20"])
def test_an_input_that_the_scope_knows_by_another_name_is_refused_at_the_capture(forward):
    backward = _with_mask(lambda model: model.scope.mask)
    named, _ = check(lambda: Masked(forward), "scopes", backward=backward)
    assert len(named) == 1
    assert "is modified in place" in named[0] or "compares by identity" in named[0]


def test_an_input_of_a_step_that_the_step_modifies_is_counted_when_it_comes():
    model = nn.BatchNorm1d(WIDTH)

    def step(batch):
        loss = (model(batch["x"]) * batch["mean"]).square().mean()
        loss.backward()
        return loss.detach()

    full = FullIteration(step, model=model, warmup_steps=1, on_mismatch="eager")
    for number in range(4):
        model.zero_grad()
        mean = model.running_mean if number == 3 else model.running_mean.clone()
        full({"x": torch.randn(3, WIDTH), "mean": mean})
    report = full.report()
    full.release()
    assert report.replayed + report.audited == 2
    assert report.eager_calls["aliases"] == 1


def test_the_identity_of_an_object_is_refused_by_name():
    named, _ = check(
        lambda: Scope(forward=lambda s, x: s.linear(x) * (1 if id(x) else 2)), "scopes"
    )
    assert len(named) == 1
    assert "builtins.id()" in named[0]


# ---- 21: returned containers


@both(("scopes", "callables"))
def test_a_container_that_is_kept_and_returned_is_refused_by_name(engine):
    class Keeps(Scope):
        stats = {"seen": 0}  # noqa: RUF012

        def forward(self, x):
            return self.linear(x).tanh(), self.stats

    def backward(model, x):
        loss = model.scope(model.pre(x))[0].square().mean()
        loss.backward()
        return loss.detach()

    named, _ = check(Keeps, engine, backward=backward)
    assert len(named) == 1
    assert "returns the container '" in named[0]


def test_a_container_of_the_arguments_that_is_returned_is_refused_by_name():
    def backward(model, x):
        loss = model.post(model.scope.run(model.scope, {"x": model.pre(x)})["x"]).mean()
        loss.backward()
        return loss.detach()

    class Passes(Scope):
        def forward(self, given):
            return given

    model = Model(Passes(nn.Tanh()))
    graphs = moe_graphs.graph(
        model, GraphConfig("scope*", warmup_steps=1, on_capture_error="error")
    )
    with pytest.raises(GraphError, match="returns a container of its arguments"), graphs.step():
        model.scope({"x": model.pre(torch.ones(1, WIDTH))})["x"].sum().backward()
    graphs.release()


# ---- 23: the state of Python's generators around ``capture``


def test_capturing_ahead_of_time_puts_back_the_random_state_of_python_and_numpy():
    model = Model(Scope(nn.Tanh()))
    graphs = moe_graphs.graph(model, GraphConfig("scope*", warmup_steps=2))
    before = random.getstate(), np.random.get_state()[2]

    def step():
        random.random()
        np.random.rand()
        model(torch.randn(2, 3, WIDTH)).sum().backward()

    graphs.capture(step)
    graphs.release()
    assert (random.getstate(), np.random.get_state()[2]) == before


# ---- 28: tensors that no operation reads

TENSOR: torch.Tensor | None = None


@both(ENGINES)
@pytest.mark.parametrize("later", [None, torch.ones(2)], ids=["None", "another shape"])
def test_a_global_tensor_that_becomes_something_else_is_counted(engine, later):
    def put(value):
        global TENSOR
        TENSOR = value

    def forward(s, x):
        return s.linear(x) * (1.0 if TENSOR is not None and len(TENSOR) == 1 else 3.0)

    first = torch.ones(1)

    def make():
        put(first)
        return Scope(forward=forward)

    _, report = check(
        make,
        engine,
        before=lambda _, number: put(later if number >= CHANGE_AT else first),
    )
    assert report.replayed
    assert report.eager_calls["moved"] == STEPS - CHANGE_AT
