"""Pipeline schedules: validity, numbers of slots, and the usual ones against tables by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_graphs.engine.callables.order import Action, check_order
from moe_graphs.pipelines.builders import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble,
)
from moe_graphs.pipelines.schedule import Schedule
from random_schedules import schedules


def order(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def schedule(*ranks: str) -> Schedule:
    return Schedule(tuple(map(order, ranks)))


@given(schedules())
@settings(deadline=None)
def test_slots_are_the_peak_in_flight_and_enough(random):
    for own_order, peak in zip(random.ranks, random.slots(), strict=True):
        for chunk, number in peak.items():
            actions = [a for a in own_order if a.chunk == chunk]
            spans = {
                a.microbatch: [i for i, b in enumerate(actions) if b.microbatch == a.microbatch]
                for a in actions
            }
            in_flight = [
                {m for m, span in spans.items() if span[0] <= i <= span[-1]}
                for i in range(len(actions))
            ]
            assert number == max(map(len, in_flight))
            run_in_slots(actions, number)


def run_in_slots(actions: list[Action], number: int) -> None:
    """Run an order in ``number`` slots: F takes a free slot, the last of B and W gives it back."""
    free, taken = list(range(number)), {}
    left = Counter(action.microbatch for action in actions)
    for action in actions:
        if action.kind == "F":
            taken[action.microbatch] = free.pop()  # IndexError: too few slots
        assert len(set(taken.values())) == len(taken)
        left[action.microbatch] -= 1
        if not left[action.microbatch]:
            free.append(taken.pop(action.microbatch))
    assert not taken


@given(schedules(), st.data())
@settings(deadline=None)
def test_an_action_before_what_it_needs_is_named(random, data):
    rank = data.draw(st.integers(0, len(random.ranks) - 1))
    own = list(random.ranks[rank])
    late = data.draw(st.sampled_from([a for a in own if a.kind != "F"]))
    own.remove(late)
    first = Action("F" if late.kind == "B" else "B", late.chunk, late.microbatch)
    position = data.draw(st.integers(0, own.index(first)))
    own.insert(position, late)
    with pytest.raises(ValueError, match=rf"^order, position {position}: {late} needs {first} "):
        check_order(own)


@given(schedules(), st.data())
@settings(deadline=None)
def test_twice_or_missing_is_named(random, data):
    own = list(data.draw(st.sampled_from(random.ranks)))
    action = data.draw(st.sampled_from(own))
    with pytest.raises(ValueError, match=rf"position {len(own)}: {action} has run already"):
        check_order([*own, action])
    backward = data.draw(st.sampled_from([a for a in own if a.kind == "B"]))
    without = [a for a in own if a.kind != "W" and a != backward]
    with pytest.raises(ValueError, match=f"order: {backward} is missing"):
        check_order(without)


# ---- errors


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), "at least one rank"),
        (("",), "rank 0 is empty"),
        (("0B0 0F0",), "rank 0, position 0: 0B0 needs 0F0 before it"),
        (("0F0 0W0 0B0",), "rank 0, position 1: 0W0 needs 0B0 before it"),
        (("0F0 0B0", "1F0 1F0 1B0"), "rank 1, position 1: 1F0 has run already, at position 0"),
        (("0F0 0F1 0B0",), "rank 0: 0B1 is missing"),
        (("0F1 0B1",), "rank 0: 0F0 is missing"),
        (("0F0 0B0", "0F1 0B1 0F0 0B0"), "rank 1, position 0: 0F1 belongs to a chunk of rank 0"),
        (("0F0 0B0", "2F0 2B0"), "chunk 1 lies on no rank"),
        (("0F0 0B0", "1F0 1B0 1F1 1B1"), "rank 1, position 2: 1F1 is a microbatch that rank 0"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0"), "rank 1: 1F1 is missing"),
    ],
)
def test_what_is_wrong_is_named(ranks, message):
    with pytest.raises(ValueError, match=message):
        schedule(*ranks)


def test_a_deadlock_names_who_waits_for_whom():
    message = (
        "deadlock: rank 0, position 1: 0B0 waits for 1B0; rank 1, position 0: 1F1 waits for 0F1"
    )
    with pytest.raises(ValueError, match=message):
        schedule("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0F0 ;", "-1F0"])
def test_text_that_is_no_action(text):
    with pytest.raises(ValueError, match="write chunk, one of F, B, I, W, and microbatch"):
        Action.parse(text)


def test_actions_are_checked():
    assert Action.parse(" 12I3 ") == Action("B", 12, 3)
    with pytest.raises(ValueError, match="accepted are F, B, W"):
        Action("I", 0, 0)
    with pytest.raises(ValueError, match="count from 0"):
        Action("F", 0, -1)


# ---- the usual schedules, against tables made by hand


def test_one_f_one_b_by_hand():
    assert one_f_one_b(3, 4) == schedule(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )
    assert one_f_one_b(3, 4).slots() == ({0: 3}, {1: 2}, {2: 1})


def test_gpipe_by_hand():
    assert gpipe(2, 2) == schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert gpipe(2, 5).slots() == ({0: 5}, {1: 5})


def test_zero_bubble_by_hand():
    assert zero_bubble(2, 3) == schedule(
        "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2",
        "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2",
    )
    assert zero_bubble(4, 16).slots() == ({0: 4}, {1: 4}, {2: 4}, {3: 4})


def test_interleaved_by_hand():
    assert interleaved_1f1b(2, 2, 2) == schedule(
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    )


@pytest.mark.parametrize(
    ("pp", "chunks", "microbatches", "group_size", "warmup"),
    [
        # Megatron-LM has 2 * (pp - rank - 1) + (chunks - 1) * group_size of them, if there are so
        # many.
        (4, 2, 8, None, [10, 8, 6, 4]),
        (4, 2, 8, 8, [14, 12, 10, 8]),
        (4, 4, 16, None, [18, 16, 14, 12]),
        (8, 2, 8, None, [16, 16, 16, 16, 14, 12, 10, 8]),
        (2, 2, 3, None, [4, 2]),
    ],
)
def test_warm_up_of_megatron(pp, chunks, microbatches, group_size, warmup):
    made = interleaved_1f1b(pp, chunks, microbatches, group_size)
    for own_order, expected in zip(made.ranks, warmup, strict=True):
        leading = [a.kind for a in own_order].index("B")
        # The first forward of the steady part comes before the first backward.
        assert leading == min(expected + 1, chunks * microbatches)


@pytest.mark.parametrize("microbatches", [8, 16, 64])
def test_slots_do_not_grow_with_microbatches(microbatches):
    for few, many in [
        (one_f_one_b(4, 4), one_f_one_b(4, microbatches)),
        (zero_bubble(4, 4), zero_bubble(4, microbatches)),
        (interleaved_1f1b(4, 2, 12), interleaved_1f1b(4, 2, 4 + microbatches)),
    ]:
        assert few.slots() == many.slots()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pp": 0, "chunks": 2, "microbatches": 4}, "pp=0: at least 1"),
        ({"pp": 4, "chunks": 2, "microbatches": 8, "group_size": 2}, "group_size=2 with pp=4"),
        ({"pp": 4, "chunks": 3, "microbatches": 5}, "deadlock: rank 0"),
    ],
)
def test_interleaved_with_numbers_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        interleaved_1f1b(**arguments)


def test_interleaved_with_one_chunk_is_1f1b():
    assert interleaved_1f1b(4, 1, 8) == one_f_one_b(4, 8)


def test_the_table():
    expected = """
 time  rank 0  rank 1
    0  0F0
    1  0F1     1F0
    2          1B0
    3  0B0     1W0
    4  |       1F1
    5          1B1
    6          |
    7  0B1
    8  |"""
    made = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1W0 1F1 1B1")
    assert f"\n{made}" == expected
    assert made.timeline()[1][1] == (Action("B", 1, 0), 2, 3)
    assert made.table({"F": 2, "B": 3, "W": 1}).splitlines()[-1] == "   17  |"
