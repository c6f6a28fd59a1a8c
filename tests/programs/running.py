"""Runs of one program, eagerly and graphed, and their comparison."""

from __future__ import annotations

import contextlib
import gc
import random
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import moe_graphs
from moe_graphs import GraphError
from programs import events
from programs.model import visible
from programs.sessions import ENGINES, REFERENCES, Eager
from programs.specification import Event, Program
from programs.stepping import update
from programs.world import Plan, Planned, Snapshot, World

EQUAL, COUNTED, NAMED = "equal", "equal, counted eager", "named error"
AS_EAGER, INVALID = "raises as eager", "eager raises always"
DIFFERENT, AFTER_ERROR = "SILENTLY DIFFERENT", "DIFFERENT AFTER A NAMED ERROR"
LOST, CRASH, LEAK = "ERROR OF EAGER LOST", "UNNAMED CRASH", "LEAK"
ALLOWED = (EQUAL, COUNTED, NAMED, AS_EAGER, INVALID)
_PACKAGE = str(Path(moe_graphs.__file__).parent)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Verdict:
    """Comparison of a graphed run with the eager run."""

    program: Program
    outcome: str
    detail: str = ""
    replayed: int = 0
    eager_calls: Mapping[str, int] = field(default_factory=dict)
    named_errors: tuple[str, ...] = ()

    @property
    def is_allowed(self) -> bool:
        return self.outcome in ALLOWED


class Broken(Exception):
    """A run that cannot go on: ``outcome`` says why."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


class Run:
    """One run of a program: a trace of everything that training code can see.

    Args:
        expected: places at which the eager run raised (None: this is the eager run).
    """

    def __init__(
        self, program: Program, kind: type[Eager], expected: Mapping[str, str] | None
    ) -> None:
        self.program, self.expected = program, expected
        self.trace: list[tuple[str, Any]] = []
        self.errors: dict[str, str] = {}
        self.named: list[str] = []
        self.world = World.of(program)
        self.session: Eager = self._open(kind)

    def _open(self, kind: type[Eager]) -> Eager:
        try:
            return kind(self.world)
        except Exception as error:
            if self.expected is None:  # its sample calls
                raise Broken(INVALID, _told(error)) from error
            if not is_named(error):
                raise
            self.named.append(_told(error))
            return Eager(self.world)

    def train(self) -> None:
        for step in range(self.program.steps):
            self._events(step)
            batch = self.world.batch()
            self._attempt(f"step {step}", lambda b=batch, s=step: self._step(s, b))
            self._note_gradients(f"step {step}")
            if not self.program.optimizer_inside:
                update(self.world)
            self._note_state(f"step {step}")
        self.named += [_told(error) for error in self.session.errors]
        self._note("log", self.world.log)
        self._note("random numbers", [torch.rand(2), random.random(), np.random.rand()])

    def _step(self, step: int, batch: list[torch.Tensor]) -> None:
        for x in batch:
            x.grad = None  # a gradient of an attempt that ended in an error
        with self.world.plan.around_step():
            outputs = self.session.step(batch)
        self._note(f"step {step}: outputs", outputs)

    def _events(self, step: int) -> None:
        """Apply the events of a step, after undoing the changes of the plan that do not last."""
        world = self.world
        world.plan = plan = _lasting_plan(self.program, step)
        for event in self.program.events:
            if event.step != step:
                continue
            if event.kind in events.WITHIN:
                plan.before_backward += (_within(event),)
            elif event.kind in events.PLANS:
                events.PLANS[event.kind](plan, event.pick)
            else:
                action = events.BEFORE[event.kind]
                name = f"step {step} event {event.kind}"
                self._attempt(name, lambda a=action, e=event: a(world, e.pick))

    # ---- errors

    def _attempt(self, place: str, action: Callable[[], None]) -> None:
        snapshot, length = Snapshot(self.world), len(self.trace)
        try:
            action()
        except Planned as error:
            del self.trace[length:]
            self._note(place, f"aborted in its {error}")
        except Exception as error:
            del self.trace[length:]
            self._failed(place, error, snapshot, action)
        else:
            if self.expected is not None and place in self.expected:
                raise Broken(LOST, f"{place}: eager raises {self.expected[place]}")

    def _failed(
        self, place: str, error: Exception, snapshot: Snapshot, action: Callable[[], None]
    ) -> None:
        told = _told(error)
        traceback.clear_frames(error.__traceback__)
        if self.expected is None or place in self.expected:
            self.errors[place] = told
            snapshot.put_back()
            self._note(place, "raised")
            return
        if not is_named(error):
            raise Broken(CRASH, f"{place}: {told}") from error
        self.named.append(told)
        # A whole step promises that nothing has happened; with scopes, a part of the step has run.
        if self.program.engine != "step" or "event" in place:
            snapshot.put_back()
        try:
            with self.session.paused():
                action()
        except Planned as planned:
            self._note(place, f"aborted in its {planned}")
        except Exception as again:
            raise Broken(CRASH, f"{place}, again after {told}: {_told(again)}") from again

    # ---- what is compared

    def _note(self, name: str, tree: Any) -> None:
        if isinstance(tree, torch.Tensor):
            self.trace.append((name, tree.detach().clone()))
        elif isinstance(tree, dict):
            for key, value in tree.items():
                self._note(f"{name}[{key!r}]", value)
        elif isinstance(tree, (list, tuple)):
            for number, value in enumerate(tree):
                self._note(f"{name}[{number}]", value)
        else:
            self.trace.append((name, tree))

    def _note_gradients(self, where: str) -> None:
        for name, parameter in self.world.model.named_parameters():
            self._note(f"{where}: {name}.grad", parameter.grad)

    def _note_state(self, where: str) -> None:
        world = self.world
        for name, tensor in world.model.state_dict(keep_vars=True).items():
            self._note(f"{where}: {name}", tensor)
            self._note(f"{where}: {name}.requires_grad", tensor.requires_grad)
        for name, value in visible(world.model):
            self._note(f"{where}: {name}", value)
        for number, (_, state) in enumerate(sorted_state(world)):
            self._note(f"{where}: optimizer state of parameter {number}", state)
        self._note(f"{where}: kept", [k for k in world.kept if isinstance(k, torch.Tensor)])
        self._note(f"{where}: log", len(world.log))
        numpy_state = np.random.get_state()
        states = [torch.get_rng_state(), hash(random.getstate()), numpy_state[1].tobytes()]
        self._note(f"{where}: random states", [*states, numpy_state[2]])


def sorted_state(world: World) -> list[tuple[int, dict[str, Any]]]:
    number = {id(p): n for n, p in enumerate(world.optimizer.param_groups[0]["params"])}
    states = [(number.get(id(p), -1), state) for p, state in world.optimizer.state.items()]
    return sorted(states, key=lambda each: each[0])


def _lasting_plan(program: Program, step: int) -> Plan:
    """The plan of a step, with the lasting changes of earlier steps (events with an odd pick)."""
    plan = Plan(order=program.order)
    for event in program.events:
        if event.step < step and event.kind in events.PLANS and event.pick % 2:
            events.PLANS[event.kind](plan, event.pick)
    return plan


def _within(event: Event) -> Callable[..., None]:
    return lambda world, result, loss: events.WITHIN[event.kind](world, result, loss, event.pick)


def is_named(error: BaseException) -> bool:
    """Whether the package raised an error: a ``GraphError``, or a ``ValueError`` of its own."""
    if isinstance(error, GraphError):
        return True
    if not isinstance(error, ValueError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    return last is not None and last.filename.startswith(_PACKAGE) and "raise" in str(last.line)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# ---- the verdict


def judge(program: Program) -> Verdict:
    """Run the program eagerly and graphed, and clean up what a run has left in the process."""
    gc.collect()
    gc.freeze()  # a capture collects garbage: freeze torch's modules, which take most of the time
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(restore_process)
        try:
            eager = Run(program, REFERENCES[program.engine], None)
        except Broken as broken:
            return Verdict(program, broken.outcome, broken.detail)
        eager.train()
        if len([place for place in eager.errors if "event" not in place]) == program.steps:
            return Verdict(program, INVALID, str(eager.errors))
        found = leaks()
        assert not found, f"the eager run leaks {found}"
        return _judge_graphed(program, eager)


def _judge_graphed(program: Program, eager: Run) -> Verdict:
    run, outcome, detail = None, "", ""
    try:
        run = Run(program, ENGINES[program.engine], eager.errors)
        run.train()
    except Broken as broken:
        outcome, detail = broken.outcome, broken.detail
    except Exception as error:
        outcome, detail = CRASH, f"outside of a step: {_told(error)}"
    if run is None:
        return Verdict(program, outcome, detail)
    if not outcome:
        detail = first_difference(eager.trace, run.trace)
        outcome = (AFTER_ERROR if run.named else DIFFERENT) if detail else ""
    replayed, eager_calls = run.session.counts()
    run.session.release()
    if not outcome and (detail := leaks()):
        outcome = LEAK
    if not outcome:
        counted = COUNTED if eager_calls else EQUAL
        outcome = NAMED if run.named else AS_EAGER if eager.errors else counted
    return Verdict(program, outcome, detail, replayed, dict(eager_calls), tuple(run.named))


def first_difference(eager: list[tuple[str, Any]], graphed: list[tuple[str, Any]]) -> str:
    for (name, a), (other, b) in zip(eager, graphed, strict=False):
        if name != other:
            return f"eager has {name}, graphed {other}"
        if not same(a, b):
            return f"{name}{_place(a, b)}: eager {_shown(a)}, graphed {_shown(b)}"
    if len(eager) != len(graphed):
        return f"{len(eager)} values eagerly, {len(graphed)} graphed"
    return ""


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit, where all NaNs are equal."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a is b or bool(a == b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = _BITS[a.element_size()]
    if torch.equal(a.view(bits), b.view(bits)):
        return True
    equal = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    return bool(equal.all())


def _place(a: Any, b: Any) -> str:
    """The number of elements that differ between two tensors, and the first one."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return ""
    pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
    at = [(n, *pair) for n, pair in enumerate(pairs) if repr(pair[0]) != repr(pair[1])]
    return f" ({len(at)} of {a.numel()}, at {at[0][0]}: {at[0][1]!r}, {at[0][2]!r})" if at else ""


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype)[6:]}"
    return repr(value)[:80]


def leaks() -> str:
    """Contexts and flags that a run has left on in this process."""
    found: dict[str, bool] = {
        "a dispatch mode": bool(_get_current_dispatch_mode_stack()),
        "a function mode": bool(_get_current_function_mode_stack()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast's cache off": not torch.is_autocast_cache_enabled(),
        "no_grad": not torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "garbage collection off": not gc.isenabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "another default dtype": torch.get_default_dtype() is not torch.float32,
    }
    return ", ".join(name for name, is_there in found.items() if is_there)


def restore_process() -> None:
    while _get_current_dispatch_mode_stack():
        torch._C._pop_torch_dispatch_stack()
    while _get_current_function_mode_stack():
        torch._C._pop_torch_function_stack()
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()
    torch.set_grad_enabled(True)
    torch.set_anomaly_enabled(False)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    gc.enable()


def confirmed(verdict: Verdict) -> Verdict:
    """Whether two eager runs are equal; if not, a difference is no fault of the engine."""
    program = verdict.program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traces: list[list[tuple[str, Any]]] = []
        for _ in range(2):
            run = Run(program, REFERENCES[program.engine], None)
            run.train()
            traces.append(run.trace)
    difference = first_difference(*traces)
    return replace(verdict, outcome=f"flaky: {difference}") if difference else verdict
