"""Adversaries: values that compare equal, arguments with Python objects, unusual outputs."""

from __future__ import annotations

import fractions
import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import nn

from programs.cases import Table
from programs.scripts import Gain, having, setting

case = Table()
SETTINGS: dict[str, Any] = {}


# ---- values that compare equal, or are no plain numbers

case("-0.0 in place of 0.0", lambda s, x: s.l(x) + math.copysign(1.0, s.z), having(z=0.0),
     change=setting("z", -0.0))  # fmt: skip
case("True in place of 1", lambda s, x: s.l(x) * (3.0 if s.flag is True else 1.0), having(flag=1),
     change=setting("flag", True))  # fmt: skip
case(
    "1.0 in place of 1",
    lambda s, x: (
        s.l(x) * (torch.ones(3, 1, dtype=torch.int32) * s.n / 3).to(s.l(x).dtype)
        + (0.5 if isinstance(s.n, float) else 0.0)
    ),
    having(n=1),
    change=setting("n", 1.0),
)
case("a fraction", lambda s, x: s.l(x) * float(s.gain), having(gain=fractions.Fraction(1, 2)),
     change=setting("gain", fractions.Fraction(3, 2)))  # fmt: skip
case("a range", lambda s, x: s.l(x) * len(s.r), having(r=range(1)), change=setting("r", range(3)))
case("bytes", lambda s, x: s.l(x) * s.b[0], having(b=b"\x01"), change=setting("b", b"\x03"))
case("a set", lambda s, x: s.l(x) * (3.0 if "a" in s.s else 1.0), having(s=set()),
     change=lambda m, e: m.sc.s.add("a"))  # fmt: skip
case("a list in a tuple", lambda s, x: s.l(x) * s.t[0][0], lambda s: setattr(s, "t", ([1.0],)),
     change=lambda m, e: m.sc.t[0].__setitem__(0, 3.0))  # fmt: skip
case("a number of numpy", lambda s, x: s.l(x) * s.g.item(), having(g=np.float64(1.0)),
     change=setting("g", np.float64(3.0)))  # fmt: skip
case("an element of a numpy array", lambda s, x: s.l(x) * float(s.a[0]),
     lambda s: setattr(s, "a", np.ones(2)),
     change=lambda m, e: m.sc.a.__setitem__(0, 3.0))  # fmt: skip
case("a tensor made from a numpy array", lambda s, x: s.l(x) * torch.tensor(s.a).float(),
     lambda s: setattr(s, "a", np.ones(4)),
     change=lambda m, e: m.sc.a.__setitem__(0, 3.0))  # fmt: skip
case("an int is one more key of a dictionary", lambda s, x: s.l(x) * sum(s.d.values()),
     having(d={"a": 1.0}), change=lambda m, e: m.sc.d.update(b=1.0))  # fmt: skip
case("a size", lambda s, x: s.l(x).reshape(s.shape).reshape(3, 4) * s.shape[0],
     having(shape=torch.Size([3, 4])), change=setting("shape", torch.Size([4, 3])))  # fmt: skip

# ---- tensors and arguments that carry Python


def _input_with_attribute(m, x):
    h = m.pre(x)
    h.gain = SETTINGS["gain"]
    return m.sc(h)


case("an attribute of the input tensor", lambda s, x: s.l(x) * x.gain, use=_input_with_attribute,
     start=lambda m, e: SETTINGS.update(gain=1.0),
     change=lambda m, e: SETTINGS.update(gain=3.0))  # fmt: skip
case("an attribute of a parameter", lambda s, x: s.l(x) * getattr(s.l.weight, "gain", 1.0),
     change=lambda m, e: setattr(m.sc.l.weight, "gain", 3.0))  # fmt: skip
case("a tensor in a list is replaced", lambda s, x: s.l(x) * s.ts[0],
     lambda s: setattr(s, "ts", [torch.ones(4)]),
     change=lambda m, e: m.sc.ts.__setitem__(0, torch.full((4,), 3.0)))  # fmt: skip
case("an item of a ParameterList is replaced", lambda s, x: s.l(x) * s.ps[0],
     lambda s: setattr(s, "ps", nn.ParameterList([torch.ones(4)])),
     change=lambda m, e: m.sc.ps.__setitem__(0, nn.Parameter(torch.full((4,), 3.0))))  # fmt: skip
case("two submodules are swapped", lambda s, x: s.b(torch.tanh(s.l(x))),
     lambda s: setattr(s, "b", nn.Linear(4, 4)),
     change=lambda m, e: m.sc._modules.update(l=m.sc.b, b=m.sc.l))  # fmt: skip
case("layers of a ModuleList in another order",
     lambda s, x: functools.reduce(lambda y, layer: layer(y).tanh(), s.layers, x),
     lambda s: setattr(s, "layers", nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])),
     change=lambda m, e: m.sc.layers._modules.update(
         {"0": m.sc.layers[1], "1": m.sc.layers[0]}))  # fmt: skip
case("an argument is an iterator", lambda s, x, it: s.l(x) * next(it),
     use=lambda m, x: m.sc(m.pre(x), SETTINGS["it"]),
     start=lambda m, e: SETTINGS.update(it=itertools.cycle([1.0, 2.0])))  # fmt: skip
case("an argument is a list that the forward appends to",
     lambda s, x, seen: seen.append(len(seen)) or s.l(x) * len(seen),
     use=lambda m, x: m.sc(m.pre(x), SETTINGS["seen"]),
     start=lambda m, e: SETTINGS.update(seen=[]))  # fmt: skip
case("an argument is a function whose closure changes", lambda s, x, f: f(s.l(x)),
     use=lambda m, x: m.sc(m.pre(x), SETTINGS["f"]),
     start=lambda m, e: SETTINGS.update(o=(o := Gain()), f=lambda x: x * o.gain),
     change=lambda m, e: setattr(SETTINGS["o"], "gain", 3.0))  # fmt: skip
case("an argument is a set of the same size", lambda s, x, keys: s.l(x) * sum(keys),
     use=lambda m, x: m.sc(m.pre(x), SETTINGS["keys"]),
     start=lambda m, e: SETTINGS.update(keys={1.0}),
     change=lambda m, e: (SETTINGS["keys"].clear(), SETTINGS["keys"].add(3.0)))  # fmt: skip

# ---- what leaves the forward besides its output

case("a tensor left on the module for the loss",
     lambda s, x: setattr(s, "aux", s.l(x).square().mean()) or s.l(x),
     loss=lambda m, x, e: m.sc(m.pre(x)).square().mean() + m.sc.aux)  # fmt: skip
case("a detached tensor left on the module for a metric",
     lambda s, x: setattr(s, "aux", s.l(x).detach().norm()) or s.l(x),
     step=lambda m, x, e: (m.sc(m.pre(x)).sum().backward(), m.sc.aux))  # fmt: skip
case("a detached tensor left on the module, kept over steps",
     lambda s, x: setattr(s, "aux", s.l(x).detach()) or s.l(x),
     step=lambda m, x, e: (m.sc(m.pre(x)).sum().backward(), e.kept.append(m.sc.aux)))  # fmt: skip
case("tensors put into a list of the script",
     lambda s, x: SETTINGS["aux"].append(s.l(x).mean()) or s.l(x),
     start=lambda m, e: SETTINGS.update(aux=[]),
     loss=lambda m, x, e: (SETTINGS["aux"].clear(), m.sc(m.pre(x)).square().mean())[1]
     + sum(SETTINGS["aux"]))  # fmt: skip
case("a fresh set among the outputs, changed by the caller", lambda s, x: (s.l(x), {1.0}),
     loss=lambda m, x, e: (out := m.sc(m.pre(x)), out[1].add(1.0 + len(out[1])))[0][0].mean()
     * len(out[1]))  # fmt: skip
case("a function among the outputs", lambda s, x: (s.l(x), lambda y: y * s.l.bias),
     use=lambda m, x: (lambda y, f: f(y))(*m.sc(m.pre(x))))  # fmt: skip
case("a number of calls among the outputs", lambda s, x: (s.l(x), next(s.n)),
     lambda s: setattr(s, "n", itertools.count(1)),
     use=lambda m, x: (lambda y, n: y / n)(*m.sc(m.pre(x))))  # fmt: skip


def _returns_same(s, x):
    y = s.l(x)
    return y, y


def _other_if_same(m, x):
    a, b = m.sc(m.pre(x))
    return a * 3.0 if a is b else a


case("two outputs are one object", _returns_same, use=_other_if_same)
case("an output is the module itself", lambda s, x: (s.l(x), s),
     use=lambda m, x: (lambda y, s: s.l(y))(*m.sc(m.pre(x))))  # fmt: skip
