"""Hand-written adversaries: a scope, the code around it, and the verdict under each engine.

A case is a few functions. Their arguments are ``s``, the scope's module with a linear layer
``s.l``; ``m``, the model with an eager layer ``m.pre`` before the scope ``m.sc``; ``e``, a
namespace of the script with ``e.log`` and ``e.kept``; and ``i``, the number of the step. Steps 0
and 1 are the warm-up, and ``change`` is called before step 4.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphError, make_graphed_callables
from programs import running
from programs.model import visible
from programs.sessions import replays_of
from programs.specification import ENGINES

WIDTH, WARMUP, CHANGE_AT = 4, 2, 4
NAMED = {"on_capture_error": "error"}  # what is refused is an error here, which has a name


class Scope(nn.Module):
    """The scope: a module with ``init`` and ``forward`` of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        if case.init is not None:
            case.init(self)
        self._forward = case.forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.pre = nn.Linear(WIDTH, WIDTH)
        self.sc = case.scope(case) if case.scope is not None else Scope(case)


def plain_loss(m: Model, x: torch.Tensor, e: SimpleNamespace) -> torch.Tensor:
    """The scope behind an eager layer."""
    return e.case.use(m, x).square().mean()


def plain_step(m: Model, x: torch.Tensor, e: SimpleNamespace) -> Any:
    loss = e.case.loss(m, x, e)
    loss.backward()
    return loss.detach()


def plain_update(m: Model, e: SimpleNamespace, i: int) -> None:
    with torch.no_grad():
        for parameter in m.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    m.zero_grad()


def _nothing(*args: Any) -> None: ...


def _no_context(m: Model, e: SimpleNamespace, i: int) -> Any:
    return contextlib.nullcontext()


def _batch(generator: torch.Generator, i: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=generator)


@dataclass(frozen=True, eq=False)
class Case:
    """One adversary.

    init, forward: functions of the scope's module. ``scope`` is a class in their place.
    use: calls the scope in the model. ``loss`` and ``step`` use its result. The values that a step
        returns are compared, beside gradients, parameters, buffers, ``e.log``, ``e.kept`` and
        random states.
    start: called as (m, e) before everything.
    change: called once as (m, e), before step 4.
    between: called as (m, e, i) before every step.
    around: called as (m, e, i); returns the context of a step.
    update: called as (m, e, i) after each step; by default SGD and ``zero_grad``.
    function: called as (m, e); returns a plain function, which the script calls as ``e.f`` and
        which is graphed as a callable in the place of the scope.
    options: arguments of ``GraphConfig`` or ``FullIteration``.
    may_kill: whether a wrong replay may kill the process; then the case has its own process.
    ``e.graphs`` is the engine's handle, None eagerly; ``e.late`` is true from step 4 on.
    """

    name: str
    forward: Callable[..., Any] = lambda s, x: s.l(x)
    init: Callable[..., Any] | None = None
    scope: Callable[..., Any] | None = None
    use: Callable[..., Any] = lambda m, x: m.sc(m.pre(x))
    loss: Callable[..., Any] = plain_loss
    step: Callable[..., Any] = plain_step
    start: Callable[..., Any] = _nothing
    change: Callable[..., Any] = _nothing
    between: Callable[..., Any] = _nothing
    around: Callable[..., Any] = _no_context
    update: Callable[..., Any] = plain_update
    batch: Callable[..., Any] = _batch
    steps: int = 7
    engines: tuple[str, ...] = ENGINES
    function: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    may_kill: bool = False


class Table:
    """The cases of a file: ``case = Table()``, then ``case("what it does", ...)``."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def __call__(self, name: str, *args: Any, **options: Any) -> Case:
        assert name not in {case.name for case in self.cases}, name
        self.cases.append(Case(name, *args, **options))
        return self.cases[-1]


@dataclass(frozen=True)
class CaseVerdict:
    outcome: str
    detail: str = ""
    replayed: int = 0
    eager_calls: tuple[tuple[str, int], ...] = ()

    @property
    def is_allowed(self) -> bool:
        return self.outcome in running.ALLOWED


class _Stop(Exception):
    """Signal that nothing after this point can be compared."""


class CaseRun:
    """One run of a case; ``raises_at`` is where the eager run raised, None for the eager run."""

    def __init__(self, case: Case, engine: str | None, raises_at: int | None = None) -> None:
        self.case, self.engine, self.raises_at = case, engine, raises_at
        self.trace: list[tuple[str, Any]] = []
        self.named: list[str] = []
        self.raised: tuple[int, str] | None = None
        torch.default_generator.manual_seed(0)  # torch.manual_seed notes the stack for a GPU
        random.seed(0)
        np.random.seed(0)
        self.m = Model(case)
        self.e = SimpleNamespace(case=case, log=[], kept=[], i=0, late=False, graphs=None)
        self._data = torch.Generator().manual_seed(1)
        case.start(self.m, self.e)
        if case.function is not None:
            self.e.f = case.function(self.m, self.e)
        self.handle: Any = None

    def _plain(self, batch: Any) -> Any:
        return self.case.step(self.m, batch, self.e)

    def _open(self, sample: tuple[tuple, dict]) -> None:
        options = dict(self.case.options)
        if self.engine == "scopes":
            config = GraphConfig("sc*", warmup_steps=WARMUP, **NAMED, **options)
            self.handle = moe_graphs.graph(self.m, config)
        elif self.engine == "callables":
            self.handle = self._open_callable(sample)
        elif self.engine == "step":
            if hasattr(self.e, "optimizer"):
                options["optimizer"] = self.e.optimizer
            options = {"on_mismatch": "eager", "warmup_steps": WARMUP} | NAMED | options
            # A method of this run would make guards look into everything that the run has noted.
            case, m, e = self.case, self.m, self.e
            step = lambda batch: case.step(m, batch, e)  # noqa: E731
            self.handle = FullIteration(step, model=m, **options)
        self.e.graphs = self.handle

    def _open_callable(self, sample: tuple[tuple, dict]) -> Any:
        args, kwargs = sample
        options = dict(warmup_steps=1, allow_unused_input=True)
        if self.case.function is not None:
            args = (torch.ones(3, WIDTH, requires_grad=True),)
            self.e.f = make_graphed_callables(self.e.f, args, **options)
            return self.e.f.graphs
        make_graphed_callables(self.m.sc, args, sample_kwargs=kwargs, **options)
        return self.m.sc.graphs

    def _sampled(self) -> tuple[tuple, dict]:
        """One eager step, in every run: the arguments of the scope's first call."""
        if self.case.function is not None:
            return (), {}
        calls: list[tuple[tuple, dict]] = []
        hook = lambda module, args, kwargs: calls.append((args, kwargs))  # noqa: E731
        handle = self.m.sc.register_forward_pre_hook(hook, with_kwargs=True)
        batch = self.case.batch(self._data, 0)
        with self.case.around(self.m, self.e, 0):
            self._plain(batch)
        handle.remove()
        self.m.zero_grad()
        detached = torch.utils._pytree.tree_map_only(torch.Tensor, _detached, calls[0])
        return detached[0], detached[1]

    def run(self, with_sample: bool) -> None:
        sample = self._sampled() if with_sample else ((), {})
        try:
            self._open(sample)
        except Exception as error:
            self._not_opened(error)
        with contextlib.suppress(_Stop):
            for i in range(self.case.steps):
                self._one_step(i)
        self.note("kept at the end", self.e.kept)

    def _not_opened(self, error: Exception) -> None:
        if not running.is_named(error):
            raise running.Broken(running.CRASH, running._told(error)) from error
        self.named.append(running._told(error))
        self.engine = None

    def _one_step(self, i: int) -> None:
        case, m, e = self.case, self.m, self.e
        e.i = i
        try:
            case.between(m, e, i)
            if i == CHANGE_AT:
                e.late = True
                case.change(m, e)
            batch = case.batch(self._data, i)
            with case.around(m, e, i):
                outputs = self._step(batch)
        except Exception as error:
            self._failed(i, error)
            raise _Stop from None
        if self.engine is not None and self.raises_at == i:
            raise running.Broken(running.LOST, f"step {i}: eager raises")
        self.note(f"step {i}: outputs", outputs)
        for name, parameter in m.named_parameters():
            self.note(f"step {i}: {name}.grad", parameter.grad)
        case.update(m, e, i)
        for name, tensor in m.state_dict(keep_vars=True).items():
            self.note(f"step {i}: {name}", [tensor, tensor.requires_grad])
        for name, value in visible(m):
            self.note(f"step {i}: {name}", value)
        self.note(f"step {i}: log", e.log)
        self.note(f"step {i}: kept", e.kept)
        self.note(f"step {i}: random", [torch.get_rng_state(), hash(random.getstate())])
        self.note(f"step {i}: numpy", np.random.get_state()[1].tobytes())

    def _step(self, batch: Any) -> Any:
        if self.engine == "step":
            return self._whole_step(batch)
        if self.engine != "scopes":
            return self._plain(batch)
        outputs = _Stop
        try:
            with self.handle.step():
                outputs = self._plain(batch)
        except GraphError as error:
            if outputs is _Stop:
                raise
            self.named.append(running._told(error))
        return outputs

    def _whole_step(self, batch: Any) -> Any:
        try:
            return self.handle(batch)
        except GraphError as error:  # nothing has happened
            self.named.append(running._told(error))
            return self._plain(batch)

    def _failed(self, i: int, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)
        if self.engine is None or self.raises_at == i:
            self.raised = (i, running._told(error))
        elif running.is_named(error):
            self.named.append(running._told(error))
        else:
            raise running.Broken(running.CRASH, f"step {i}: {running._told(error)}") from error

    def note(self, name: str, tree: Any) -> None:
        if isinstance(tree, torch.Tensor):
            # Functional tensors and sparse ones have no bits to compare.
            self.trace.append((name, tree.detach().to_dense().clone()))
        elif isinstance(tree, (list, tuple)):
            for number, value in enumerate(tree):
                self.note(f"{name}[{number}]", value)
        elif isinstance(tree, dict):
            for key, value in tree.items():
                self.note(f"{name}[{key!r}]", value)
        else:
            self.trace.append((name, tree))

    def counts(self) -> tuple[int, dict[str, int]]:
        if self.engine is None:
            return 0, {}
        if self.engine == "callables":
            return replays_of(self.handle), dict(self.handle.eager_calls)
        report = self.handle.report()
        return report.matched, {k: v for k, v in report.eager_calls.items() if k != "warmup"}

    def release(self) -> None:
        if self.engine is not None:
            self.handle.release()


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _clean_process() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            running.restore_process()


def judge(case: Case, engine: str) -> CaseVerdict:
    """Run a case eagerly and graphed, and compare the two runs."""
    return _judge_apart(case, engine) if case.may_kill else _judge(case, engine)


def _judge_apart(case: Case, engine: str) -> CaseVerdict:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(_judge(case, engine)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of forks beside threads
        process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return CaseVerdict(running.CRASH, f"the process ended with {process.exitcode}")
    finally:
        process.join()


@functools.lru_cache(maxsize=2)  # the engines of a case come one after another
def _eager(case: Case, with_sample: bool) -> CaseRun:
    with _clean_process():
        eager = CaseRun(case, None)
        eager.run(with_sample)
        leaked = running.leaks()
        assert not leaked, f"the eager run leaks {leaked}"
    return eager


def _judge(case: Case, engine: str) -> CaseVerdict:
    with_sample = engine == "callables"
    eager = _eager(case, with_sample)
    with _clean_process():
        graphed = CaseRun(case, engine, eager.raised[0] if eager.raised else None)
        try:
            graphed.run(with_sample)
        except running.Broken as broken:
            return CaseVerdict(broken.outcome, broken.detail)
        replayed, eager_calls = graphed.counts()
        graphed.release()
        counted = tuple(sorted(eager_calls.items()))
        difference = _difference(eager, graphed) or running.leaks()
    if difference:
        outcome = running.AFTER_ERROR if graphed.named else running.DIFFERENT
        return CaseVerdict(outcome, difference, replayed, counted)
    if graphed.named:
        return CaseVerdict(running.NAMED, graphed.named[0], replayed, counted)
    if eager.raised:
        return CaseVerdict(running.AS_EAGER, eager.raised[1], replayed, counted)
    outcome = running.COUNTED if eager_calls else running.EQUAL
    return CaseVerdict(outcome, "", replayed, counted)


def _difference(eager: CaseRun, graphed: CaseRun) -> str:
    """Compare two traces; after an error within a step only what came before the error."""
    a, b = eager.trace, graphed.trace
    if len(b) < len(a) and graphed.named:
        end = next((n for n, (name, _) in enumerate(b) if name.startswith("kept at")), len(b))
        a, b = a[:end], b[:end]
    return running.first_difference(a, b)
