"""Adversaries: names of attributes that code puts together. No instruction has the name."""

from __future__ import annotations

import functools
import operator
import types

import torch

from programs.cases import Table

case = Table()
ALONE = {"audit_every": None}  # guards have to see it
END, PADDED, FORMAT, SPELLED = "in", "xgain", "ga%s", ("g", "a", "i", "n")
LEAF = "leaf"
PARTS = {"end": "in"}
LOOKS_UP = getattr


class Config:
    def __init__(self):
        self.gain, self.ending = 1.0, "in"


def _of_function(): ...


class Kind:
    gain = 1.0


SETTINGS = types.ModuleType("settings_of_names")


HOLDERS = {
    "an object": lambda s: s.cfg,
    "an object of an object": lambda s: s.cfg.inner,
    "an object that holds a module": lambda s: s.trainer,
    "a module of Python": lambda s: SETTINGS,
    "a class": lambda s: Kind,
    "a function's attribute": lambda s: _of_function,
}


def _init(s):
    s.cfg, s.trainer = Config(), Config()
    s.cfg.inner, s.trainer.layer = Config(), torch.nn.Linear(1, 1)
    for each in (_itself, *HOLDERS.values()):
        each(s).gain = 1.0


def _itself(s):
    return s


def named(name, forward, of=_itself):
    """Case whose forward reads ``gain`` of something; before step 4 it becomes 3."""
    case(f"a name that is put together: {name}", forward, _init,
         change=lambda m, e: setattr(of(m.sc), "gain", 3.0), options=ALONE)  # fmt: skip


def _get(value, name):
    return getattr(value, name)


def _get_all(value, *names, **others):
    return [getattr(value, each) for each in names] + [getattr(value, others["name"])]


def _end():
    return "in"


def _assigned(s):
    name = "ga" + END
    name = name.lower()
    return getattr(s, name)


def _in_a_branch(s):
    return getattr(s, "ga" + (END if s.training else "p"))


def _with_a_default(s):
    return getattr(s, "ga" + END, 3.0 if s.training else 2.0)


def _of_an_attribute(s):
    return getattr(s, "ga" + s.cfg.ending)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, s):
        ctx.s = s
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * getattr(ctx.s, "ga" + END), None


def _hooked(s, x):
    y = s.l(x)
    y.register_hook(lambda gradient: gradient * getattr(s, "ga" + END))
    return y


READS = {
    "a sum": lambda s: getattr(s, "ga" + END),
    "%": lambda s: getattr(s, "ga%s" % END),  # noqa: UP031
    "% of a global": lambda s: getattr(s, FORMAT % END),
    "% of a tuple": lambda s: getattr(s, "%s%s" % ("ga", END)),  # noqa: UP031
    "an f-string": lambda s: getattr(s, f"ga{END}"),
    "an f-string of a format": lambda s: getattr(s, f"ga{END:2}"),
    "a slice": lambda s: getattr(s, PADDED[1:]),
    "a sum of elements": lambda s: getattr(s, SPELLED[0] + SPELLED[1] + SPELLED[2] + SPELLED[3]),
    "an entry of a dictionary": lambda s: getattr(s, "ga" + PARTS["end"]),
    "an attribute": _of_an_attribute,
    "a method of a string": lambda s: getattr(s, "GAIN".lower()),
    "a function": lambda s: getattr(s, "ga" + _end()),
    "an argument": lambda s: _get(s, "ga" + END),
    "several arguments": lambda s: _get_all(s, "ga" + END, name="ga" + END)[0],
    "a keyword": lambda s: _get_all(s, name="ga" + END)[0],
    "a variable": _assigned,
    "a branch": _in_a_branch,
    "a default": _with_a_default,
    "a comprehension": lambda s: sum([getattr(s, "ga" + each) for each in ("in",)]),
    "unpacked arguments": lambda s: getattr(*(s, "ga" + END)),
    "another name of getattr": lambda s: LOOKS_UP(s, "ga" + END),
    "map": lambda s: next(map(getattr, [s], ["ga" + END])),
    "reduce": lambda s: functools.reduce(getattr, ("ga" + END,), s),
    "partial": lambda s: functools.partial(getattr, s)("ga" + END),
    "attrgetter": lambda s: operator.attrgetter("ga" + END)(s),
    "attrgetter of a path": lambda s: operator.attrgetter("cfg.inner.ga" + END)(s),
    "__getattribute__": lambda s: s.__getattribute__("ga" + END),
    "object.__getattribute__": lambda s: object.__getattribute__(s, "ga" + END),
    "eval": lambda s: eval("s.ga" + END),
    "format": lambda s: float(("{s.ga" + END + "}").format(s=s)),
    "an object of an object": lambda s: getattr(getattr(s.cfg, "inn" + "er"), "ga" + END),
}
for _name, _read in READS.items():
    _of = HOLDERS.get(_name.replace("attrgetter of a path", "an object of an object"), _itself)
    named(_name, lambda s, x, r=_read: s.l(x) * r(s), _of)
for _name, _of in HOLDERS.items():
    if _name not in READS:
        named(_name, lambda s, x, o=_of: s.l(x) * getattr(o(s), "ga" + END), _of)
    if "holds a module" not in _name:  # audits find it (docs/design.md)
        named(f"{_name}, by a method of a text",
              lambda s, x, o=_of: s.l(x) * getattr(o(s), "GAIN".lower()), _of)  # fmt: skip
named("an object's class", lambda s, x: s.l(x) * getattr(Kind(), "ga" + END), HOLDERS["a class"])
named("a backward", lambda s, x: Scaled.apply(s.l(x), s))
named("a hook of a gradient", _hooked)
case("hasattr with a name that is put together",
     lambda s, x: s.l(x) * (3.0 if hasattr(s, "ad" + END) else 1.0),
     change=lambda m, e: setattr(m.sc, "adin", 1), options=ALONE)  # fmt: skip


def _leaves(s, x):
    y = s.l(x)
    setattr(s, "la" + END, y)
    return y


def _counts(s, x):
    setattr(s, "co" + END, getattr(s, "co" + END) + 1)
    return s.l(x)


def _drops(s, x):
    if s.training:
        s.__dict__["lain"] = 1
        delattr(s, "la" + END)
    return s.l(x)


case("setattr with a name that is put together", _leaves,
     update=lambda m, e, i: (e.log.append(m.sc.lain.detach().clone()), m.zero_grad()),
     options=ALONE)  # fmt: skip
case("a count under a name that is put together", _counts, lambda s: setattr(s, "coin", 0),
     update=lambda m, e, i: (e.log.append(m.sc.coin), m.zero_grad()), options=ALONE,
     engines=("scopes", "step"))  # fmt: skip
case("delattr with a name that is put together", _drops, options=ALONE,
     update=lambda m, e, i: (e.log.append("lain" in vars(m.sc)), m.zero_grad()))  # fmt: skip
case(
    "a tensor's history by a name that is put together",
    lambda s, x: s.l(x) * (1.0 if getattr(x, "is_" + LEAF) else 3.0),
    options=ALONE,
)
