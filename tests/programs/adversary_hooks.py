"""Adversaries: hooks on tensors, nodes, parameters and modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from programs.cases import Table
from programs.scripts import log, parameters, tanh

case = Table()


# ---- hooks


def _hook_input(m, x, e):
    h = m.pre(x)
    h.register_hook(lambda g: g * 3.0)
    return m.sc(h).square().mean()


case("a hook on the input changes its gradient", tanh, loss=_hook_input)


def _hook_output(m, x, e):
    y = m.sc(m.pre(x))
    y.register_hook(lambda g: g * 3.0)
    y.register_hook(lambda g: log(e, g))
    return y.square().mean()


case("hooks on the output change and look", tanh, loss=_hook_output)


def _hook_node(m, x, e):
    y = m.sc(m.pre(x))
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 3.0,))
    y.grad_fn.register_hook(lambda inputs, outputs: log(e, *outputs))
    return y.square().mean()


case("a prehook on the output's node changes its gradient", tanh, loss=_hook_node)


def _retain(m, x, e):
    h = m.pre(x)
    y = m.sc(h)
    h.retain_grad()
    y.retain_grad()
    y.square().mean().backward()
    return h.grad, y.grad


case("retain_grad on input and output", tanh, step=_retain)
case("a hook on a parameter halves its gradient from the fourth step on", tanh,
     change=lambda m, e: m.sc.l.weight.register_hook(lambda g: g * 0.5))  # fmt: skip
case("a post-accumulate hook updates and drops the gradient", tanh,
     start=lambda m, e: [p.register_post_accumulate_grad_hook(_update_at_once)
                         for p in m.parameters()])  # fmt: skip


@torch.no_grad()
def _update_at_once(parameter):
    parameter -= 0.1 * parameter.grad
    parameter.grad = None


def _accumulator(m, e):
    node = torch.autograd.graph.get_gradient_edge(m.sc.l.weight).node
    e.kept_node = node
    node.register_prehook(lambda grads: (grads[0] * 3.0,))


case("a prehook on a gradient accumulator from the fourth step on", tanh, change=_accumulator)


def _multi(m, e):
    def seen(gradients):
        log(e, *gradients)

    register_multi_grad_hook(parameters(m), seen)


case("a multi-gradient hook over all parameters", tanh, change=_multi)


def _multi_any(m, e):
    register_multi_grad_hook(parameters(m), lambda g: log(e, g), mode="any")


case("a multi-gradient hook for the first parameter of all", tanh, change=_multi_any)
case("a full backward hook of the scope changes its gradient", tanh,
     change=lambda m, e: m.sc.register_full_backward_hook(
         lambda module, inputs, outputs: (inputs[0] * 3.0,)))  # fmt: skip
case("a full backward hook of a layer within", tanh,
     change=lambda m, e: m.sc.l.register_full_backward_hook(
         lambda module, inputs, outputs: (inputs[0] * 3.0,)))  # fmt: skip
case("a forward hook of the scope returns something else", tanh,
     change=lambda m, e: m.sc.register_forward_hook(lambda module, args, y: y * 3.0))  # fmt: skip
case("a forward pre-hook with keyword arguments", tanh,
     change=lambda m, e: m.sc.register_forward_pre_hook(
         lambda module, args, kwargs: ((args[0] * 3.0,), kwargs), with_kwargs=True))  # fmt: skip
case("a hook that is always called", tanh,
     change=lambda m, e: m.sc.register_forward_hook(
         lambda module, args, y: log(e, y), always_call=True))  # fmt: skip


def _global_hook(kind):
    def change(m, e):
        register = getattr(nn.modules.module, f"register_module_{kind}")
        hook = {
            "forward_hook": lambda module, args, y: y * 2.0 if module is m.sc.l else None,
            "forward_pre_hook": lambda module, args: (args[0] * 2.0,) if module is m.sc.l else None,
            "full_backward_hook": lambda module, i, o: (i[0] * 2.0,) if module is m.sc.l else None,
        }[kind]
        e.handle = register(hook)

    return change


def _remove(m, e, i):
    if i == 6:
        e.handle.remove()


for _kind in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
    case(f"a global {_kind} reaches into the scope", tanh, change=_global_hook(_kind),
         between=_remove)  # fmt: skip


def _hook_raises(m, e):
    def hook(gradient):
        raise ZeroDivisionError("hook")

    m.sc.l.weight.register_hook(hook)


case("a hook on a parameter raises", tanh, change=_hook_raises)


def _hook_runs_backward(m, x, e):
    y = m.sc(m.pre(x))
    y.register_hook(lambda g: _log_gradient(e, lambda: m.pre(x), m.pre.weight))
    return y.square().mean()


@torch.enable_grad()
def _log_gradient(e, function, weight):
    log(e, *torch.autograd.grad(function().sum(), weight))


case("a hook runs another backward", tanh, loss=_hook_runs_backward)


def _hook_runs_scope(m, x, e):
    y = m.sc(m.pre(x))
    y.register_hook(lambda g: _log_gradient(e, lambda: m.sc(x), m.sc.l.weight))
    return y.square().mean()


case("a hook runs the scope itself again", tanh, loss=_hook_runs_scope)


# ---- gradients of an output from which the scope computes another one


def _and_its_mean(s, x):
    y = s.l(x).tanh()
    return y, y.square().mean()


def _looks(e, y):
    y.register_hook(lambda gradient: e.log.append(gradient.clone()))


def _keeps(e, y):
    y.retain_grad()
    e.held = y


LOOKS = {
    "a hook that looks": _looks,
    "a hook that doubles": lambda e, y: y.register_hook(lambda gradient: gradient * 2),
    "retain_grad": _keeps,
    "a hook of several": lambda e, y: register_multi_grad_hook(
        (y,), lambda gradients: e.log.append(gradients[0].clone())),
}  # fmt: skip


def _looked_at(look, always):
    def loss(m, x, e):
        y, aux = m.sc(m.pre(x))
        if always or e.late:
            look(e, y)
        return y.mean() + aux

    return loss


def _note_kept(m, e, i):
    if hasattr(e, "held"):
        e.log.append(vars(e).pop("held").grad.clone())
    m.zero_grad()


for _name, _look in LOOKS.items():
    for _always in (False, True):
        case(f"{_name} at an output that is used within" + (", always" if _always else ""),
             _and_its_mean, loss=_looked_at(_look, _always), update=_note_kept,
             engines=("scopes", "callables"))  # fmt: skip
