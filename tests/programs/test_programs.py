"""Random programs: graphed equals eager bit for bit, or is counted eager, or a named error.

``python tests/programs/run.py --seeds 17 --verbose`` shows the program of a seed that fails here.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_graphs import GraphError
from programs import events, running, sessions
from programs.blocks import INTERFACES, WIRINGS
from programs.bodies import BODIES
from programs.generator import generate
from programs.minimise import minimised
from programs.running import judge
from programs.specification import BlockSpec, Event, Program
from programs.stepping import train_step

OFTEN, ALWAYS, ALL, CHUNK = 40, 200, 2000, 100
SEEDS = [pytest.param(n, marks=pytest.mark.long if n >= OFTEN else ()) for n in range(ALWAYS)]
pytestmark = pytest.mark.usefixtures("thawed")


def problem(seed: int) -> str | None:
    """The failure of a seed's program, made as small as is cheap, or None."""
    verdict = judge(generate(seed))
    if verdict.is_allowed:
        return None
    small = minimised(running.confirmed(verdict), budget=20)
    features = " ".join(small.program.features())
    return f"seed {seed}: {small.outcome}: {small.program.engine} {features}: {small.detail}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_is_not_silently_different(seed):
    found = problem(seed)
    assert found is None, found


@pytest.mark.full
@pytest.mark.parametrize("first", range(ALWAYS, ALL, CHUNK))
def test_all_random_programs(first, request):
    if not request.config.getoption("--full-grids", default=False):
        pytest.skip("waits for --full-grids")
    found = [each for seed in range(first, first + CHUNK) if (each := problem(seed))]
    assert not found, "\n".join(found)


# ---- the generator and the judge themselves


def test_a_seed_always_gives_the_same_program_and_the_same_eager_run():
    for seed in range(0, 60, 10):
        program = generate(seed)
        assert program == generate(seed)
        verdict = running.Verdict(program, running.DIFFERENT)
        assert running.confirmed(verdict).outcome == running.DIFFERENT


def test_everything_occurs_among_the_programs():
    programs = [generate(seed) for seed in range(ALL)]
    blocks = [block for program in programs for block in program.blocks]
    assert {kind for block in blocks for kind in block.body.kinds()} == set(BODIES)
    assert {block.interface for block in blocks} == set(INTERFACES)
    assert {block.wiring for block in blocks} == set(WIRINGS)
    kinds = {event.kind for program in programs for event in program.events}
    assert kinds == {*events.BEFORE, *events.PLANS, *events.WITHIN}


def test_plain_programs_are_replayed():
    """Most programs replay something; otherwise these tests would test nothing."""
    for engine in ("scopes", "callables", "step"):
        verdict = judge(Program(seed=1, engine=engine))
        assert verdict.outcome in (running.EQUAL, running.COUNTED), verdict
        assert verdict.replayed >= 3, verdict


class Wrong(sessions.Eager):
    """An engine that goes wrong at the fourth step."""

    calls = 0

    def __init__(self, world):
        super().__init__(world)
        self.calls = 0

    def step(self, batch):
        self.calls += 1
        return self.fourth(batch) if self.calls == 4 else train_step(self.world, batch)


class NudgesGradient(Wrong):
    def fourth(self, batch):
        outputs = train_step(self.world, batch)
        gradient = next(p.grad for p in self.world.model.parameters() if p.grad is not None)
        gradient.view(-1)[0] = torch.nextafter(gradient.view(-1)[0], torch.tensor(1e9))
        return outputs


class ZeroForNone(Wrong):
    def fourth(self, batch):
        outputs = train_step(self.world, batch)
        for parameter in self.world.model.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else (parameter.grad)
            )
        return outputs


class NamedHalfway(Wrong):
    def fourth(self, batch):
        train_step(self.world, batch)
        raise GraphError("scope 'b0': something: change it")


class Crashes(Wrong):
    def fourth(self, batch):
        raise RuntimeError("Expected all tensors to be somewhere else")


class DrawsNumber(Wrong):
    def fourth(self, batch):
        torch.rand(1)
        return train_step(self.world, batch)


class LeavesMode(Wrong):
    def fourth(self, batch):
        outputs = train_step(self.world, batch)
        torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
        return outputs


@pytest.mark.parametrize(
    ("engine", "outcome"),
    [
        (NudgesGradient, running.DIFFERENT),
        (DrawsNumber, running.DIFFERENT),
        (ZeroForNone, running.DIFFERENT),
        (NamedHalfway, running.NAMED),
        (Crashes, running.CRASH),
        (LeavesMode, running.LEAK),
    ],
)
def test_the_judge_sees_what_an_engine_does_wrong(engine, outcome, monkeypatch):
    monkeypatch.setitem(sessions.ENGINES, "scopes", engine)
    block = BlockSpec(interface="twoheads")
    program = Program(seed=3, blocks=(block,), events=(Event(0, "other_terms", 1),))
    assert judge(program).outcome == outcome


def test_the_judge_sees_an_error_that_is_lost(monkeypatch):
    program = Program(seed=3, events=(Event(3, "hidden_changed", 0),))
    block = dataclasses.replace(program.blocks[0], wiring="residual")
    program = dataclasses.replace(program, blocks=(block,))
    assert judge(program).outcome in running.ALLOWED

    class Ignores(Wrong):
        def fourth(self, batch):
            self.world.plan.before_backward = ()
            return train_step(self.world, batch)

    monkeypatch.setitem(sessions.ENGINES, "scopes", Ignores)
    assert judge(program).outcome in (running.LOST, running.DIFFERENT)
