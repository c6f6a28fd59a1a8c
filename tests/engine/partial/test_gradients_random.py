"""Random programs of everything that is done to gradients, graphed and eagerly.

The bits are the same after every action, while the memory that graphs may write is poisoned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moe_graphs
from moe_graphs import GraphConfig
from poisoned_gradients import poison
from two_scopes import WIDTH, Model, scopes, train_step, update


class Session:
    """One model, and everything that a program keeps. ``values`` has it all, after every action."""

    def __init__(self, config: GraphConfig, model: str, begins: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[model]()
        self.graphs = moe_graphs.graph(self.model, config)
        for _ in range(3):
            getattr(self, f"step_{begins}")()
        self.parameters = list(self.model.parameters())
        self.kept: list[Tensor] = []
        self.hooks: list = []
        self.nodes: list = []
        self.open: contextlib.ExitStack | None = None
        self.values: list[Tensor] = []

    # how the warm-up steps are

    def step_plain(self) -> None:
        train_step(self.model, self.graphs, torch.randn(4, WIDTH))

    def step_accumulating(self) -> None:
        self.model.zero_grad()
        with self.graphs.step():
            for _ in range(2):
                self.model(torch.randn(4, WIDTH)).square().mean().backward()
        update(self.model)

    # what a program does

    def run(self, program: list[tuple[str, int]]) -> list[Tensor]:
        for action, number in program:
            parameter = self.parameters[number % len(self.parameters)]
            ACTIONS[action](self, parameter)
            self.note()
        self.close()
        self.note()
        return self.values

    def note(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.values += [t.detach().clone() for t in (*self.parameters, *gradients, *self.kept)]

    def loss(self) -> Tensor:
        return self.model(torch.randn(4, WIDTH)).square().mean()

    @contextlib.contextmanager
    def in_step(self):
        if self.open is not None:
            yield
        else:
            with self.graphs.step():
                yield

    def close(self) -> None:
        if self.open is not None:
            self.open.close()
            self.open = None


class Tied(Model):
    """A model with a weight of two scopes."""

    def __init__(self) -> None:
        super().__init__()
        self.second.linear.weight = self.first.linear.weight


class TiedOutside(Model):
    """A model with a weight of a scope and of eager code, and one used twice in a scope."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.first.linear.weight
        self.second.inside = lambda x: x + nn.functional.linear(x, self.second.linear.weight)
        self.head = weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.head


class Shifted(Model):
    """A weight of an input's shape: its gradient lies on memory of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first.shift = nn.Parameter(torch.randn(4, WIDTH))
        self.first.inside = lambda x: x + self.first.shift


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Model, "tied": Tied, "tied outside": TiedOutside, "shifted": Shifted,
}  # fmt: skip
ACTIONS: dict[str, Callable[[Session, Tensor], object]] = {}


def action(function: Callable[[Session, Tensor], object]) -> Callable:
    ACTIONS[function.__name__] = function
    return function


@action
def backward(s, p):
    with s.in_step():
        s.loss().backward()


@action
def penalty(s, p):
    """Adds a gradient from elsewhere to the same backward."""
    with s.in_step():
        (s.loss() + 0.1 * p.square().sum()).backward()


@action
def zero_between(s, p):
    with s.in_step():
        loss = s.loss()
        s.model.zero_grad()
        loss.backward()


@action
def two_in_flight(s, p):
    with s.in_step():
        losses = [s.loss(), s.loss()]
        losses[0].backward(retain_graph=True)
        losses[1].backward()


@action
def forward_alone(s, p):
    with s.in_step():
        s.loss()


@action
def only_one_weight(s, p):
    with s.in_step():
        s.loss().backward(inputs=[p])


@action
def asked_for(s, p):
    with s.in_step():
        s.kept += torch.autograd.grad(s.loss(), s.parameters)


@action
def begin_step(s, p):
    s.close()
    s.open = contextlib.ExitStack()
    s.open.enter_context(s.graphs.step())


@action
def end_step(s, p):
    s.close()


@action
def zero(s, p):
    s.model.zero_grad()


@action
def zero_in_place(s, p):
    s.model.zero_grad(set_to_none=False)


@action
def zero_one(s, p):
    p.grad = None


@action
def sgd(s, p):
    update(s.model)


@action
def clip(s, p):
    nn.utils.clip_grad_norm_(s.parameters, 0.1)


@action
def scale(s, p):
    if p.grad is not None:
        p.grad.mul_(0.5)


@action
def keep(s, p):
    s.kept += [p.grad] if p.grad is not None else []


@action
def keep_all(s, p):
    s.kept += [each.grad for each in s.parameters if each.grad is not None]


@action
def keep_view(s, p):
    s.kept += [p.grad.unsqueeze(0)] if p.grad is not None else []


@action
def keep_and_view(s, p):
    s.kept += [p.grad, p.grad.detach()] if p.grad is not None else []


@action
def scale_kept(s, p):
    for each in s.kept[-2:]:
        each.mul_(2.0)


@action
def drop(s, p):
    s.kept.clear()


@action
def drop_first(s, p):
    del s.kept[:1]


@action
def own(s, p):
    p.grad = torch.ones(2 * p.numel())[p.numel() :].view_as(p)


@action
def own_strides(s, p):
    if p.shape == (WIDTH, WIDTH):
        p.grad = torch.ones_like(p).t()


@action
def put_back(s, p):
    fitting = [each for each in s.kept if each.shape == p.shape]
    p.grad = fitting[0] if fitting else None


@action
def swap(s, p):
    a, b = s.model.first.linear, s.model.second.linear
    a.bias.grad, b.bias.grad = b.bias.grad, a.bias.grad


@action
def data_of_gradient(s, p):
    if p.grad is not None:
        s.kept.append(p.grad.detach())
        p.grad.data = torch.full_like(p, 0.25)


@action
def tensor_hook(s, p):
    s.hooks.append(p.register_hook(s.kept.append))


@action
def scaling_hook(s, p):
    s.hooks.append(p.register_hook(lambda gradient: gradient * 0.5))


@action
def post_hook(s, p):
    def hook(q):
        s.kept += [q.grad] if q.grad is not None else []  # another hook took it

    s.hooks.append(p.register_post_accumulate_grad_hook(hook))


@action
def update_in_backward(s, p):
    @torch.no_grad()
    def hook(q):
        if q.grad is not None:  # another hook did it
            q.sub_(q.grad, alpha=0.01)
            q.grad = None

    s.hooks.append(p.register_post_accumulate_grad_hook(hook))


def accumulator(s, p):
    s.nodes.append(p.view_as(p).grad_fn.next_functions[0][0])
    return s.nodes[-1]


@action
def prehook_of_accumulator(s, p):
    def hook(gradients):
        s.kept.extend(g for g in gradients if g is not None)

    s.hooks.append(accumulator(s, p).register_prehook(hook))


@action
def bucket(s, p):
    """Makes ``.grad`` a view of a bucket, as DDP does with gradient_as_bucket_view."""
    memory = torch.zeros(p.numel() + 3)

    def hook(*_):
        if p.grad is not None:
            memory[3:].view_as(p).copy_(p.grad)
            p.grad = memory[3:].view_as(p)

    s.hooks.append(accumulator(s, p).register_hook(hook))


@action
def unhook(s, p):
    for handle in s.hooks:
        handle.remove()
    s.hooks.clear()


TRAINING = ["zero", "backward", "sgd"]
steps = st.one_of(
    st.sampled_from(sorted(ACTIONS)).map(lambda name: [name]),
    st.sampled_from(["keep", "keep_view", "zero", "zero_in_place", "backward"]).map(lambda n: [n]),
    st.just(TRAINING),
)
programs = st.lists(st.tuples(steps, st.integers(0, 5)), min_size=2, max_size=12).map(
    lambda found: [(name, number) for names, number in found for name in names]
)


def run(program, config: GraphConfig, model: str, begins: str) -> Session:
    session = Session(config, model, begins)
    try:
        session.run(program)
    finally:
        session.close()
        session.graphs.release()
    return session


def check(program, model: str, begins: str) -> None:
    eager = run(program, GraphConfig(impl="none"), model, begins)
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison(monkeypatch)
        graphed = run(program, scopes(warmup_steps=2), model, begins)
    assert len(eager.values) == len(graphed.values)
    differing = [n for n, pair in enumerate(zip(eager.values, graphed.values, strict=True))
                 if not torch.equal(*pair)]  # fmt: skip
    assert not differing
    # The values do not change when the graphs are gone, either.
    assert all(map(torch.equal, eager.kept, graphed.kept))


def named(*names: str) -> list[tuple[str, int]]:
    return [(name, 0) for name in names]


# torch warns once a process of gradients with own_strides.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.filterwarnings("ignore:.* ran eagerly:moe_graphs.GraphWarning")
@settings(max_examples=20, deadline=None)
@given(programs, st.sampled_from(sorted(MODELS)), st.sampled_from(["plain", "accumulating"]))
@example(named("keep_and_view", "backward", "scale_kept", "backward"), "plain", "plain")
@example(named("zero", "tensor_hook", "backward", "zero", "backward"), "plain", "plain")
@example(named("zero", "prehook_of_accumulator", "backward", "zero", "backward"), "plain", "plain")
@example(named("zero", "bucket", "backward", "backward", "unhook", "backward"), "plain", "plain")
@example(named("swap", "backward", "zero", "backward"), "plain", "plain")
@example(named("data_of_gradient", "backward", "zero", "backward"), "plain", "plain")
def test_random_programs(program, model, begins):
    check(program, model, begins)
