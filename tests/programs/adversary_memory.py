"""Adversaries: tensors that are kept, freed, moved, swapped or aliased."""

from __future__ import annotations

import torch
from torch import nn

from programs.cases import Table, plain_update
from programs.scripts import tanh

case = Table()


def linear(s, x):
    return s.l(x)


def keeping(what):
    """A step that keeps something of the scope's output for ever."""

    def step(m, x, e):
        y = m.sc(m.pre(x))
        e.kept.append(what(y))
        y.square().mean().backward()

    return step


# ---- kept

KEPT = {
    "the output": lambda y: y,
    "its .data": lambda y: y.data,
    "a row of it": lambda y: y.detach()[1],
    "a numpy view of it": lambda y: torch.from_numpy(y.detach().numpy()),
    "its storage": lambda y: torch.empty(0).set_(y.untyped_storage()),
    "a DLPack of it": lambda y: torch.utils.dlpack.from_dlpack(y.detach()),
    "a subclass of it": lambda y: y.detach().as_subclass(nn.Buffer),
    "a 0-dim output": lambda y: y.detach().sum(),
    "what its node saved": lambda y: y.grad_fn._saved_result if hasattr(
        y.grad_fn, "_saved_result") else y.detach().clone(),
}  # fmt: skip
for _name, _what in KEPT.items():
    case(f"kept over steps: {_name}", tanh, step=keeping(_what), engines=("scopes", "callables"))


def _output_and_view(m, x, e):
    y = m.sc(m.pre(x))
    if e.kept:
        with torch.no_grad():
            e.kept[-2].add_(1.0)
    e.kept += [y, y.detach().view(-1)]
    y.square().mean().backward()


case("kept over steps: the output and a view of it, which sees what is written later", tanh,
     step=_output_and_view, engines=("scopes", "callables"))  # fmt: skip


def grad_kept(keep, later):
    """Keeps something of a ``.grad`` after one step, and looks at it two steps later."""

    def update(m, e, i):
        if i == 3:
            e.held = keep(m.sc.l.weight.grad)
        if i == 5:
            e.kept += later(e.held)
        plain_update(m, e, i)

    return update


def _written_later(held):
    held[0].add_(1.0)
    return [each.clone() for each in held]


GRADS_KEPT = {
    "itself": (lambda g: g, lambda g: [g.clone()]),
    "its storage": (lambda g: g.untyped_storage(), lambda s: [
        torch.empty(0).set_(s, 0, (4, 4)).clone()]),
    "itself and a view, which sees what is written later": (
        lambda g: (g, g.view(-1)), _written_later),
}  # fmt: skip
for _name, (_keep, _later) in GRADS_KEPT.items():
    case(f"of .grad is kept: {_name}", tanh, update=grad_kept(_keep, _later))


def _keep_gradient(m, x, e):
    h = m.pre(x)
    h.register_hook(lambda g: e.kept.append(g))
    m.sc(h).square().mean().backward()


case("kept over steps: the gradient of the input", tanh, step=_keep_gradient,
     engines=("scopes", "callables"))  # fmt: skip


def _keep_input(m, x, e):
    h = m.pre(x)
    e.kept.append(h.detach())
    m.sc(h).square().mean().backward()


case("kept over steps: the input", tanh, step=_keep_input, engines=("scopes", "callables"))


def _keep_aux(s, x):
    y = torch.tanh(s.l(x))
    return y, y.detach().mean(), y.detach()[:, 0]


def _keep_three(m, x, e):
    y, mean, column = m.sc(m.pre(x))
    e.kept += [mean, column]
    y.square().mean().backward()


case("kept over steps: a 0-dim metric and a column", _keep_aux, step=_keep_three,
     engines=("scopes", "callables"))  # fmt: skip


def _previous_as_target(m, x, e):
    y = m.sc(m.pre(x))
    target = e.kept[-1] if e.kept else torch.zeros(3, 4)
    (y - target).square().mean().backward()
    e.kept[:] = [y.detach()]
    return y.detach()


case("the last step's output is this step's target", tanh, step=_previous_as_target)


def _previous_as_input(m, x, e):
    h = m.pre(x) + (e.kept[-1] if e.kept else 0.0)
    y = m.sc(h)
    y.square().mean().backward()
    e.kept[:] = [y.detach()]
    return y.detach()


case("the last step's output goes into this step", tanh, step=_previous_as_input)


def _own_output_as_input(m, x, e):
    y = m.sc(m.pre(x))
    z = m.sc(y)
    (y.detach() * z).mean().backward()
    return y.detach().clone(), z.detach().clone()


case("the scope's output is its next input", tanh, step=_own_output_as_input)

# ---- freed and moved


case("the output's .data is dropped before the backward", lambda s, x: s.l(x),
     step=lambda m, x, e: _free_after_use(m, x, e, "data"))  # fmt: skip
case("the output's storage is freed", lambda s, x: s.l(x), may_kill=True,
     step=lambda m, x, e: _free_after_use(m, x, e, "storage"))  # fmt: skip


def _free_after_use(m, x, e, how):
    y = m.sc(m.pre(x))
    loss = (y * 2.0).sum()
    if how == "data":
        y.data = torch.empty(1)
    else:
        y.untyped_storage().resize_(0)
    loss.backward()
    return loss.detach()


def _free_parameters(m, e, i):
    """Parameters have no memory between the steps, as under FSDP."""
    for p in m.sc.parameters():
        value, size = p.detach().clone(), p.untyped_storage().nbytes()
        p.untyped_storage().resize_(0)
        e.junk = torch.full((64,), float("nan"))
        p.untyped_storage().resize_(size)
        with torch.no_grad():
            p.copy_(value)


case("parameters' storage is freed and allocated again", tanh, may_kill=True,
     between=lambda m, e, i: i >= 3 and _free_parameters(m, e, i))  # fmt: skip


def _flat(m, e):
    e.flat = torch.cat([p.detach().flatten() for p in m.sc.parameters()])
    offset = 0
    for p in m.sc.parameters():
        p.data = e.flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()


def _other_flat(m, e):
    e.old = e.flat
    _flat(m, e)
    e.old.fill_(float("nan"))


case("parameters are views of one flat buffer", tanh, start=_flat,
     between=lambda m, e, i: e.flat.mul_(0.9))  # fmt: skip
case("parameters move to another flat buffer", tanh, start=_flat, change=_other_flat)
case("set_ gives a parameter other memory", tanh,
     change=lambda m, e: torch.no_grad()(m.sc.l.weight.set_)(torch.ones(4, 4)))  # fmt: skip
case("swap_tensors exchanges two parameters", lambda s, x: s.b(torch.tanh(s.l(x))),
     lambda s: setattr(s, "b", nn.Linear(4, 4)),
     change=lambda m, e: torch.utils.swap_tensors(m.sc.l.weight, m.sc.b.weight))  # fmt: skip
case("two parameters exchange their .data", lambda s, x: s.b(torch.tanh(s.l(x))),
     lambda s: setattr(s, "b", nn.Linear(4, 4)), change=lambda m, e: _swap_data(m.sc))  # fmt: skip


def _swap_data(s):
    s.l.weight.data, s.b.weight.data = s.b.weight.data, s.l.weight.data


def _swap_back_and_forth(m, x, e):
    """The weights are those of an average for an evaluation within the step, and are put back."""
    saved = m.sc.l.weight.data
    m.sc.l.weight.data = torch.ones(4, 4)
    with torch.no_grad():
        value = m.sc(m.pre(x))
    m.sc.l.weight.data = saved
    m.sc(m.pre(x)).square().mean().backward()
    return value


case("an evaluation with other .data within each step", tanh, step=_swap_back_and_forth)
case("a buffer becomes larger", may_kill=True, forward=lambda s, x: s.l(x) * s.b.mean(),
     init=lambda s: s.register_buffer("b", torch.ones(2)),
     change=lambda m, e: m.sc.b.resize_(64).fill_(3.0))  # fmt: skip
case("a buffer is registered again with another shape", lambda s, x: s.l(x) * s.b.sum(),
     lambda s: s.register_buffer("b", torch.ones(2)),
     change=lambda m, e: m.sc.register_buffer("b", torch.ones(5)))  # fmt: skip
case("a parameter becomes another dtype by .data",
     lambda s, x: s.l(x.to(s.l.weight.dtype)).float(), may_kill=True,
     change=lambda m, e: [setattr(p, "data", p.data.double())
                          for p in m.sc.parameters()])  # fmt: skip
case("a parameter in other strides at the same address", tanh,
     change=lambda m, e: torch.no_grad()(m.sc.l.weight.t_)())  # fmt: skip
case("a convolution goes to channels_last", lambda s, x: s.c(x[:, :, None, None].expand(3, 4, 2, 2)
     * s.l.bias.sum()).mean((2, 3)), lambda s: setattr(s, "c", nn.Conv2d(4, 4, 1)),
     change=lambda m, e: m.sc.to(memory_format=torch.channels_last))  # fmt: skip

# ---- aliases among inputs and outputs

case("an output is a view of an input, which is changed in place later",
     lambda s, x: (x + s.l.bias, x[:, :2]),
     step=lambda m, x, e: _change_after(m, x, e))  # fmt: skip


def _change_after(m, x, e):
    h = m.pre(x).detach()
    y, view = m.sc(h)
    h.mul_(3.0)
    (y.sum() + (view * m.pre.bias[:2]).sum()).backward()
    return view.clone()


def _change_output(m, x, e):
    y, view = m.sc(m.pre(x))
    with torch.no_grad():
        y.mul_(2.0)
    loss = view.sum() + y.sum()
    loss.backward()
    return loss.detach()


case("an output is a view of another, which is changed in place",
     lambda s, x: (lambda y: (y, y[:1]))(s.l(x)), step=_change_output)  # fmt: skip


def _change_chunk(m, x, e):
    a, b = m.sc(m.pre(x))
    if e.late:
        a.mul_(2.0)
    (a.sum() + b.sum()).backward()


case("a chunk is changed in place, which eager refuses", lambda s, x: s.l(x).chunk(2, 1),
     step=_change_chunk)  # fmt: skip


def _add_in_place(m, x, e):
    y = m.sc(m.pre(x))
    if e.late:
        y += m.pre.bias
    y.square().mean().backward()
    return y.detach().clone()


case("the output is changed in place with a gradient", linear, step=_add_in_place)
case("the output is changed in place, and was saved", tanh, step=_add_in_place)


def _change_input_later(m, x, e):
    h = m.pre(x) * 1.0
    y = m.sc(h)
    if e.late:
        h.mul_(3.0)
    (y.sum() + h.sum()).backward()


case("the input is changed in place after the scope saved it", tanh, step=_change_input_later)
case("the input is changed in place before the backward, unsaved", lambda s, x: x + s.l.bias,
     step=_change_input_later)  # fmt: skip


def _overlapping(m, x, e):
    h = m.pre(x)
    m.sc(h[:2], h[1:]).square().mean().backward()


case("two inputs overlap", lambda s, x, y: torch.tanh(s.l(x)) * y, step=_overlapping)


def _one_changes(m, x, e):
    h = m.pre(x).detach()
    y = m.sc(h, h.view(-1))
    y.square().mean().backward()
    return y.detach()


def _writes_first_reads_second(s, x, flat):
    with torch.no_grad():
        x.add_(1.0)
    return s.l.bias * flat.view(3, 4)


case("an input is written and read through another input", _writes_first_reads_second,
     step=_one_changes)  # fmt: skip


def _with_buffer(s):
    s.register_buffer("b", torch.arange(4.0))


def _write_to_a_view(s, x):
    s.b[1:3].mul_(2.0).add_(1.0)
    return s.l(x) * s.b.clone()


def _write_to_what_was_viewed(s, x):
    scale = s.b[1] * 2.0
    s.b.add_(1.0)
    return s.l(x) * scale


def _write_to_a_row_of_the_input(s, x):
    x[0].add_(1.0)
    return s.l(x)


def _write_to_an_element_of_a_parameter(s, x):
    with torch.no_grad():
        s.l.bias[1].mul_(0.5)
    return s.l(x)


case("a buffer is written through a view", _write_to_a_view, _with_buffer)
case("a buffer is written of which a view was read", _write_to_what_was_viewed, _with_buffer)
case("a row of the input is written", _write_to_a_row_of_the_input,
     use=lambda m, x: m.sc(m.pre(x) * 1.0))  # fmt: skip
case("a row of the batch is written", _write_to_a_row_of_the_input, use=lambda m, x: m.sc(x))
case("an element of a parameter is written", _write_to_an_element_of_a_parameter)
case("the input is a parameter of the scope", lambda s, x: torch.tanh(s.l(x)),
     use=lambda m, x: m.sc(m.sc.l.weight))  # fmt: skip
case("the input is a view of a parameter of the scope", lambda s, x: torch.tanh(s.l(x)),
     use=lambda m, x: m.sc(m.sc.l.weight[:2]))  # fmt: skip
case("the input is a buffer that the scope updates",
     lambda s, x: s.l.bias * s.b.add_(1.0).clone() + x,
     lambda s: s.register_buffer("b", torch.zeros(3, 4)),
     use=lambda m, x: m.sc(m.sc.b) + m.pre(x))  # fmt: skip
case("an output is a buffer of the scope", lambda s, x: (s.l(x), s.b.add_(1.0)),
     lambda s: s.register_buffer("b", torch.zeros(4)),
     step=lambda m, x, e: _keep_buffer(m, x, e))  # fmt: skip


def _keep_buffer(m, x, e):
    y, b = m.sc(m.pre(x))
    e.kept.append(b)
    (y * b).mean().backward()
    return b is m.sc.b


case("an output is a parameter of the scope", lambda s, x: (s.l(x), s.l.weight),
     loss=lambda m, x, e: (lambda y, w: y.mean() + w.square().sum() + float(w is m.sc.l.weight))(
         *m.sc(m.pre(x))))  # fmt: skip
case("the output is the input itself", lambda s, x: x, loss=lambda m, x, e: (
    lambda h: (m.sc(h) + h).mean() * (2.0 if m.sc(h) is h else 1.0))(m.pre(x)))  # fmt: skip
case("an output is a view of a parameter", lambda s, x: (s.l(x), s.l.weight[0]),
     loss=lambda m, x, e: (lambda y, w: y.mean() + w.square().sum())(*m.sc(m.pre(x))))  # fmt: skip
case("out= writes into a buffer",
     lambda s, x: s.l(x) * torch.mul(x.detach().mean(0), 2.0, out=s.b).clone(),
     lambda s: s.register_buffer("b", torch.zeros(4)))  # fmt: skip
