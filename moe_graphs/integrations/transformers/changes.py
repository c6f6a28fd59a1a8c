"""Changes of a model, line by line, with what was left, and how to undo them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Change:
    """``part`` of the model: what it was, how often, and what it is now, or why it was left."""

    part: str
    what: str
    count: int
    done: bool
    note: str

    def __str__(self) -> str:
        done = "changed" if self.done else "left"
        return f"{self.part:8} {done:8} {self.count:4} {self.what}: {self.note}"


class Changes:
    """A record of changes to a model in place.

    Attributes:
        changes: line by line; ``print`` it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changes: list[Change] = []
        self._undo: list[Callable[[], None]] = []
        self._watched: list[Callable[[], list[Change]]] = []

    def undo(self) -> None:
        """The model is transformers' own again, with the weights of now."""
        self._watched.clear()
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.changes, *self.since()]))

    def since(self) -> list[Change]:
        """Lists what no longer holds, since somebody else has changed the model."""
        return [change for look in self._watched for change in look()]

    def watch(self, look: Callable[[], list[Change]]) -> None:
        """``look`` is called whenever somebody asks what no longer holds."""
        self._watched.append(look)

    def changed(
        self, part: str, what: str, count: int, note: str, undo: Callable[[], None]
    ) -> None:
        self._undo.append(undo)
        self.changes.append(Change(part, what, count, True, note))

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Takes the undo of a change that is not worth a line."""
        self._undo.append(undo)

    def left(self, part: str, what: str, count: int, note: str) -> None:
        self.changes.append(Change(part, what, count, False, note))

    def changed_classes(
        self, part: str, modules: list[Any], maker: Callable[[type[Any]], Any], note: str
    ) -> None:
        """Gives ``modules``, which are of one class, the forward that ``maker`` makes of it."""
        kind: Any = type(modules[0])
        undo = change_class(modules, derived(kind, maker))
        self.changed(part, kind.__name__, len(modules), note, undo)

    def changed_unless(
        self,
        part: str,
        modules: list[Any],
        why_not: Callable[[Any], str | None],
        maker: Callable[[type[Any]], Any],
        note: str,
        otherwise: str,
    ) -> None:
        """Changes the classes of modules, except where ``why_not`` has a reason.

        Args:
            otherwise: what holds for the modules that are left; it stands behind the reason.
        """
        reasons = list(map(why_not, modules))
        served = [module for module, why in zip(modules, reasons, strict=True) if why is None]
        for same in by_class(served):
            self.changed_classes(part, same, maker, note)
        left = Counter((type(module).__name__, why)
                       for module, why in zip(modules, reasons, strict=True) if why)  # fmt: skip
        for (what, why), count in left.items():
            self.left(part, what, count, f"{why}: {otherwise}")

    def add(self, others: Changes) -> None:
        """Adds all changes of ``others``, which are undone together."""
        self._undo.append(others.undo)
        self.changes += others.changes
        self._watched.append(others.since)


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """A context in which modules are run on random numbers.

    Tensors that are made in it are fp32 on the CPU, whatever is torch's default. It leaves no trace
    in torch's random numbers.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@functools.cache
def derived(kind: type[Any], maker: Callable[[type[Any]], Any]) -> type[Any]:
    """``kind`` with the forward that ``maker`` makes of it, under the same name; once for each.

    ``maker`` is a function of a module: a pickle of an object names it. It may return a dictionary
    of several methods instead.
    """
    made = maker(kind)
    own = {
        **(made if isinstance(made, dict) else {"forward": made}),
        "_makers": (*makers_of(kind), maker),
        "__reduce_ex__": _reduce,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), own)


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    """Names the class that others can import, and what was made of it."""
    kind = type(self)
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))
    if "_makers" not in vars(kind):  # somebody has derived a class from it
        return reduced
    importable = next(each for each in kind.__mro__ if "_makers" not in vars(each))
    return _rebuilt, (importable, makers_of(kind)), *reduced[2:]


def _rebuilt(kind: Any, makers: tuple[Callable[[type[Any]], Any], ...]) -> Any:
    for maker in makers:
        kind = derived(kind, maker)
    return kind.__new__(kind)


def makers_of(kind: type[Any]) -> tuple[Callable[[type[Any]], Any], ...]:
    """The functions by which ``derived`` has made ``kind``, in order."""
    return getattr(kind, "_makers", ())


def change_class(modules: list[Any], kind: type[nn.Module]) -> Callable[[], None]:
    """Returns the undo. ``modules`` are of one class, ``kind`` is derived from it."""
    before = type(modules[0])
    for module in modules:
        module.__class__ = kind

    def undo() -> None:
        for module in modules:
            module.__class__ = before

    return undo


def lists_of_layers(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of decoder layers of a transformers model, by their names."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    }


def by_class(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    found: dict[type, list[nn.Module]] = {}
    for module in modules:
        found.setdefault(type(module), []).append(module)
    return list(found.values())
