"""Fixed memory that graphs read from and write to, and copies into it and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.signature import tensor_leaves
from moe_graphs.engine.stand_for import local


def static_copy(tensor: Tensor) -> Tensor:
    """Memory of its own with the same values and strides, those of gaps and expansions included:
    kernels are chosen by strides."""
    made = static_like(tensor)
    copy_to(target_of(made), tensor.detach())
    return made


def static_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def target_of(static: Tensor) -> Tensor:
    """What copies into static memory write to: all of it, behind autograd's back, since an open
    autograd graph may have saved the static tensor."""
    return _dense(static.data)


def copy_to(target: Tensor, value: Tensor) -> None:
    """``value`` has the shape of the tensor that ``target`` was made of."""
    target.copy_(value if value.shape == target.shape else _narrowed(value, target))


def owned(tree: Any) -> Any:
    """The tree with detached copies of its tensors."""
    leaves, structure = pytree.tree_flatten(tree)
    return pytree.tree_unflatten(owned_leaves(leaves), structure)


@torch.no_grad()
def owned_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among the leaves, in few launches. The same tensor stays the same."""
    copies: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in copies:
            copies[id(leaf)] = torch.empty_like(leaf, requires_grad=False)
    sources = {id(leaf): local(leaf).detach() for leaf in tensor_leaves(leaves)}
    copy_all([local(copies[key]) for key in sources], list(sources.values()))
    return [copies.get(id(leaf), leaf) for leaf in leaves]


@torch.no_grad()
def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def dense_pair(static: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What ``copy_all`` takes to copy a value into static memory that may be expanded."""
    return target_of(static), _dense(value.detach())


def _narrowed(value: Tensor, target: Tensor) -> Tensor:
    """The part of an expanded value that an expanded target has memory for."""
    for dim, (size, kept) in enumerate(zip(value.shape, target.shape, strict=True)):
        if kept < size:
            value = value.narrow(dim, 0, kept)
    return value


def _dense(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that has memory of its own: copies go there."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
