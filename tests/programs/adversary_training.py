"""Adversaries: optimizers, averages, copies of models, and what training code does to them."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from programs.cases import Case, Scope, Table, plain_loss, plain_step, plain_update
from programs.scripts import other_from_fourth, several, tanh

case = Table()


# ---- optimizers


def optimizing(make):
    """Makes the optimizer, which runs outside of the scopes or within the whole step."""

    def start(m, e):
        e.optimizer = make(m)

    def step(m, x, e):
        loss = plain_loss(m, x, e)
        loss.backward()
        e.optimizer.step()
        e.optimizer.zero_grad()
        return loss.detach()

    return dict(forward=tanh, start=start, step=step, update=lambda m, e, i: None)


def adamw(m, **options):
    return torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), fused=True, **options)


def groups(m, e):
    return e.optimizer.param_groups


case("weight decay of a group changes", **optimizing(adamw),
     change=lambda m, e: groups(m, e)[0].update(weight_decay=0.5))  # fmt: skip
case("a learning rate that is a number changes", **optimizing(
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
     change=lambda m, e: groups(m, e)[0].update(lr=0.5))  # fmt: skip
case("a learning rate that is a tensor is filled", **optimizing(adamw),
     change=lambda m, e: groups(m, e)[0]["lr"].fill_(0.5))  # fmt: skip
case("a learning rate that is a tensor is replaced", **optimizing(adamw),
     change=lambda m, e: groups(m, e)[0].update(lr=torch.tensor(0.5)))  # fmt: skip
case("betas change", **optimizing(adamw),
     change=lambda m, e: groups(m, e)[0].update(betas=(0.5, 0.9)))  # fmt: skip
case("maximize is turned on", **optimizing(adamw),
     change=lambda m, e: groups(m, e)[0].update(maximize=True))  # fmt: skip
case("momentum is dropped from the state", **optimizing(
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
     change=lambda m, e: e.optimizer.state.clear())  # fmt: skip
case("a parameter leaves the optimizer", **optimizing(adamw),
     change=lambda m, e: groups(m, e)[0]["params"].pop())  # fmt: skip
case("a group of parameters is added", **optimizing(
    lambda m: torch.optim.AdamW(m.pre.parameters(), lr=torch.tensor(0.01), fused=True)),
     change=lambda m, e: e.optimizer.add_param_group(
         {"params": list(m.sc.parameters())}))  # fmt: skip
case("a step hook of the optimizer is added", **optimizing(adamw),
     change=lambda m, e: e.optimizer.register_step_post_hook(
         lambda *a: m.pre.bias.data.fill_(0.5)))  # fmt: skip
case("the optimizer is replaced by another", **optimizing(adamw),
     change=lambda m, e: setattr(e, "optimizer",
                                 torch.optim.SGD(m.parameters(), lr=0.1)))  # fmt: skip
case("the optimizer's state is loaded", **optimizing(adamw),
     change=lambda m, e: e.optimizer.load_state_dict(
         copy.deepcopy(e.optimizer.state_dict())))  # fmt: skip
case("foreach in the optimizer's step", **optimizing(
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True)))  # fmt: skip
case("Adam counts its steps on the host", **optimizing(
    lambda m: torch.optim.Adam(m.parameters(), lr=0.01)))  # fmt: skip


def _closure_step(m, x, e):
    def closure():
        e.optimizer.zero_grad()
        loss = plain_loss(m, x, e)
        loss.backward()
        return loss

    return e.optimizer.step(closure).detach()


case("LBFGS calls the closure several times", tanh, step=_closure_step,
     start=lambda m, e: setattr(e, "optimizer", torch.optim.LBFGS(m.parameters(), max_iter=3)),
     update=lambda m, e, i: None)  # fmt: skip


def _sharpness_aware(m, x, e):
    """SAM: a second forward and backward at moved weights, which are moved back."""
    plain_loss(m, x, e).backward()
    moves = []
    with torch.no_grad():
        for p in m.parameters():
            moves.append(0.05 * p.grad)
            p.add_(moves[-1])
    m.zero_grad()
    loss = plain_loss(m, x, e)
    loss.backward()
    with torch.no_grad():
        for p, move in zip(m.parameters(), moves, strict=True):
            p.sub_(move)
    return loss.detach()


case("sharpness-aware minimisation", tanh, step=_sharpness_aware)


def _average_start(m, e):
    e.average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _average_update(m, e, i):
    plain_update(m, e, i)
    e.average.update_parameters(m)
    with torch.no_grad():
        e.log.append(e.average.module.sc(torch.ones(2, 4)).clone())


case("an average of the weights runs beside", tanh, start=_average_start, update=_average_update)


def _swap_in_average(m, e, i):
    """Weights of the average are copied in for an evaluation, and out again."""
    plain_update(m, e, i)
    e.average.update_parameters(m)
    kept = [p.detach().clone() for p in m.parameters()]
    with torch.no_grad():
        for p, a in zip(m.parameters(), e.average.module.parameters(), strict=True):
            p.copy_(a)
        e.log.append(m.sc(torch.ones(2, 4)).clone())
        for p, k in zip(m.parameters(), kept, strict=True):
            p.copy_(k)


case("weights of an average are swapped in and out", tanh, start=_average_start,
     update=_swap_in_average)  # fmt: skip


def _scaled(m, x, e):
    scaler = e.scaler
    scaler.scale(plain_loss(m, x, e)).backward()
    scaler.unscale_(e.optimizer)
    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    scaler.step(e.optimizer)
    scaler.update()
    e.optimizer.zero_grad()
    return norm, scaler.get_scale()


def _start_scaler(m, e):
    e.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    e.optimizer = torch.optim.SGD(m.parameters(), lr=0.1)


case("a loss scaler grows", tanh, start=_start_scaler, step=_scaled, update=lambda m, e, i: None)


def _two_players(m, x, e):
    """GAN: the scope is trained on real and detached fakes, then frozen for the other player."""
    for p in m.sc.parameters():
        p.requires_grad_(True)
    (m.sc(x).mean() - m.sc(m.pre(x).detach()).mean()).backward()
    m.pre.zero_grad()
    for p in m.sc.parameters():
        p.requires_grad_(False)
    m.sc(m.pre(x)).mean().backward()
    for p in m.sc.parameters():
        p.requires_grad_(True)


case("two players, one frozen in the other's turn", tanh, step=_two_players)


def _teacher(m, x, e):
    with torch.no_grad():
        target = e.teacher(x)
    loss = (m.sc(m.pre(x)) - target).square().mean()
    loss.backward()
    return loss.detach()


def _update_teacher(m, e, i):
    plain_update(m, e, i)
    with torch.no_grad():
        for t, p in zip(e.teacher.parameters(), m.sc.parameters(), strict=True):
            t.lerp_(p, 0.5)


case("a teacher is a deep copy that follows the scope", tanh, step=_teacher,
     start=lambda m, e: setattr(e, "teacher", copy.deepcopy(m.sc)),
     update=_update_teacher)  # fmt: skip
case("a teacher is copied while the scope is graphed", tanh, step=other_from_fourth(_teacher),
     change=lambda m, e: setattr(e, "teacher", copy.deepcopy(m.sc)))  # fmt: skip


def _copy_trains(m, x, e):
    e.twin.sc(e.twin.pre(x)).square().mean().backward()
    with torch.no_grad():
        for p in e.twin.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    e.log.append(e.twin.sc.l.weight.detach().clone())
    return plain_step(m, x, e)


case("a deep copy of the model trains beside it", tanh, step=other_from_fourth(_copy_trains),
     change=lambda m, e: setattr(e, "twin", copy.deepcopy(m)))  # fmt: skip


def _saved_whole(m, e):
    memory = io.BytesIO()
    torch.save(m.sc, memory)
    memory.seek(0)
    e.log.append(torch.load(memory, weights_only=False)(torch.ones(1, 4)).detach())
    e.log.append(pickle.loads(pickle.dumps(m.sc))(torch.ones(1, 4)).detach())
    e.log.append(sorted(copy.copy(m.sc).state_dict()))


case("the scope is saved, pickled and copied as a whole", change=_saved_whole,
     scope=lambda case: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))  # fmt: skip


def _shallow(m, e):
    twin = copy.copy(m.sc)
    twin.gain = 3.0
    e.log.append(twin(torch.ones(1, 4)).detach())


case("a shallow copy of the scope has other attributes", lambda s, x: s.l(x) * s.gain,
     lambda s: setattr(s, "gain", 1.0), change=_shallow)  # fmt: skip

# ---- modules that move


def _moved(m, e):
    m.other_name = m.sc
    del m._modules["sc"]
    m.__dict__["sc"] = m.other_name


case("the scope gets another name", tanh, change=_moved)
case("the scope is wrapped", tanh, change=lambda m, e: setattr(m, "sc", Wrapped(m.sc)))


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.l = inner.l

    def forward(self, x):
        return self.inner(x) * 3.0


case("the scope is replaced by a copy", tanh,
     change=lambda m, e: setattr(m, "sc", copy.deepcopy(m.sc)))  # fmt: skip
case("the scope is replaced by a new one", tanh,
     change=lambda m, e: setattr(m, "sc", Scope(Case("another", tanh))))  # fmt: skip
case("the scope is called by its forward", tanh, use=lambda m, x: m.sc.forward(m.pre(x)),
     engines=("scopes", "step"))  # fmt: skip
case("the scope is called by its class's forward", tanh, engines=("scopes", "step"),
     use=lambda m, x: type(m.sc).forward(m.sc, m.pre(x)))  # fmt: skip
case("a layer of the scope is also called outside", tanh,
     use=lambda m, x: m.sc(m.pre(x)) + m.sc.l(x))  # fmt: skip
case("a layer of the scope is also called outside, three microbatches", tanh,
     use=lambda m, x: m.sc(m.pre(x)) + m.sc.l(x), step=several(3))  # fmt: skip
