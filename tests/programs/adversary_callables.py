"""Adversaries: plain functions that are graphed as callables."""

from __future__ import annotations

import functools

import torch
from torch import nn

from programs.cases import Table
from programs.scripts import released_between, tanh

case = Table()


# ---- plain functions as callables


def functions(name, function, change=lambda m, e: None, **options):
    """Case whose graphed function is what ``function(m, e)`` returns."""
    case(name, tanh, function=function, change=change, engines=("callables",),
         **({"loss": lambda m, x, e: e.f(m.pre(x)).square().mean()} | options))  # fmt: skip


def _closure(m, e):
    gain = 1.0

    def set_gain(value):
        nonlocal gain
        gain = value

    e.set_gain = set_gain
    return lambda x: m.sc(x) * gain


functions("a function: a number in its closure", _closure, lambda m, e: e.set_gain(3.0))
GAIN = 1.0


def _set_global(value):
    global GAIN
    GAIN = value


def _with_global(m, e):
    _set_global(1.0)
    return lambda x: m.sc(x) * GAIN


functions("a function: a global number", _with_global, lambda m, e: _set_global(3.0))


def _with_default(m, e):
    def scaled(x, gain=1.0):
        return m.sc(x) * gain

    e.plain = scaled
    return scaled


functions("a function: its default argument", _with_default,
          lambda m, e: setattr(e.plain, "__defaults__", (3.0,)))  # fmt: skip


class Head:
    def __init__(self, module):
        self.module, self.gain = module, 1.0

    def score(self, x):
        return self.module(x) * self.gain

    def __call__(self, x):
        return self.score(x)


def _method(m, e):
    e.head = Head(m.sc)
    return e.head.score


functions("a bound method: its object changes", _method,
          lambda m, e: setattr(e.head, "gain", 3.0))  # fmt: skip


def _callable_object(m, e):
    e.head = Head(m.sc)
    return e.head


functions("an object with __call__: it changes", _callable_object,
          lambda m, e: setattr(e.head, "gain", 3.0))  # fmt: skip


def _partial(m, e):
    e.options = {"gain": 1.0}
    return functools.partial(lambda x, options: m.sc(x) * options["gain"], options=e.options)


functions("a partial: a dictionary among its keywords changes", _partial,
          lambda m, e: e.options.update(gain=3.0))  # fmt: skip


def _rebound(m, e):
    module = m.sc

    def rebind(other):
        nonlocal module
        module = other

    e.rebind = rebind
    return lambda x: module(x)


functions("a function: its module is bound anew", _rebound,
          lambda m, e: e.rebind(nn.Tanh()))  # fmt: skip


def _in_list(m, e):
    modules = [m.sc]
    return lambda x: modules[0](x)


functions("a function: its module is in a list", _in_list)
functions("a function: its module is in a list and goes to eval", lambda m, e: _listed_dropout(m),
          lambda m, e: m.eval())  # fmt: skip


def _listed_dropout(m):
    modules = [nn.Dropout(0.5)]
    m.dropout = modules[0]
    return lambda x: modules[0](x)


def _recursive(m, e):
    def again(x, depth=2):
        return x if depth == 0 else again(torch.tanh(x * m.sc.l.bias), depth - 1)

    return again


functions("a recursive function", _recursive)
functions("a decorated function", lambda m, e: torch.enable_grad()(lambda x: m.sc(x)))
functions("a function without parameters", lambda m, e: lambda x: torch.tanh(x) * x)
functions("a function returns its argument", lambda m, e: lambda x: x)
functions("a function that is called twice before a backward", lambda m, e: m.sc.__call__,
          loss=lambda m, x, e: (e.f(m.pre(x)) * e.f(x)).mean())  # fmt: skip
functions("a function whose first output is thrown away", lambda m, e: lambda x: m.sc(x),
          loss=lambda m, x, e: (e.f(m.pre(x)), e.f(m.pre(x)))[1].mean())  # fmt: skip
functions("a function under no_grad in between", lambda m, e: lambda x: m.sc(x),
          loss=lambda m, x, e: (torch.no_grad()(e.f)(x), e.f(m.pre(x)))[1].mean())  # fmt: skip
functions("a function is reset between forward and backward", lambda m, e: lambda x: m.sc(x),
          step=lambda m, x, e: released_between(m, x, e))  # fmt: skip
