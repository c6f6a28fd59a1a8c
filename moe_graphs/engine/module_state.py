"""What a graph assumes of the modules it was captured from, checked at every call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import nn

from moe_graphs.engine.signature import Mismatch
from moe_graphs.errors import CaptureError, GraphError

_PLAIN = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GONE = object()


class ModuleState:
    """Flags, numbers, hooks, parameters, buffers and submodules of a scope's module.

    Kept as flat lists of (place, key, value, ..., name), where ``place`` is the dictionary in
    which the owner keeps it, and as columns of them, which are compared by one loop in C.
    """

    def __init__(self, scope: str, module: nn.Module) -> None:
        self._scope = scope
        self._modules = list(module.named_modules())
        inner = [m for name, m in self._modules if name]
        self._hooks = [getattr(m, kind) for m in inner for kind in _HOOKS]
        self._children = [
            (m._modules, key, child, _join(name, key))
            for name, m in self._modules
            for key, child in m._modules.items()
            if child is not None
        ]
        self._tensors = [
            (place, key, tensor, tensor.data_ptr(), tensor.requires_grad, _join(name, key))
            for name, m in self._modules
            for place in (m._parameters, m._buffers)
            for key, tensor in place.items()
            if tensor is not None
        ]
        self._attributes: list[tuple[dict, str, Any, str]] = []
        self._plain = _Columns([])
        self._objects = _Columns([*self._tensors, *self._children])
        self._parameters = [tensor for _, _, tensor, *_ in self._tensors]
        self._addresses = Addresses(self._parameters)
        self._requires_grad = [tensor.requires_grad for tensor in self._parameters]

    def freeze(self) -> None:
        """After the capture: notes numbers, flags and strings as they are from now on.

        A graph has them baked in (a dropout rate, ``training``).
        """
        self._attributes = [
            (m.__dict__, key, value, _join(name, key))
            for name, m in self._modules
            for key, value in m.__dict__.items()
            if type(value) in _PLAIN and key not in _OF_EVERY_MODULE
        ]
        self._plain = _Columns(self._attributes)

    def check_capturable(self) -> None:
        """Raises ``CaptureError`` for hooks inside the scope: a replay would not run them."""
        for name, module in self._modules:
            if name and any(getattr(module, kind) for kind in _HOOKS):
                raise CaptureError(
                    f"scope {self._scope!r}: submodule {name!r} has hooks, which a replay does "
                    f"not run: remove them, or choose a scope that ends before {name!r}"
                )

    def mismatch(self) -> Mismatch | None:
        """How the modules differ from the capture in a way that an eager call can serve."""
        changed = () if self._plain.are_there() else self._attributes
        for place, key, captured, name in changed:
            now = place.get(key, _GONE)
            if now is not captured and now != captured:
                reason = "training_flag" if key == "training" else "attribute"
                message = (
                    f"{name!r} was {captured!r} at the capture and is {now!r} now: set it back"
                )
                return Mismatch(reason, message)
        if any(self._hooks):
            return Mismatch("hooks", "a submodule has hooks now, which a replay does not run")
        if [tensor.requires_grad for tensor in self._parameters] == self._requires_grad:
            return None
        for _, _, tensor, _, requires_grad, name in self._tensors:
            if tensor.requires_grad is not requires_grad:
                message = f"{name!r}: captured with requires_grad={requires_grad}: set it back"
                return Mismatch("requires_grad", message)
        return None

    def check_addresses(self) -> None:
        """Raises ``GraphError`` if something the graph reads has been replaced or has moved."""
        if self._objects.are_there() and self._addresses.are_same():
            return
        for place, key, tensor, address, _, name in self._tensors:
            if place.get(key) is not tensor:
                self._refuse(name, "was replaced by another object")
            if tensor.data_ptr() != address:
                self._refuse(name, "lies at another address (model moved, or .data assigned)")
        for place, key, child, name in self._children:
            if place.get(key) is not child:
                self._refuse(name, "was replaced by another module")

    def _refuse(self, name: str, what: str) -> None:
        raise GraphError(
            f"scope {self._scope!r}: {name!r} {what} since the capture, and the graph would read "
            f"the old one: call graphs.release() and graph the model again, or change parameters "
            f"in place (load_state_dict without assign=True does)"
        )


class Addresses:
    """Where tensors lie."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._indices = list(range(len(self._tensors)))

    def are_same(self) -> bool:
        if hasattr(torch._C, "_tensors_data_ptrs_at_indices_equal"):  # builds with CUDA
            at_once = torch._C._tensors_data_ptrs_at_indices_equal
            return at_once(self._tensors, self._addresses, self._indices)
        return [tensor.data_ptr() for tensor in self._tensors] == self._addresses


class _Columns:
    """The places, keys and values of rows (place, key, value, ...)."""

    def __init__(self, rows: Sequence[tuple]) -> None:
        self._places, self._keys, self._values = ([row[i] for row in rows] for i in range(3))

    def are_there(self) -> bool:
        """Whether every place has the very value. An equal one, as for floats, says no, too."""
        return all(map(is_, map(dict.get, self._places, self._keys, repeat(_GONE)), self._values))


def _join(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
