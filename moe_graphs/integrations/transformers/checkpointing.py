"""Gradient checkpointing of transformers, for layers that have graphs.

A layer calls torch's checkpoint around its own forward, which no graph can hold. Graphs of such a
layer keep its inputs only and recompute the rest, so the layer's call of checkpoint is passed by.
Eager calls of the layer run under torch's checkpoint again, which the graphs call for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_graphs.engine.partial.graphed_scope import GraphedScope

_FUNCTION = "_gradient_checkpointing_func"


class PassedBy(functools.partial):  # type: ignore[type-arg]
    """Stand-in for a layer's checkpoint function, which it knows, that only calls what it gets."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the layer, which have no graphs, call checkpoint."""
        return functools.partial, (self.func,), (self.func, self.args, self.keywords, None)


class Look:
    """Forward pre-hook of a model whose graphs look at checkpointing; copies look at nothing."""

    def __init__(self, graphed: Sequence[GraphedScope]) -> None:
        self._graphed = graphed

    def __call__(self, *_: Any) -> None:
        pass_by(self._graphed)

    def __reduce__(self) -> tuple[Any, ...]:
        return Look, ((),)


class Switch:
    """Stands in for a model's method that switches checkpointing; graphs pass it by at once.

    DPO switches it off and on again between a forward and its backward.
    """

    name = "_set_gradient_checkpointing"

    def __init__(self, model: Any, graphed: Sequence[GraphedScope]) -> None:
        self._model, self._graphed = model, graphed

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        getattr(type(self._model), self.name)(self._model, *args, **kwargs)
        pass_by(self._graphed)

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the model have no graphs."""
        return {"_model": self._model, "_graphed": ()}

    def install(self) -> Callable[[], None]:
        """Sets it on the model; returns the undo."""
        if not hasattr(type(self._model), self.name):
            return lambda: None
        vars(self._model)[self.name] = self
        return functools.partial(vars(self._model).pop, self.name, None)


def pass_by(graphed: Sequence[GraphedScope]) -> Callable[[], None]:
    """Lets graphs recompute what transformers would; returns the undo.

    Layers with a checkpoint function that is not known stay eager. Call it before each forward of
    the model, because somebody may switch checkpointing on or off at any time.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for each in graphed:
        layer, scope = each.scope.module, each.scope
        is_whole = scope.start is None and scope.stop is None
        if not isinstance(layer, GradientCheckpointingLayer) or not is_whole:
            continue
        each.use_reentrant = None
        found = vars(layer).get(_FUNCTION)
        if not layer.gradient_checkpointing or not _is_known(found):
            continue
        if not isinstance(found, PassedBy):
            setattr(layer, _FUNCTION, PassedBy(found.func, **found.keywords))
        each.use_reentrant = found.keywords["use_reentrant"]
    return functools.partial(_undo, graphed)


def _undo(graphed: Sequence[GraphedScope]) -> None:
    for each in graphed:
        found = vars(each.scope.module).get(_FUNCTION)
        if isinstance(found, PassedBy):
            setattr(each.scope.module, _FUNCTION, functools.partial(found.func, **found.keywords))


def _is_known(function: Any) -> bool:
    """Whether it is torch's checkpoint with nothing but ``use_reentrant`` chosen."""
    return (
        isinstance(function, functools.partial)
        and function.func is checkpoint
        and not function.args
        and function.keywords.keys() == {"use_reentrant"}
        and isinstance(function.keywords["use_reentrant"], bool)
    )


def runs_checkpoint(module: nn.Module) -> bool:
    """Whether a call of the module runs torch's checkpoint, which no graph can serve."""
    is_on = module.training and bool(getattr(module, "gradient_checkpointing", False))
    return is_on and not isinstance(vars(module).get(_FUNCTION), PassedBy)


def is_reentrant(module: nn.Module) -> bool:
    """Whether the module's forward runs without gradients first, as reentrant checkpoint does."""
    found = vars(module).get(_FUNCTION)
    is_on = module.training and bool(getattr(module, "gradient_checkpointing", False))
    return is_on and isinstance(found, PassedBy) and found.keywords["use_reentrant"]
