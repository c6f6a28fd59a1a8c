"""What a graph assumes of the modules it was captured from, checked at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_graphs.capture.errors import CaptureError, GraphError
from moe_graphs.capture.signature import Mismatch

_PLAIN = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Member:
    """A parameter, buffer or submodule at the place where its owner keeps it."""

    name: str
    place: dict[str, Any]
    key: str
    value: Any
    address: int | None
    requires_grad: bool


class ModuleState:
    """The training flags, hooks, parameters, buffers and submodules of a scope's module."""

    def __init__(self, scope: str, module: nn.Module) -> None:
        self._scope = scope
        self._modules = [(name, m, m.training) for name, m in module.named_modules()]
        self._hooks = [getattr(m, kind) for name, m, _ in self._modules if name for kind in _HOOKS]
        self._attributes = self._current_attributes()
        self._members = [
            _member(f"{name}.{key}" if name else key, place, key)
            for name, m, _ in self._modules
            for place in (m._parameters, m._buffers, m._modules)
            for key in place
            if place[key] is not None
        ]

    def freeze(self) -> None:
        """After the capture: notes the modules' plain attributes as they are from now on."""
        self._attributes = self._current_attributes()

    def check_capturable(self) -> None:
        """Raises ``CaptureError`` for hooks inside the scope: a replay would not run them."""
        for name, module, _ in self._modules:
            if name and any(getattr(module, kind) for kind in _HOOKS):
                raise CaptureError(
                    f"scope {self._scope!r}: submodule {name!r} has hooks, which a replay does "
                    f"not run: remove them, or choose a scope that ends before {name!r}"
                )

    def mismatch(self) -> Mismatch | None:
        """How the modules differ from the capture in a way that an eager call can serve."""
        for name, module, training in self._modules:
            if module.training is not training:
                message = f"module {name or 'itself'!r}: captured with training={training}"
                return Mismatch("training_flag", message)
            if self._attributes[name] != _plain_attributes(module):
                message = f"module {name or 'itself'!r}: an attribute changed since the capture"
                return Mismatch("attribute", message)
        if any(self._hooks):
            return Mismatch("hooks", "a submodule has hooks now, which a replay does not run")
        for member in self._members:
            value = member.value
            if isinstance(value, torch.Tensor) and value.requires_grad != member.requires_grad:
                message = f"{member.name!r}: captured requires_grad={member.requires_grad}"
                return Mismatch("requires_grad", message)
        return None

    def _current_attributes(self) -> dict[str, dict[str, Any]]:
        return {name: _plain_attributes(module) for name, module, _ in self._modules}

    def check_addresses(self) -> None:
        """Raises ``GraphError`` if something the graph reads has been replaced or has moved."""
        for member in self._members:
            now = member.place.get(member.key)
            if now is not member.value:
                what = "was replaced by another object"
            elif member.address is not None and now.data_ptr() != member.address:
                what = "lies at another address (model moved, or .data assigned)"
            else:
                continue
            raise GraphError(
                f"scope {self._scope!r}: {member.name!r} {what} since the capture, and the graph "
                f"would read the old one: call graphs.release() and graph the model again, or "
                f"change parameters in place (load_state_dict without assign=True does)"
            )


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, flags and strings on a module (a dropout rate, say): a graph has them baked in."""
    return {
        key: value
        for key, value in module.__dict__.items()
        if type(value) in _PLAIN and key not in _OF_EVERY_MODULE
    }


def _member(name: str, place: dict[str, Any], key: str) -> Member:
    value = place[key]
    is_tensor = isinstance(value, torch.Tensor)
    address = value.data_ptr() if is_tensor else None
    return Member(name, place, key, value, address, is_tensor and value.requires_grad)
