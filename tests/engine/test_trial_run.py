"""A trial run watches a block's Python and operations, and its snapshot puts back what it wrote."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.partial import trials
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tracing import TrialRun
from moe_graphs.errors import CaptureError


def backend(*generators):
    return backend_for([torch.zeros(1)], generators)


def doubled(x):
    return x * 2


def test_what_ran_is_known_afterwards():
    x = torch.ones(2)
    with TrialRun(backend(), [x]) as run:
        doubled(x)
    assert doubled.__code__ in run.accessed.code
    assert [str(op[0]) for op in run.trace.ops] == ["aten.mul.Tensor"]
    assert run.trace.read == {x.data_ptr()}
    run.check()


def test_python_of_torch_behind_an_operation_is_not_noted():
    with TrialRun(backend()) as run:
        torch.erfinv(torch.zeros(2))
    assert torch._ops.OpOverload.__call__.__code__ not in run.accessed.code


@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_a_kernel_of_the_users_own_for_an_operation_of_torch_is_noted():
    def kernel(x):
        return x + random.Random(0).random()

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("erfinv", kernel, "CPU")
        with TrialRun(backend()) as run:
            torch.erfinv(torch.zeros(2))
        assert kernel.__code__ in run.accessed.code
    with TrialRun(backend()) as run:
        torch.erfinv(torch.zeros(2))
    assert kernel.__code__ not in run.accessed.code


@pytest.mark.parametrize("plain", [True, False])
def test_what_a_class_of_tensors_of_the_users_own_does_is_noted(plain):
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    x = torch.zeros(2) if plain else torch.zeros(2).as_subclass(Own)
    with TrialRun(backend(), [x]) as run:
        torch.erfinv(x)
    assert (Own.__torch_dispatch__.__func__.__code__ in run.accessed.code) is not plain


def test_what_the_block_wrote_is_put_back_by_the_snapshot():
    x, buffer = torch.ones(2), torch.zeros(2)
    with Snapshot() as before:
        with TrialRun(backend(), [x, buffer], before=before):
            buffer.add_(x)
        assert before.tensors[0].data_ptr() == buffer.data_ptr()
        assert buffer.tolist() == [1, 1]
    assert buffer.tolist() == [0, 0]


def test_a_backward_knows_what_its_forward_made():
    """The strict trial run of a backward may read tensors that the forward has made."""
    x = torch.ones(2, requires_grad=True)
    with TrialRun(backend(), [x]) as forward:
        made = x * 2
        loss = made.sum()
    with Snapshot() as before:
        with TrialRun(backend(), before=before, strict=False, behind=forward) as backward:
            made.detach().zero_()  # what the forward made is no business of the caller's
            torch.autograd.grad(loss, x)
        assert before.tensors == []
    assert len(backward.trace.ops) > 1


@pytest.mark.parametrize("options", [{}, {"in_step": True}])
def test_backwards_run_on_the_watched_thread(options):
    def threads() -> bool:
        return torch._C._is_multithreading_enabled()

    before = threads()
    assert before
    with TrialRun(backend(), **options):
        assert threads() is (not options)
    assert threads()
    with TrialRun(backend()) as forward, TrialRun(backend(), behind=forward):
        assert not threads()
    assert threads()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda x, g: x.add_(1), "input 'x' is modified in place"),
        (lambda x, g: x[0].add_(1), "input 'x' is modified in place"),
        (lambda x, g: x.sum().item(), "reads values on the host"),
        (lambda x, g: torch.rand(2, generator=torch.Generator()), "pass generators"),
        (lambda x, g: (torch.rand(2, generator=g), random.random()), "draws from Python's random"),
    ],
)
def test_what_a_graph_cannot_have_is_refused_and_nothing_stays_watched(block, message):
    x, generator, drawn = torch.ones(2), torch.Generator(), random.getstate()

    def tried():
        with TrialRun(backend(generator), [x], inputs={"x": x}) as run:
            block(x, generator)
        run.check()

    with pytest.raises(CaptureError, match=message):
        tried()
    assert sys.getprofile() is None
    assert random.getstate() == drawn
    assert x.tolist() == [1, 1]
    x.add_(1).sum().item()  # no mode is left


def test_memory_that_nobody_knows_is_refused_only_where_the_run_is_strict():
    foreign = torch.ones(2)
    with TrialRun(backend(), strict=False) as run:
        doubled(foreign)
    assert run.trace.check_others([]) == []
    with TrialRun(backend()) as run:
        doubled(foreign)
    with pytest.raises(CaptureError, match="neither an input nor a parameter"):
        run.trace.check_others([torch.ones(2)])


def test_memory_that_guards_compare_is_known():
    foreign = torch.ones(2)
    with TrialRun(backend()) as run:
        doubled(foreign)
    assert run.trace.check_others([torch.ones(2), foreign]) == [foreign]
    assert run.trace.read


def test_backwards_that_always_differ_end_the_trial_runs(monkeypatch):
    """A counter that no guard sees must not keep the warm-up running for ever."""
    counter = itertools.count()
    monkeypatch.setattr(trials, "differing_op", lambda *both: f"run {next(counter)} differs")
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    config = GraphConfig("*0,*1", warmup_steps=1, on_capture_error="error")
    graphs = moe_graphs.graph(model, config)
    with pytest.raises(CaptureError, match="two runs of the same call differ"), graphs.step():
        model(torch.ones(1, 2)).sum().backward()
    assert next(counter) < 20
