"""Adversaries: values of tensors that reach Python in another way than by ``item()``."""

from __future__ import annotations

import copy
import ctypes
import io
import math
import pickle

import numpy as np
import torch

from programs.cases import Table
from programs.scripts import tanh

case = Table()


def reads(name, value, **options):
    """Case whose forward multiplies by a number that it reads from its input."""
    case(f"reads values by {name}", lambda s, x: s.l(x) * (value(x.detach().tanh()) / 8), **options)


reads("float()", lambda x: float(x.sum()))
reads("int()", lambda x: int(x.sum() * 10))
reads("bool()", lambda x: 3.0 if bool(x.sum() > 0) else 1.0)
reads("an if", lambda x: 3.0 if x.sum() > 0 else 1.0)
reads("and", lambda x: 3.0 if (x.sum() > 0 and x.mean() < 9) else 1.0)
reads("all() of Python", lambda x: 3.0 if all(x[0] < 0.5) else 1.0)
reads("max() of Python", lambda x: max(x[0, 0], x[0, 1]))
reads("in", lambda x: 3.0 if 0.0 in (x > 0).float() else 1.0)
reads("a range", lambda x: float(len(range((x > 0).sum()))))
reads("an index of a list", lambda x: [1.0, 2.0, 3.0][(x[0, 0] > 0).long()])
reads("math.sqrt", lambda x: math.sqrt(x.square().sum()))
reads("round()", lambda x: round(float(x.sum()), 1))
reads("format", lambda x: float(f"{x.sum():.2f}"))
reads("repr", lambda x: len(repr(x > 0)) / 100)
reads("tolist", lambda x: x.tolist()[0][0])
reads("numpy()", lambda x: float(x.numpy()[0, 0]))
reads("np.asarray", lambda x: float(np.asarray(x)[0, 0]))
reads("a ufunc of numpy", lambda x: float(np.tanh(x)[0, 0]))
reads("__array__", lambda x: float(x.__array__()[0, 0]))
reads("DLPack", lambda x: float(np.from_dlpack(x)[0, 0]))
reads("its address", lambda x: ctypes.c_float.from_address(x.data_ptr()).value)
reads("its storage", lambda x: x.untyped_storage()[3] / 255)
reads("its storage as a list", lambda x: sum(x.untyped_storage().tolist()[:4]) / 1000)
reads("pickle", lambda x: pickle.loads(pickle.dumps(x.clone())).sum())
reads("torch.save", lambda x: _saved(x))
reads("deepcopy and numpy", lambda x: float(copy.deepcopy(x).numpy()[0, 0]))
reads("torch.equal", lambda x: 3.0 if torch.equal(x > 0, x > 0.5) else 1.0)
reads("torch.allclose", lambda x: 3.0 if torch.allclose(x, x.abs(), atol=1.0) else 1.0)
reads("torch.is_nonzero", lambda x: 3.0 if torch.is_nonzero((x > 0).any()) else 1.0)
reads("nonzero", lambda x: float(x.relu().nonzero().shape[0]))
reads("unique", lambda x: float((x > 0).unique().numel()))
reads("a mask", lambda x: x[x > 0].sum())
reads("masked_select", lambda x: x.masked_select(x > 0).mean())
reads("torch.where with one argument", lambda x: float(torch.where(x > 0)[0].numel()))
reads("argwhere", lambda x: float(len(torch.argwhere(x > 0))))
reads("bincount", lambda x: float(torch.bincount((x[0] > 0).long() * 2).numel()))
reads("repeat_interleave by a tensor", lambda x: torch.repeat_interleave(
    x[0], (x[0] > 0).long()).sum())  # fmt: skip
reads("split by a tensor's values", lambda x: x.flatten().split(
    [int((x > 0).sum()), int((x <= 0).sum())])[0].sum())  # fmt: skip
reads("narrow by a tensor", lambda x: x[0].narrow(0, (x[0, 0] > 0).long(), 2).sum())
reads("slicing by a tensor", lambda x: x[0, (x[0, 0] > 0).long() :].sum())
reads("a size from a tensor", lambda x: float(torch.zeros(int((x > 0).sum())).numel()))
reads("linspace between tensors", lambda x: torch.linspace(x.min(), x.max(), 3)[1])
reads("arange to a tensor", lambda x: float(torch.arange(x.abs().sum()).numel()))
reads("torch.tensor of a list of tensors", lambda x: torch.tensor([x.sum(), x.mean()]).sum())
reads("torch.as_tensor of numpy", lambda x: torch.as_tensor(x.numpy() * 2.0).sum())
reads("torch.full with a tensor", lambda x: torch.full((4,), x.sum()))
reads("a tensor made from its pieces", lambda x: torch.Tensor([float(v) for v in x[0]]))
reads("clamp by numbers read", lambda x: x.clamp(max=x.mean().item()).sum())
reads("histc", lambda x: torch.histc(x, 4, min=-1, max=1).max())
reads("index_put with a mask", lambda x: _index_put(x))
reads("x[mask] = value", lambda x: _set_by_mask(x))


def _saved(x):
    memory = io.BytesIO()
    torch.save(x.clone(), memory)
    memory.seek(0)
    return torch.load(memory).sum()


def _index_put(x):
    return x.clone().index_put_((x > 0,), torch.zeros(())).sum()


def _set_by_mask(x):
    y = x.clone()
    y[x > 0] = 2.0
    return y.sum()


def _metadata_changed(m, x, e):
    """The caller changes the shape of the output in place."""
    y = m.sc(m.pre(x))
    y.unsqueeze_(0)
    loss = y.square().mean() * y.dim()
    loss.backward()
    return loss.detach(), y.dim()


case("the caller unsqueezes the output in place", lambda s, x: s.l(x), step=_metadata_changed)


def _transposed(m, x, e):
    y = m.sc(m.pre(x))
    y.t_()
    (y[0].sum() + y.square().mean()).backward()
    return y.shape


case("the caller transposes the output in place", lambda s, x: s.l(x), step=_transposed)


def _resized_input(m, x, e):
    h = m.pre(x).detach()
    y = m.sc(h)
    h.resize_(1, 4)
    y.square().mean().backward()


case("the caller resizes an input that nobody saved", lambda s, x: x + s.l.bias,
     step=_resized_input)  # fmt: skip


def _swapped_data(m, x, e):
    h = m.pre(x)
    y = m.sc(h)
    y.data = torch.zeros(3, 4)
    y.sum().backward()
    return y.detach().clone()


case("the caller assigns the output's .data", tanh, step=_swapped_data)
