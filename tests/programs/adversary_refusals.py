"""Adversaries: forwards that change something and then cannot be captured; all is put back."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.nn import functional

from programs.cases import Table

case = Table()
SEEN: list[int] = []


def reads_host(s, x):
    return s.l(x) / (1.0 + x.detach().abs().sum().item())


def refused(name, first, **options):
    """Case whose forward calls ``first(s, x)`` and then reads a value on the host."""

    def forward(s, x):
        first(s, x)
        return reads_host(s, x)

    case(f"refused after {name}", forward, **options)


def buffer(s):
    s.register_buffer("b", torch.zeros(4))


refused("a buffer was changed in place", lambda s, x: s.b.add_(1.0), init=buffer)
refused("a buffer was assigned", lambda s, x: setattr(s, "b", s.b + 1.0), init=buffer)
refused("a buffer was registered", lambda s, x: s.register_buffer("late", torch.ones(2)))
refused("a frozen parameter was changed", lambda s, x: torch.no_grad()(s.l.bias.mul_)(0.5),
        start=lambda m, e: m.sc.l.bias.requires_grad_(False))  # fmt: skip
refused("a parameter was changed under no_grad", lambda s, x: torch.no_grad()(s.l.bias.mul_)(0.5))
refused("a counter was counted", lambda s, x: setattr(s, "n", getattr(s, "n", 0) + 1))
refused("a list grew", lambda s, x: s.seen.append(len(s.seen)),
        init=lambda s: setattr(s, "seen", []))  # fmt: skip
refused("a global list grew", lambda s, x: SEEN.append(1), start=lambda m, e: SEEN.clear(),
        between=lambda m, e, i: e.log.append(len(SEEN)))  # fmt: skip
refused("torch's numbers were drawn", lambda s, x: torch.rand(3))
refused("Python's numbers were drawn", lambda s, x: random.random())
refused("numpy's numbers were drawn", lambda s, x: np.random.rand())
refused("a seed was set", lambda s, x: torch.manual_seed(5))
refused("the module went to eval", lambda s, x: s.eval())
refused("a parameter was frozen", lambda s, x: s.l.bias.requires_grad_(False))
refused("a hook was put on a parameter", lambda s, x: s.l.weight.register_hook(lambda g: g * 0.5))
refused("a gradient was dropped", lambda s, x: setattr(s.l.weight, "grad", None),
        update=lambda m, e, i: None)  # fmt: skip
refused("a gradient was added to", lambda s, x: setattr(
    s.l.weight, "grad", torch.ones(4, 4)), update=lambda m, e, i: None)  # fmt: skip
refused("a submodule was added", lambda s, x: s.add_module("late", torch.nn.Tanh()))
refused("a tensor was left on the module", lambda s, x: setattr(s, "last", x.detach().clone()))


def _remembers(s, x):
    y = reads_host(s, x) + (s.last if s.last is not None else 0.0)
    s.last = y.detach().mean(0)
    return y


case("refused, and the last output is remembered", _remembers,
     lambda s: setattr(s, "last", None))  # fmt: skip


def _raises_once(s, x):
    s.n += 1
    if s.n == 4:
        raise ZeroDivisionError("once")
    return functional.dropout(s.l(x), 0.5)


def _tries_again(m, x, e):
    try:
        y = m.sc(m.pre(x))
    except ZeroDivisionError:
        y = m.sc(m.pre(x))
    y.mean().backward()
    return y.detach()


case("the fourth forward raises, and is tried again", _raises_once,
     lambda s: setattr(s, "n", 0), step=_tries_again)  # fmt: skip


class RefusedBackward(torch.autograd.Function):
    """Function whose backward changes a list and then reads values on the host."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        SEEN.append(1)
        return gradient / (1.0 + gradient.abs().sum().item())


case("the backward cannot be captured", lambda s, x: RefusedBackward.apply(s.l(x)),
     start=lambda m, e: SEEN.clear(), between=lambda m, e, i: e.log.append(len(SEEN)))  # fmt: skip
case("the backward cannot be captured, behind dropout and a buffer",
     lambda s, x: RefusedBackward.apply(functional.dropout(s.l(x), 0.5) + s.b.add_(1.0).clone()),
     buffer)  # fmt: skip


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(SEEN) == 5:
            raise ZeroDivisionError("backward")
        SEEN.append(1)
        return gradient


case("the fifth backward raises", lambda s, x: RaisesInBackward.apply(s.l(x)),
     start=lambda m, e: SEEN.clear())  # fmt: skip
