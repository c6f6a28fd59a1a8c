"""Replacements of the forward of one module, on that instance only, until they are taken away."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_graphs.engine.partial.scope import Part
from moe_graphs.staged import recomputed_within

_NEVER = object()


class Installed:
    """A replacement of a module's forward.

    Attributes:
        installed: the attributes that it has set on the module, itself among them.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self.installed: dict[str, Any] = {}

    def check_unpatched(self) -> None:
        """Checks that nobody has patched the module's forward.

        Raises:
            ValueError: if the module's forward is patched already.
        """
        attributes = self._module.__dict__
        if isinstance(attributes.get("forward"), Installed):
            raise ValueError(f"{self._name} has graphs already: release() them first")
        if "forward" in attributes:
            raise ValueError(f"{self._name}: forward is patched on this instance: undo it")

    def install(self, **attributes: Any) -> None:
        """Takes the place of the module's forward. ``attributes`` are set on the module as well."""
        self.check_unpatched()
        # Copies and pickles of the module carry a plain, eager forward.
        self.installed = {"forward": self, "__getstate__": self._state, **attributes}
        self._module.__dict__.update(self.installed)

    def uninstall(self) -> None:
        """Gives the module its own forward back."""
        attributes = self._module.__dict__
        if attributes.get("forward") is self:
            for name in self.installed:
                attributes.pop(name, None)

    def _state(self) -> dict[str, Any]:
        module = self._module
        of_class = getattr(type(module), "__getstate__", None)
        state = of_class(module) if of_class is not None else module.__dict__
        return {name: v for name, v in state.items() if v is not self.installed.get(name, _NEVER)}


class RecomputedPart(Installed):
    """The forward of a module within a scope, under torch's checkpoint in every call."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.module, f"module {part.name!r}, which is to be recomputed,")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = recomputed_within(type(self._module).forward.__get__(self._module))
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
