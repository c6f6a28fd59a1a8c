"""Adversaries: autocast, default dtypes, flags and modes that are on around a call."""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from programs.cases import Table, plain_loss
from programs.scripts import tanh, without_value

case = Table()
FLAG = [1.0]


def from_fourth(context):
    """A context around the steps from the fourth on."""
    return lambda m, e, i: context() if i >= 4 else contextlib.nullcontext()


def around_call(context):
    """A step whose forward, not its backward, runs in the context from the fourth step on."""

    def step(m, x, e):
        with context() if e.late else contextlib.nullcontext():
            loss = plain_loss(m, x, e)
        loss.backward()
        return loss.detach()

    return step


def around_backward(context):
    def step(m, x, e):
        loss = plain_loss(m, x, e)
        with context() if e.late else contextlib.nullcontext():
            loss.backward()
        return loss.detach()

    return step


@contextlib.contextmanager
def flag():
    FLAG[0] = 3.0
    try:
        yield
    finally:
        FLAG[0] = 1.0


@contextlib.contextmanager
def setting(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def deterministic():
    return setting(torch.use_deterministic_algorithms, True, False)


def bf16(**options):
    return lambda: torch.autocast("cpu", torch.bfloat16, **options)


# ---- autocast

twice = dict(forward=lambda s, x: s.l(torch.tanh(s.l(x))).float())
case("autocast around the call", **twice, step=around_call(bf16()))
case("autocast without its cache around the call", **twice, step=around_call(
    bf16(cache_enabled=False)))  # fmt: skip
case("autocast around the backward alone", **twice, step=around_backward(bf16()))
case("autocast around the step", **twice, around=from_fourth(bf16()))


def _always(context):
    return lambda m, e, i: context()


case("autocast around every step", **twice, around=_always(bf16()))
case("autocast to another dtype", **twice, around=lambda m, e, i: torch.autocast(
    "cpu", torch.float16 if i >= 4 else torch.bfloat16, cache_enabled=False))  # fmt: skip
case("the dtype of autocast is set, while it is off", lambda s, x: _own_autocast(s, x),
     around=lambda m, e, i: setting(lambda d: torch.set_autocast_dtype("cpu", d),
                                    torch.float16 if i >= 4 else torch.bfloat16,
                                    torch.bfloat16))  # fmt: skip


def _own_autocast(s, x):
    with torch.autocast("cpu"):
        return s.l(x).float()


def _nested_autocast(s, x):
    with torch.autocast("cpu", enabled=False):
        y = s.l(x.float())
    return s.l(y).float()


case("autocast is off in a part of the scope", _nested_autocast, around=_always(bf16()))
case("autocast by a decorator of the forward",
     torch.autocast("cpu", torch.bfloat16)(lambda s, x: s.l(torch.tanh(s.l(x)))),
     use=lambda m, x: m.sc(m.pre(x)).float())  # fmt: skip


def _cache_across(m, x, e):
    """One cast of the shared weight serves eager code and scope; then the weight changes."""
    with torch.autocast("cpu", torch.bfloat16):
        first = functional.linear(x, m.sc.l.weight)
        y = m.sc(m.pre(x))
        loss = (first * y).float().mean()
    loss.backward()
    return loss.detach()


case("autocast's cache is shared between scope and eager code", tanh, step=_cache_across)


def _within_no_grad_first(m, x, e):
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            m.sc(m.pre(x))  # casts of the weights are cached here, without a history
        loss = m.sc(m.pre(x)).float().square().mean()
    loss.backward()
    return loss.detach()


case("autocast's cache is filled under no_grad", tanh, step=_within_no_grad_first)

# ---- flags of torch

case("another default dtype", lambda s, x: s.l(x) * (torch.ones(4) / 3),
     around=lambda m, e, i: setting(torch.set_default_dtype,
                                    torch.float64 if i >= 4 else torch.float32, torch.float32),
     batch=lambda g, i: torch.randn(3, 4, generator=g, dtype=torch.float32))  # fmt: skip
case("Python asks for the default dtype",
     lambda s, x: s.l(x) * (3.0 if torch.get_default_dtype() is torch.float64 else 1.0),
     around=from_fourth(lambda: setting(torch.set_default_dtype, torch.float64, torch.float32)),
     batch=lambda g, i: torch.randn(3, 4, generator=g, dtype=torch.float32))  # fmt: skip
case("Python asks for deterministic algorithms",
     lambda s, x: s.l(x) * (3.0 if torch.are_deterministic_algorithms_enabled() else 1.0),
     around=from_fourth(deterministic))  # fmt: skip


def _refused_if_deterministic(s, x):
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("not deterministic")
    return s.l(x)


case("a kernel refuses deterministic algorithms", _refused_if_deterministic,
     around=from_fourth(deterministic))  # fmt: skip
case("deterministic algorithms fill empty tensors", lambda s, x: s.l(x) + torch.nan_to_num(
    torch.empty(4), nan=1.0, posinf=0.0, neginf=0.0).clamp(1.0, 1.0),
     around=from_fourth(deterministic))  # fmt: skip
case("Python asks for the matmul precision",
     lambda s, x: s.l(x) * (3.0 if torch.get_float32_matmul_precision() == "medium" else 1.0),
     around=from_fourth(lambda: setting(torch.set_float32_matmul_precision, "medium",
                                        "highest")))  # fmt: skip
case("Python asks for the number of threads", lambda s, x: s.l(x) * torch.get_num_threads(),
     around=from_fourth(lambda: setting(torch.set_num_threads, 2, 1)))  # fmt: skip
case("mkldnn is off", lambda s, x: s.c(x[:, :, None]).mean(2),
     lambda s: setattr(s, "c", nn.Conv1d(4, 4, 1)),
     around=from_fourth(lambda: torch.backends.mkldnn.flags(enabled=False)))  # fmt: skip
case("Python asks whether mkldnn is on",
     lambda s, x: s.l(x) * (1.0 if torch.backends.mkldnn.enabled else 3.0),
     around=from_fourth(lambda: torch.backends.mkldnn.flags(enabled=False)))  # fmt: skip


def _attends(s, x):
    q = s.l(x)[None, None]
    return functional.scaled_dot_product_attention(q, q, q)[0, 0]


case("another kernel for attention around the call", _attends,
     step=around_call(lambda: sdpa_kernel(SDPBackend.MATH)))  # fmt: skip
case("no kernel for attention is allowed", _attends,
     step=around_call(lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)))  # fmt: skip
case("Python asks which kernels for attention are on",
     lambda s, x: s.l(x) * (1.0 if torch.backends.cuda.flash_sdp_enabled() else 3.0),
     step=around_call(lambda: sdpa_kernel(SDPBackend.MATH)))  # fmt: skip
case("attention in eval takes a fast path, by a flag", lambda s, x: s.e(x[:, None])[:, 0],
     lambda s: setattr(s, "e", nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1)),
     change=lambda m, e: (m.eval(), torch.backends.mha.set_fastpath_enabled(False)),
     between=lambda m, e, i: i == 6 and torch.backends.mha.set_fastpath_enabled(True))  # fmt: skip

# ---- modes of the caller's own


class DoublesLinear(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2.0 if func is functional.linear else out


class CountsOps(TorchDispatchMode):
    def __init__(self, e):
        super().__init__()
        self.e = e

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.e.ops = getattr(self.e, "ops", 0) + (func is torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class DoublesAddmm(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2.0 if func is torch.ops.aten.addmm.default else out


case("a function mode changes linear", tanh, around=from_fourth(DoublesLinear))
case("a function mode changes linear, around the call", tanh, step=around_call(DoublesLinear))
case("a dispatch mode changes addmm", tanh, around=from_fourth(DoublesAddmm))
case("a dispatch mode counts addmm", tanh,
     around=lambda m, e, i: CountsOps(e) if i >= 4 else contextlib.nullcontext(),
     update=lambda m, e, i: e.log.append(getattr(e, "ops", 0)) or m.zero_grad())  # fmt: skip
case("a dispatch mode around the first steps", tanh,
     around=lambda m, e, i: CountsOps(e) if i < 2 else contextlib.nullcontext(),
     update=lambda m, e, i: e.log.append(getattr(e, "ops", 0)) or m.zero_grad())  # fmt: skip


def _counts_flops(m, x, e):
    with FlopCounterMode(display=False) as counter:
        plain_loss(m, x, e).backward()
    return counter.get_total_flops()


case("FLOPs are counted from the fourth step on", tanh,
     step=lambda m, x, e: (_counts_flops if e.late else without_value)(m, x, e))  # fmt: skip
case("FLOPs are counted in the warm-up", tanh,
     step=lambda m, x, e: (_counts_flops if e.i < 2 else without_value)(m, x, e))  # fmt: skip


case("tensors are made on another device by default", lambda s, x: s.l(x) + torch.zeros(4),
     step=around_call(lambda: torch.device("meta")))  # fmt: skip
case("the default device is set to what it is", lambda s, x: s.l(x) + torch.ones(4),
     around=from_fourth(lambda: torch.device("cpu")))  # fmt: skip
case("parametrizations are cached around the call", lambda s, x: s.p(torch.tanh(s.p(x))),
     lambda s: setattr(s, "p", parametrizations.spectral_norm(nn.Linear(4, 4))),
     step=around_call(parametrize.cached))  # fmt: skip
case("parametrizations are cached around every step", lambda s, x: s.p(torch.tanh(s.p(x))),
     lambda s: setattr(s, "p", parametrizations.weight_norm(nn.Linear(4, 4))),
     around=_always(parametrize.cached))  # fmt: skip
case("a flag of the user's own around the call", lambda s, x: s.l(x) * FLAG[0],
     step=around_call(flag))  # fmt: skip


def _always_flag(m, x, e):
    with flag():
        loss = plain_loss(m, x, e)
    loss.backward()
    return loss.detach()


case("a flag of the user's own around every call", lambda s, x: s.l(x) * FLAG[0],
     step=_always_flag)  # fmt: skip


class ReadsFlag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FLAG[0]


case("a flag of the user's own around every backward", lambda s, x: ReadsFlag.apply(s.l(x)),
     around=lambda m, e, i: contextlib.nullcontext(),
     step=lambda m, x, e: _flagged_backward(m, x, e, True))  # fmt: skip
case("a flag of the user's own around some backwards", lambda s, x: ReadsFlag.apply(s.l(x)),
     step=lambda m, x, e: _flagged_backward(m, x, e, e.late))  # fmt: skip


def _flagged_backward(m, x, e, is_on):
    loss = plain_loss(m, x, e)
    with flag() if is_on else contextlib.nullcontext():
        loss.backward()


def _sets_flag_inside(s, x):
    """A context that the forward enters and that is still open in the backward."""
    FLAG[0] += 1.0
    return s.l(x) * 1.0


case("the forward counts in a global list", _sets_flag_inside,
     start=lambda m, e: FLAG.__setitem__(0, 1.0),
     update=lambda m, e, i: e.log.append(FLAG[0]) or m.zero_grad())  # fmt: skip
case("a warning in the forward", lambda s, x: warnings.warn("each call", stacklevel=1) or s.l(x),
     step=lambda m, x, e: _counts_warnings(m, x, e))  # fmt: skip


def _counts_warnings(m, x, e):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plain_loss(m, x, e).backward()
    return sum(str(w.message) == "each call" for w in seen)
