"""What a graph was captured for, and how a call differs from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Mismatch:
    """``reason`` is the counter's key, ``message`` what a user reads."""

    reason: str
    message: str


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(name, shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def mismatch(self, value: Any) -> Mismatch | None:
        if not isinstance(value, torch.Tensor):
            return Mismatch("structure", f"input {self.name!r}: captured a tensor, got {value!r}")
        if (
            value.shape == self.shape
            and value.stride() == self.stride
            and value.dtype is self.dtype
            and value.device == self.device
            and value.requires_grad is self.requires_grad
        ):
            return None
        return self._difference(TensorSpec.of(self.name, value))

    def _difference(self, got: TensorSpec) -> Mismatch:
        remedy = "let it run eagerly with on_mismatch='eager', or keep it as it was captured"
        for field in ("shape", "dtype", "device", "requires_grad", "stride"):
            captured, now = getattr(self, field), getattr(got, field)
            if captured != now:
                message = f"input {self.name!r}: captured {field} {captured}, got {now}: {remedy}"
                return Mismatch(field, message)
        raise AssertionError("called for equal specs")


@dataclass(frozen=True)
class ConstantSpec:
    """Anything but a tensor: frozen into the graph, so it must be the same at every call."""

    name: str
    value: Any

    def mismatch(self, value: Any) -> Mismatch | None:
        if _equal_constants(value, self.value):
            return None
        message = (
            f"input {self.name!r}: captured the constant {self.value!r}, got {value!r}: pass it as "
            f"a tensor if it varies, or let the call run eagerly with on_mismatch='eager'"
        )
        return Mismatch("constant", message)


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a device: it decides which casts are in the graph."""

    enabled: bool
    dtype: torch.dtype | None
    cached: bool

    @classmethod
    def current(cls, device_type: str) -> Autocast:
        if not torch.is_autocast_enabled(device_type):
            return cls(False, None, False)
        dtype = torch.get_autocast_dtype(device_type)
        return cls(True, dtype, torch.is_autocast_cache_enabled())


@dataclass(frozen=True)
class Signature:
    """The structure, tensors and constants of a scope's inputs, and the autocast state."""

    structure: pytree.TreeSpec
    leaves: tuple[TensorSpec | ConstantSpec, ...]
    autocast: Autocast

    @classmethod
    def of(
        cls, inputs: Any, device_type: str, name_of: Callable[[Sequence[Any]], str] = pytree.keystr
    ) -> Signature:
        """``name_of`` turns the path of a leaf into the name that messages use."""
        paths, structure = pytree.tree_flatten_with_path(inputs)
        leaves = tuple(
            (TensorSpec.of if isinstance(leaf, torch.Tensor) else ConstantSpec)(name_of(path), leaf)
            for path, leaf in paths
        )
        return cls(structure, leaves, Autocast.current(device_type))

    def mismatch(
        self, structure: pytree.TreeSpec, leaves: Sequence[Any], device_type: str
    ) -> Mismatch | None:
        """The first difference of a call, or None. Reads no values and does not synchronise."""
        if structure != self.structure:
            return Mismatch(
                "structure", f"captured inputs {self.structure}, got {structure}: call it alike"
            )
        for spec, leaf in zip(self.leaves, leaves, strict=True):
            difference = spec.mismatch(leaf)
            if difference is not None:
                return difference
        current = Autocast.current(device_type)
        if self.autocast != current:
            return Mismatch("autocast", f"captured under {self.autocast}, called under {current}")
        return None


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a pytree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _equal_constants(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError):  # arrays compare element by element
        return False
