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
from moe_graphs.engine.guards.guards import Guards
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

EQUAL, COUNTED, NAMED, NO_EFFECT = "equal", "counted", "error", "no effect"
FOUND = "found by an audit"
SILENT, LOST, DIFFERENT, CRASH = "SILENT", "ERROR LOST", "DIFFERENT THOUGH EAGER", "CRASH"
NOT_REPLAYED, INVALID = "not replayed", "invalid"
ALLOWED = (EQUAL, COUNTED, NAMED, NO_EFFECT, NOT_REPLAYED, LOST, FOUND)
WARMUP = 2
AUDIT_EVERY: int | None = None  # guards alone: what they miss has names in `known_silent.py`
MOST_BUILT = 24  # captures of one program, whose state some mutations damage


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


Seen = dict[str, Any]


def without_guards() -> None:
    """Turns guards off in this process: what is found then, audits find."""
    Guards.mismatch = lambda self: None  # type: ignore[method-assign]


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
            config = GraphConfig(
                "sc*", warmup_steps=WARMUP, on_capture_error="error", audit_every=AUDIT_EVERY
            )
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
                audit_every=AUDIT_EVERY,
            )

    def run(self, x: torch.Tensor) -> Seen:
        """One step. Returns what is compared."""
        if self.engine == "scopes":
            with self.handle.step():
                loss = self.step(x)
        elif self.engine == "step":
            loss = self.handle(x)
        else:
            loss = self.step(x)
        seen: dict[str, Any] = {"loss": loss.detach().clone()}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                gradient = parameter.grad
                seen[f"{name}.grad"] = None if gradient is None else gradient.clone()
                if gradient is not None:
                    parameter -= 0.1 * gradient
            for name, buffer in self.model.named_buffers():
                seen[name] = buffer.detach().clone()
        self.model.zero_grad()
        return seen

    def counts(self) -> tuple[int, int]:
        """Replays, and calls that were counted as eager."""
        if self.handle is None:
            return 0, 0
        if self.engine == "callables":
            return replays_of(self.handle), sum(self.handle.eager_calls.values())
        report = self.handle.report()
        return report.replayed, sum(report.eager_calls.values()) - report.eager_calls.get(
            "warmup", 0
        )

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

    def __init__(self, program: MutableProgram, thorough: bool) -> None:
        self._data = torch.Generator().manual_seed(1)
        self.thorough, self._open, self._graphed_ran = thorough, [], True
        self.counts = (0, 0)
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
        """Run one step of all three; return whether all are equal and the graphed one replayed.

        The graphed one is left out if it has not run since it was whole.
        """
        running = self._open if self._graphed_ran else self._open[:2]
        state = self.control.model.state_dict()
        for each in running[1:]:
            each.take(state)
        x, (replays, eager) = self.batch(), self.graphed.counts() if self._graphed_ran else (0, 0)
        seen = [each.run(x) for each in running]
        self.is_equal = all(same_values(seen[0], each) for each in seen[1:])
        if not self._graphed_ran:
            return self.is_equal
        self.counts = self.graphed.counts()
        is_whole = self.is_equal and self.counts == (replays + 1, eager)
        # State outside of the graphs, such as a counter in C, goes on only in runs that run.
        self._graphed_ran = self.thorough or not is_whole
        return is_whole

    def try_mutation(self, mutation: Mutation) -> tuple[str, str]:
        """The outcome of a mutation. Graphs are not tried with what changes nothing in eager."""
        steps = (2 if self.thorough else 1) + (AUDIT_EVERY or 0)
        batches = [self.batch() for _ in range(steps)]
        state = {name: t.clone() for name, t in self.control.model.state_dict().items()}
        control = [self.control.run(x) for x in batches]
        eager, raised, _ = _mutated(self.twin, mutation, batches)
        if not self.thorough and raised is None and same_values(control, eager):
            return NO_EFFECT, ""
        self.graphed.take(state)
        self._graphed_ran = True
        try:
            graphed, error, counts = _mutated(self.graphed, mutation, batches)
        except Exception as reason:
            return INVALID, f"nothing to be mutated in the graphed run: {reason!r}"
        return _compared(control, eager, raised, graphed, error, counts)

    def close(self) -> None:
        for each in self._open:
            with contextlib.suppress(Exception):
                each.close()


def _mutated(
    instance: Instance, mutation: Mutation, batches: list[torch.Tensor]
) -> tuple[list[Seen], Exception | None, list[tuple[int, int]]]:
    """Run steps after a mutation, and undo it."""
    undo = mutation.apply(instance.world)
    torch.default_generator.manual_seed(0)  # a mutated step may draw: ``__init__`` in a forward
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
    control: list[Seen],
    eager: list[Seen],
    raised: Exception | None,
    graphed: list[Seen],
    error: Exception | None,
    counts: list[tuple[int, int]],
) -> tuple[str, str]:
    if error is not None and is_named(error):
        return NAMED, str(error)[:200]
    if error is not None and raised is None:
        return CRASH, f"{type(error).__name__}: {str(error)[:200]}"
    for step, (a, b) in enumerate(zip(eager, graphed, strict=False)):
        if not same_values(a, b):
            if AUDIT_EVERY and counts[-1][1] > counts[step + 1][1]:
                return FOUND, f"wrong from step {step} on"
            replayed = counts[step + 1][0] > counts[step][0]
            losses = ", ".join(
                f"{n} {each[step]['loss'].item():.6g}"
                for n, each in (("eager", eager), ("graphed", graphed), ("unchanged", control))
            )
            return SILENT if replayed else DIFFERENT, f"losses of step {step}: {losses}"
    if raised is not None:
        if error is not None or len(graphed) == len(eager):
            return NO_EFFECT, f"eager raises {type(raised).__name__}"
        return LOST, f"eager raises {type(raised).__name__}: {str(raised)[:100]}"
    if same_values(control, eager):
        return NO_EFFECT, ""
    return (COUNTED if counts[-1][1] > counts[0][1] else EQUAL), ""


def same_values(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_values, a, b))
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
    text = shown(mutation.path) + mutation.place
    return re.search(r"_\d+\b", text) is not None or text.endswith(".step")


Choice = Generator[Mutation, Outcome, None]


def each_kind(found: list[Mutation], tries: int = 6) -> Choice:
    """The first mutations of each kind that concern a piece, at each place until one has effect."""
    left = {each.kind: tries for each in found}
    at_place: Counter[tuple] = Counter()
    # Attributes of Python's own and of torch's modules come last, since they are many.
    inner = re.compile("__|_modules|_parameters|weight|bias")
    own = sorted(filter(is_of_piece, found), key=lambda each: len(inner.findall(str(each))))
    for mutation in own:
        place = (mutation.kind, mutation.path, mutation.place)
        if left[mutation.kind] and at_place[place] < 3:
            outcome = yield mutation
            left[mutation.kind] -= 1
            at_place[place] += 1 if outcome.outcome == NO_EFFECT else 3


def drawn(found: list[Mutation], draw: random.Random, count: int) -> Choice:
    """Mutations at random, most of them of a piece's own state."""
    kinds = Counter(each.kind for each in found)
    weights = [(1.0 if is_of_piece(each) else 0.1) / kinds[each.kind] for each in found]
    chosen = draw.choices(found, weights, k=count) if found else []
    while chosen:
        yield chosen.pop()


def judge(
    program: MutableProgram,
    choose: Callable[[list[Mutation]], Choice] = each_kind,
    thorough: bool = False,
) -> Iterator[Outcome]:
    """Yield the outcomes of the mutations that are chosen among all of a program.

    If ``thorough``, more steps run after each mutation, and graphs run after every one.
    """
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(restore_process)
        try:
            trio = Trio(program, thorough)
        except Exception as error:
            outcome = NAMED if is_named(error) else INVALID
            yield Outcome(program, None, outcome, f"{type(error).__name__}: {error}"[:300])
            return
        stack.callback(lambda: trio.close())
        if not trio.step_together():
            outcome = NOT_REPLAYED if trio.is_equal else SILENT
            yield Outcome(program, None, outcome, str(trio.counts))
            return
        choice, built = choose(candidates(trio)), 1
        mutation = next(choice, None)
        while mutation is not None:
            outcome = Outcome(program, mutation, *_tried(trio, mutation))
            yield outcome
            if not trio.is_whole():
                trio.close()
                if built == MOST_BUILT:
                    return
                trio, built = Trio(program, thorough), built + 1
            try:
                mutation = choice.send(outcome)
            except StopIteration:
                mutation = None


def _tried(trio: Trio, mutation: Mutation) -> tuple[str, str]:
    try:
        return trio.try_mutation(mutation)
    except Exception as error:
        return NO_EFFECT, f"cannot be done: {error!r}"[:200]
