"""Adversaries: changes after the warm-up has looked into a call, and before its capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from programs.cases import Table, plain_loss
from programs.scripts import log, tanh

case = Table()
SEEN: list[int] = []
SECOND, CAPTURE = 1, 2  # steps


def begins(name: str, forward: Callable[..., Any], change: Callable[..., None], **options) -> None:
    """Cases that call ``change(m, e)`` after the first warm-up step, or before the capture."""
    for when, at in (("in the warm-up", SECOND), ("at the capture", CAPTURE)):

        def between(m, e, i, at=at):
            if i == at:
                change(m, e)
            e.log += [len(SEEN), getattr(m.sc, "n", 0)]

        options = {"start": lambda m, e: SEEN.clear()} | options
        case(f"{name} {when}", forward, between=between, **options)


# ---- hooks

begins("a forward hook notes what it sees", tanh,
       lambda m, e: m.sc.l.register_forward_hook(lambda s, args, out: log(e, out)))  # fmt: skip
begins("a hook before the forward notes what it sees", tanh,
       lambda m, e: m.sc.l.register_forward_pre_hook(lambda s, args: log(e, *args)))  # fmt: skip
begins("a forward hook halves", tanh,
       lambda m, e: m.sc.l.register_forward_hook(lambda s, args, out: out * 0.5))  # fmt: skip
begins("a backward hook notes what it sees", tanh,
       lambda m, e: m.sc.l.register_full_backward_hook(lambda s, i, o: log(e, *o)))  # fmt: skip
begins("a hook before the backward halves", tanh,
       lambda m, e: m.sc.l.register_full_backward_pre_hook(
           lambda s, o: (o[0] * 0.5,)))  # fmt: skip
begins("a hook of the scope itself notes what it sees", tanh,
       lambda m, e: m.sc.register_forward_hook(lambda s, args, out: log(e, out)))  # fmt: skip


def _hooked_parameter(m, e):
    m.sc.l.weight.register_hook(lambda gradient: log(e, gradient))


begins("a hook on a parameter notes what it sees", tanh, _hooked_parameter)


# ---- state


def _on(m, e):
    m.sc.on = True


def off(s):
    s.on, s.n = False, 0


def _counts(s, x):
    if s.on:
        s.n += 1
    return torch.tanh(s.l(x)) * (1.0 + s.n)


def _grows(s, x):
    if s.on:
        SEEN.append(1)
    return torch.tanh(s.l(x))


def _draws(s, x):
    return torch.tanh(s.l(x)) * (random.random() if s.on else 1.0)


def _reads(s, x):
    y = torch.tanh(s.l(x))
    if s.on:
        SEEN.append(1)
        y = y / (1.0 + y.detach().abs().sum().item())
    return y


def _raises(s, x):
    if s.on:
        s.on, s.n = False, s.n + 1
        SEEN.append(1)
        raise ZeroDivisionError("once")
    return torch.tanh(s.l(x))


begins("a counter", _counts, _on, init=off)
begins("a list grows", _grows, _on, init=off)
begins("Python's numbers are drawn", _draws, _on, init=off)
begins("a value is read on the host", _reads, _on, init=off)
begins("an exception", _raises, _on, init=off)


class Doubled(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        SEEN.append(1)
        return x * 2.0


def _inside(s, x):
    return torch.tanh(s.l(x) if s.inside is None else s.inside(s.l(x)))


def nothing_inside(s):
    s.inside = None


def _growing(x):
    SEEN.append(1)
    return x * 2.0


begins("a function that lets a list grow", _inside,
       lambda m, e: setattr(m.sc, "inside", _growing), init=nothing_inside)  # fmt: skip
begins("a module that counts", _inside,
       lambda m, e: setattr(m.sc, "inside", Doubled()), init=nothing_inside)  # fmt: skip


class Backward(torch.autograd.Function):
    """Function whose backward appends to a list, from the step on at which a flag is set."""

    flag = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Backward.flag:
            SEEN.append(1)
        return gradient * (1.0 + len(SEEN))


def _down(m, e):
    SEEN.clear()
    Backward.flag = False


begins("a backward lets a list grow", lambda s, x: Backward.apply(s.l(x)),
       lambda m, e: setattr(Backward, "flag", True), start=_down)  # fmt: skip


def _flag_before_backward(m, x, e):
    loss = plain_loss(m, x, e)
    Backward.flag |= e.i == CAPTURE
    loss.backward()
    e.log.append(len(SEEN))


case("a backward lets a list grow from the capture's on", lambda s, x: Backward.apply(s.l(x)),
     start=_down, step=_flag_before_backward)  # fmt: skip


def _hook_before_backward(m, x, e):
    loss = plain_loss(m, x, e)
    if e.i == CAPTURE:
        m.sc.l.register_full_backward_hook(lambda s, i, o: log(e, *o))
        m.sc.l.weight.register_hook(lambda gradient: log(e, gradient))
    loss.backward()


case("hooks come between the capture's forward and its backward", tanh,
     step=_hook_before_backward)  # fmt: skip
