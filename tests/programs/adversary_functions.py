"""Adversaries: saved tensors, grad modes, custom autograd functions."""

from __future__ import annotations

import itertools

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from programs.cases import Table, plain_loss, plain_step
from programs.scripts import other_from_fourth, tanh

case = Table()


# ---- saved tensors, grad modes


def _packs(m, e, i):
    return (
        saved_tensors_hooks(lambda t: t.half().float(), lambda t: t)
        if i >= 4
        else (torch.enable_grad())
    )


case("saved tensors are rounded from the fourth step on", tanh, around=_packs)
case("saved tensors go to the host", tanh,
     around=lambda m, e, i: save_on_cpu() if i >= 4 else torch.enable_grad())  # fmt: skip


def _packs_forward_only(m, x, e):
    with saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
        loss = plain_loss(m, x, e)
    loss.backward()
    return loss.detach()


case("saved tensors are halved around the forward", tanh,
     step=other_from_fourth(_packs_forward_only))  # fmt: skip
case("anomaly mode from the fourth step on", tanh,
     around=lambda m, e, i: torch.autograd.set_detect_anomaly(i >= 4))  # fmt: skip


case("anomaly mode finds a NaN in the backward", lambda s, x: (s.l(x) * 0.0).sqrt(),
     around=lambda m, e, i: torch.autograd.set_detect_anomaly(i >= 4))  # fmt: skip


def _no_grad_call(m, x, e):
    with torch.no_grad():
        y = m.sc(m.pre(x))
    y.requires_grad_()
    (y * m.pre.bias).square().mean().backward()
    return y.detach(), y.grad


case("the scope runs without gradients, its output is a leaf", tanh,
     step=other_from_fourth(_no_grad_call))  # fmt: skip


def _inference(m, x, e):
    with torch.inference_mode():
        m.sc(m.pre(x))
    return plain_step(m, x, e)


case("inference mode before each training call", tanh, step=_inference)
case("a part of the scope has no gradient", lambda s, x: s.l(x) + _without(s, x))


@torch.no_grad()
def _without(s, x):
    return torch.tanh(s.l(x))


def _with_mode(s, x):
    with torch.set_grad_enabled(s.mode):
        y = s.l(x)
    return y + x


case("the grad mode is a flag of the module", _with_mode, lambda s: setattr(s, "mode", True),
     change=lambda m, e: setattr(m.sc, "mode", False))  # fmt: skip


def _forces(s, x):
    """An energy model, whose forward differentiates."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(s.l(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force


case("the forward calls autograd.grad with create_graph", _forces)
case("detach_ on the scope's output", tanh,
     loss=lambda m, x, e: (m.sc(m.pre(x)).detach_() * m.pre.bias).mean())  # fmt: skip


def _detached_later(m, x, e):
    y = m.sc(m.pre(x))
    return (y if not e.late else y.detach()).mean() + m.pre.bias.sum()


case("the loss detaches the output from the fourth step on", tanh, loss=_detached_later)


# ---- custom functions


class NeedsInput(torch.autograd.Function):
    """Function that reads ``ctx.needs_input_grad``."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.factor = 3.0 if ctx.needs_input_grad[0] else 1.0
        return x * weight * ctx.factor

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient * weight * ctx.factor if ctx.needs_input_grad[0] else None
        return of_x, (gradient * x * ctx.factor).sum(0)


case("a function asks which inputs need gradients", lambda s, x: NeedsInput.apply(s.l(x), s.l.bias),
     change=lambda m, e: m.sc.l.weight.requires_grad_(False))  # fmt: skip


class Undefined(torch.autograd.Function):
    """Function with two outputs, whose backward reads which of them got a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 1.0, x * 2.0

    @staticmethod
    def backward(ctx, first, second):
        if second is None:
            return first * 5.0
        return first + 2.0 * second if first is not None else second


def _both_or_one(m, x, e):
    a, b = m.sc(m.pre(x))
    return (a + b).square().mean() if not e.late else a.square().mean()


case("a function sees undefined gradients", lambda s, x: Undefined.apply(s.l(x)), loss=_both_or_one)
case("a function in the eager part sees undefined gradients",
     lambda s, x: (s.l(x), torch.tanh(x)),
     loss=lambda m, x, e: (lambda a, b: (a + b if not e.late else a).square().mean())(
         *m.sc(Undefined.apply(m.pre(x))[0])))  # fmt: skip


class Materialised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0, x * 2.0

    @staticmethod
    def backward(ctx, first, second):
        return first + 2.0 * second + 1.0


case("a function adds a constant to its gradient", lambda s, x: Materialised.apply(s.l(x)),
     loss=_both_or_one)  # fmt: skip


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


case("a function returns None for its gradient", lambda s, x: NoGradient.apply(s.l(x)) + x)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0


case("a function changes its input in place", lambda s, x: Dirty.apply(s.l(x)))
case("a function changes the scope's input in place", lambda s, x: s.l(Dirty.apply(x)),
     use=lambda m, x: m.sc(m.pre(x) * 1.0))  # fmt: skip
COUNTS = {"backward": itertools.count(1)}


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / next(COUNTS["backward"])


case("a backward counts with an iterator", lambda s, x: Counts.apply(s.l(x)),
     start=lambda m, e: COUNTS.update(backward=itertools.count(1)))  # fmt: skip


class StateOfContext(torch.autograd.Function):
    """Function whose backward reads an object that changes between forward and backward."""

    @staticmethod
    def forward(ctx, x, box):
        ctx.box = box
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.box[0], None


def _change_box(m, x, e):
    m.sc.box[0] = 1.0
    loss = plain_loss(m, x, e)
    m.sc.box[0] = 1.0 + e.i
    loss.backward()


case("a backward reads a list that changes after the forward",
     lambda s, x: StateOfContext.apply(s.l(x), s.box), lambda s: setattr(s, "box", [1.0]),
     step=_change_box)  # fmt: skip


class Reverses(torch.autograd.Function):
    """Reversible function, whose backward runs a module again."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.module(x.detach().requires_grad_())
            torch.autograd.backward(y, gradient)
        return gradient, None


case("a function's backward runs a backward of its own into .grad",
     lambda s, x: Reverses.apply(x, s.l))  # fmt: skip


class WithSetup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


case("a function with setup_context", lambda s, x: WithSetup.apply(s.l(x)))
