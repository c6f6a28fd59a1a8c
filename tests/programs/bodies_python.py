"""Bodies whose forward reads, counts or draws something in Python."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import silu as activation

from programs.bodies import WIDTH, Linear, body

GLOBALS: dict[str, Any] = {}  # read by forwards; part of a snapshot
GENERATOR = torch.Generator()


def reset_globals() -> None:
    """Sets the globals to what they are before a program; called before every run."""
    global gain, activation
    gain, activation = 1.0, functional.silu
    GLOBALS.clear()
    GLOBALS.update(scale=1.0, flag=False, backwards=0, generator=GENERATOR)
    GENERATOR.manual_seed(5)
    ClassAttribute.gain = 1.0
    os.environ.pop("PROGRAMS_GAIN", None)


@contextlib.contextmanager
def flag() -> Iterator[None]:
    """A context manager that a user has written."""
    before, GLOBALS["flag"] = GLOBALS["flag"], True
    try:
        yield
    finally:
        GLOBALS["flag"] = before


@body
class ReadsFlag(Linear):
    def forward(self, x):
        return self.linear(x) * (3.0 if GLOBALS["flag"] else 1.0)


class _FlagInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        GLOBALS["backwards"] += 1
        return gradient * (3.0 if GLOBALS["flag"] else 1.0) / GLOBALS["backwards"]


@body
class ReadsInBackward(Linear):
    """An autograd function that reads and counts in Python."""

    def forward(self, x):
        return _FlagInBackward.apply(self.linear(x))


@body
class ReadsAttribute(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.act, self.dtype = 1.0, torch.tanh, torch.float32

    def forward(self, x):
        return self.act(self.linear(x) * self.gain).to(self.dtype).to(x.dtype)

    def turn(self, pick):
        if pick % 3 == 0:
            self.gain = 1.5
        elif pick % 3 == 1:
            self.act = torch.sigmoid
        else:
            self.dtype = torch.bfloat16


class Mode(enum.Enum):
    PLAIN = 0
    SQUARED = 1


@dataclass
class Settings:
    scale: float = 1.0
    mode: Mode = Mode.PLAIN


@body
class ReadsConfig(Linear):
    """Configurations as in transformers, frozen or not."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.0, inner=Settings())

    def forward(self, x):
        y = self.linear(x) * self.config.scale * self.config.inner.scale
        return y.square() if self.config.inner.mode is Mode.SQUARED else y

    def turn(self, pick):
        if pick % 3 == 0:
            self.config.scale = 2.0
        elif pick % 3 == 1:
            self.config.inner.mode = Mode.SQUARED
        else:
            self.config.inner = replace(self.config.inner, scale=0.5)


@body
class ReadsContainers(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.scales, self.by_name = [1.0, 0.5], {"a": 1.0, "deep": [1.0]}
        self.array = np.ones(2)

    def forward(self, x):
        y = self.linear(x) * sum(self.scales) * self.by_name["a"] * self.by_name["deep"][0]
        return y * float(self.array[0])

    def turn(self, pick):
        if pick % 4 == 0:
            self.scales.append(1.0)
        elif pick % 4 == 1:
            self.by_name["a"] = 2.0
        elif pick % 4 == 2:
            self.by_name["deep"][0] = 0.5
        else:
            self.array[0] = 3.0


gain = 1.0


@body
class ReadsGlobals(Linear):
    def forward(self, x):
        return activation(self.linear(x) * gain) * GLOBALS["scale"]

    def turn(self, pick):
        global gain, activation
        if pick % 3 == 0:
            gain = 2.0
        elif pick % 3 == 1:
            activation = functional.relu
        else:
            GLOBALS["scale"] = 0.5


@body
class ReadsClosure(Linear):
    def __init__(self) -> None:
        super().__init__()
        scale, factors = 1.0, [1.0]

        def multiply(x):
            return x * scale * factors[0]

        def assign(pick):
            nonlocal scale
            if pick % 2:
                scale = 2.0
            else:
                factors[0] = 3.0

        self.multiply, self.turn = multiply, assign

    def forward(self, x):
        return self.multiply(self.linear(x))


@body
class ReadsPartial(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.pool = functools.partial(torch.mul, other=torch.tensor(2.0).item())
        self.steps = {"act": functools.partial(functional.leaky_relu, negative_slope=0.1)}

    def forward(self, x):
        return self.steps["act"](self.pool(self.linear(x)))

    def turn(self, pick):
        if pick % 2:
            self.pool = functools.partial(torch.mul, other=0.5)
        else:
            self.steps["act"] = functools.partial(functional.leaky_relu, negative_slope=0.5)


@body
class ClassAttribute(Linear):
    gain = 1.0

    @property
    def doubled(self):
        return 2 * type(self).gain

    def forward(self, x):
        return self.linear(x) * self.doubled

    def turn(self, pick):
        type(self).gain = (2.0, 0.5)[pick % 2]


@body
class ReadsEnvironment(Linear):
    def forward(self, x):
        return self.linear(x) * float(os.environ.get("PROGRAMS_GAIN", "1.0"))

    def turn(self, pick):
        os.environ["PROGRAMS_GAIN"] = ("2.0", "0.5")[pick % 2]


@body
class Optional(Linear):
    """Attributes that are None and may become a tensor, a module or a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mask", None)
        self.register_module("adapter", None)

    def forward(self, x):
        y = self.linear(x)
        y = y if self.mask is None else y * self.mask
        return y if self.adapter is None else self.adapter(y)

    def turn(self, pick):
        if pick % 2:
            self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        else:
            self.adapter = nn.Tanh()


@body
class Depth(nn.Module):
    """A loop over as many layers as an attribute says, or over the layers of a route."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.depth, self.route = 2, "tanh"
        self.routes = nn.ModuleDict({"tanh": nn.Tanh(), "relu": nn.ReLU()})

    def forward(self, x):
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return self.routes[self.route](x)

    def turn(self, pick):
        if pick % 2:
            self.depth = (1, 3)[pick // 2 % 2]
        else:
            self.route = "relu"


@body
class Annealed(Linear):
    """A counter of calls in Python that the forward computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.linear(x) / (1 + self.calls)


@body
class Counted(Linear):
    """A counter of calls in Python that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, []

    def forward(self, x):
        self.calls += 1
        self.log.append(len(x))
        return self.linear(x)


@body
class SideChannel(Linear):
    """A forward that puts a tensor on the module, which the loss reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: torch.Tensor | None = None

    def forward(self, x):
        y = self.linear(x)
        self.aux = y.square().mean()
        return y


@body
class DrawsPython(Linear):
    def forward(self, x):
        return self.linear(x) if random.random() < 0.5 else x * self.linear.bias


@body
class DrawsNumpy(Linear):
    def forward(self, x):
        return self.linear(x) * float(np.random.rand())


@body
class DrawsGenerator(Linear):
    def forward(self, x):
        return self.linear(x) * torch.rand(WIDTH, generator=GLOBALS["generator"])


@body
class ReadsAnother(Linear):
    """A tensor of a module that is not a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.other = (nn.Linear(WIDTH, WIDTH),)  # a tuple hides it from named_modules

    def forward(self, x):
        return self.linear(x) * self.other[0].bias.detach()

    def turn(self, pick):
        if pick % 2:
            self.other[0].bias.data.fill_(2.0)
        else:
            self.other[0].bias = nn.Parameter(torch.ones(WIDTH))


@body
class Remembers(Linear):
    """A forward that computes with its input of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x):
        y = self.linear(x)
        if self.last is not None:
            y = y + 0.1 * self.last
        self.last = y.detach().mean(0)
        return y
