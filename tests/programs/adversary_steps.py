"""Adversaries: step functions, their batches and what happens between them."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from programs.cases import Table, plain_loss, plain_step, plain_update
from programs.scripts import tanh

case = Table()


# ---- step functions


def steps(name, step=plain_step, **options):
    case(name, tanh, step=step, engines=("step",), **options)


def batches(make):
    return lambda generator, i: make(torch.randn(3, 4, generator=generator), i)


def of(key):
    return lambda m, b, e: (loss := plain_loss(m, b[key], e), loss.backward())[0].detach()


def _mutates(m, b, e):
    b["seen"] = b.get("seen", 0) + 1
    return of("x")(m, b, e), b["seen"]


steps("the step writes into its batch", _mutates, batch=batches(lambda x, i: {"x": x}),
      between=lambda m, e, i: None)  # fmt: skip


class Reused:
    """One dictionary serves for all batches, as in some loaders."""

    batch: dict[str, Any] | None = None


def _reused_batch(x, i):
    if i == 0:
        Reused.batch = {"x": x.clone(), "scale": 1.0}
    Reused.batch["x"].copy_(x)
    Reused.batch["scale"] = 1.0 if i < 4 else 3.0
    return Reused.batch


steps("one batch object whose number changes", lambda m, b, e: (
    loss := plain_loss(m, b["x"], e) * b["scale"], loss.backward())[0].detach(),
      batch=batches(_reused_batch))  # fmt: skip
steps("a string in the batch changes", lambda m, b, e: (
    loss := plain_loss(m, b["x"], e) * len(b["name"]), loss.backward())[0].detach(),
      batch=batches(lambda x, i: {"x": x, "name": "a" * (1 + i // 4)}))  # fmt: skip
steps("None in the batch becomes a tensor", lambda m, b, e: (
    loss := (m.sc(m.pre(b["x"])) * (1.0 if b["mask"] is None else b["mask"])).mean(),
    loss.backward())[0].detach(),
      batch=batches(lambda x, i: {"x": x, "mask": None if i < 4 else x}))  # fmt: skip
steps("two entries of the batch are one tensor, later two", lambda m, b, e: (
    loss := plain_loss(m, b[0], e) * (3.0 if b[0] is b[1] else 1.0), loss.backward())[0].detach(),
      batch=batches(lambda x, i: (x, x if i < 4 else x.clone())))  # fmt: skip


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    scale: float = 1.0


steps("the batch is a NamedTuple", lambda m, b, e: (
    loss := (m.sc(m.pre(b.x)) * b.y).mean(), loss.backward())[0].detach(),
      batch=batches(lambda x, i: Pair(x, x + 1.0)))  # fmt: skip
steps("the batch is a plain dataclass", lambda m, b, e: (
    loss := plain_loss(m, b.x, e) * b.scale, loss.backward())[0].detach(),
      batch=batches(lambda x, i: Record(x)))  # fmt: skip
steps("the batch is a UserDict", of("x"), batch=batches(lambda x, i: UserDict(x=x)))
steps("the batch is a SimpleNamespace", lambda m, b, e: plain_loss(m, b.x, e).backward(),
      batch=batches(lambda x, i: SimpleNamespace(x=x)))  # fmt: skip
steps("the batch is a numpy array", lambda m, b, e: plain_loss(
    m, torch.from_numpy(b), e).backward(), batch=batches(lambda x, i: x.numpy()))  # fmt: skip
steps("the batch is expanded", batch=batches(lambda x, i: x[:1].expand(3, 4)))
steps("the batch overlaps itself", batch=batches(lambda x, i: x.flatten().unfold(0, 4, 2)))
steps("the batch is a list that grows", lambda m, b, e: [
    (loss := plain_loss(m, x, e), loss.backward())[0].detach() for x in b],
      batch=batches(lambda x, i: [x] * (1 if i < 4 else 3)))  # fmt: skip


def _toggles(m, x, e):
    m.eval()
    with torch.no_grad():
        value = m.sc(m.pre(x)).mean()
    m.train()
    plain_loss(m, x, e).backward()
    return value


steps("the step evaluates first, in eval mode", _toggles)
steps("the step leaves the model in another mode", lambda m, x, e: (
    plain_step(m, x, e), m.train(not m.training))[0],
      update=lambda m, e, i: e.log.append(m.training) or plain_update(m, e, i))  # fmt: skip


class Trainer:
    def __init__(self):
        self.factor, self.history = 1.0, []

    def loss(self, m, x, e):
        return plain_loss(m, x, e) * self.factor


steps("a method of a trainer, whose factor changes", loss=lambda m, x, e: (
    m.sc(m.pre(x)).mean() * e.trainer.factor),
      start=lambda m, e: setattr(e, "trainer", Trainer()),
      change=lambda m, e: setattr(e.trainer, "factor", 3.0))  # fmt: skip


def _writes_history(m, x, e):
    loss = e.trainer.loss(m, x, e)
    loss.backward()
    e.trainer.history.append(loss.detach())
    return torch.stack(e.trainer.history[-2:]).mean()


steps("a method of a trainer keeps a history of losses", _writes_history,
      start=lambda m, e: setattr(e, "trainer", Trainer()))  # fmt: skip


def _cycles(m, x, e):
    e.n = getattr(e, "n", 0) + 1
    layer = (m.pre, m.sc.l)[e.n % 2]
    loss = plain_loss(m, x, e) + layer.weight.square().sum()
    loss.backward()
    return loss.detach()


steps("the step regularises layers in turn", _cycles)


def _keeps_best(m, x, e):
    """Early stopping by a Python comparison on the host."""
    loss = plain_loss(m, x, e)
    loss.backward()
    if loss.item() < getattr(e, "best", 1e9):
        e.best = loss.item()
    return loss.detach(), e.best


steps("the step keeps the best loss", _keeps_best)
steps("gradients add up over two calls", update=lambda m, e, i: i % 2 and plain_update(m, e, i))
steps("gradients add up for ever", update=lambda m, e, i: None)
steps("gradients are clamped outside", update=lambda m, e, i: (
    [setattr(p, "grad", p.grad.clamp(-0.01, 0.01)) for p in m.parameters()],
    plain_update(m, e, i)))  # fmt: skip
steps("gradients are zeroed in place outside", update=lambda m, e, i: (
    plain_update(m, e, i),
    [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()]))  # fmt: skip
steps("one gradient is dropped at the fourth step", update=lambda m, e, i: None,
      change=lambda m, e: setattr(m.sc.l.weight, "grad", None))  # fmt: skip
steps("one gradient is replaced at the fourth step", update=lambda m, e, i: None,
      change=lambda m, e: setattr(m.sc.l.weight, "grad", torch.ones(4, 4)))  # fmt: skip


def _hooks_within(m, x, e):
    y = m.sc(m.pre(x))
    handle = m.sc.l.weight.register_hook(lambda g: g * 3.0)
    y.mean().backward()
    handle.remove()


steps("the step registers a hook and removes it", _hooks_within)


def _control_by_exception(m, x, e):
    try:
        if e.stop:
            raise ZeroDivisionError
        loss = plain_loss(m, x, e)
    except ZeroDivisionError:
        loss = m.pre(x).mean()
    loss.backward()
    return loss.detach()


steps("the step catches its own exception, by a flag", _control_by_exception,
      start=lambda m, e: setattr(e, "stop", False),
      change=lambda m, e: setattr(e, "stop", True))  # fmt: skip
steps("called under no_grad later", lambda m, x, e: plain_loss(m, x, e).detach(),
      around=lambda m, e, i: torch.set_grad_enabled(i < 4))  # fmt: skip
steps("called under inference mode later", lambda m, x, e: plain_loss(m, x, e).detach(),
      around=lambda m, e, i: torch.inference_mode(i >= 4))  # fmt: skip


def _average_inside(m, x, e):
    plain_step(m, x, e)
    with torch.no_grad():
        e.average.lerp_(m.sc.l.weight, 0.1)
    return e.average


steps("an average in a tensor that nobody declared", _average_inside,
      start=lambda m, e: setattr(e, "average", torch.zeros(4, 4)))  # fmt: skip
AVERAGE = torch.zeros(4, 4)


def _declared(m, x, e):
    plain_step(m, x, e)
    with torch.no_grad():
        AVERAGE.lerp_(m.sc.l.weight, 0.1)
    return AVERAGE.clone()


steps("an average that is declared as state", _declared, start=lambda m, e: AVERAGE.zero_(),
      options={"state": [AVERAGE]})  # fmt: skip


def _schedule_inside(m, x, e):
    plain_step(m, x, e)
    e.optimizer.step()
    e.scheduler.step()


def _start_schedule(m, e):
    e.optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    e.scheduler = torch.optim.lr_scheduler.ExponentialLR(e.optimizer, 0.5)


steps("the step steps its scheduler", _schedule_inside, start=_start_schedule,
      update=lambda m, e, i: m.zero_grad())  # fmt: skip
steps("the step trains another module at times", lambda m, x, e: (
    e.other(x) if e.late else m.sc(m.pre(x))).mean().backward(),
      start=lambda m, e: setattr(e, "other", m.pre))  # fmt: skip


def _result_changed(m, x, e):
    loss = plain_loss(m, x, e)
    loss.backward()
    return {"loss": loss.detach(), "x": x, "weight": m.sc.l.weight.detach()}


def _change_results(m, e, i):
    plain_update(m, e, i)
    e.log.append(m.sc.l.weight.detach().sum())


steps("the step returns its batch and a weight", _result_changed, update=_change_results)
