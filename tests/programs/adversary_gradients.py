"""Adversaries: ways to ask for gradients, and gradients that are there already."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from programs.cases import Table, plain_loss, plain_step
from programs.scripts import log, other_from_fourth, parameters, tanh

case = Table()


# ---- which gradients are asked for


def _only_before(m, x, e):
    plain_loss(m, x, e).backward(inputs=[m.pre.weight])


case("backward(inputs=) for a weight before the scope", tanh,
     step=other_from_fourth(_only_before))  # fmt: skip


def _one_of_scope(m, x, e):
    plain_loss(m, x, e).backward(inputs=[m.sc.l.bias])


case("backward(inputs=) for one weight of the scope", tanh,
     step=other_from_fourth(_one_of_scope))  # fmt: skip


def _of_input(m, x, e):
    h = m.pre(x)
    return torch.autograd.grad(m.sc(h).square().mean(), h)


case("autograd.grad for the scope's input alone", tanh, step=other_from_fourth(_of_input))


def _of_output(m, x, e):
    y = m.sc(m.pre(x))
    (gradient,) = torch.autograd.grad(y.square().mean(), y, retain_graph=True)
    y.backward(gradient * 2.0)
    return gradient


case("autograd.grad for the output, then a backward from it", tanh, step=_of_output)


def _given_gradient(m, x, e):
    y = m.sc(m.pre(x))
    torch.autograd.backward([y, y.sum()], [torch.ones_like(y).t().contiguous().t(), None])


case("autograd.backward with several roots and strides", tanh, step=_given_gradient)


def _twice_retained(m, x, e):
    y = m.sc(m.pre(x))
    y.mean().backward(retain_graph=True)
    y.square().mean().backward()


case("two losses, one backward each", tanh, step=other_from_fourth(_twice_retained))


def _same_and_other(s, x):
    y = torch.tanh(s.l(x))
    return y, y.sigmoid(), y


def _all_three(m, x, e):
    first, second, third = m.sc(m.pre(x))
    return (first * 2.0 + second - third * third).square().mean()


def _another_layout(m, x, e):
    first, second, third = m.sc(m.pre(x))
    (first.t().contiguous() * second.t() + third.t().sigmoid()).sum().backward()


def _third_alone(m, x, e):
    m.sc(m.pre(x))[2].sum().backward()


case("one tensor returned twice, gradients of another layout", _same_and_other, loss=_all_three,
     step=other_from_fourth(_another_layout))  # fmt: skip
case("one tensor returned twice, once without a gradient", _same_and_other, loss=_all_three,
     step=other_from_fourth(_third_alone))  # fmt: skip


def _again_later(m, x, e):
    loss = plain_loss(m, x, e)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        m.pre.weight.add_(0.0)
    loss.backward()


case("a second backward after a weight was touched", tanh,
     step=other_from_fourth(_again_later))  # fmt: skip


def _batched(m, x, e):
    y = m.sc(m.pre(x))
    vectors = torch.eye(12).view(12, 3, 4)
    return torch.autograd.grad(y, parameters(m), vectors, is_grads_batched=True)


case("is_grads_batched=True", tanh, step=other_from_fourth(_batched))


def _penalty(m, x, e):
    h = m.pre(x)
    y = m.sc(h)
    (gradient,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
    (y.mean() + gradient.square().sum()).backward()
    return gradient.detach()


case("a gradient penalty begins at the fourth step", tanh, step=other_from_fourth(_penalty))


def _product(m, x, e):
    first = torch.autograd.grad(plain_loss(m, x, e), parameters(m), create_graph=True)
    return torch.autograd.grad(sum(g.sum() for g in first), parameters(m))


case("a Hessian-vector product", tanh, step=other_from_fourth(_product))


def _inner_update(m, x, e):
    """MAML: the second forward uses weights that depend on the first backward."""
    first = torch.autograd.grad(plain_loss(m, x, e), parameters(m), create_graph=True)
    names = [name for name, _ in m.named_parameters()]
    fast = {n: p - 0.1 * g for n, p, g in zip(names, parameters(m), first, strict=True)}
    h = nn.functional.linear(x, fast["pre.weight"], fast["pre.bias"])
    y = functional_call(m.sc, {"l.weight": fast["sc.l.weight"], "l.bias": fast["sc.l.bias"]}, (h,))
    y.square().mean().backward()


case("an inner update, with functional_call on the scope", tanh,
     step=other_from_fourth(_inner_update))  # fmt: skip


def _functional_call(m, x, e):
    doubled = {name: p * 2.0 for name, p in m.sc.named_parameters()}
    functional_call(m.sc, doubled, (m.pre(x),)).square().mean().backward()


case("functional_call with other weights", tanh, step=other_from_fourth(_functional_call))


def _func_grad(m, x, e):
    def loss(weights):
        return functional_call(m.sc, weights, (m.pre(x),)).square().mean()

    return torch.func.grad(loss)({n: p.detach() for n, p in m.sc.named_parameters()})


case("torch.func.grad over the scope", tanh, step=other_from_fourth(_func_grad))


def _vmap(m, x, e):
    return torch.func.vmap(lambda row: m.sc(row[None])[0])(m.pre(x)).detach()


case("torch.func.vmap over the scope", tanh, step=other_from_fourth(_vmap))


def _jvp(m, x, e):
    h = m.pre(x).detach()
    return [t.detach() for t in torch.func.jvp(m.sc, (h,), (torch.ones_like(h),))]


case("torch.func.jvp over the scope", tanh, step=other_from_fourth(_jvp))


def _dual(m, x, e):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(m.pre(x).detach(), torch.ones(3, 4))
        return forward_ad.unpack_dual(m.sc(dual)).tangent.detach()


case("a dual number is the input", tanh, step=other_from_fourth(_dual))


def _jacobian(m, x, e):
    return torch.autograd.functional.jacobian(m.sc, m.pre(x).detach())


case("a Jacobian", tanh, step=other_from_fourth(_jacobian))


def _vectorised(m, x, e):
    return torch.autograd.functional.jacobian(m.sc, m.pre(x).detach(), vectorize=True)


def _hessian(m, x, e):
    h = m.pre(x).detach()[:1]
    return torch.autograd.functional.hessian(lambda h: m.sc(h).square().sum(), h)


case("a vectorised Jacobian", tanh, step=other_from_fourth(_vectorised))
case("a Hessian", tanh, step=other_from_fourth(_hessian))


def _in_thread(m, x, e):
    loss = plain_loss(m, x, e)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss.detach()


case("the backward runs in a thread of its own", tanh, step=other_from_fourth(_in_thread))


def _single_threaded(m, e, i):
    return torch.autograd.set_multithreading_enabled(i < 4)


case("autograd without threads", tanh, around=_single_threaded)

# ---- gradients that are there already


def _flat_gradients(m, e):
    """Make every ``.grad`` a view of one buffer that the script reads, as a bucket of DDP."""
    e.flat = torch.zeros(sum(p.numel() for p in m.parameters()))
    offset = 0
    for p in m.parameters():
        p.grad = e.flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()


@torch.no_grad()
def _update_from_flat(m, e, i):
    log(e, e.flat)
    offset = 0
    for p in m.parameters():
        p -= 0.1 * e.flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    e.flat.zero_()


case("gradients are views of one buffer", tanh, start=_flat_gradients, update=_update_from_flat)


def _held(m, x, e):
    e.kept = [p.grad for p in m.parameters()] if e.i == 3 else e.kept
    return plain_step(m, x, e)


case("a script holds .grad while more is added to it", tanh, step=_held,
     update=lambda m, e, i: None, engines=("scopes", "callables"))  # fmt: skip


def _shares_gradient(m, x, e):
    m.sc.l.weight.grad = m.pre.weight.grad
    return plain_step(m, x, e)


case("two parameters share one .grad", tanh, step=_shares_gradient, update=lambda m, e, i: None)
case("a gradient in other strides is there", tanh,
     change=lambda m, e: setattr(m.sc.l.weight, "grad", torch.ones(4, 4).t()))  # fmt: skip
case("an expanded gradient is there", tanh,
     change=lambda m, e: setattr(m.sc.l.weight, "grad", torch.ones(1, 4).expand(4, 4)))  # fmt: skip
case("a gradient that requires a gradient is there", tanh,
     change=lambda m, e: setattr(m.sc.l.weight, "grad",
                                 torch.ones(4, 4).requires_grad_()))  # fmt: skip
case("gradients of an expanded output have no strides", tanh, loss=lambda m, x, e:
     m.sc(m.pre(x)).sum() + m.sc(m.pre(x))[:, :1].expand(3, 7).sum())  # fmt: skip
case("create_graph leaves gradients with a history", tanh,
     step=lambda m, x, e: plain_loss(m, x, e).backward(create_graph=True),
     update=lambda m, e, i: [setattr(p, "grad", None) for p in m.parameters()])  # fmt: skip


def _per_task(m, x, e):
    found, weights = e.case.use(m, x), parameters(m)
    losses = [found.square().mean(), found.abs().mean(), found.exp().mean()]
    tasks = [torch.autograd.grad(each, weights, retain_graph=True) for each in losses]
    for number, weight in enumerate(weights):
        weight.grad = torch.stack([task[number] for task in tasks]).sum(0)
    return [each.detach() for each in losses]


def _two_losses(m, x, e):
    found = e.case.use(m, x)
    found.square().mean().backward(retain_graph=True)
    found.abs().mean().backward()
    return found.detach()


case("two losses over one forward", tanh, step=_two_losses)
case("two losses over one forward with split backwards", tanh, step=_two_losses,
     options={"split_backward": True}, engines=("scopes",))  # fmt: skip
case("two losses over one forward begin later", tanh, step=other_from_fourth(_two_losses))
case("gradients of each task", tanh, step=_per_task)
case("gradients of each task begin later", tanh, step=other_from_fourth(_per_task))
