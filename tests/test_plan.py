"""From observed events to a plan, without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_graphs.capture.errors import CaptureError
from moe_graphs.capture.plan import Event, plan


def events(text: str) -> list[Event]:
    """``"Fa Fb Bb Ba"``: each forward is a new call, a backward is the latest call without one."""
    calls: list[str] = []
    open_calls: list[int] = []
    found = []
    for kind, scope in text.split():
        if kind == "F":
            calls.append(scope)
            open_calls.append(len(calls) - 1)
            found.append(Event("F", scope, len(calls) - 1))
        else:
            number = next(n for n in reversed(open_calls) if calls[n] == scope)
            open_calls.remove(number)
            found.append(Event("B", scope, number))
    return found


def test_one_microbatch():
    assert plan(events("Fa Fb Bb Ba")).calls == (0, 1)


def test_accumulated_microbatches_take_one_slot():
    found = plan(events("Fa Fb Bb Ba Fa Fb Bb Ba Fa Fb Bb Ba"))
    assert (found.calls, found.slots) == ((4, 5), 1)


def test_a_repeated_layer_is_captured_once_per_call():
    assert plan(events("Fa Fb Fa Ba Bb Ba")).calls == (0, 1, 2)


def test_the_most_common_microbatch_wins():
    assert plan(events("Fa Fb Bb Ba Fa Ba Fa Fb Bb Ba")).calls == (3, 4)


def test_forwards_without_backward_are_no_trouble():
    assert plan(events("Fa Fb Fc Bb")).calls == (0, 1, 2)


def test_nothing_observed():
    with pytest.raises(CaptureError, match="nothing to capture"):
        plan([])


@pytest.mark.parametrize(
    "order",
    [
        [("F", 0), ("F", 1), ("F", 2), ("F", 3), ("B", 1), ("B", 0), ("B", 3), ("B", 2)],  # GPipe
        [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)],  # 1F1B
    ],
    ids=["gpipe", "1f1b"],
)
def test_two_microbatches_in_flight_are_refused(order):
    found = [Event(kind, "ab"[call % 2], call) for kind, call in order]
    with pytest.raises(CaptureError, match="two microbatches are in flight"):
        plan(found)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms())
def test_any_step_of_nested_microbatches_is_planned_in_order(sizes, random):
    """Forwards in order, backwards in reverse with any of them missing."""
    found, number = [], 0
    for size in sizes:
        calls = list(range(number, number + size))
        number += size
        found += [Event("F", str(call - calls[0]), call) for call in calls]
        # At least one backward: it is what ends a microbatch.
        kept = sorted(random.sample(calls, random.randint(1, size)), reverse=True)
        found += [Event("B", str(call - calls[0]), call) for call in kept]
    chosen = plan(found).calls
    assert list(chosen) == sorted(chosen)
    assert sizes.count(len(chosen)) == max(sizes.count(size) for size in sizes)
