"""The scopes of a model, and the three parts of one call of a scope.

``prologue`` runs what stands before the graph and returns the graph's inputs. ``run`` is the part
that is captured. ``epilogue`` runs what follows the graph. For a whole forward ``prologue`` and
``epilogue`` do nothing.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moe_graphs.config import SCOPE_STAGES, Choice, GraphConfig, check, is_pattern
from moe_graphs.engine.guards.introspection import scripted
from moe_graphs.engine.side_outputs import Assigned
from moe_graphs.engine.tensors import is_sharded_by_fsdp
from moe_graphs.staged import Boundary, Frame, Staged, Stop, resuming, run_until


@dataclass(frozen=True)
class Call:
    """The arguments of a call of the scope's module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def without_tensors(self) -> Call:
        """A call without tensors, for a forward that resumes and so reads its record instead."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: None, (self.args, self.kwargs))
        return Call(args, kwargs)


@dataclass(frozen=True)
class Exit:
    """Stages and modules, outermost first, at which the captured part ended, and the reason."""

    frames: tuple[tuple[nn.Module, str], ...]
    reason: str


@dataclass(frozen=True)
class Scope:
    """A part of ``module``'s forward. ``start`` and ``stop`` name stages; None is the very end.

    Attributes:
        function: a function that runs in place of the forward of the module's class, or None.
        stages: the names of its stages; none if it is a whole forward.
        assigned: the attributes that calls assign tensors to.
    """

    name: str
    module: nn.Module
    start: str | None = None
    stop: str | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False)
    stages: tuple[str, ...] = ()
    assigned: Assigned = field(default_factory=Assigned, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.assigned.name = f"scope {self.name!r}"

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward of the module's class as it is now, or ``function``; dynamo can trace it."""
        return self.function or type(self.module).forward.__get__(self.module)

    def prologue(self, call: Call) -> Any:
        """The inputs of the captured part: the arguments, or the record that enters ``start``."""
        if self.start is None:
            return call.args, call.kwargs
        stop = Stop(self.module, self.start)
        _, boundary = run_until(stop, lambda: self.forward(*call.args, **call.kwargs))
        assert boundary is not None, f"{self.name}: forward ended before stage {self.start!r}"
        return boundary.frames[0].record

    def run(self, inputs: Any, call: Call, *, capturing: bool) -> tuple[Any, Exit | None]:
        """Runs the captured part. Returns its outputs, and where it was left (None: at its end).

        In a capture a component that cannot be captured ends it early; otherwise only ``stop``
        does.
        """
        stop = Stop(self.module, self.stop, capturing)
        if self.start is None:
            args, kwargs = inputs
            value, boundary = run_until(stop, lambda: self.forward(*args, **kwargs))
        else:
            with resuming(Boundary((Frame(self.module, self.start, inputs),), "")):
                value, boundary = run_until(stop, lambda: self.forward(*call.args, **call.kwargs))
        if boundary is None:
            return value, None
        left = tuple((frame.module, frame.stage) for frame in boundary.frames)
        return tuple(frame.record for frame in boundary.frames), Exit(left, boundary.reason)

    def run_captured(self, inputs: Any, call: Call) -> tuple[Any, Exit | None]:
        """Runs the captured part; what it leaves in attributes is a part of its outputs."""
        exits: list[Exit | None] = []

        def run(own: Any) -> Any:
            outputs, exit = self.run(own, call, capturing=True)
            exits.append(exit)
            return outputs

        return self.assigned.run(inputs, run), exits[0]

    def epilogue(self, outputs: Any, exit: Exit | None, call: Call) -> Any:
        """Runs the eager rest and returns what the module's forward returns."""
        if exit is None:
            return outputs
        frames = (Frame(m, stage, r) for (m, stage), r in zip(exit.frames, outputs, strict=True))
        with resuming(Boundary(tuple(frames), exit.reason)):
            return self.forward(*call.args, **call.kwargs)

    def name_input(self, path: Sequence[Any]) -> str:
        """The name of an input for messages: a parameter of ``forward`` or a field of a record."""
        path, attribute = self.assigned.name_of(path)
        if attribute is not None:
            return attribute
        if self.start is not None:
            return pytree.keystr(tuple(path)).lstrip(".")
        which, *rest = path
        below = pytree.keystr(tuple(rest[1:]))
        if which.idx == 1:
            return f"{rest[0].key}{below}"
        parameters = list(inspect.signature(self.forward).parameters.values())
        position = rest[0].idx
        if (
            position < len(parameters)
            and parameters[position].kind != inspect.Parameter.VAR_POSITIONAL
        ):
            return f"{parameters[position].name}{below}"
        return f"argument {position}{below}"


def _check_not_sharded(model: nn.Module) -> None:
    if any(map(is_sharded_by_fsdp, model.modules())):
        raise ValueError(
            "fully_shard (FSDP2) gathers parameters into other memory in every step, with "
            "reshard_after_forward=False, too, and graphs of scopes read them where they lay: "
            "capture whole steps with FullIteration, which holds the gathering itself, or leave "
            "weights whole on all ranks (moe_graphs.parallel.replicate)"
        )


def find_scopes(model: nn.Module, config: GraphConfig) -> list[Scope]:
    """The scopes that ``config`` selects, in the order of the model's modules.

    Raises:
        ValueError: if a name or pattern selects nothing, or a rule of ``config.py`` is broken, or
            two scopes overlap, or FSDP2 has sharded the model.
    """
    _check_not_sharded(model)
    scopes: list[Scope] = []
    asked = tuple(config.scopes or ())
    if not all(map(is_pattern, asked)):
        layers = _outermost_staged(model)
        offered = {s.name: s.dynamic for _, layer in layers for s in layer.stages()}
        choice = Choice(config.impl, asked, offered, some_patterns(model))
        check(choice)
        wanted = choice.wanted_stages()
        scopes += [s for name, layer in layers if (s := _part_of_layer(name, layer, wanted))]
    for pattern in filter(is_pattern, asked):
        scopes += _matching(model, pattern)
    _check_disjoint(scopes)
    order = {id(module): position for position, module in enumerate(model.modules())}
    return sorted(scopes, key=lambda scope: order[id(scope.module)])


def some_patterns(model: nn.Module) -> tuple[str, ...]:
    """Three patterns that select submodules of this model: repeated layers, parts of a layer."""
    named = [(n, m) for n, m in model.named_modules() if n and not _is_empty(m)]
    layers = [name for name, _ in named if name.rpartition(".")[2].isdigit() and "." in name]
    found = [f"{name.rpartition('.')[0]}.*" for name in layers]
    found += [f"*.{n.rpartition('.')[2]}" for n, _ in named if n.rpartition(".")[0] in layers]
    found += [f"*{name}" for name, _ in named if "." not in name]
    return tuple(dict.fromkeys(found))[:3]


def _is_empty(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _outermost_staged(model: nn.Module, prefix: str = "") -> list[tuple[str, Staged]]:
    if isinstance(model, Staged):
        return [(prefix, model)]
    found = []
    for name, child in model.named_children():
        found += _outermost_staged(child, f"{prefix}.{name}" if prefix else name)
    return found


def _part_of_layer(name: str, layer: Staged, wanted: Sequence[str]) -> Scope | None:
    stages = [stage.name for stage in layer.stages()]
    chosen = [stage for stage in stages if stage in wanted]
    if not chosen:
        return None
    first, end = stages.index(chosen[0]), stages.index(chosen[-1]) + 1
    if chosen != stages[first:end]:
        gap = [stage for stage in stages[first:end] if stage not in chosen]
        raise ValueError(
            f"layer {name!r}: the scopes select stages {chosen}, with {gap} between them: select "
            f"those too, since one layer is one graph"
        )
    return Scope(
        name=f"{name}.{'+'.join(chosen)}" if name else "+".join(chosen),
        module=layer,
        start=chosen[0] if first else None,
        stop=stages[end] if end < len(stages) else None,
        stages=tuple(chosen),
    )


def _matching(model: nn.Module, pattern: str) -> list[Scope]:
    names = [name for name, _ in model.named_modules() if name]
    # The pattern "*.encoder" also selects the encoder of the model itself.
    matches = [n for n in names if any(fnmatch.fnmatchcase(each, pattern) for each in (n, f".{n}"))]
    if not matches:
        some = ", ".join(names[:8])
        raise ValueError(
            f"pattern {pattern!r} matches no submodule; the first names are {some}: "
            f"print([name for name, _ in model.named_modules()]) shows them all"
        )
    # The pattern "layers.*" selects the layers; modules inside a match are captured as parts of it.
    outermost = [n for n in matches if not any(n.startswith(f"{m}.") for m in matches)]
    modules = [(name, model.get_submodule(name)) for name in outermost]
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"pattern {pattern!r}: {scripted(name)}")
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"pattern {pattern!r} selects {name!r}, a {type(module).__name__}, which has no "
                f"forward to capture: take '{name}.*' for its members"
            )
    return [Scope(name, module) for name, module in modules]


@dataclass(frozen=True)
class Part:
    """A module within a scope that keeps its inputs only."""

    name: str
    module: nn.Module


def recomputed_among(
    scopes: Sequence[Scope], wanted: Sequence[str] | bool
) -> tuple[list[Scope], list[Part]]:
    """The scopes that keep their inputs only, and the modules within others that do.

    A pattern that names no scope names modules within scopes. A module that lies inside of another
    one is a part of that one.

    Raises:
        ValueError: if a word names neither, or a part of the stages of a scope, or a module that is
            no whole part of one.
    """
    if isinstance(wanted, bool):
        return (list(scopes) if wanted else []), []
    chosen: list[Scope] = []
    within: list[Part] = []
    named = {stage for word in wanted for stage in SCOPE_STAGES.get(word, ())}
    for word in wanted:
        found = [scope for scope in scopes if _is_named(scope, word)]
        parts = [] if found or not is_pattern(word) else _parts_named(scopes, word)
        if not found and not parts:
            names = ", ".join(scope.name for scope in scopes[:8])
            raise ValueError(
                f"recompute={word!r} names none of the scopes, and no module within one: the "
                f"scopes are {names}"
            )
        chosen += [scope for scope in found if scope not in chosen]
        within += [part for part in parts if part not in within]
    for scope in chosen:
        rest = [stage for stage in scope.stages if stage not in named]
        if rest and len(rest) < len(scope.stages):
            raise ValueError(
                f"recompute names a part of {scope.name!r}, which is one graph: name {rest} too, "
                f"or modules within a scope of the whole layer by a pattern, such as '*.moe'"
            )
    return chosen, _outermost(within)


def _parts_named(scopes: Sequence[Scope], pattern: str) -> list[Part]:
    """The modules within scopes that a pattern selects.

    Raises:
        ValueError: if one cannot run under torch's checkpoint.
    """
    found: list[Part] = []
    for scope in scopes:
        for path, module in scope.module.named_modules():
            # Stages are no part of the name of their layer.
            owner = scope.name.rpartition(".")[0] if scope.stages else scope.name
            name = f"{owner}.{path}" if owner else path
            if path and any(fnmatch.fnmatchcase(each, pattern) for each in (name, f".{name}")):
                _check_part(scope, name, module)
                found.append(Part(name, module))
    return found


def _check_part(scope: Scope, name: str, module: nn.Module) -> None:
    staged = (each for each in module.modules() if isinstance(each, Staged))
    is_whole = scope.start is None and scope.stop is None
    if not is_whole or any(stage.dynamic for each in staged for stage in each.stages()):
        raise ValueError(
            f"recompute selects {name!r}, and the graph of {scope.name!r} may begin or end within "
            f"it: choose a scope of the whole layer, such as 'full', or recompute the scope"
        )
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        raise ValueError(f"recompute selects {name!r}, a {type(module).__name__} without a forward")


def _outermost(parts: Sequence[Part]) -> list[Part]:
    inner = {id(m) for part in parts for m in part.module.modules() if m is not part.module}
    return [part for part in parts if id(part.module) not in inner]


def _is_named(scope: Scope, word: str) -> bool:
    if is_pattern(word):
        return any(fnmatch.fnmatchcase(each, word) for each in (scope.name, f".{scope.name}"))
    return word == "full" or not set(SCOPE_STAGES[word]).isdisjoint(scope.stages)


def _check_disjoint(scopes: Sequence[Scope]) -> None:
    owner = {id(scope.module): scope for scope in scopes}
    if len(owner) < len(scopes):
        raise ValueError("two scopes select the same module: list it once")
    for scope in scopes:
        for name, module in scope.module.named_modules():
            if name and id(module) in owner:
                inner = owner[id(module)].name
                raise ValueError(f"scope {inner!r} lies inside scope {scope.name!r}: drop one")
