"""Graphs of layers give out as outputs what transformers collects inside of them.

``output_router_logits``, ``output_attentions`` and the like put hooks on routers and attention, and
a replay runs no hooks. So the hooks inside of a graphed module are taken off it. In a call that
wants what they collect, the module's forward runs them and returns what they have found beside its
output; behind the graph it goes to where transformers collects.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from moe_graphs.engine.guards.introspection import forward_hooks_of
from moe_graphs.engine.partial.graphs import Graphs
from moe_graphs.integrations.transformers.changes import (
    by_class,
    change_class,
    derived,
    makers_of,
)
from moe_graphs.integrations.transformers.checkpointing import is_reentrant, runs_checkpoint
from moe_graphs.staged import Staged

try:
    from transformers.utils import output_capturing
except ImportError:  # a version that collects in another way
    output_capturing = None
# Holds the dictionary that the hooks of the running forward fill.
_COLLECTOR: Any = getattr(output_capturing, "_active_collector", None)
_WANTED = "moe_graphs_wanted"
_HOOKS, _STATE = "_moe_graphs_hooks", "_moe_graphs_collecting"


class Collected(NamedTuple):
    """The output of a forward, and what was found in it, by the name of what was asked for."""

    output: Any
    found: dict[str, list[Tensor]]


class Hook(NamedTuple):
    """``number``: its place among the hooks of ``module``; ``key``: what it collects."""

    module: nn.Module
    number: int
    function: Callable[..., Any]
    key: str


class Collecting:
    """The state of collecting inside of one graphed module.

    Attributes:
        hooks: those that were taken off the modules inside.
        outer: where transformers collects, while the module runs with a dictionary of its own.
        eager: why the call that runs cannot return what the hooks find, None if it can.
    """

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.outer: dict[str, list[Any]] | None = None
        self.eager: str | None = None
        self._may_be_back = True

    def take(self, module: nn.Module, *, may_be_new: bool) -> None:
        if not (may_be_new or self._may_be_back):
            return
        for inner in list(module.modules())[1:]:
            hooks = forward_hooks_of(inner)
            for number, function in list(hooks.items()):
                key = _key_of(function)
                if key is not None:
                    del hooks[number]
                    self.hooks.append(Hook(inner, number, function, key))
        self._may_be_back = False

    def put_back(self) -> None:
        for hook in self.hooks:
            forward_hooks_of(hook.module)[hook.number] = hook.function
        self.hooks.clear()
        self._may_be_back = True


def collect_outputs(graphs: Graphs) -> Callable[[], None]:
    """Lets the graphs of a transformers model give out what is collected inside; returns the undo.

    Calls that cannot do so run eagerly, counted by the name of what was asked for.
    """
    for graphed in graphs.scopes:
        graphed.why_eager = _why_eager
    if _COLLECTOR is None:
        return lambda: None
    undos: list[Callable[[], None]] = []
    scopes = [each.scope for each in graphs.scopes]
    whole = [scope.module for scope in scopes if scope.start is None and scope.stop is None]
    for modules in by_class(module for module in whole if not isinstance(module, Staged)):
        kind: Any = type(modules[0])
        undos.append(change_class(modules, derived(kind, collecting_forward)))
    for scope in scopes:
        undos.append(_listen(scope.module))

    def undo() -> None:
        for each in undos:
            each()

    return undo


def collect_within(model: Any) -> Callable[[], None]:
    """Puts the hooks inside of ``model`` in place only for calls that want them.

    A graph of a whole step then holds what they collect. Returns the undo.
    """
    install = getattr(output_capturing, "maybe_install_capturing_hooks", None)
    if install is None:
        return lambda: None
    install(model)
    state = Collecting()
    state.take(model, may_be_new=True)
    # Copies and pickles carry no hooks: transformers puts its own in place there.
    plain = functools.partial(_without_hooks, model)
    model.__dict__.update({_HOOKS: state.hooks, "__getstate__": plain})
    kind: Any = type(model)
    restore = change_class([model], derived(kind, _forward_that_collects))

    def undo() -> None:
        restore()
        state.put_back()
        for name in (_HOOKS, "__getstate__"):
            model.__dict__.pop(name, None)

    return undo


def _without_hooks(model: nn.Module) -> dict[str, Any]:
    left = (_HOOKS, "__getstate__", "_output_capturing_hooks_installed")
    return {name: value for name, value in vars(model).items() if name not in left}


def _forward_that_collects(kind: type[Any]) -> Callable[..., Any]:
    theirs = kind.forward

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = vars(self).get(_HOOKS, ())  # a copy has none
        options = {f"output_{hook.key}" for hook in hooks}
        if not any(kwargs.get(each, getattr(self.config, each, False)) for each in options):
            return theirs(self, *args, **kwargs)
        with _in_place(hooks):
            return theirs(self, *args, **kwargs)

    return forward


def _listen(module: nn.Module) -> Callable[[], None]:
    state = Collecting()
    module.__dict__.update({_STATE: state, _HOOKS: state.hooks})
    state.take(module, may_be_new=True)
    before = module.register_forward_pre_hook(_before, with_kwargs=True)
    after = module.register_forward_hook(_after, prepend=True, with_kwargs=True, always_call=True)

    def undo() -> None:
        before.remove()
        after.remove()
        state.put_back()
        for name in (_STATE, _HOOKS):
            module.__dict__.pop(name, None)

    return undo


def _why_eager(module: nn.Module) -> str | None:
    """The reason in the report: the name of the option of transformers."""
    if runs_checkpoint(module):
        return "gradient_checkpointing"
    state = vars(module).get(_STATE)
    return None if state is None else state.eager


def _before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    state, collected = vars(module)[_STATE], _COLLECTOR.get()
    state.eager = None
    if runs_checkpoint(module):  # its recomputation has to do what its forward does
        state.put_back()
        return None
    state.take(module, may_be_new=bool(collected))
    wanted = tuple(sorted({hook.key for hook in state.hooks} & (collected or {}).keys()))
    if not wanted:
        return None
    # The first layer's hook on hidden states takes the input as well: it has to know the others'.
    # What reentrant checkpoint collects has no history, unlike what a graph gives out.
    can_give = collecting_forward in makers_of(type(module)) and not is_reentrant(module)
    if "hidden_states" in wanted or not can_give:
        state.eager = f"output_{wanted[0]}"
        state.put_back()
        return None
    state.outer = collected
    _COLLECTOR.set(None)
    return args, {**kwargs, _WANTED: wanted}


def _after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    state = vars(module)[_STATE]
    state.eager = None
    if state.outer is None:
        return None
    collected, state.outer = state.outer, None
    _COLLECTOR.set(collected)
    if not isinstance(output, Collected):  # it has raised
        return None
    for key, tensors in output.found.items():
        collected[key] += tensors
    return output.output


def collecting_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward of ``kind`` that also returns, in calls that want it, what was found inside."""
    theirs = kind.forward

    @functools.wraps(theirs)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop(_WANTED, None)
        if wanted is None:
            return theirs(self, *args, **kwargs)
        return _with_hooks(self, theirs, wanted, args, kwargs)

    return forward


def _with_hooks(
    module: nn.Module,
    forward: Callable[..., Any],
    wanted: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Collected:
    """A function by itself: graphs of calls that want nothing depend on no hooks."""
    found: dict[str, list[Tensor]] = {key: [] for key in wanted}
    with _hooks_in_place(vars(module)[_HOOKS], found):
        output = forward(module, *args, **kwargs)
    return Collected(output, found)


@contextlib.contextmanager
def _hooks_in_place(hooks: list[Hook], found: dict[str, list[Tensor]]) -> Iterator[None]:
    with _in_place(hooks):
        _COLLECTOR.set(found)
        try:
            yield
        finally:
            _COLLECTOR.set(None)


@contextlib.contextmanager
def _in_place(hooks: list[Hook]) -> Iterator[None]:
    places = [forward_hooks_of(hook.module) for hook in hooks]
    for place, hook in zip(places, hooks, strict=True):
        place[hook.number] = hook.function
    try:
        yield
    finally:
        for place, hook in zip(places, hooks, strict=True):
            del place[hook.number]


def is_collecting(hooks: dict[int, Callable[..., Any]]) -> bool:
    """Whether all of them are transformers' own, which collect and change nothing."""
    return _COLLECTOR is None or all(_key_of(hook) is not None for hook in hooks.values())


def _key_of(hook: Any) -> str | None:
    """The key under which a hook of transformers collects; None of any other hook."""
    if getattr(hook, "__module__", None) != output_capturing.__name__:
        return None
    return inspect.getclosurevars(hook).nonlocals.get("key")
