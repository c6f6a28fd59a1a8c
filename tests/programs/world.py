"""The world of a running program: model, optimizer, data, random numbers, kept tensors."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from programs import bodies_python
from programs.bodies import WIDTH
from programs.model import MADE_BY_GRAPHS, VOCABULARY, build
from programs.specification import Program

Context = Callable[[], contextlib.AbstractContextManager]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@dataclass
class Plan:
    """The way a step runs. Events change it for one step, or from then on.

    terms: which terms of the loss count: "all", "first", "none".
    before_backward: called with (world, result, loss) between forward and backward.
    kept: what to keep of a result: "hidden", "detached", "view", "loss", "terms".
    abort: raise ``Planned`` at "forward" or "backward" of the last microbatch.
    """

    rows: int = 3
    order: str = "accumulate"
    terms: str = "all"
    gradients: str = "backward"
    input: str = "fresh"
    around_forward: Context = contextlib.nullcontext
    around_backward: Context = contextlib.nullcontext
    around_step: Context = contextlib.nullcontext
    before_backward: tuple[Callable[..., None], ...] = ()
    kept: tuple[str, ...] = ()
    abort: str | None = None


class Planned(Exception):
    """The exception of a program that raises on purpose."""


@dataclass
class World:
    """All objects of a running program.

    ``log`` has values that hooks saw, ``kept`` tensors of earlier steps.
    """

    program: Program
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: torch.Generator
    plan: Plan
    log: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    saved_state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> World:
        """Seed all generators, so that a program is the same whatever ran before."""
        bodies_python.reset_globals()
        model = build(program)
        torch.default_generator.manual_seed(program.seed + 1)
        random.seed(program.seed)
        np.random.seed(program.seed)
        optimizer = OPTIMIZERS[program.optimizer](list(model.parameters()))
        data = torch.Generator().manual_seed(program.seed)
        return cls(program, model, optimizer, data, Plan(order=program.order))

    def batch(self) -> list[torch.Tensor]:
        """The inputs of a step's microbatches."""
        return [self._microbatch() for _ in range(self.program.microbatches)]

    def _microbatch(self) -> torch.Tensor:
        rows = self.plan.rows
        if self.program.own_layers:
            return torch.randint(VOCABULARY, (rows, 6), generator=self.data)
        x = torch.randn(rows, WIDTH, generator=self.data)
        if self.plan.input == "transposed":
            x = torch.randn(WIDTH, rows, generator=self.data).t()
        elif self.plan.input == "expanded":
            x = x[:1].expand(rows, WIDTH)
        elif self.plan.input == "kept" and self._kept_tensor_like(x):
            x = self.kept[-1].detach()
        elif self.plan.input == "double":
            x = x.double().float()[:, [1, 0, 3, 2]]
        return x.requires_grad_() if self.program.input_grad else x

    def _kept_tensor_like(self, x: torch.Tensor) -> bool:
        """Whether the last thing kept is a tensor, not a node of autograd, and of x's shape."""
        last = self.kept[-1] if self.kept else None
        return isinstance(last, torch.Tensor) and last.shape == x.shape

    def linears(self) -> list[nn.Linear]:
        found = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        return [m for m in found if isinstance(m._parameters.get("weight"), nn.Parameter)]

    def parameter(self, pick: int) -> nn.Parameter:
        parameters = list(self.model.parameters())
        return parameters[pick % len(parameters)]

    def turnable(self) -> list[nn.Module]:
        return [m for m in self.model.modules() if hasattr(m, "turn")]


class Snapshot:
    """Snapshot of everything in a world that a step may change, to be put back in place."""

    def __init__(self, world: World) -> None:
        self._world = world
        modules = list(world.model.modules())
        self._dictionaries = [
            (d, dict(d))
            for m in modules
            for d in (m.__dict__, m._parameters, m._buffers, m._modules)
        ]
        values = [v for m in modules for k, v in m.__dict__.items() if not k.startswith("_")]
        self._lists = [(v, list(v)) for v in (*values, world.log, world.kept) if type(v) is list]
        tensors = {id(t): t for t in (*world.model.parameters(), *world.model.buffers())}
        tensors |= {id(t): t for s in world.optimizer.state.values() for t in _tensors(s)}
        self._tensors = [(t, t.detach().clone(), t.requires_grad) for t in tensors.values()]
        self._gradients = [
            (p, p.grad, None if p.grad is None else p.grad.detach().clone())
            for p in world.model.parameters()
        ]
        self._states = {p: dict(state) for p, state in world.optimizer.state.items()}
        self._globals, self._environment = dict(bodies_python.GLOBALS), dict(os.environ)
        generators = (world.data, bodies_python.GENERATOR)
        self._generators = [(g, g.get_state()) for g in generators]
        self._random = (torch.get_rng_state(), random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        for dictionary, before in self._dictionaries:
            # Entries that an engine has put there, or taken away since, stay as they are now.
            own = {key: dictionary[key] for key in MADE_BY_GRAPHS if key in dictionary}
            dictionary.clear()
            dictionary.update({k: v for k, v in before.items() if not _is_made(k, v)} | own)
        for values, before in self._lists:
            values[:] = before
        with torch.no_grad():
            for tensor, value, requires_grad in self._tensors:
                if tensor.grad_fn is None:
                    tensor.requires_grad_(requires_grad)
                tensor.detach().copy_(value)
            for parameter, gradient, value in self._gradients:
                parameter.grad = gradient
                if gradient is not None:
                    gradient.detach().copy_(value)
        self._world.optimizer.state.clear()
        self._world.optimizer.state.update(self._states)
        bodies_python.GLOBALS.update(self._globals)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        for generator, state in self._generators:
            generator.set_state(state)
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        np.random.set_state(self._random[2])


def _is_made(key: str, value: Any) -> bool:
    return key in MADE_BY_GRAPHS and not isinstance(
        value, partial
    )  # the event patch_forward sets partials


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))
