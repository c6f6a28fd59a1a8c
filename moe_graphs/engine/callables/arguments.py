"""The arguments of ``make_graphed_callables``, checked and sorted, also Transformer Engine's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from moe_graphs.engine.callables.order import Action, check_order, from_te_order, slots
from moe_graphs.engine.partial.plan import Plan, PlannedChunk
from moe_graphs.engine.partial.scope import Call
from moe_graphs.errors import GraphError

T = TypeVar("T")

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_WITH_KWARGS = ("forward_pre_hooks_with_kwargs", "forward_hooks_with_kwargs")


def each_args(sample_args: Any, is_single: bool) -> list[tuple[Any, ...]]:
    """The positional arguments of each callable."""
    if not isinstance(sample_args, (tuple, list)):
        raise ValueError(
            f"sample_args: a tuple of positional arguments{'' if is_single else ' for each'}, got "
            f"a {type(sample_args).__name__}: write (x,) for one argument"
        )
    each = [tuple(sample_args)] if is_single else list(sample_args)
    for args in each:
        if not isinstance(args, (tuple, list)):
            raise ValueError(
                f"sample_args: a tuple of positional arguments for each callable, got a "
                f"{type(args).__name__}: write ((x,), ...)"
            )
    return [tuple(args) for args in each]


def each_kwargs(sample_kwargs: Any, count: int) -> list[dict[str, Any]]:
    if sample_kwargs is None:
        return [{} for _ in range(count)]
    each = [sample_kwargs] if isinstance(sample_kwargs, Mapping) else list(sample_kwargs)
    if len(each) != count:
        raise ValueError(f"sample_kwargs: {len(each)} for {count} sample_args: one for each")
    return [dict(kwargs) for kwargs in each]


def order_of(
    schedule: Sequence[Action] | None, signed: Sequence[int | float] | None
) -> tuple[Action, ...] | None:
    if schedule is not None and signed is not None:
        raise ValueError("schedule and _order say the same: give one of them")
    if signed is not None:
        return from_te_order(signed)
    if schedule is not None:
        check_order(schedule, "schedule")
    return None if schedule is None else tuple(schedule)


def layers_per_chunk(
    order: Sequence[Action] | None, given: int | Sequence[int] | None, count: int
) -> list[int]:
    """The number of consecutive callables in each chunk."""
    chunks = 1 if order is None else len({action.chunk for action in order})
    if given is None:
        given = count // chunks
    layers = [given] * chunks if isinstance(given, int) else list(given)
    if len(layers) != chunks or sum(layers) != count:
        raise ValueError(
            f"{count} callables do not make {chunks} chunks of {layers} layers: give "
            f"_num_layers_per_chunk"
        )
    return layers


def split(numbers: Sequence[T], layers: Sequence[int]) -> list[Sequence[T]]:
    ends = [sum(layers[: i + 1]) for i in range(len(layers))]
    return [numbers[end - own : end] for end, own in zip(ends, layers, strict=True)]


def one_per_layer(
    calls: Sequence[Call], layers: Sequence[int], order: Sequence[Action] | None
) -> list[Call]:
    """The first sample of each layer; Transformer Engine has them by chunk, microbatch, layer."""
    microbatches = 1 + max(action.microbatch for action in order or ())
    if len(calls) != sum(layers) * microbatches:
        raise ValueError(
            f"sample_args: {len(calls)} for {sum(layers)} layers and {microbatches} microbatches: "
            f"_order wants one per forward, {sum(layers) * microbatches}"
        )
    of_chunks = split(calls, [own * microbatches for own in layers])
    return [
        call for own, of_chunk in zip(layers, of_chunks, strict=True) for call in of_chunk[:own]
    ]


def layer_of_each_forward(order: Sequence[Action], layers: Sequence[int]) -> list[int]:
    """Transformer Engine's order of forwards: by chunk, microbatch, layer."""
    return [
        layer
        for chunk, of_chunk in enumerate(split(range(sum(layers)), layers))
        for _ in range(sum(action.kind == "F" and action.chunk == chunk for action in order))
        for layer in of_chunk
    ]


def plan_of(order: Sequence[Action] | None, layers: Sequence[int]) -> Plan:
    numbers = split(range(sum(layers)), layers)
    in_flight = {0: 1} if order is None else slots(order)
    peaks = [in_flight[chunk] for chunk in sorted(in_flight)]
    return Plan(
        tuple(PlannedChunk(tuple(own), peak) for own, peak in zip(numbers, peaks, strict=True))
    )


def hooks_of(
    given: Sequence[Mapping[str, Any] | None] | None, count: int
) -> list[dict[str, Callable[..., None]]]:
    """Per callable a function for each kind of hook, called as (module, args, kwargs, ...)."""
    if given is None:
        return [{} for _ in range(count)]
    if len(given) != count:
        raise ValueError(f"capture_time_hooks: {len(given)} for {count} callables: one for each")
    for of_callable in given:
        unknown = sorted(set(of_callable or ()) - set(_HOOKS) - set(_WITH_KWARGS))
        if unknown:
            raise ValueError(f"capture_time_hooks: {unknown[0]!r} is none of {', '.join(_HOOKS)}")
    return [
        {
            kind: functools.partial(_call_hooks, kind, of_callable or {})
            for kind in of_callable or ()
        }
        for of_callable in given
    ]


def _call_hooks(kind: str, hooks: Mapping[str, Any], module: nn.Module, *values: Any) -> None:
    for key, hook in hooks[kind].items():
        if kind.startswith("forward"):
            args, kwargs, *output = values
            wants_kwargs = hooks.get(f"{kind}_with_kwargs", {}).get(key, False)
            values_of_hook = (args, kwargs, *output) if wants_kwargs else (args, *output)
        else:
            values_of_hook = values
        if hook(module, *values_of_hook) is not None:
            raise GraphError(
                f"capture_time_hooks: hook {key!r} of {kind} returned a value: it cannot replace "
                f"what is captured, and has to return None"
            )
