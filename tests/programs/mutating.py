"""Runs of programs that are mutated under graphs, beside an eager twin."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, make_graphed_callables
from programs.mutable_sources import (
    PLAIN_PLACE,
    PLAIN_READER,
    PLAIN_SPELLING,
    Piece,
    install,
    source,
)
from programs.mutations import Mutation, mutations
from programs.reachable_objects import World, shown, walk
from programs.running import is_named, leaks, restore_process, same
from programs.sessions import replays_of
from programs.specification import ENGINES

EQUAL, COUNTED, NAMED, NO_EFFECT = "equal", "counted", "error", "no effect"
SILENT, LOST, DIFFERENT, CRASH = "SILENT", "ERROR LOST", "DIFFERENT THOUGH EAGER", "CRASH"
NOT_REPLAYED, INVALID = "not replayed", "invalid"
ALLOWED = (EQUAL, COUNTED, NAMED, NO_EFFECT, NOT_REPLAYED, LOST)
WARMUP, AFTER = 2, 2
assert ENGINES == ("scopes", "callables", "step")


@dataclass(frozen=True)
class MutableProgram:
    """A training script with mutable state, and the engine under which it is trained."""

    pieces: tuple[Piece, ...]
    place: str = PLAIN_PLACE
    engine: str = "scopes"

    def text(self) -> str:
        return "\n".join(source(self.pieces))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutation of one program."""

    program: MutableProgram
    mutation: Mutation | None
    outcome: str
    detail: str = ""

    @property
    def is_allowed(self) -> bool:
        return self.outcome in ALLOWED

    @property
    def piece(self) -> Piece:
        """The piece whose state is mutated; the first one if it is what all programs have."""
        text = "" if self.mutation is None else shown(self.mutation.path) + self.mutation.place
        numbers = [int(each) for each in re.findall(r"_(\d+)\b", text)]
        pieces = self.program.pieces
        return next((pieces[n] for n in reversed(numbers) if n < len(pieces)), pieces[0])

    @property
    def name(self) -> str:
        """The name of what happened, in tables: state, what is not plain about it, mutation."""
        kind = "no mutation" if self.mutation is None else self.mutation.kind
        return f"{label(self.piece, self.program.place)}: {kind}"


def label(piece: Piece, place: str) -> str:
    """The state of a piece, and what is not plain about the spelling, the reader and the place."""
    plain = (PLAIN_SPELLING, PLAIN_READER, PLAIN_PLACE)
    odd = [w for w, p in zip((piece.spelling, piece.reader, place), plain, strict=True) if w != p]
    return " | ".join((piece.state, *odd))


class Instance:
    """A running program, eager or under an engine."""

    def __init__(self, program: MutableProgram, engine: str | None) -> None:
        torch.default_generator.manual_seed(0)
        self.space, self._forget = install(program.pieces, program.place)
        model, step = self.space["build"]()
        self.world = World(self.space, model, step)
        self.model, self.step, self.engine = model, step, engine
        self.handle: Any = None
        if engine == "scopes":
            config = GraphConfig("sc*", warmup_steps=WARMUP, on_capture_error="error")
            self.handle = moe_graphs.graph(model, config)
        elif engine == "callables":
            sample = torch.ones(3, 4, requires_grad=True)
            make_graphed_callables(model.sc, (sample,), warmup_steps=1, allow_unused_input=True)
            self.handle = model.sc.graphs
        elif engine == "step":
            self.handle = FullIteration(
                step,
                model=model,
                warmup_steps=WARMUP,
                on_mismatch="eager",
                on_capture_error="error",
            )

    def run(self, x: torch.Tensor) -> list[Any]:
        """One step. Returns what is compared."""
        if self.engine == "scopes":
            with self.handle.step():
                loss = self.step(x)
        elif self.engine == "step":
            loss = self.handle(x)
        else:
            loss = self.step(x)
        seen: list[Any] = [loss.detach().clone()]
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                gradient = parameter.grad
                seen.append((name, None if gradient is None else gradient.clone()))
                if gradient is not None:
                    parameter -= 0.1 * gradient
        self.model.zero_grad()
        return seen

    def counts(self) -> tuple[int, int]:
        """Replays, and calls that were counted as eager."""
        if self.handle is None:
            return 0, 0
        if self.engine == "callables":
            return replays_of(self.handle), sum(self.handle.eager_calls.values())
        report = self.handle.report()
        return report.replayed, sum(report.eager_calls.values()) - report.eager_calls.get("warmup", 0)

    def take(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                tensor.detach().copy_(state[name])

    def close(self) -> None:
        if self.handle is not None:
            self.handle.release()
        self._forget()


class Trio:
    """Three instances of a program: eager and never mutated, eager, and graphed."""

    def __init__(self, program: MutableProgram) -> None:
        self._data = torch.Generator().manual_seed(1)
        self.program, self._open = program, []
        try:
            for engine in (None, None, program.engine):
                self._open.append(Instance(program, engine))
            self.control, self.twin, self.graphed = self._open
            for _ in range(WARMUP + 1):
                self.step_together()
        except Exception:
            self.close()
            raise

    def batch(self) -> torch.Tensor:
        return torch.randn(3, 4, generator=self._data)

    def is_whole(self) -> bool:
        """Whether the mutation has been undone: all are equal, and the graphed one replays."""
        try:
            return self.step_together() and not leaks()
        except Exception:
            return False

    def step_together(self) -> bool:
        """Run one step of all three; return whether all are equal and the graphed one replayed."""
        state = self.control.model.state_dict()
        for each in (self.twin, self.graphed):
            each.take(state)
        x, (replays, eager) = self.batch(), self.graphed.counts()
        seen = [each.run(x) for each in self._open]
        after = self.graphed.counts()
        self.is_equal = _same(seen[0], seen[1]) and _same(seen[0], seen[2])
        return self.is_equal and after[0] > replays and after[1] == eager

    def try_mutation(self, mutation: Mutation, with_effect: bool) -> tuple[str, str]:
        """The outcome of a mutation; graphs do not run if the eager twin is as without it."""
        batches = [self.batch() for _ in range(AFTER)]
        control = [self.control.run(x) for x in batches]
        eager, raised, _ = _mutated(self.twin, mutation, batches)
        if with_effect and raised is None and _same(control, eager):
            return NO_EFFECT, ""
        graphed, error, counts = _mutated(self.graphed, mutation, batches)
        return _compared(control, eager, raised, graphed, error, counts)

    def close(self) -> None:
        for each in self._open:
            with contextlib.suppress(Exception):
                each.close()


def _mutated(
    instance: Instance, mutation: Mutation, batches: list[torch.Tensor]
) -> tuple[list[Any], Exception | None, list[tuple[int, int]]]:
    """Run steps after a mutation, and undo it."""
    undo = mutation.apply(instance.world)
    seen, counts = [], [instance.counts()]
    try:
        for x in batches:
            seen.append(instance.run(x))
            counts.append(instance.counts())
    except Exception as error:
        return seen, error, [*counts, instance.counts()]
    finally:
        undo()
    return seen, None, counts


def _compared(
    control: list[Any],
    eager: list[Any],
    raised: Exception | None,
    graphed: list[Any],
    error: Exception | None,
    counts: list[tuple[int, int]],
) -> tuple[str, str]:
    if error is not None and is_named(error):
        return NAMED, str(error)[:200]
    if error is not None and raised is None:
        return CRASH, f"{type(error).__name__}: {str(error)[:200]}"
    for step, (a, b) in enumerate(zip(eager, graphed, strict=False)):
        if not _same(a, b):
            replayed = counts[step + 1][0] > counts[step][0]
            what = f"step {step} after it: eager {_loss(a)}, graphed {_loss(b)}, control {_loss(control[step])}"
            return SILENT if replayed else DIFFERENT, what
    if raised is not None:
        if error is not None or len(graphed) == len(eager):
            return NO_EFFECT, f"eager raises {type(raised).__name__}"
        return LOST, f"eager raises {type(raised).__name__}: {str(raised)[:100]}"
    if _same(control, eager):
        return NO_EFFECT, ""
    return (COUNTED if counts[-1][1] > counts[0][1] else EQUAL), ""


def _loss(seen: list[Any]) -> float:
    return seen[0].item()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return same(a, b)


# ---- all mutations of a program


def candidates(trio: Trio) -> list[Mutation]:
    """All mutations of what the twin's step can reach."""
    found = list(walk(trio.twin.world))
    inside = [
        (path, value) for path, value in found if path[-1][0] != "referent" or not _is_inner(value)
    ]
    return [each for path, value in inside for each in mutations(path, value, inside)]


def _is_inner(value: Any) -> bool:
    """Whether a value is a container that an object of C keeps for itself."""
    return isinstance(value, (list, dict, tuple, set))


def is_of_piece(mutation: Mutation) -> bool:
    return re.search(r"_\d+\b", shown(mutation.path) + mutation.place) is not None


Choice = Generator[Mutation, Outcome, None]


def each_kind(found: list[Mutation], tries: int = 12) -> Choice:
    """The first mutations of each kind that concern a piece, at each place until one has effect."""
    left = {each.kind: tries for each in found}
    at_place: Counter[tuple] = Counter()
    for mutation in filter(is_of_piece, found):
        place = (mutation.kind, mutation.path, mutation.place)
        if left[mutation.kind] and at_place[place] < 3:
            outcome = yield mutation
            left[mutation.kind] -= 1
            at_place[place] += 1 if outcome.outcome == NO_EFFECT else 3


def drawn(found: list[Mutation], draw: random.Random, count: int) -> Choice:
    """Mutations at random, most of them of a piece's own state."""
    kinds = Counter(each.kind for each in found)
    weights = [(1.0 if is_of_piece(each) else 0.1) / kinds[each.kind] for each in found]
    for mutation in draw.choices(found, weights, k=count) if found else ():
        yield mutation


def judge(
    program: MutableProgram,
    choose: Callable[[list[Mutation]], Choice] = each_kind,
    with_effect: bool = True,
) -> Iterator[Outcome]:
    """Yield the outcomes of the mutations that are chosen among all of a program."""
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(restore_process)
        try:
            trio = Trio(program)
        except Exception as error:
            outcome = NAMED if is_named(error) else INVALID
            yield Outcome(program, None, outcome, f"{type(error).__name__}: {error}"[:300])
            return
        stack.callback(lambda: trio.close())
        if not trio.step_together():
            outcome = NOT_REPLAYED if trio.is_equal else SILENT
            yield Outcome(program, None, outcome, str(trio.graphed.counts()))
            return
        choice = choose(candidates(trio))
        mutation = next(choice, None)
        while mutation is not None:
            outcome = Outcome(program, mutation, *_tried(trio, mutation, with_effect))
            yield outcome
            if not trio.is_whole():
                trio.close()
                trio = Trio(program)
            try:
                mutation = choice.send(outcome)
            except StopIteration:
                mutation = None


def _tried(trio: Trio, mutation: Mutation, with_effect: bool) -> tuple[str, str]:
    try:
        return trio.try_mutation(mutation, with_effect)
    except Exception as error:
        return NO_EFFECT, f"cannot be done: {error!r}"[:200]
