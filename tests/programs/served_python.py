"""Programs whose Python does something in a forward that graphs should serve, and not refuse.

Each program is a case as in ``cases.py``, with the engines in which it is not replayed today:
s: scopes, c: callables, f: whole steps. ``test_served_python.py`` fails if one is different from
eager, and if another engine replays it or does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, weight_norm

from programs.cases import WIDTH, Table

case = Table()
EAGER: dict[str, str] = {}
LOGGER = logging.getLogger("served")
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])
CACHE: dict[int, torch.Tensor] = {}
LAST: list[Any] = [None]


def served(name: str, forward: Callable[..., Any], eager: str = "", **options: Any) -> None:
    case(name, forward, **options)
    EAGER[name] = eager


def has(**values: Callable[[], Any]) -> Callable[[nn.Module], None]:
    """Attributes of the scope's module; tensors among them are plain attributes."""
    return lambda s: s.__dict__.update({name: make() for name, make in values.items()})


def buffer(**values: Callable[[], Any]) -> Callable[[nn.Module], None]:
    def init(s):
        for name, make in values.items():
            s.register_buffer(name, make())

    return init


def scalar() -> torch.Tensor:
    return torch.zeros(())


def row() -> torch.Tensor:
    return torch.zeros(WIDTH)


# ---- an attribute that the forward assigns is an output


def with_aux(m, x, e):
    return e.case.use(m, x).square().mean() + 0.1 * m.sc.aux_loss


def logs(what: Callable[[Any], Any]) -> Callable[..., Any]:
    """Code between steps that reads what the last forward has left."""

    def between(m, e, i):
        if i > 0:
            e.log.append(what(m.sc))

    return between


def aux_loss(s, x):
    h = s.l(x)
    s.aux_loss = h.square().mean()
    return h.relu()


def last(s, x):
    s.last = s.l(x)
    return s.last.relu()


served("an auxiliary loss is left", aux_loss, loss=with_aux, init=has(aux_loss=scalar))
served("an auxiliary loss is left where there was none", aux_loss, loss=with_aux)
served("an auxiliary loss is None before", aux_loss, loss=with_aux,
       init=has(aux_loss=lambda: None))  # fmt: skip
served("an auxiliary loss is left and not used", aux_loss, "c")
served("an auxiliary loss is a buffer", aux_loss, init=buffer(aux_loss=scalar),
       loss=with_aux)  # fmt: skip
served("the hidden state is left", last, "c", between=logs(lambda s: s.last.detach().clone()))
served("the hidden state is left without history", lambda s, x: setattr(s, "last", s.l(x).detach())
       or s.l(x), between=logs(lambda s: s.last))  # fmt: skip
served("the input is left", lambda s, x: setattr(s, "seen", x) or s.l(x),
       between=logs(lambda s: s.seen.detach().clone()))  # fmt: skip
served("several attributes are left", lambda s, x: setattr(s, "a", s.l(x)) or setattr(
    s, "b", s.a.detach().sum(-1)) or s.a,
    loss=lambda m, x, e: m.sc(m.pre(x)).mean() + m.sc.a.square().sum() + m.sc.b.sum())  # fmt: skip
served("a dictionary of tensors is left", lambda s, x: setattr(
    s, "stats", {"mean": x.detach().mean(), "max": x.detach().amax()}) or s.l(x),
    between=logs(lambda s: dict(s.stats)))  # fmt: skip
served("a list of tensors is left", lambda s, x: setattr(s, "hidden", [x, s.l(x)])
       or s.hidden[1],
       loss=lambda m, x, e: m.sc(m.pre(x)).mean() + m.sc.hidden[1].square().mean())  # fmt: skip
served("an entry of a dictionary is left", lambda s, x: s.stats.update(mean=x.detach().mean())
       or s.l(x), init=has(stats=dict),
       between=logs(lambda s: s.stats["mean"]))  # fmt: skip
served("an attribute of a part is left", lambda s, x: setattr(s.l, "norm", x.detach().norm())
       or s.l(x), between=logs(lambda s: s.l.norm))  # fmt: skip
served("a shape is left beside a tensor", lambda s, x: setattr(s, "last", x.mean()) or setattr(
    s, "shape", tuple(x.shape)) or s.l(x), "c", between=logs(lambda s: s.shape))  # fmt: skip
served("a tensor is left in a global list", lambda s, x: LAST.__setitem__(0, x.detach().sum())
       or s.l(x), "scf", start=lambda m, e: LAST.__setitem__(0, None),
       between=logs(lambda s: LAST[0]))  # fmt: skip
served("an attribute is left and taken away outside", aux_loss, loss=with_aux,
       update=lambda m, e, i: (m.zero_grad(), delattr(m.sc, "aux_loss")))  # fmt: skip
served("an attribute is used by the step alone", lambda s, x: s.l(x),
       step=lambda m, x, e: (setattr(m, "loss", e.case.loss(m, x, e)), m.loss.backward(),
                             m.loss.detach())[-1])  # fmt: skip


# ---- caches, plain tensors, globals


def mask_of(cache: Callable[[Any], dict], make: Callable[[int], torch.Tensor]) -> Callable:
    def forward(s, x):
        found, key = cache(s), x.shape[-1]
        if key not in found:
            found[key] = make(key)
        return s.l(x) * found[key]

    return forward


def halves(n: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.0, n)


def lazy(s, x):
    if s.positions is None:
        s.positions = torch.arange(WIDTH, dtype=torch.float32)
    return s.l(x) + s.positions


def grows(s, x):
    if s.table.shape[0] < x.shape[-1]:
        s.table = halves(2 * x.shape[-1])
    return s.l(x) * s.table[: x.shape[-1]]


served("a mask in a dictionary", mask_of(lambda s: s.cache, halves), init=has(cache=dict))
served("a mask in a global dictionary", mask_of(lambda s: CACHE, halves),
       start=lambda m, e: CACHE.clear())  # fmt: skip
served("positions made at the first call", lazy, init=has(positions=lambda: None))
served("a table that grows", grows, init=has(table=lambda: torch.ones(1)))
served("a plain tensor", lambda s, x: s.l(x) * s.scale, init=has(scale=lambda: halves(4)))
served("a plain tensor that is filled between steps", lambda s, x: s.l(x) * s.scale,
       init=has(scale=lambda: halves(4)),
       between=lambda m, e, i: m.sc.scale.fill_(0.1 * i))  # fmt: skip
served("a plain tensor written in place", lambda s, x: s.seen.add_(x.detach().mean()) * s.l(x),
       init=has(seen=scalar))  # fmt: skip
served("a global tensor", lambda s, x: s.l(x) * MASK)
served("a tensor in a list", lambda s, x: s.l(x) * s.scales[1],
       init=has(scales=lambda: [MASK, halves(4)]))  # fmt: skip
served("a tensor in the closure", (lambda scale: lambda s, x: s.l(x) * scale)(halves(4)))
served("a tensor as a default", lambda s, x, scale=MASK: s.l(x) * scale)
served("a buffer that is in no state_dict", lambda s, x: s.l(x) * s.scale,
       init=lambda s: s.register_buffer("scale", halves(4), persistent=False))  # fmt: skip


# ---- counters


def counts(s, x):
    s.calls += 1
    return s.l(x)


def counts_longhand(s, x):
    s.calls = s.calls + 2
    return s.l(x)


def counts_and_asks(s, x):
    s.calls += 1
    return s.l(x) * (2.0 if s.calls % 2 else 1.0)


class Counter:
    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1


served("a counter", counts, init=has(calls=int))
served("a counter of another form", counts_longhand, init=has(calls=int))
served("a counter of a helper object", lambda s, x: s.counter.count() or s.l(x),
       init=has(counter=Counter), between=lambda m, e, i: e.log.append(m.sc.counter.n))  # fmt: skip
served("a counter in a dictionary", lambda s, x: s.n.__setitem__("calls", s.n["calls"] + 1)
       or s.l(x), "scf", init=has(n=lambda: {"calls": 0}))  # fmt: skip
served("a counter that is read", counts_and_asks, "scf", init=has(calls=int))
served("a counter that is reset between steps", counts, init=has(calls=int),
       between=lambda m, e, i: setattr(m.sc, "calls", 0) if i == 5 else None)  # fmt: skip
served(
    "a counter in a buffer", counts, init=buffer(calls=lambda: torch.zeros((), dtype=torch.long))
)
served("a counter in a plain tensor", counts,
       init=has(calls=lambda: torch.zeros((), dtype=torch.long)))  # fmt: skip
served("a counter in a buffer is read", lambda s, x: counts(s, x) / s.calls,
       init=buffer(calls=scalar))  # fmt: skip
served("a buffer is assigned one more", counts_longhand,
       init=buffer(calls=lambda: torch.zeros((), dtype=torch.long)))  # fmt: skip


# ---- averages


def average(s, x):
    s.ema = s.ema.mul(0.9).add(x.detach().mean(0), alpha=0.1)
    return s.l(x) + s.ema


def average_in_place(s, x):
    s.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return s.l(x) + s.ema


def average_under_no_grad(s, x):
    h = s.l(x - s.ema)
    with torch.no_grad():
        s.ema = 0.9 * s.ema + 0.1 * h.mean(0)
    return h


served("an average buffer is assigned", average, init=buffer(ema=row))
served("an average attribute is assigned", average, init=has(ema=row))
served("an average buffer is changed in place", average_in_place, init=buffer(ema=row))
served("an average attribute is changed in place", average_in_place, init=has(ema=row))
served("an average is assigned under no_grad", average_under_no_grad, init=buffer(ema=row))
served("the last state goes into the next", lambda s, x: setattr(
    s, "state", torch.tanh(s.l(x) + s.state).detach()) or s.l(x) * s.state,
    init=has(state=lambda: torch.zeros(3, WIDTH)))  # fmt: skip
served("an average is read outside", average, init=buffer(ema=row),
       between=logs(lambda s: s.ema))  # fmt: skip
served("an average is replaced between steps", average, init=buffer(ema=row),
       between=lambda m, e, i: setattr(m.sc, "ema", row()) if i == 5 else None)  # fmt: skip


# ---- autocast with its cache


def autocast(m, e, i):
    return torch.autocast("cpu", torch.bfloat16)


def twice(s, x):
    return s.l(s.l(x))


def autocast_within(m, x, e):
    with torch.autocast("cpu", torch.bfloat16):
        return e.case.use(m, x).float().square().mean()


served("autocast around the step", lambda s, x: s.l(x), "cf", around=autocast)
served("autocast around the step, a weight used twice", twice, "cf", around=autocast)
served("autocast around the step, an input used twice", lambda s, x: s.l(x) * s.l(x + 1) + x,
       "cf", around=autocast)  # fmt: skip
served("autocast around the forward", lambda s, x: s.l(x), "c", loss=autocast_within)
served("autocast around the forward, a weight used twice", twice, "c", loss=autocast_within)
served("autocast around the forward, a weight used outside, too", lambda s, x: s.l(x), "sc",
       use=lambda m, x: m.sc(m.pre(x)) + functional.linear(x, m.sc.l.weight),
       loss=autocast_within)  # fmt: skip


# ---- checks


def asserts(s, x):
    h = s.l(x)
    assert not h.isnan().any()
    return h


def raises(s, x):
    h = s.l(x)
    if h.isnan().any():
        raise ValueError("not a number")
    return h


def asserts_with_a_message(s, x):
    assert torch.isfinite(x).all(), f"not finite: {x}"
    return s.l(x)


def returns_early(s, x):
    if x.isnan().any():
        return x
    return s.l(x)


served("an assertion", asserts)
served("an assertion with a message", asserts_with_a_message)
served("a check that raises", raises)
served("a branch on a value", returns_early, "scf")


# ---- distributions


def sample(s, x):
    mean = s.l(x)
    return torch.distributions.Normal(mean, torch.ones_like(mean)).rsample()


def log_probability(s, x):
    return torch.distributions.Normal(s.l(x), 1.0).log_prob(x.detach())


def divergence(s, x):
    ours = torch.distributions.Normal(s.l(x), torch.ones_like(x))
    return torch.distributions.kl_divergence(ours, torch.distributions.Normal(0.0, 1.0))


def categorical(s, x):
    found = torch.distributions.Categorical(logits=s.l(x))
    return found.logits * found.entropy().unsqueeze(-1)


served("a normal distribution", sample)
served("a density", log_probability)
served("a divergence", divergence)
served("a categorical distribution", categorical)


# ---- layers of torch


def batch_norm(s):
    s.norm = nn.BatchNorm1d(WIDTH, momentum=None)


def normed(s):
    s.l = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def spectral(s):
    s.l = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def old_norm(s):
    s.l = weight_norm(nn.Linear(WIDTH, WIDTH))


def pruned(s):
    prune.l1_unstructured(s.l, "weight", 0.5)


served("batch norm without momentum", lambda s, x: s.norm(s.l(x)), "scf", init=batch_norm)
served("weight norm by parametrization", lambda s, x: s.l(x), init=normed)
served("spectral norm by parametrization", lambda s, x: s.l(x), init=spectral)
served("weight norm by a hook", lambda s, x: s.l(x), "c", init=old_norm)
served("pruning by a hook", lambda s, x: s.l(x), "c", init=pruned)


# ---- clocks and logs


def timed(s, x):
    began = time.perf_counter()
    h = s.l(x)
    s.seconds = round(0.0 * (time.perf_counter() - began), 1)
    return h


def logged(s, x):
    h = s.l(x)
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("mean %s", h.mean().item())
    return h


served("a clock", timed, "scf", init=has(seconds=float))
served("a logger that is asked", logged)
served("a logger that logs nothing", lambda s, x: LOGGER.debug("called") or s.l(x))
