"""Dispatchers in one process: moved rows, dropped rows, and agreement between dispatchers.

Shapes: T tokens, D model, K top-k, E experts, C capacity.
"""

from __future__ import annotations

import copy

import pytest
import torch

from moe_graphs.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    LocalDispatcher,
    PaddedDispatcher,
    make_dispatcher,
)
from moe_graphs.staged import Stop, run_until
from stand_in_experts import rows_of, sums_of

ROUTINGS = {
    "random": lambda t, k, e: torch.rand(t, e).topk(k).indices,
    "one-takes-all": lambda t, k, e: torch.arange(k).expand(t, k),
    "last-takes-all": lambda t, k, e: torch.arange(e - k, e).expand(t, k),
    "half-empty": lambda t, k, e: torch.rand(t, e // 2).topk(min(k, e // 2)).indices * 2,
}


def _expert(rows, offsets, scales_E):
    """A stand-in for the experts: row times its expert's number, row by row."""
    starts = [0, *offsets.tolist()[:-1]]
    parts = [
        rows[start:end] * scale
        for start, end, scale in zip(starts, offsets.tolist(), scales_E, strict=True)
    ]
    return torch.cat(parts)


def _run(dispatcher: Dispatcher, hidden, weights, experts, scales_E):
    plan = dispatcher.preprocess(hidden, weights, experts, len(scales_E))
    dispatched = dispatcher.dispatch(plan)
    assert dispatched.order.offsets_E[-1] == rows_of(dispatched).shape[0]
    assert dispatched.order.offsets_E.dtype == torch.int32
    sums = sums_of(dispatched, lambda rows, offsets: _expert(rows, offsets, scales_E))
    return dispatcher.combine(sums, dispatched, plan), plan


def _inputs(num_tokens: int, num_experts: int):
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 3, dtype=torch.float64, requires_grad=True)
    scales_E = torch.randn(num_experts, dtype=torch.float64, requires_grad=True)
    return hidden, scales_E


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 2), (13, 3, 6), (32, 2, 5)]
)
@pytest.mark.parametrize(
    "dispatcher",
    [LocalDispatcher(), PaddedDispatcher(6.0), AllToAllDispatcher(), AllGatherDispatcher()],
    ids=repr,
)
def test_equals_a_loop_over_tokens(dispatcher, num_tokens, top_k, num_experts, routing):
    hidden, scales_E = _inputs(num_tokens, num_experts)
    experts = ROUTINGS[routing](num_tokens, top_k, num_experts)
    weights = torch.rand(experts.shape, dtype=torch.float64, requires_grad=True)
    got, plan = _run(dispatcher, hidden, weights, experts, scales_E)
    want = torch.stack(
        [
            sum(
                weights[t, k] * scales_E[experts[t, k]] * hidden[t] for k in range(weights.shape[1])
            )
            for t in range(num_tokens)
        ]
    )
    torch.testing.assert_close(got, want)
    assert plan.dropped.shape == ()
    assert plan.dropped.dtype == torch.int64
    assert plan.dropped == 0
    grad = torch.randn_like(want)
    leaves = (hidden, weights, scales_E)
    for actual, expected in zip(
        torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True
    ):
        torch.testing.assert_close(actual, expected)


class TestPadded:
    def test_capacity_rounds_up(self):
        assert PaddedDispatcher(1.0).capacity(10, 2, 8) == 3
        assert PaddedDispatcher(1.25).capacity(16, 2, 8) == 5
        assert PaddedDispatcher(0.01).capacity(16, 2, 8) == 1

    def test_worked_example_of_padding(self):
        experts = torch.tensor([[0], [0], [0], [1]])
        hidden = torch.arange(4.0).unsqueeze(1) + 1
        dispatcher = PaddedDispatcher(1.0)
        plan = dispatcher.preprocess(hidden, torch.ones(4, 1), experts, 2)
        assert plan.order.order_R.tolist() == [0, 1, 3, -1]
        assert plan.order.inverse_R.tolist() == [0, 1, -1, 2]
        assert plan.order.offsets_E.tolist() == [2, 4]
        assert rows_of(dispatcher.dispatch(plan)).flatten().tolist() == [1, 2, 4, 0]
        assert plan.dropped == 1

    @pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 1.5])
    def test_an_expert_keeps_its_first_tokens(self, factor):
        """Dropped pairs are those of a loop that fills the experts in token order."""
        num_tokens, top_k, num_experts = 23, 3, 7
        hidden, scales_E = _inputs(num_tokens, num_experts)
        experts = (torch.rand(num_tokens, num_experts) * torch.linspace(0.3, 1, 7)).topk(3).indices
        weights = torch.rand(experts.shape, dtype=torch.float64, requires_grad=True)
        dispatcher = PaddedDispatcher(factor)
        capacity = dispatcher.capacity(num_tokens, top_k, num_experts)
        taken, kept = [0] * num_experts, torch.zeros_like(weights)
        for token in range(num_tokens):
            for k in range(top_k):
                expert = experts[token, k].item()
                kept[token, k] = taken[expert] < capacity
                taken[expert] += 1
        assert 0 < (kept == 0).sum() < kept.numel()

        got, plan = _run(dispatcher, hidden, weights, experts, scales_E)
        assert plan.dropped == (kept == 0).sum()
        assert plan.order.order_R.numel() == num_experts * capacity
        want = ((weights * kept * scales_E[experts]).sum(1, keepdim=True)) * hidden
        torch.testing.assert_close(got, want)
        grad = torch.randn_like(want)
        leaves = (hidden, weights, scales_E)
        for actual, expected in zip(
            torch.autograd.grad(got, leaves, grad),
            torch.autograd.grad(want, leaves, grad),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected)

    def test_a_factor_of_experts_over_top_k_never_drops(self):
        experts = ROUTINGS["one-takes-all"](16, 2, 8)
        plan = PaddedDispatcher(4.0).preprocess(torch.randn(16, 3), torch.rand(16, 2), experts, 8)
        assert plan.dropped == 0

    @pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
    def test_factors_that_cannot_be_are_refused(self, factor):
        with pytest.raises(ValueError, match="capacity_factor must be positive and finite"):
            PaddedDispatcher(factor)


class TestAllToAll:
    def test_ends_a_capture_before_anything_is_sent(self):
        hidden, scales_E = _inputs(4, 2)
        experts = ROUTINGS["random"](4, 1, 2)
        result, boundary = run_until(
            Stop(capturing=True),
            lambda: _run(AllToAllDispatcher(), hidden, torch.rand(4, 1), experts, scales_E),
        )
        assert result is None
        assert boundary.reason == "all_to_all split sizes live on the host"

    def test_the_others_do_not_end_a_capture(self):
        hidden, scales_E = _inputs(4, 2)
        experts = ROUTINGS["random"](4, 1, 2)
        for dispatcher in (LocalDispatcher(), PaddedDispatcher(), AllGatherDispatcher()):
            _, boundary = run_until(
                Stop(capturing=True),
                lambda dispatcher=dispatcher: _run(
                    dispatcher, hidden, torch.rand(4, 1), experts, scales_E
                ),
            )
            assert boundary is None
            assert not dispatcher.host_sync


class TestFactory:
    def test_names(self):
        assert make_dispatcher("local") == LocalDispatcher()
        assert make_dispatcher("padded", capacity_factor=2.0) == PaddedDispatcher(2.0)
        assert make_dispatcher("all_to_all") == AllToAllDispatcher()
        assert make_dispatcher("all_gather") == AllGatherDispatcher()

    def test_unknown_names_and_options_say_what_there_is(self):
        with pytest.raises(ValueError, match="'alltoall' is unknown: choose one of local"):
            make_dispatcher("alltoall")
        with pytest.raises(ValueError, match=r"'padded' has no option factor: it takes capacity_f"):
            make_dispatcher("padded", factor=2.0)
        with pytest.raises(ValueError, match="'local' has no option group: it takes none"):
            make_dispatcher("local", group=None)


def test_dispatchers_hold_no_state_and_are_shared_by_copies():
    dispatcher = AllToAllDispatcher()
    assert copy.deepcopy(dispatcher) is dispatcher
    with pytest.raises(AttributeError):
        dispatcher.plan = None
