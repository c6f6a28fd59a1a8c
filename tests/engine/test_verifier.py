"""Tests of the verifier by itself: the answer of each strategy to given runs."""

from __future__ import annotations

import _thread
import itertools
import threading
import warnings

import pytest
import torch

from moe_graphs import GraphWarning
from moe_graphs.engine.tracing import Operations
from moe_graphs.engine.verify import ELSEWHERE, ByFingerprint, ByValue, Difference, warn

X = torch.arange(1.0, 9.0)
BF16 = torch.finfo(torch.bfloat16).eps
ROUNDED, NEAR, WRONG = X * (1 + 6 * torch.finfo(X.dtype).eps), X + 1e-3, X + 1
OF_BF16 = X * (1 + BF16)  # fp32 that is computed from sums in bf16


def left(*tensors):
    return [(f"output {number}", tensor) for number, tensor in enumerate(tensors)]


def not_called(*_):
    raise AssertionError("this run is not needed")


class Runs:
    """A run that leaves one of these after another, the last one for ever, and is counted."""

    def __init__(self, *results):
        self.results, self.count = results, 0

    def __call__(self):
        self.count += 1
        return self.results[min(self.count, len(self.results)) - 1]


# ---- by value, replayed as often as needed


def test_the_same_bits_need_no_further_run():
    verdict = ByValue(bool).replayed(left(X), left(X.clone()), not_called, not_called, outputs=1)
    assert verdict.difference is None
    assert not verdict.not_reproducible


def test_a_difference_is_told_with_both_values():
    again = Runs(left(X))
    verdict = ByValue(bool).replayed(left(X), left(WRONG), again, not_called, outputs=1)
    assert str(verdict.difference) == (
        "output 0[0] is 1.0 eagerly and 2.0 replayed (8 elements differ)"
    )
    assert again.count == 1


def test_what_eager_runs_differ_by_is_no_difference():
    verdict = ByValue(bool).replayed(left(X), left(X + 2e-3), Runs(left(NEAR)), not_called,
                                     outputs=1)  # fmt: skip
    assert verdict.difference is None
    assert verdict.not_reproducible


def test_more_than_what_eager_runs_differ_by_is_a_difference():
    verdict = ByValue(bool).replayed(left(X), left(WRONG), Runs(left(NEAR)), not_called, outputs=1)
    assert verdict.difference.replayed == 2.0


def test_entries_behind_the_outputs_are_not_looked_at_again_where_eager_varies():
    eager, replayed, again = ([("output 0", X), ("buffer", each)] for each in (X, WRONG, NEAR))
    verdict = ByValue(bool).replayed(eager, replayed, Runs(again), not_called, outputs=1)
    assert verdict.difference is None
    assert verdict.not_reproducible


@pytest.mark.parametrize("vary", [False, True])
def test_sums_in_another_order_are_no_difference_if_replays_vary(vary):
    a_sum = Difference("output 0", (0,), 1.0, 1.1, 1, only_order_of_sums=True)
    another = Runs(None, None, a_sum) if vary else Runs(None)
    verdict = ByValue(bool).replayed(left(X), left(ROUNDED), Runs(left(X)), another, outputs=1)
    assert verdict.not_reproducible is vary
    assert (verdict.difference is None) is vary
    assert another.count == (3 if vary else 64)


def test_a_rank_that_finds_nothing_runs_along_with_one_that_does():
    answers = iter([True, False, True])  # found, may vary, wrong: on another rank
    again = Runs(left(X))
    strategy = ByValue(lambda here: next(answers))
    verdict = strategy.replayed(left(X), left(X), again, not_called, outputs=1)
    assert verdict.difference is ELSEWHERE
    assert again.count == 1


# ---- by value, replayed once


def once(eager, again, replayed, beside=None, another=not_called, anywhere=bool):
    return ByValue(anywhere).replayed_once(
        left(eager), left(again), left(replayed), beside or Runs(None), another
    )


def test_one_replay_is_compared_with_two_eager_runs():
    assert once(X, X, X).difference is None
    assert once(X, X, WRONG, another=Runs(left(X))).difference.index == (0,)
    assert once(X, NEAR, X + 2e-3) == once(X, NEAR, NEAR)
    assert once(X, NEAR, NEAR).not_reproducible
    assert once(X, NEAR, WRONG, another=Runs(left(NEAR))).difference is not None
    assert once(X, NEAR, WRONG, another=Runs(left(NEAR))).not_reproducible


def test_two_eager_runs_that_agree_by_chance_hide_no_noise():
    another = Runs(left(X), left(NEAR))
    verdict = once(X, X, X + 2e-3, another=another)
    assert verdict.difference is None
    assert verdict.not_reproducible
    assert another.count == 2


def test_tensors_are_explained_by_different_runs():
    def two(first, second):
        return [("the gradient of a", first), ("the gradient of b", second)]

    another = Runs(two(NEAR, X), two(X, NEAR))
    verdict = ByValue(bool).replayed_once(
        two(X, X), two(X, X), two(NEAR, NEAR), Runs(None), another
    )
    assert verdict.difference is None
    assert another.count == 2


def test_further_runs_explain_no_wrong_value():
    another = Runs(left(NEAR))
    assert once(X, X, WRONG, another=another).difference is not None
    assert another.count == 4


def test_none_is_no_zero():
    assert once(None, None, None).difference is None
    assert once(None, None, X * 0).difference is not None


def test_what_is_left_beside_the_results_counts_unless_eager_varies():
    found = Difference("the FP8 scales", (0,), 1.0, 2.0, 1)
    assert once(X, X, X, Runs(found), Runs(left(X))).difference is found
    assert once(X, NEAR, X, not_called).difference is None


@pytest.mark.parametrize("vary", [False, True])
def test_sums_in_another_order_are_no_difference_if_eager_backwards_vary(vary):
    verdict = once(X, X, ROUNDED, another=Runs(left(X), left(NEAR)) if vary else Runs(left(X)))
    assert verdict.not_reproducible is vary
    assert (verdict.difference is None) is vary


@pytest.mark.parametrize("replayed", [ROUNDED, OF_BF16, WRONG])
def test_sums_in_another_order_are_no_difference_if_a_kernel_is_known_to_add_in_any_order(replayed):
    another = Runs(left(X))
    verdict = ByValue(bool).replayed_once(
        left(X), left(X), left(replayed), Runs(None), another, any_order=BF16
    )
    assert verdict.not_reproducible
    assert (verdict.difference is None) is (replayed is not WRONG)
    assert another.count == 4


def operations_of(function, *args):
    with Operations() as operations:
        function(*args)
    return operations


def test_backwards_of_attention_on_gpus_are_known_to_add_in_any_order():
    q = torch.randn(1, 1, 8, 16, device="meta", dtype=torch.bfloat16)
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    out, *rest = forward(q, q, q, None, True)
    arguments = (q, q, q, q, None, out, *rest, 0.0, [True, True, True, False])
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    assert operations_of(backward, *arguments).rounding_of_any_order() == BF16
    assert operations_of(forward, q, q, q, None, True).rounding_of_any_order() == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert operations_of(backward, *arguments).rounding_of_any_order() == 0
    finally:
        torch.use_deterministic_algorithms(False)


# ---- by fingerprint


def named(tensor, drawn=1):
    return {"output 0": tensor, "a gradient": None, "the random numbers drawn": drawn}


def checked(eager, replay, anywhere=bool):
    strategy, rooms = ByFingerprint(anywhere), []
    strategy.expect(eager)
    return strategy.check(eager, replay, lambda: rooms.append(1)), rooms


def test_a_step_runs_eagerly_twice_and_is_replayed_once_if_all_is_well():
    eager, replay = Runs(named(X)), Runs(named(X.clone()))
    verdict, rooms = checked(eager, replay)
    assert (verdict.difference, verdict.not_reproducible, rooms) == (None, False, [])
    assert (eager.count, replay.count) == (2, 1)


@pytest.mark.parametrize("replayed", [ROUNDED, OF_BF16, WRONG])
def test_a_step_whose_kernels_add_in_any_order_may_replay_sums_in_another_order(replayed):
    strategy = ByFingerprint(bool)
    strategy.expect(Runs(named(X)))
    verdict = strategy.check(Runs(named(X)), Runs(named(replayed)), lambda: None, any_order=BF16)
    assert verdict.not_reproducible
    assert (verdict.difference is None) is (replayed is not WRONG)


def test_a_step_that_differs_is_told_by_its_values_which_are_computed_once_more():
    eager, replay = Runs(named(X)), Runs(named(WRONG))
    verdict, rooms = checked(eager, replay)
    assert str(verdict.difference).startswith("output 0[0] is 1.0 eagerly and 2.0 replayed")
    assert not verdict.not_reproducible
    assert (eager.count, replay.count, rooms) == (2 + 4 + 1, 1 + 4 + 1, [1])


def test_what_is_no_tensor_is_compared_as_it_is():
    verdict, _ = checked(Runs(named(X)), Runs(named(X, drawn=2)))
    assert verdict.difference.tensor == "the random numbers drawn"
    verdict, _ = checked(Runs(named(X)), Runs(named(X) | {"a gradient": X}))
    assert verdict.difference.tensor == "a gradient"


def test_a_step_that_varies_is_right_as_near_as_its_runs_are():
    several = [named(X + 1e-3 * (n % 3)) for n in range(9)]
    verdict, _ = checked(Runs(*several), Runs(named(X + 5e-4)))
    assert (verdict.difference, verdict.not_reproducible) == (None, True)
    verdict, _ = checked(Runs(*several), Runs(named(WRONG)))
    assert verdict.difference is not None


def test_replays_that_vary_among_each_other_are_not_reproducible():
    replays = itertools.cycle([named(NEAR), named(X)])
    verdict, _ = checked(Runs(named(X)), lambda: next(replays))
    assert (verdict.difference, verdict.not_reproducible) == (None, True)


def test_a_rank_without_a_difference_runs_a_step_as_often_as_one_with_one():
    eager, replay = Runs(named(X)), Runs(named(X))
    said = iter([False, True, *[False, True] * 4, True, True])
    strategy = ByFingerprint(lambda here: next(said))
    strategy.expect(eager)
    verdict = strategy.check(eager, replay, lambda: None)
    assert verdict.difference is ELSEWHERE
    assert (eager.count, replay.count) == (2 + 4 + 1, 1 + 4 + 1)


def test_a_strategy_holds_no_tensors():
    """Fingerprints are kept so that a step needs no second set of a model's memory."""
    strategy = ByFingerprint(bool)
    strategy.expect(Runs(named(X)))
    kept = [strategy._expected, *strategy._again]
    assert not any(isinstance(value, torch.Tensor) for each in kept for value in each.values())


# ---- warnings


def test_a_thread_without_code_of_a_user_warns_too():
    """A backward on a GPU runs in such a thread."""
    ended = threading.Event()
    names = {"warn": warn, "ended": ended}
    exec("def warns():\n warn('said in a thread')\n ended.set()", names)
    with warnings.catch_warnings(record=True, action="always") as said:
        _thread.start_new_thread(names["warns"], ())
        assert ended.wait(60)
    assert [str(each.message) for each in said] == ["said in a thread"]
    assert said[0].filename == "sys"


def test_a_module_without_a_name_warns_too():
    with pytest.warns(GraphWarning, match="said by a file") as said:
        exec(compile("warn('said by a file')", "user.py", "exec"), {"warn": warn})
    assert said[0].filename == "user.py"
