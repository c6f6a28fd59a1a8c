"""A SwiGLU network on a side stream: the same bits, and nothing is freed or read too early."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moe_graphs import side_stream
from moe_graphs.kernels import swiglu
from moe_graphs.kernels.swiglu_beside import _Begin, _End, begin_swiglu, end_swiglu
from side_streams import TwoStreams

T, D, F = 6, 8, 12


def leaves(frozen: tuple[int, ...] = ()) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((T, D), (2 * F, D), (D, F), (1, D))
    return [torch.randn(s).requires_grad_(i not in frozen) for i, s in enumerate(shapes)]


def on_one_stream(x_TD, w1, w2, gate=None):
    out_TD = functional.linear(swiglu(functional.linear(x_TD, w1)), w2)
    return out_TD if gate is None else functional.linear(x_TD, gate).sigmoid() * out_TD


def beside(x_TD, w1, w2, gate=None):
    gated = (None, None) if gate is None else (gate, x_TD)
    return end_swiglu(begin_swiglu(x_TD, w1, w2, *gated))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2, 3), (0, 1, 2)], ids=str)
def test_equals_one_stream_bit_by_bit(gated, frozen):
    given = leaves(frozen)[: 4 if gated else 3]
    wanted = [leaf for leaf in given if leaf.requires_grad]
    results = []
    for run in (on_one_stream, beside):
        out_TD = run(*given)
        grad_TD = torch.arange(T * D, dtype=out_TD.dtype).view(D, T).t()  # as strided as may be
        found = [out_TD.detach()]
        assert out_TD.requires_grad == bool(wanted)
        for _ in range(2 if wanted else 0):  # a graph that is kept is run again
            found += torch.autograd.grad(out_TD, wanted, grad_TD, retain_graph=True)
        results.append(found)
    assert all(map(torch.equal, *results))


def test_forks_at_both_ends_and_joins_at_the_others(monkeypatch):
    x_TD, w1, w2, _ = leaves()
    with TwoStreams(monkeypatch) as streams:
        hidden_TD = x_TD * 2
        begun = begin_swiglu(hidden_TD, w1, w2)
        forward, streams.events = streams.events, []
        out_TD = end_swiglu(begun) + 1
        ended, streams.events = streams.events, []
        out_TD.sum().backward()
    assert forward[0] == "fork"
    assert forward.count("aten.mm.default") == 2
    assert ended == ["join"]
    assert streams.events[0] == "fork"
    assert streams.events[-1] == "join"
    assert streams.events.count("aten.mm.default") == 4
    assert not streams.hazards


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_may_look_at_gradients_at_once(monkeypatch):
    x_TD, w1, w2, _ = leaves()
    out_TD = beside(x_TD, w1, w2)
    with TwoStreams(monkeypatch) as streams, torch.autograd.detect_anomaly():
        out_TD.sum().backward()
    assert streams.events.count("join") == 2
    assert not streams.hazards


class Forgetful(list):
    """Holds nothing."""

    def __iadd__(self, other):
        return self

    def extend(self, other):
        pass


@pytest.mark.parametrize("holds", [list, Forgetful])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_the_side_stream_reads_lives_until_the_join(monkeypatch, holds, backward):
    """And the checker finds it if it does not."""
    held, (x_TD, w1, w2, _) = holds(), leaves()
    with TwoStreams(monkeypatch) as streams:
        with torch.set_grad_enabled(backward):
            hidden_TD = x_TD * 2
            begun = _Begin.apply([] if backward else held, None, hidden_TD, w1, w2, None)
            if backward:
                out_TD = _End.apply(held, *begun) * 3
            else:
                begun, hidden_TD = begun[0], None
                torch.ones(3)
        if backward:
            hidden_TD = begun = None
            out_TD.sum().backward()
            torch.ones(3)
    assert bool(streams.hazards) == (holds is Forgetful), streams.hazards


def test_the_checker_finds_a_join_that_is_left_out(monkeypatch):
    x_TD, w1, w2, _ = leaves()
    with TwoStreams(monkeypatch) as streams:
        monkeypatch.setattr(side_stream, "join", lambda device: None)
        (beside(x_TD, w1, w2) * 2).sum().backward()
    assert any("reads what side writes" in hazard for hazard in streams.hazards)
