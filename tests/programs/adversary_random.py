"""Adversaries: random numbers, threads and contexts of Python."""

from __future__ import annotations

import contextvars
import random
import threading

import numpy as np
import torch
from torch.nn import functional

from programs.cases import Table, plain_loss
from programs.scripts import tanh, without_value

case = Table()


# ---- random numbers


def dropped(s, x):
    return functional.dropout(s.l(x), 0.5)


def _forked(m, x, e):
    with torch.random.fork_rng():
        y = m.sc(m.pre(x))
    y.square().mean().backward()
    return y.detach(), torch.rand(1)


case("fork_rng around the call", dropped, step=_forked)


def _forks_inside(s, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y = functional.dropout(s.l(x), 0.5)
    return functional.dropout(y, 0.5)


case("fork_rng and a seed inside", _forks_inside)
case("a seed before every call", dropped,
     step=lambda m, x, e: (torch.manual_seed(e.i), plain_loss(m, x, e).backward())[1])  # fmt: skip


def _same_numbers_twice(m, x, e):
    """Reversible layers, for whose second forward the random state is put back."""
    h = m.pre(x)
    state = torch.get_rng_state()
    y = m.sc(h)
    torch.set_rng_state(state)
    z = m.sc(h)
    (y * z).mean().backward()
    return torch.equal(y, z), torch.rand(1)


case("the random state is put back between two calls", dropped, step=_same_numbers_twice)


def _remembers_state(s, x):
    s.state = torch.get_rng_state()
    return functional.dropout(s.l(x), 0.5)


case("the forward remembers the random state", _remembers_state,
     update=lambda m, e, i: e.kept.append(m.sc.state) or m.zero_grad())  # fmt: skip
case("the forward asks for the seed", lambda s, x: s.l(x) * (torch.initial_seed() % 7),
     between=lambda m, e, i: torch.manual_seed(i))  # fmt: skip
GENERATORS = {"own": torch.Generator()}
case("a generator of the script is replaced",
     lambda s, x: s.l(x) * torch.rand(4, generator=GENERATORS["own"]),
     start=lambda m, e: GENERATORS.update(own=torch.Generator().manual_seed(1)),
     change=lambda m, e: GENERATORS.update(own=torch.Generator().manual_seed(2)))  # fmt: skip
case("Python's, numpy's and torch's numbers in one forward",
     lambda s, x: dropped(s, x) * random.random() * float(np.random.rand()))  # fmt: skip
case("a random permutation", lambda s, x: s.l(x)[torch.randperm(3)])
case("random numbers in the backward", lambda s, x: NoisyBackward.apply(s.l(x)))


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.randn(gradient.shape) * 0.1


def _two_forwards_two_backwards(m, x, e):
    first, second = plain_loss(m, x, e), plain_loss(m, x + 1.0, e)
    first.backward()
    torch.rand(1)
    second.backward()


case("random numbers in backwards of two microbatches",
     lambda s, x: NoisyBackward.apply(dropped(s, x)), step=_two_forwards_two_backwards)  # fmt: skip

# ---- threads and contexts of Python


def _in_thread(m, x, e):
    if not e.late:
        return without_value(m, x, e)
    thread = threading.Thread(target=without_value, args=(m, x, e))
    thread.start()
    thread.join()


case("a whole step in a thread of its own", tanh, step=_in_thread)


def _in_copied_context(m, x, e):
    contextvars.copy_context().run(without_value, m, x, e)


case("a step in a copied context", tanh, step=_in_copied_context)


def _in_generator(m, x, e):
    """The forward runs in a generator that is suspended before the backward."""

    def stages():
        yield plain_loss(m, x, e)

    for loss in stages():
        loss.backward()


case("a step within a generator", tanh, step=_in_generator)


def _two_threads(m, x, e):
    """Two microbatches at once; the script makes them wait for each other."""
    order, first_done = [], threading.Event()

    def first():
        order.append(plain_loss(m, x, e))
        first_done.set()

    def second():
        first_done.wait()
        order.append(plain_loss(m, x + 1.0, e))

    threads = [threading.Thread(target=second), threading.Thread(target=first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loss in order:
        loss.backward()
    return [loss.detach() for loss in order]


case("two threads run one microbatch each", tanh, step=_two_threads)
