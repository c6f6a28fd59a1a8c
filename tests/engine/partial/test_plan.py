"""The way from observed events to a plan, without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_graphs.engine.partial.plan import Event, plan
from moe_graphs.errors import CaptureError


def events(text: str) -> list[Event]:
    """Events of a text: in ``"a1 b1 -b1 -a1"`` microbatch 1 goes through a and b and back.

    Both backwards run in one backward of autograd. ``~a1`` are weight gradients. ``-a1?`` leaves
    its weight gradients to the next ``~``, which takes the oldest microbatch left so. ``a1!`` is a
    call of another signature.
    """
    calls: list[tuple[str, str]] = []
    found, left = [], []
    for word in text.split():
        name, changed = word.rstrip("!?"), word.endswith("!")
        if name == "~":
            found.append(Event("W", "", -1, delayed=left.pop(0)))
        elif name[0] in "-~":
            key = (name[1], name[2:])
            number = max(n for n, call in enumerate(calls) if call == key)
            kind = "B" if name[0] == "-" else "W"
            task, delayed = int(key[1]), -1
            if word.endswith("?"):
                delayed = task
                left += [task] * (task not in left)
            found.append(Event(kind, key[0], number, task, delayed=delayed))
        else:
            signature_id = 100 * changed + ord(name[0])
            found.append(Event("F", name[0], len(calls), signature_id=signature_id))
            calls.append((name[0], name[1:]))
    return found


def planned(*texts: str) -> list[tuple[str, int]]:
    """The scopes of each chunk (``!``: calls of another signature), and its slots."""
    return [(_shown(chunk.calls), chunk.slots) for chunk in plan(list(map(events, texts))).chunks]


def _shown(calls: tuple[int, ...]) -> str:
    return "".join(chr(number - 100 * (number >= 150)) + "!" * (number >= 150) for number in calls)


def test_one_microbatch():
    assert planned("a1 b1 -b1 -a1") == [("ab", 1)]


def test_accumulated_microbatches_take_one_slot():
    assert planned("a1 b1 -b1 -a1 a2 b2 -b2 -a2 a3 b3 -b3 -a3") == [("ab", 1)]


def test_a_repeated_layer_is_captured_once_per_call():
    found = [Event("F", s, n, signature_id=ord(s)) for n, s in enumerate("aba")]
    found += [Event("B", "aba"[n], n, task=1) for n in (2, 1, 0)]
    assert [(_shown(c.calls), c.slots) for c in plan([found]).chunks] == [("aba", 1)]


def test_the_most_common_microbatch_wins():
    assert planned("a1 b1 -b1 -a1 a2 -a2 a3 b3 -b3 -a3") == [("ab", 1)]


def test_the_most_common_signature_wins():
    assert planned("a1 b1 -b1 -a1 a2 b2 -b2 -a2 a3! b3! -b3 -a3") == [("ab", 1)]


def test_a_partial_batch_in_the_last_step_is_not_what_is_captured():
    full, partial = "a1 b1 -b1 -a1", "a1! b1! -b1 -a1"
    assert planned(full, full, partial) == [("ab", 1)]
    assert planned(full, partial) == [("a!b!", 1)]  # the last one among equals


def test_the_last_step_says_how_many_slots():
    """The first step differs: torch's schedules run their stages once more, for shapes."""
    assert planned("a1 a2 a3 -a2 -a3", "a1 a2 -a2 -a1", "b1 -b1") == [("a", 2), ("b", 1)]


def test_forwards_without_backward_are_no_trouble():
    assert planned("a1 b1 c1 -b1") == [("abc", 1)]


def test_nothing_observed():
    with pytest.raises(CaptureError, match="nothing to capture"):
        plan([])


@pytest.mark.parametrize(
    ("order", "slots"),
    [
        ("a1 b1 a2 b2 -b1 -a1 -b2 -a2", 2),  # GPipe
        ("a1 b1 a2 b2 -b2 -a2 -b1 -a1", 2),  # GPipe, last in, first out
        ("a1 b1 a2 b2 -b1 -a1 a3 b3 -b2 -a2 -b3 -a3", 2),  # 1F1B
    ],
)
def test_microbatches_in_flight(order, slots):
    assert planned(order) == [("ab", slots)]


def test_chunks_are_planned_apart():
    order = "a1 a2 b1 b2 -b1 -a1 b3 a3 -b2 -a2 -b3 -a3"
    # Chunks a and b of an interleaved pipeline have backwards of their own.
    found = [
        Event(e.kind, e.scope, e.call, e.task + 10 * (e.scope == "b"), e.signature_id)
        for e in events(order)
    ]
    chunks = [(_shown(chunk.calls), chunk.slots) for chunk in plan([found]).chunks]
    assert chunks == [("a", 2), ("b", 2)]


@pytest.mark.parametrize("backward", ["-b1 -a1", "-b1? -a1?"])
def test_a_microbatch_is_in_flight_until_its_weight_gradients(backward):
    weights = "~" if "?" in backward else "~a1 ~b1"
    assert planned(f"a1 b1 {backward} a2 b2 -b2 -a2 {weights}") == [("ab", 2)]
    assert planned(f"a1 b1 {backward} {weights} a2 b2 -b2 -a2") == [("ab", 1)]


def test_whole_backwards_do_not_wait_for_weight_gradients():
    """DualPipeV has both kinds on one rank."""
    assert planned("a1 -a1 a2 -a2? ~ a3 -a3 a4 -a4? ~") == [("a", 1)]
    assert planned("a1 -a1 a2 -a2? a3 ~ -a3") == [("a", 2)]


def test_a_frozen_first_scope_belongs_to_the_microbatch_that_follows():
    assert planned("a1 b1 a2 b2 -b1 -b2") == [("ab", 2)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms())
def test_any_step_of_nested_microbatches_is_planned_in_order(sizes, random):
    """Forwards come in order, backwards in reverse, and any backwards may be missing."""
    found, number = [], 0
    for task, size in enumerate(sizes):
        calls = list(range(number, number + size))
        number += size
        found += [Event("F", str(n), call, signature_id=n) for n, call in enumerate(calls)]
        # There is at least one backward, because a backward ends a microbatch.
        saved = sorted(random.sample(calls, random.randint(1, size)), reverse=True)
        found += [Event("B", str(call - calls[0]), call, task) for call in saved]
    (chunk,) = plan([found]).chunks
    chosen = chunk.calls
    assert list(chosen) == sorted(chosen)
    assert sizes.count(len(chosen)) == max(sizes.count(size) for size in sizes)
