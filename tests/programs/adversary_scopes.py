"""Adversaries: scopes called at odd times, in odd orders, or changed by other code."""

from __future__ import annotations

import contextlib
import copy

import torch

import moe_graphs
from programs.cases import Case, Scope, Table, plain_loss, plain_step
from programs.scripts import released_between, tanh

case = Table()


# ---- calls of scopes


def scopes(name, step=plain_step, **options):
    forward = options.pop("forward", tanh)
    case(name, forward, step=step, **({"engines": ("scopes", "callables")} | options))


def second_scope(m, e):
    m.sc2 = Scope(Case("second", tanh))


def with_second(name, loss, **options):
    case(name, tanh, loss=loss, start=second_scope, engines=("scopes",), **options)


with_second("two scopes change their order", lambda m, x, e: (
    m.sc2(m.sc(m.pre(x))) if not e.late else m.sc(m.sc2(m.pre(x)))).mean())  # fmt: skip
with_second("the second scope is left out", lambda m, x, e: (
    m.sc2(m.sc(m.pre(x))) if not e.late else m.sc(m.pre(x))).mean())  # fmt: skip
with_second("the first scope is left out", lambda m, x, e: (
    m.sc2(m.sc(m.pre(x))) if not e.late else m.sc2(m.pre(x))).mean())  # fmt: skip
with_second("two scopes on one input", lambda m, x, e: (
    lambda h: (m.sc(h) * m.sc2(h)).mean() + h.mean())(m.pre(x)))  # fmt: skip
with_second("the first scope's output goes to the second and to the loss", lambda m, x, e: (
    lambda h: (m.sc2(h) + h).mean() + h.detach().mean())(m.sc(m.pre(x))))  # fmt: skip
with_second("only the second scope gets gradients", lambda m, x, e: (
    m.sc2(m.sc(m.pre(x)).detach() if e.late else m.sc(m.pre(x)))).mean())  # fmt: skip
with_second("a residual around both scopes", lambda m, x, e: (
    lambda h: (h + m.sc2(h + m.sc(h))).square().mean())(m.pre(x)))  # fmt: skip
with_second("the second scope runs on what is kept of the first", lambda m, x, e: (
    e.kept.append(m.sc(m.pre(x))), m.sc2(e.kept[-1] + e.kept[0].detach()).mean())[1])  # fmt: skip


def third_scope(m, e):
    second_scope(m, e)
    m.sc3 = Scope(Case("third", tanh))
    m.sc.l.requires_grad_(False)


case("a frozen scope's output goes to two scopes, to the first of them changed", tanh,
     loss=lambda m, x, e: (lambda h: (m.sc2(h * 2.0 if e.late else h) * m.sc3(h)).mean())(
         m.sc(m.pre(x).detach())), start=third_scope, engines=("scopes",))  # fmt: skip
case("a frozen scope's output goes to two scopes, to the second of them changed", tanh,
     loss=lambda m, x, e: (lambda h: (m.sc2(h) * m.sc3(h * 2.0 if e.late else h)).mean())(
         m.sc(m.pre(x).detach())), start=third_scope, engines=("scopes",))  # fmt: skip


def share(m, e):
    second_scope(m, e)
    m.sc2.l = m.sc.l


case("two scopes share a layer, two microbatches", tanh, start=share, engines=("scopes",),
     step=lambda m, x, e: [(m.sc2(m.sc(m.pre(x + n)))).mean().backward()
                           for n in range(2)] and None)  # fmt: skip


def schedule(before, after):
    def step(m, x, e):
        waiting = {}
        for action in (before if not e.late else after).split():
            if action[0] == "F":
                waiting[action[1]] = plain_loss(m, x * (1 + int(action[1])), e)
            elif action[0] == "B":
                waiting.pop(action[1]).backward()
            else:  # S01: both in one backward
                (waiting.pop(action[1]) + waiting.pop(action[2])).backward()

    return step


SCHEDULES = {
    "more in flight than observed": ("F0 B0 F1 B1", "F0 F1 F2 B0 B1 B2"),
    "two in flight, later the other way round": ("F0 F1 B0 B1", "F0 F1 B1 B0"),
    "two in flight, later in one backward": ("F0 F1 B0 B1", "F0 F1 S01"),
    "in one backward, later one by one": ("F0 F1 S01", "F0 B0 F1 B1"),
    "fewer than observed": ("F0 F1 F2 B0 B1 B2", "F0 B0"),
    "a backward that never comes": ("F0 F1 B0 B1", "F0 F1 B1"),
    "an abandoned forward first": ("F0 B0 F1 B1", "F0 F1 F2 B2 B1"),
    "none at all": ("F0 B0", ""),
    "1F1B": ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 B0 F2 F3 B3 B1 B2"),
}
for _name, _schedule in SCHEDULES.items():
    scopes(f"microbatches: {_name}", schedule(*_schedule))


def _later(m, x, e):
    loss = plain_loss(m, x, e)
    e.waiting, before = loss, getattr(e, "waiting", None)
    (before if e.late else loss).backward(retain_graph=e.i == 3)


scopes("the backward of the step before", _later, forward=lambda s, x: x + s.l.bias)


def _recursion(s, x, depth=1):
    return torch.tanh(s.l(s(x, depth=depth - 1) if depth else x))


scopes("a scope that calls itself", forward=_recursion)


def _interrupted(m, x, e):
    if e.late:
        with contextlib.suppress(ZeroDivisionError):
            plain_loss(m, x, e)
            raise ZeroDivisionError
    return plain_step(m, x, e)


scopes("an exception that the step itself catches", _interrupted)


class Interrupts(BaseException):
    pass


def _raises_inside(s, x):
    if s.stop:
        s.stop = False
        raise Interrupts
    return s.l(x)


def _catches(m, x, e):
    try:
        return plain_step(m, x, e)
    except Interrupts:
        return plain_step(m, x, e)


case("a keyboard interrupt in the forward", _raises_inside, lambda s: setattr(s, "stop", False),
     step=_catches, change=lambda m, e: setattr(m.sc, "stop", True))  # fmt: skip


def _paused(m, x, e):
    if not e.late or not isinstance(e.graphs, moe_graphs.Graphs):
        return plain_step(m, x, e)
    with e.graphs.paused():
        loss = plain_loss(m, x, e)
    loss.backward()
    return loss.detach()


scopes("paused around the forward alone", _paused)
scopes("released between forward and backward", released_between)


def _graphed_twin(m, e):
    e.twin = copy.deepcopy(m)
    if isinstance(e.graphs, moe_graphs.Graphs):
        e.twin_graphs = moe_graphs.graph(e.twin, moe_graphs.GraphConfig("sc*", warmup_steps=1))


def _train_twin(m, x, e):
    if hasattr(e, "twin"):
        graphs = getattr(e, "twin_graphs", None)
        with graphs.step() if graphs else contextlib.nullcontext():
            loss = e.twin.sc(e.twin.pre(x)).mean()
            loss.backward()
        e.log.append(e.twin.sc.l.weight.grad.clone())
    return plain_step(m, x, e)


scopes("a deep copy of the model is graphed, too", _train_twin, change=_graphed_twin)


def _wrap_forward(m, e):
    inner = m.sc.forward
    m.sc.forward = lambda x: inner(x) * 3.0


scopes("another tool patches forward over the graphs", change=_wrap_forward)
scopes("another tool deletes the patched forward",
       change=lambda m, e: m.sc.__dict__.pop("forward", None))  # fmt: skip
scopes("every step has another shape",
       batch=lambda g, i: torch.randn(2 + i % 3, 4, generator=g))  # fmt: skip
scopes("the last warm-up step has another shape",
       batch=lambda g, i: torch.randn(1 if i == 1 else 3, 4, generator=g))  # fmt: skip


def _features(m, x, e):
    """The loss contrasts the output with another microbatch's, as a memory bank does."""
    y = m.sc(m.pre(x))
    bank = torch.cat([*e.kept[-3:], y])
    e.kept.append(y.detach())
    loss = (y @ bank.t()).logsumexp(1).mean()
    loss.backward()
    return loss.detach()


scopes("a bank of the last outputs", _features)


def _no_grad_first(m, x, e):
    with torch.no_grad():
        h = m.sc(m.pre(x))
    y = m.sc(m.pre(x + h))
    y.mean().backward()
    return h.clone()


scopes("a call without gradients feeds a call with them", _no_grad_first)


def _only_loss_kept(m, x, e):
    losses = [plain_loss(m, x * n, e) for n in range(3)]
    del x
    torch.stack(losses).sum().backward()


scopes("three forwards, one backward of a stack", _only_loss_kept)


def _chained(m, x, e):
    """One scope three times in a row, with a loss on each."""
    h, total = m.pre(x), 0.0
    for _ in range(3 if not e.late else 2):
        h = m.sc(h)
        total = total + h.square().mean()
    total.backward()
    return total.detach()


scopes("one scope in a chain that becomes shorter", _chained)
