"""Adversaries: metadata of tensors that Python reads, and unusual inputs."""

from __future__ import annotations

import torch
from torch import nn

from programs.cases import Table
from programs.scripts import tanh

case = Table()


# ---- metadata


def _looks(m, x, e):
    out = m.sc(m.pre(x))
    y = out if isinstance(out, torch.Tensor) else out[0]
    y.sum().backward()
    return [y.stride(), y.requires_grad, y.is_leaf, y.is_contiguous(), type(y).__name__]


case("a script looks at strides and flags of a plain output", tanh, step=_looks)
case("a script looks at strides and flags of a transposed output",
     lambda s, x: torch.tanh(s.l(x)).t(), step=_looks)  # fmt: skip
case("a script looks at strides and flags of a slice", lambda s, x: torch.tanh(s.l(x))[1:, 1:],
     step=_looks)  # fmt: skip
case("a script looks at strides and flags of an expanded output",
     lambda s, x: torch.tanh(s.l(x))[:1].expand(3, 4), step=_looks)  # fmt: skip
case("a script looks at a detached output", lambda s, x: (s.l(x), s.l(x).detach()),
     step=lambda m, x, e: (lambda y, d: (y.sum().backward(), d.requires_grad, d.is_leaf))(
         *m.sc(m.pre(x))))  # fmt: skip


def _tagged(s, x):
    y = s.l(x)
    y.tag = 3.0
    return y


case("an output carries an attribute", _tagged, loss=lambda m, x, e: (
    lambda y: y.mean() * getattr(y, "tag", 1.0))(m.sc(m.pre(x))))  # fmt: skip


class Tagged(torch.Tensor):
    """A subclass without behaviour of its own."""


case("an output is of a subclass", lambda s, x: s.l(x).as_subclass(Tagged), loss=lambda m, x, e: (
    lambda y: y.mean() * (3.0 if isinstance(y, Tagged) else 1.0))(m.sc(m.pre(x))))  # fmt: skip
case("an input is of a subclass from the fourth step on",
     lambda s, x: s.l(x) * (3.0 if isinstance(x, Tagged) else 1.0),
     loss=lambda m, x, e: m.sc(
         m.pre(x).as_subclass(Tagged) if e.late else m.pre(x)).mean())  # fmt: skip
case("an input is a Parameter from the fourth step on",
     lambda s, x: s.l(x) * (3.0 if isinstance(x, nn.Parameter) else 1.0),
     loss=lambda m, x, e: m.sc(
         nn.Parameter(x) if e.late else x.clone().requires_grad_()).mean()
     + m.pre.bias.sum())  # fmt: skip
case("the forward asks whether the input is a leaf",
     lambda s, x: s.l(x) * (3.0 if x.is_leaf else 1.0))  # fmt: skip
case("the forward asks whether the input has a history",
     lambda s, x: s.l(x) * (3.0 if x.grad_fn is None else 1.0))  # fmt: skip
case("the forward asks whether the input is contiguous",
     lambda s, x: s.l(x) * (3.0 if x.is_contiguous() else 1.0),
     use=lambda m, x: m.sc(m.pre(x).t().contiguous().t()))  # fmt: skip
case("the forward asks whether the input is a view",
     lambda s, x: s.l(x) * (3.0 if x._is_view() else 1.0),
     use=lambda m, x: m.sc(m.pre(x)[:, :]))  # fmt: skip
case("the forward asks for the version of the input", lambda s, x: s.l(x) * (1.0 + x._version) / 4,
     use=lambda m, x: m.sc(m.pre(x).add_(1.0).add_(1.0)))  # fmt: skip
case("the forward looks at the version of its weight",
     lambda s, x: s.l(x) * (1.0 + s.l.weight._version))  # fmt: skip
case("the forward looks at its own gradient",
     lambda s, x: s.l(x) * (1.0 if s.l.weight.grad is None else 3.0),
     update=lambda m, e, i: i % 2 and m.zero_grad())  # fmt: skip
case("the forward reads a value of its own gradient", lambda s, x: s.l(x) * (
    1.0 if s.l.weight.grad is None else s.l.weight.grad.mean()),
     update=lambda m, e, i: i % 2 and m.zero_grad())  # fmt: skip

# ---- shapes and layouts of inputs

case("an empty batch at the fourth step", tanh,
     batch=lambda g, i: torch.randn(0 if i == 4 else 3, 4, generator=g),
     loss=lambda m, x, e: m.sc(m.pre(x)).sum())  # fmt: skip
case("empty batches always", tanh, batch=lambda g, i: torch.randn(0, 4, generator=g),
     loss=lambda m, x, e: m.sc(m.pre(x)).sum() + m.pre.bias.sum())  # fmt: skip
case("a 0-dim input", lambda s, x, t: s.l(x) * t,
     use=lambda m, x: m.sc(m.pre(x), x.mean()))  # fmt: skip
case("a 0-dim output alone", lambda s, x: s.l(x).square().mean(), use=lambda m, x: m.sc(m.pre(x)))
case("an input with overlapping memory", tanh,
     use=lambda m, x: m.sc(m.pre(x).flatten().unfold(0, 4, 2)))  # fmt: skip
case("an input with an offset into larger memory", tanh,
     use=lambda m, x: m.sc(torch.cat([m.pre(x), m.pre(x)])[2:5]))  # fmt: skip
case("an input is conjugated lazily", lambda s, x: s.l(x.real + x.imag),
     use=lambda m, x: m.sc(torch.complex(m.pre(x), m.pre(x).sin()).conj()))  # fmt: skip
case("an input is negated lazily", lambda s, x: s.l(x),
     use=lambda m, x: m.sc(torch.complex(m.pre(x), m.pre(x)).conj().imag))  # fmt: skip
case("an input is sparse", lambda s, x: torch.tanh(torch.sparse.mm(x, s.l.weight.t())),
     use=lambda m, x: m.sc(x.relu().to_sparse()) * m.pre.bias)  # fmt: skip
case("an input is a float one time and a tensor the next", lambda s, x, scale: s.l(x) * scale,
     loss=lambda m, x, e: m.sc(m.pre(x), 0.5 if e.i % 2 else torch.tensor(0.5)).mean())  # fmt: skip
case("positional arguments become keyword arguments", lambda s, x, scale=1.0: s.l(x) * scale,
     loss=lambda m, x, e: (m.sc(m.pre(x), 0.5) if not e.late else
                           m.sc(x=m.pre(x), scale=0.5)).mean())  # fmt: skip
case("keyword arguments in another order",
     lambda s, **k: s.l(k["a"]) * next(iter(k.values())).mean(),
     loss=lambda m, x, e: (m.sc(a=m.pre(x), b=x) if not e.late else
                           m.sc(b=x, a=m.pre(x))).mean())  # fmt: skip
case("a dictionary argument with keys in another order",
     lambda s, d: s.l(d["a"]) * next(iter(d.values())).mean(),
     loss=lambda m, x, e: m.sc({"a": m.pre(x), "b": x} if not e.late else
                               {"b": x, "a": m.pre(x)}).mean())  # fmt: skip
