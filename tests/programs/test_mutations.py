"""Programs that are mutated under graphs: an eager twin has the same numbers, or it is counted.

The table takes every kind of state, spelling, reader and place once. Without ``--long`` the engines
take turns, and a program of the table has eight mutations, drawn by its name. What is silent today
is in ``known_silent.py``, and nothing else may be.
``python tests/programs/run_mutations.py --seed 17 --verbose`` shows the program of a seed.
"""

from __future__ import annotations

import gc
import random
import types
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from programs import mutating
from programs.known_silent import KNOWN
from programs.mutable_programs import LETTERS, generate, is_known, known_of, table
from programs.mutable_sources import PLACES, READERS, SPELLINGS, Piece
from programs.mutable_states import STATES
from programs.mutating import MutableProgram, Trio, candidates, drawn, judge, label
from programs.reachable_objects import PLAIN, walk
from programs.specification import ENGINES

SEEDS, FEW = 24, 8
PROGRAMS = list(table())
PAIRS = [
    pytest.param(
        program, engine, id=f"{label(program.pieces[0], program.place)}, {engine}", marks=marks
    )
    for number, program in enumerate(PROGRAMS)
    for turn, engine in enumerate(ENGINES)
    for marks in [() if turn == number % len(ENGINES) else pytest.mark.long]
]
pytestmark = pytest.mark.usefixtures("thawed")


@pytest.mark.parametrize(("program", "engine"), PAIRS)
def test_mutations_of_every_kind_are_silent_only_where_it_is_known(program, engine, request):
    is_long = request.config.getoption("--long")
    draw = random.Random(label(program.pieces[0], program.place))
    choose = mutating.each_kind if is_long else partial(drawn, draw=draw, count=FEW)
    found = list(judge(replace(program, engine=engine), choose))
    assert not [each for each in found if each.outcome == mutating.INVALID]
    silent = {each.name: f"{each.outcome}: {each.mutation}: {each.detail}" for each in found
              if not each.is_allowed}  # fmt: skip
    known = known_of(program, engine)
    new = {name: text for name, text in silent.items() if name not in known}
    assert not new, f"silent, and not in known_silent.py: {new}\n{program.text()}"
    gone = known - set(silent) if is_long else set()
    assert not gone, (
        f"not silent any more under {engine}, to be taken out of known_silent.py: {gone}"
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_mutations_of_random_programs_are_silent_only_where_it_is_known(seed):
    choose = partial(drawn, draw=random.Random(seed), count=4)
    for outcome in judge(generate(seed), choose, thorough=True):
        told = (
            f"seed {seed}: {outcome.outcome}: {outcome.name}: {outcome.mutation}: {outcome.detail}"
        )
        assert outcome.is_allowed or is_known(outcome), f"{told}\n{outcome.program.text()}"


# ---- the generator and the judge themselves


def test_known_names_are_names_of_the_table():
    labels = {label(program.pieces[0], program.place) for program in PROGRAMS}
    assert {name.partition(": ")[0] for name in KNOWN} <= labels
    assert all(set(engines) <= set(LETTERS.values()) for engines in KNOWN.values())


def test_everything_occurs_among_the_programs():
    drawn_ones = map(generate, range(2000))
    pieces = [(piece, program.place) for program in drawn_ones for piece in program.pieces]
    for found in (pieces, [(program.pieces[0], program.place) for program in PROGRAMS]):
        assert {piece.state for piece, _ in found} == set(STATES)
        assert {piece.spelling for piece, _ in found} == set(SPELLINGS)
        assert {piece.reader for piece, _ in found} == set(READERS)
        assert {place for _, place in found} == set(PLACES)


def test_a_seed_always_gives_the_same_program():
    assert [generate(seed) for seed in range(50)] == [generate(seed) for seed in range(50)]


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_programs_are_replayed_and_their_mutations_counted(engine):
    outcomes = Counter(
        each.outcome for each in judge(MutableProgram((Piece("list"),), engine=engine))
    )
    assert outcomes[mutating.COUNTED] >= 3, outcomes


# Insides of functions, classes and objects, which the walk calls by other names.
PASSED_BY = (types.CellType, types.GetSetDescriptorType, types.MemberDescriptorType, dict, tuple)


def test_the_walk_reaches_what_the_garbage_collector_reaches():
    """Everything of a program's that ``gc.get_referents`` reaches, except bookkeeping of torch."""
    trio = Trio(MutableProgram((Piece("class registry"), Piece("dict"), Piece("closure"))), True)
    world = trio.twin.world
    found = {id(value) for _, value in walk(world)}
    bookkeeping = {
        id(child) for module in world.model.modules() for child in gc.get_referents(module)
    }
    bookkeeping -= {id(each) for each in world.model.modules()}
    waiting, seen, missed = [world.step], set(), []
    while waiting:
        value = waiting.pop()
        if isinstance(value, PLAIN) or id(value) in seen | bookkeeping or not world.is_own(value):
            continue
        is_helper = isinstance(value, types.FunctionType) and value.__name__[:2] == "__"
        if is_helper or (isinstance(value, dict) and value.get("__name__") == "builtins"):
            continue
        seen.add(id(value))
        if id(value) not in found and not isinstance(value, PASSED_BY):
            missed.append(value)
        waiting += gc.get_referents(value)
    trio.close()
    assert not missed


def test_what_a_mutation_does_is_undone():
    """All three runs are equal again after most mutations; others need new captures."""
    trio = Trio(MutableProgram((Piece("attribute of an object"), Piece("list"))), False)
    found = candidates(trio)[::7]
    whole = 0
    for mutation in found:
        trio.try_mutation(mutation)
        whole += trio.is_whole()
    trio.close()
    assert whole > 0.95 * len(found)


Plain = mutating.Instance


class Wrong(mutating.Instance):
    """An instance whose graphs see no mutation: they run the steps of an untouched twin."""

    def __init__(self, program, engine):
        super().__init__(program, None)
        self.engine = engine
        self.replays = 0
        if engine is not None:
            self.untouched = Plain(program, None)

    def run(self, x):
        engine, self.engine = self.engine, None
        seen = super().run(x) if engine is None else self.untouched.run(x)
        self.engine = engine
        self.replays += 1
        return seen

    def take(self, state):
        super().take(state)
        if self.engine is not None:
            self.untouched.take(state)

    def counts(self):
        return (0, 0) if self.engine is None else (self.replays, 0)


def test_the_judge_sees_a_replay_of_what_has_changed(monkeypatch):
    monkeypatch.setattr(mutating, "Instance", Wrong)
    outcomes = Counter(each.outcome for each in judge(MutableProgram((Piece("list"),))))
    assert outcomes[mutating.SILENT] >= 3, outcomes
    assert not outcomes[mutating.COUNTED], outcomes
    assert torch.is_grad_enabled()
