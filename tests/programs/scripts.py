"""Parts of scripts that several files of adversaries share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from programs.cases import CHANGE_AT, Model, plain_loss, plain_step

Step = Callable[[Model, torch.Tensor, SimpleNamespace], Any]


def tanh(s: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward whose output is saved for its backward."""
    return torch.tanh(s.l(x))


def other_from_fourth(after: Step, before: Step = plain_step) -> Step:
    """Step that calls one function before step 4 and another from then on."""
    return lambda m, x, e: (after if e.late else before)(m, x, e)


def several(count: int) -> Step:
    """A step of ``count`` microbatches."""

    def step(m, x, e):
        for n in range(count):
            e.case.loss(m, x + n, e).backward()

    return step


def without_value(m: Model, x: torch.Tensor, e: SimpleNamespace) -> None:
    plain_loss(m, x, e).backward()


def released_between(m: Model, x: torch.Tensor, e: SimpleNamespace) -> None:
    """The graphs are released between a forward and its backward."""
    loss = e.case.loss(m, x, e)
    if e.i == CHANGE_AT and e.graphs is not None:
        e.graphs.release()
        if hasattr(e, "f"):
            e.f = m.sc
    loss.backward()


def log(e: SimpleNamespace, *tensors: torch.Tensor | None) -> None:
    e.log += [None if t is None else t.detach().clone() for t in tensors]


class Gain:
    """A callable with state, and methods."""

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def having(**attributes):
    """``init`` that gives the scope's module these attributes, with copies of containers."""

    def init(s):
        for name, value in attributes.items():
            setattr(s, name, copy.copy(value) if isinstance(value, (list, dict, set)) else value)

    return init


def setting(name, value):
    return lambda m, e: setattr(m.sc, name, value)


def parameters(m: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters that are trained."""
    return [p for p in m.parameters() if p.requires_grad]
