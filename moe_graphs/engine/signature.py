"""What a graph was captured for, and how a call differs from it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.values import same_value

_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}


@dataclass(frozen=True)
class Mismatch:
    """``reason`` is the counter's key, ``message`` what a user reads."""

    reason: str
    message: str


@dataclass(frozen=True)
class TensorSpec:
    name: str
    kind: type
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: torch.layout = torch.strided

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        layout = tensor.layout
        stride = tensor.stride() if layout is torch.strided else ()
        return cls(
            name,
            type(tensor),
            tuple(tensor.shape),
            stride,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            layout,
        )

    def mismatch(self, value: Any) -> Mismatch | None:
        if (
            type(value) is self.kind
            and value.shape == self.shape
            and value.layout is self.layout
            and value.stride() == self.stride
            and value.dtype is self.dtype
            and value.device == self.device
            and value.requires_grad is self.requires_grad
        ):
            return None
        if not isinstance(value, torch.Tensor):
            message = f"input {self.name!r}: captured a tensor, got {value!r}: pass a tensor"
            return Mismatch("structure", message)
        return self._difference(TensorSpec.of(self.name, value))

    def unsupported(self) -> str | None:
        """Why a graph cannot have this tensor for an input, or None."""
        plain = self.kind in (torch.Tensor, torch.nn.Parameter)
        if plain and self.layout is torch.strided and not self._overlaps_itself():
            return None
        what = f"a {self.kind.__name__}"
        if plain:
            strided = self.layout is torch.strided
            what = "a view that overlaps itself" if strided else f"of layout {self.layout}"
        return f"input {self.name!r} is {what}: graphs take plain, strided tensors: convert it"

    def _overlaps_itself(self) -> bool:
        """Otherwise than by being expanded: no copy could be written there."""
        at = sorted((stride, size) for size, stride in zip(self.shape, self.stride, strict=True))
        reached = 0
        for stride, size in at:
            if size > 1 and stride > 0:
                if stride <= reached:
                    return True
                reached += (size - 1) * stride
        return False

    def _difference(self, got: TensorSpec) -> Mismatch | None:
        for field in ("shape", "dtype", "device", "requires_grad", "layout", "stride", "kind"):
            captured, now = getattr(self, field), getattr(got, field)
            if captured != now:
                message = f"input {self.name!r}: captured {field} {captured}, got {now}"
                return Mismatch(field, f"{message}: {EAGER_CALLS[field].remedy}")
        return None


@dataclass(frozen=True)
class ConstantSpec:
    """Anything but a tensor: frozen into the graph, so it must be the same at every call. What
    lies inside of an object is compared by ``Guards``."""

    name: str
    value: Any

    def mismatch(self, value: Any) -> Mismatch | None:
        if value is self.value or same_value(value, self.value):
            return None
        message = (
            f"input {self.name!r}: captured the constant {self.value!r}, got {value!r}: "
            f"{EAGER_CALLS['constant'].remedy}"
        )
        return Mismatch("constant", message)


@dataclass(frozen=True)
class Signature:
    """The structure, tensors and constants of a scope's inputs.

    first: of every leaf the number of the first one that is the very same tensor (``attn(x, x,
        x)``): the forward may ask ``key is value``, and gradients add up in another order.
    """

    structure: pytree.TreeSpec
    leaves: tuple[TensorSpec | ConstantSpec, ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Any, name_of: Callable[[Sequence[Any]], str] = pytree.keystr) -> Signature:
        """``name_of`` turns the path of a leaf into the name that messages use."""
        paths, _ = pytree.tree_flatten_with_path(inputs)
        leaves = tuple(
            (TensorSpec.of if isinstance(leaf, torch.Tensor) else ConstantSpec)(name_of(path), leaf)
            for path, leaf in paths
        )
        return cls(flatten(inputs)[1], leaves, _first_of_each([leaf for _, leaf in paths]))

    def mismatch(self, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> Mismatch | None:
        """The first difference of a call, or None. Reads no values and does not synchronise."""
        if structure is not self.structure and structure != self.structure:
            return Mismatch(
                "structure", f"captured inputs {self.structure}, got {structure}: call it alike"
            )
        for spec, leaf in zip(self.leaves, leaves, strict=True):
            difference = spec.mismatch(leaf)
            if difference is not None:
                return difference
        if _first_of_each(leaves) != self.first:
            message = "captured with other arguments being the very same tensor: call it alike"
            return Mismatch("aliases", message)
        return None

    def tensors(self) -> list[int]:
        """The numbers of the leaves that are tensors."""
        return [i for i, spec in enumerate(self.leaves) if isinstance(spec, TensorSpec)]

    def unsupported(self) -> str | None:
        found = (self.leaves[i].unsupported() for i in self.tensors())
        return next((reason for reason in found if reason is not None), None)


def flatten(inputs: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """As ``pytree.tree_flatten``; arguments that are all tensors by position take a tenth of the
    time."""
    if is_call(inputs) and not inputs[1]:
        leaves = inputs[0]
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return list(leaves), _of_tensors(len(leaves))
    return pytree.tree_flatten(inputs)


def unflattening(structure: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """``pytree.tree_unflatten`` for one structure; of a node with leaves only in a fifth of the
    time."""
    if structure.is_leaf():
        return operator.itemgetter(0)
    node = pytree.SUPPORTED_NODES.get(structure.type)
    if node is None or structure.num_leaves != structure.num_nodes - 1:
        return functools.partial(pytree.tree_unflatten, treespec=structure)
    return lambda leaves: node.unflatten_fn(leaves, structure.context)


def is_call(inputs: Any) -> bool:
    """Whether they are positional arguments and those by keyword."""
    return (
        type(inputs) is tuple
        and len(inputs) == 2
        and type(inputs[0]) is tuple
        and type(inputs[1]) is dict
    )


@functools.cache
def _of_tensors(count: int) -> pytree.TreeSpec:
    return pytree.tree_structure(((0,) * count, {}))


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a pytree, in order. Arguments of operations by a shorter way:
    an operation that is watched asks several times."""
    kind = type(tree)
    if kind is torch.Tensor:
        return [tree]
    if kind in _CONSTANTS:
        return []
    if kind is tuple or kind is list or kind is dict:
        parts = tree.values() if kind is dict else tree
        return [tensor for part in parts for tensor in tensor_leaves(part)]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _first_of_each(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Of constants it is the number itself."""
    tensors = [
        id(leaf) if isinstance(leaf, torch.Tensor) else -1 - i for i, leaf in enumerate(leaves)
    ]
    if len(set(tensors)) == len(tensors):
        return tuple(range(len(tensors)))
    return tuple(map(tensors.index, tensors))
