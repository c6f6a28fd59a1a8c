"""Schedules in the formats of torch and Transformer Engine."""

from __future__ import annotations

from collections import Counter

import pytest

from moe_graphs.engine.callables.order import Action, from_te_order, slots
from moe_graphs.pipelines.builders import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble,
)
from moe_graphs.pipelines.formats import from_torch
from pipeline_runs import torch_schedule


def order(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 16), (8, 16)])
def test_torchs_schedules_of_one_stage_are_ours(pp, microbatches):
    def read(name):
        return from_torch(torch_schedule(name, pp, 1, microbatches))

    assert read("GPipe") == gpipe(pp, microbatches)
    assert read("1F1B") == one_f_one_b(pp, microbatches)
    assert read("InterleavedZeroBubble") == zero_bubble(pp, microbatches)


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 4, 16)])
def test_torchs_schedules_of_several_stages(pp, chunks, microbatches):
    def read(name):
        return from_torch(torch_schedule(name, pp, chunks, microbatches))

    assert read("Interleaved1F1B") == interleaved_1f1b(pp, chunks, microbatches)
    every = dict.fromkeys(range(pp * chunks), microbatches)
    assert {c: n for rank in read("LoopedBFS").slots() for c, n in rank.items()} == every
    split = read("InterleavedZeroBubble")
    assert all(Action("W", chunk, microbatches - 1) in split.ranks[chunk % pp] for chunk in every)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_torchs_schedules_in_a_v(name):
    read = from_torch(torch_schedule(name, 4, 2, 8))
    assert [read.chunks(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert read.local_order(3)[0] == Action("F", 0, 0)
    kinds = Counter(action.kind for own_order in read.ranks for action in own_order)
    assert kinds["F"] == kinds["B"] == 64
    assert kinds["W"] == (64 if name == "ZBVZeroBubble" else kinds["W"]) > 0


def test_a_schedule_without_an_order():
    with pytest.raises(ValueError, match="object has no pipeline_order"):
        from_torch(object())


def test_transformer_engines_orders():
    # Transformer Engine's own test has two chunks and three microbatches.
    signed = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]
    text = "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2"
    assert from_te_order(signed) == order(text)
    assert slots(from_te_order(signed)) == {0: 2, 1: 2}
    assert from_te_order([1, 1, -1, -1.5, -1, -1.5]) == order("0F0 0F1 0B0 0W0 0B1 0W1")


@pytest.mark.parametrize(
    ("signed", "message"),
    [
        ([1, 0, -1], "position 1 of _order: 0 is none of"),
        ([1.5, -1], "position 0 of _order: 1.5 is none of"),
        ([1, -1, -1.25], "position 2 of _order: -1.25 is none of"),
        ([1, -1.5, -1], "position 1 of _order: -1.5 comes before any backward of chunk 1"),
        ([1, -1, -1.5, -1.5], "_order, position 3: 0W0 has run already"),
        ([1, -1, -1], "_order, position 2: 0B1 needs 0F1 before it"),
        ([1, 1, -1], "_order: 0B1 is missing"),
        ([], "_order is empty"),
    ],
)
def test_wrong_orders_of_transformer_engine(signed, message):
    with pytest.raises(ValueError, match=message):
        from_te_order(signed)
