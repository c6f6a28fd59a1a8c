"""Interfaces of blocks (their calls and results), and the eager code around them.

An interface is a module around a body. Its ``forward`` is what may be a scope; ``use`` is the eager
code that calls it: it takes the hidden state and the model's input, and returns the new hidden
state and terms for the loss, which a step may or may not use.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from programs.bodies import WIDTH

INTERFACES: dict[str, type[Block]] = {}
WIRINGS: dict[str, Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]] = {}


class Block(nn.Module):
    """Tensor in, tensor out."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def __init_subclass__(cls) -> None:
        INTERFACES[cls.__name__.lower()] = cls

    def forward(self, x):
        return self.part(x)

    def use(self, h, x):
        return self(h), []


INTERFACES["block"] = Block


class WithAux(Block):
    """An output of 0 dimensions beside the main one."""

    def forward(self, x):
        y = self.part(x)
        return y, y.square().mean()

    def use(self, h, x):
        y, aux = self(h)
        return y, [aux]


class Dictionary(Block):
    def forward(self, x):
        y = self.part(x)
        return {"hidden": y, "aux": [y.abs().sum(), None], "width": WIDTH}

    def use(self, h, x):
        out = self(h)
        return out["hidden"] / out["width"], [out["aux"][0]]


class Named(NamedTuple):
    hidden: torch.Tensor
    aux: torch.Tensor
    name: str


class NamedOutput(Block):
    def forward(self, x):
        y = self.part(x)
        return Named(y, y.exp().mean(), "named")

    def use(self, h, x):
        out = self(h)
        return out.hidden, [out.aux]


@dataclass
class Record:
    hidden: torch.Tensor
    aux: torch.Tensor


class RecordOutput(Block):
    """A plain dataclass, which is no pytree."""

    def forward(self, x):
        y = self.part(x)
        return Record(y, y.mean())

    def use(self, h, x):
        out = self(h)
        return out.hidden, [out.aux]


class ModelOutput(collections.OrderedDict):
    """A dictionary with attributes, as the outputs of transformers."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HuggingFaceLike(Block):
    def forward(self, x, return_dict=True):
        return ModelOutput(hidden=self.part(x))

    def use(self, h, x):
        return self(h).hidden, []


class Chunks(Block):
    """Views of one tensor that do not overlap."""

    def forward(self, x):
        return self.part(x).chunk(2, dim=-1)

    def use(self, h, x):
        left, right = self(h)
        return torch.cat([right, left], -1), [left.square().mean()]


class Overlapping(Block):
    """An output and a view of it."""

    def forward(self, x):
        y = self.part(x)
        return y, y[:1], y.t()

    def use(self, h, x):
        y, first, transposed = self(h)
        return y, [first.sum(), transposed.square().sum()]


class SameTwice(Block):
    def forward(self, x):
        y = self.part(x)
        return y, y

    def use(self, h, x):
        first, second = self(h)
        return first + second.sin() + (1.0 if first is second else 0.0), []


class PassesThrough(Block):
    def forward(self, x):
        return self.part(x), x

    def use(self, h, x):
        y, same = self(h)
        return y + same, [same.square().mean()]


class ViewsInput(Block):
    """An output that is a view of an input."""

    def forward(self, x):
        return self.part(x), x[:, :2]

    def use(self, h, x):
        y, view = self(h)
        return y + view.repeat(1, 2), []


class ReturnsWeight(Block):
    def forward(self, x):
        y = self.part(x)
        return y, next(iter(self.part.parameters()), None)

    def use(self, h, x):
        y, weight = self(h)
        return y, [] if weight is None else [weight.square().mean()]


class Detached(Block):
    """A metric beside the output, with a number of Python."""

    def forward(self, x):
        y = self.part(x)
        return y, y.detach().abs().amax(), {"rows": len(x), "grad": torch.is_grad_enabled()}

    def use(self, h, x):
        y, metric, info = self(h)
        return y / metric.clamp(min=1.0) / info["rows"], []


class TwoHeads(Block):
    """A second output that has its own weight, and that the loss may not use."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(part)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        y = self.part(x)
        return y, self.head(y)

    def use(self, h, x):
        y, logits = self(h)
        return y, [functional.cross_entropy(logits, torch.zeros(len(h), dtype=torch.long))]


class TwoInputs(Block):
    """Two tensors, of which one may have no gradient."""

    def forward(self, x, y):
        return self.part(x) * y

    def use(self, h, x):
        return self(h, x), []


class SameInputTwice(Block):
    """A forward that takes another branch if both arguments are one tensor."""

    def forward(self, q, k, v=None):
        out = self.part(q) + k
        return out if v is q else out * 2.0

    def use(self, h, x):
        return self(h, h, v=h), []


class Keywords(Block):
    def forward(self, x, *, scale=1.0, mask=None, **options):
        y = self.part(x) * scale
        return y if mask is None else y.masked_fill(mask, 0.0)

    def use(self, h, x):
        return self(h, scale=0.5, mask=x.detach() > 1.0, extra=[1, "a"]), []


class NestedInput(Block):
    def forward(self, batch):
        return self.part(batch["hidden"][0]) + batch["bias"]

    def use(self, h, x):
        return self({"hidden": [h, None], "bias": x.mean(0), "rows": len(h)}), []


class Options:
    """A plain object as an argument, changed by its owner later."""

    scale = 1.0


class ObjectInput(Block):
    def __init__(self, part: nn.Module) -> None:
        super().__init__(part)
        self.options = Options()

    def forward(self, x, options):
        return self.part(x) * options.scale

    def use(self, h, x):
        return self(h, self.options), []

    def turn(self, pick):
        self.options.scale = (2.0, 0.5)[pick % 2]


class Transposed(Block):
    """Arguments and results with unusual strides."""

    def forward(self, x):
        return self.part(x.t()).t()

    def use(self, h, x):
        return self(h.t()).t(), []


# ---- what stands around the call


def wiring(function: Callable[..., Any]) -> Callable[..., Any]:
    WIRINGS[function.__name__] = function
    return function


@wiring
def chain(block, h, x):
    return block.use(h, x)


@wiring
def residual(block, h, x):
    y, terms = block.use(h, x)
    return h + y, terms


@wiring
def sine_between(block, h, x):
    y, terms = block.use(h.sin(), x)
    return y, terms


@wiring
def twice(block, h, x):
    y, terms = block.use(h, x)
    y, more = block.use(y, x)
    return y, terms + more


@wiring
def in_parallel(block, h, x):
    y, terms = block.use(h, x)
    z, more = block.use(h * 0.5, x)
    return y - z, terms + more


@wiring
def in_place_after(block, h, x):
    y, terms = block.use(h, x)
    return y.add_(1.0), terms


@wiring
def detached_target(block, h, x):
    y, terms = block.use(h, x)
    return y, [*terms, (y - h.detach()).square().mean()]


@wiring
def stops_before(block, h, x):
    return block.use(h.detach(), x)


@wiring
def weight_outside(block, h, x):
    """The block's first matrix is used outside of the block, too (tied weights)."""
    y, terms = block.use(h, x)
    square = [p for p in block.parameters() if p.shape == (WIDTH, WIDTH)]
    return (functional.linear(y, square[0]) if square else y), terms


@wiring
def penalised(block, h, x):
    y, terms = block.use(h, x)
    return y, [*terms, 0.1 * sum(p.square().sum() for p in block.parameters())]


@wiring
def checkpointed(block, h, x):
    y = checkpoint(lambda value: block.use(value, x)[0], h, use_reentrant=False)
    return y, []


@wiring
def input_as_leaf(block, h, x):
    """A prompt-like leaf that requires grad enters the block."""
    return block.use(h + x.detach().clone().requires_grad_(), x)


@wiring
def under_autocast(block, h, x):
    with torch.autocast("cpu", torch.bfloat16):
        y, terms = block.use(h, x)
    return y.float(), [t.float() for t in terms]


@wiring
def half_the_rows(block, h, x):
    y, terms = block.use(h[::2], x[::2])
    return torch.cat([y, h[1::2]]), terms


@wiring
def expanded(block, h, x):
    y, terms = block.use(h.mean(0, keepdim=True).expand(len(h), WIDTH), x)
    return y + h, terms


@wiring
def sums_before_use(block, h, x):
    """The output is expanded in the backward: a gradient with zero strides."""
    y, terms = block.use(h, x)
    return h, [*terms, y.sum()]


@wiring
def skipped_gradient(block, h, x):
    """A block of which only a metric reaches the loss."""
    with torch.no_grad():
        metric = h.norm()
    y, terms = block.use(h, x)
    return h * metric + 0.0 * y.detach(), terms
