"""Guarantees of all engines, a row each: the table in docs/design.md, as tests.

Every row trains eagerly and with an engine, and both have to be the same bit for bit after every
step. "eager" means that a change before the fifth step makes calls run eagerly, counted under this
reason. "refused" means that the capture is refused with this text, and training goes on eagerly.
"""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_graphs
from grids import by_turns
from moe_graphs import FullIteration, GraphConfig, GraphError, GraphWarning, make_graphed_callables
from training_runs import DEVICES

WIDTH, STEPS, CHANGE_AT = 4, 7, 4
ENGINES = ("scopes", "callables", "whole steps")
SETTINGS = {"gain": 1.0}
UNKNOWN: dict[str, torch.Generator] = {}


class Scope(nn.Module):
    """A linear layer, and whatever the row puts around it."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain, self.gains, self.offset = 1.0, [1.0], None
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.total, self.mean = 0, torch.zeros(()), torch.zeros(())
        self.row = row.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        return torch.tanh(self.row(self, x))


class Model(nn.Module):
    def __init__(self, row: Row) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scope = Scope(row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scope(self.first(x).float())


def plain(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    return scope.linear(x) * scope.gain * scope.gains[0] * SETTINGS["gain"]


@dataclass(frozen=True)
class Row:
    """A row of the table. If it has neither ``eager`` nor ``refused``, everything is replayed.

    Attributes:
        change: a change before the fifth step.
        around: a context around the fifth step and the steps after it.
        rows: number of rows of the batch from the fifth step on.
    """

    forward: Callable[[Scope, torch.Tensor], torch.Tensor] = plain
    change: Callable[[Model], Any] | None = None
    around: Callable[[], contextlib.AbstractContextManager] | None = None
    rows: int = 3
    eager: str | None = None
    refused: str | None = None


def _draw(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    return plain(scope, x) * random.random()


def _leave(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    scope.left = x.detach().mean()
    return plain(scope, x)


def _count_calls(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    scope.number += 1
    return plain(scope, x)


def _check(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    if x.isnan().any():
        raise ValueError("not a number")
    return plain(scope, x)


def _count(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    scope.gain += 1.0
    return plain(scope, x)


def _collect(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    scope.gains.append(x.detach().mean())
    return plain(scope, x)


def _read(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    return plain(scope, x) * scope.calls.item()


def _generator(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    kind = x.device.type
    return plain(scope, x) * torch.rand(WIDTH, generator=UNKNOWN[kind], device=kind)


def _checkpointed(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(scope.linear, x, use_reentrant=False)


def _offloaded(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plain(scope, x)


def _replace(model: Model) -> None:
    model.scope.linear.weight = nn.Parameter(model.scope.linear.weight.detach() * 2.0)


def _load(model: Model) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def _autocast() -> contextlib.AbstractContextManager:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(kind, torch.bfloat16, cache_enabled=False)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _unchanged_hooks() -> contextlib.AbstractContextManager:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


ROWS = {
    "values are loaded in place": Row(change=_load),
    "dropout draws new numbers": Row(lambda s, x: nn.functional.dropout(plain(s, x), 0.5)),
    "a tensor is left in an attribute": Row(_leave),
    "an average is assigned": Row(lambda s, x: setattr(s, "mean", s.mean * 0.9 + x.detach().mean())
                                  or plain(s, x) + s.mean),
    "a plain tensor is written": Row(lambda s, x: plain(s, x) + s.total.add_(x.detach().mean())),
    "Python that counts calls": Row(_count_calls),
    "a check of a value": Row(_check),
    "a number of a module": Row(change=lambda m: setattr(m.scope, "gain", 3.0), eager="attribute"),
    "a list of a module": Row(change=lambda m: m.scope.gains.__setitem__(0, 3.0),
                              eager="attribute"),
    "a global dictionary": Row(change=lambda m: SETTINGS.update(gain=3.0), eager="attribute"),
    "the training flag": Row(lambda s, x: plain(s, x) * (3.0 if s.training else 1.0),
                             change=lambda m: m.eval(), eager="training_flag"),
    "a parameter is replaced": Row(change=_replace, eager="moved"),
    "requires_grad": Row(change=lambda m: m.scope.linear.weight.requires_grad_(False),
                         eager="requires_grad"),
    "a hook on a submodule": Row(
        change=lambda m: m.scope.linear.register_forward_hook(lambda *a: a[2] * 3.0),
        eager="hooks"),
    "another shape": Row(rows=2, eager="shape"),
    "autocast": Row(around=_autocast, eager="autocast"),
    "deterministic algorithms": Row(around=_deterministic, eager="context"),
    "hooks on saved tensors": Row(around=_unchanged_hooks, eager="saved_tensors_hooks"),
    "Python's random numbers": Row(_draw, refused="draws from Python's random"),
    "Python that counts": Row(_count, refused=r"it changes .*gain \("),
    "a list of metrics": Row(_collect, refused=r"assign the tensor|keep it in a tensor"),
    "values on the host": Row(_read, refused="reads values on the host"),
    "a generator nobody named": Row(_generator, refused="generators="),
    "activation checkpoints inside": Row(_checkpointed),
    "activations on the host": Row(_offloaded, refused="saved-tensor hooks"),
}  # fmt: skip
GOOD = [name for name, row in ROWS.items() if row.refused is None]
REFUSED = [name for name, row in ROWS.items() if row.refused is not None]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    SETTINGS["gain"] = 1.0


class Run:
    """One training run; ``engine`` None is eager."""

    def __init__(self, name: str, engine: str | None, device: str) -> None:
        self.row, self.engine, self.device = ROWS[name], engine, device
        random.seed(0)
        torch.manual_seed(0)
        UNKNOWN[device] = torch.Generator(device).manual_seed(0)
        SETTINGS["gain"] = 1.0
        self.model = Model(self.row).to(device)
        scope = self.model.scope
        scope.total, scope.mean = scope.total.to(device), scope.mean.to(device)
        self.batches = torch.Generator().manual_seed(1)
        self.named: list[str] = []
        self.seen: list[torch.Tensor] = []
        self.graphs: Any = None
        self._open()
        for index in range(STEPS):
            self._step(index)
        self.seen.append(torch.rand(1, device=device))
        if self.graphs is not None:
            self.report = self.graphs.report()
            self.graphs.release()

    def _open(self) -> None:
        if self.engine == "scopes":
            self.graphs = moe_graphs.graph(self.model, GraphConfig("scope*", warmup_steps=2))
        elif self.engine == "whole steps":
            self.graphs = FullIteration(
                self._plain, model=self.model, warmup_steps=2, on_mismatch="eager"
            )
        elif self.engine == "callables":
            sample = torch.ones(3, WIDTH, device=self.device, requires_grad=True)
            try:
                make_graphed_callables(self.model.scope, (sample,))
                self.graphs = self.model.scope.graphs
            except GraphError as error:
                self.named.append(str(error))

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    def _step(self, index: int) -> None:
        late = index >= CHANGE_AT
        if index == CHANGE_AT and self.row.change is not None:
            self.row.change(self.model)
        rows = self.row.rows if late else 3
        x = torch.randn(rows, WIDTH, generator=self.batches).to(self.device)
        with self.row.around() if late and self.row.around else contextlib.nullcontext():
            self.seen.append(self._run(x).clone())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.seen.append(parameter.grad.clone())
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
        self.seen += [tensor.detach().clone() for tensor in self.model.state_dict().values()]

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        if self.engine == "scopes":
            loss = None
            try:
                with self.graphs.step():
                    loss = self._plain(x)
            except GraphError as error:
                self.named.append(str(error))
            return loss
        if self.engine == "whole steps":
            try:
                return self.graphs(x)
            except GraphError as error:
                self.named.append(str(error))
        return self._plain(x)


def assert_same(found: Run, expected: Run) -> None:
    assert len(found.seen) == len(expected.seen)
    pairs = enumerate(zip(found.seen, expected.seen, strict=True))
    assert [i for i, (a, b) in pairs if not torch.equal(a, b)] == []


@pytest.mark.filterwarnings("ignore::moe_graphs.GraphWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("engine", "name"), by_turns(ENGINES, GOOD))
def test_right_or_eager_and_counted(name, engine, device):
    found = Run(name, engine, device)
    assert_same(found, Run(name, None, device))
    assert not found.named
    assert found.report.replayed > 0
    counted = set(found.report.eager_calls) - {"warmup"}
    assert counted == ({found.row.eager} if found.row.eager else set())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("engine", "name"), by_turns(ENGINES, REFUSED))
def test_refused_by_name_and_trained_eagerly(name, engine, device):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = Run(name, engine, device)
    named = found.named + [str(each.message) for each in said if each.category is GraphWarning]
    assert_same(found, Run(name, None, device))
    assert re.search(found.row.refused, named[0]), named
    assert len(named) == 1
    # Callables are captured ahead of time, when there is no training to go on with.
    assert len(found.named) == (engine == "callables")
    if found.graphs is not None:
        assert (found.report.matched, found.report.off_because) == (0, named[0])
