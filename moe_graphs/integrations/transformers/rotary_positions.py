"""Attention of transformers with ``apply_rotary_pos_emb`` as one kernel."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.integrations.transformers.changes import Changes, by_class
from moe_graphs.integrations.transformers.decoding import theirs_in_decoding
from moe_graphs.kernels import apply_rotary

_NAME = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]


def change_rotary(model: nn.Module, done: Changes) -> None:
    """Gives every attention module whose ``forward`` calls that function one that calls ours.

    Its code is transformers' own, with that one name bound to another function.
    """
    for modules in by_class(filter(_is_candidate, model.modules())):
        kind = type(modules[0])
        reason = _why_not(kind, modules)
        if reason is not None:
            done.left("rotary", kind.__name__, len(modules), reason)
            continue
        note = "one kernel for queries and keys"
        done.changed_classes("rotary", modules, _rebound, note)


def _is_candidate(module: nn.Module) -> bool:
    kind = type(module)
    names = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    return kind.__name__.endswith("Attention") and _NAME in names


def _why_not(kind: type[nn.Module], modules: list[nn.Module]) -> str | None:
    forward: Any = inspect.unwrap(kind.forward)
    theirs = forward.__globals__[_NAME]
    if _NAME not in forward.__code__.co_names:
        return f"its forward does not call {_NAME} itself"
    if any("forward" in vars(module) for module in modules):
        return "has a forward of its own"
    if not _knows_its_inner(kind.forward):
        return "a decorator of its forward is not known"
    if theirs is _rotary:
        return "is on our kernel already"
    if list(inspect.signature(theirs).parameters) != _PARAMETERS or not _computes(theirs):
        return "computes something else"
    return None


@torch.no_grad()
def _computes(theirs: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Compares whole heads, and parts of heads if it takes these. The tables' halves differ."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, n, 5, 16, generator=generator) for n in (4, 2))
    for columns in (16, 8):
        tables = [torch.randn(2, 5, columns, generator=generator) for _ in range(2)]
        try:
            expected = theirs(query, key, *tables)
        except (RuntimeError, IndexError, ValueError):
            if columns == 16:
                return False
            continue  # it has no heads that turn in part
        found = apply_rotary(query, key, *tables)
        if not all(map(torch.allclose, expected, found)):
            return False
    return True


def _rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Our kernel. Queries and keys are ``[B, S, heads, Q]`` where ``unsqueeze_dim`` is 2."""
    if unsqueeze_dim == 1:
        return apply_rotary(q, k, cos, sin)
    query, key = apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return query.transpose(1, 2), key.transpose(1, 2)


@theirs_in_decoding
def _rebound(kind: Any) -> types.FunctionType:
    return _with_ours(kind.forward)


def _with_ours(forward: Any) -> types.FunctionType:
    """A copy of ``forward``, and of the decorators around it, in which the name is ours."""
    inner, names = getattr(forward, "__wrapped__", None), forward.__globals__
    cells: Any
    if inner is None:
        names, cells = {**names, _NAME: _rotary}, forward.__closure__
    else:
        made_inner = _with_ours(inner)
        cells = tuple(
            types.CellType(made_inner) if cell.cell_contents is inner else cell
            for cell in forward.__closure__ or ()
        )
    made = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, cells
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    if inner is not None:
        made.__wrapped__ = made_inner  # type: ignore[attr-defined]
    return made


def _knows_its_inner(forward: Any) -> bool:
    """Whether the closure of every decorator around a forward holds what it calls."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        if not any(cell.cell_contents is inner for cell in forward.__closure__ or ()):
            return False
        forward = inner
    return True
