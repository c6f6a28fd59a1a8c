"""Optimizers inside a graph: which can be, state of their first step, and hooks of a step."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from moe_graphs.engine.guards.introspection import OF_TENSORS, hooks_of_updates
from moe_graphs.engine.tensors import Mismatch
from moe_graphs.engine.whole_step.grad_fields import Accumulators
from moe_graphs.errors import CaptureError

# The first step of these from zeros is the same, bit for bit, as a first step without any state.
# Classes outside of torch say so by `starts_from_zeros = True`.
_START_FROM_ZEROS = (
    optim.Adadelta, optim.Adam, optim.Adamax, optim.AdamW, optim.RAdam, optim.RMSprop, optim.SGD,
)  # fmt: skip

_READ_VALUES = tuple(
    getattr(optim, name) for name in ("LBFGS", "SparseAdam", "Adafactor") if hasattr(optim, name)
)
_EXAMPLE = "torch.optim.AdamW(..., fused=True, capturable=True)"


def check_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Refuses by name an optimizer that a graph cannot hold.

    Raises:
        CaptureError: with what to use instead.
    """
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                raise CaptureError(
                    f"{kind}.param_groups[{number}][{key!r}] is a tensor on {value.device}, whose "
                    f"value a graph would freeze: put it on {device}"
                )
    remedy = remedy_for(optimizer)
    if remedy is not None:
        raise CaptureError(f"{kind} cannot be in a graph: {remedy}")
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device != parameter.device:
                raise CaptureError(
                    f"{kind} keeps {key!r} on {value.device}, which a replay would not change: "
                    f"{_flags(optimizer.param_groups[0])}"
                )


def check_capturable_flags(optimizer: Optimizer) -> None:
    """Checks that torch's optimizer can step at all: ``capturable`` alone works on GPUs only.

    Raises:
        ValueError: if a flag is missing; the message names the flag.
    """
    for group in optimizer.param_groups:
        on_cpu = any(parameter.device.type == "cpu" for parameter in group["params"])
        if on_cpu and group.get("capturable") and not group.get("fused", True):
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} has capturable=True, which torch accepts "
                f"on a CPU with fused=True only: pass fused=True, too (right on GPUs as well)"
            )


def remedy_for(optimizer: Optimizer) -> str | None:
    """The remedy for an optimizer whose step cannot be in a graph, or None if it can.

    A class outside of torch whose step reads no value on the host says ``capturable = True``.
    """
    if vars(type(optimizer)).get("capturable"):
        return None
    if isinstance(optimizer, _READ_VALUES):
        return f"it reads values on the host: use {_EXAMPLE}, or step outside of the graph"
    for group in optimizer.param_groups:
        on_cuda = any(parameter.is_cuda for parameter in group["params"])
        fused, capturable = group.get("fused"), group.get("capturable")
        if "capturable" in group and not (capturable if on_cuda else fused):
            # This is the family of Adam; on the CPU only the fused ones read no values on the host.
            if not on_cuda and "fused" not in group:
                return (
                    f"on a CPU it reads its step counter on the host: use {_EXAMPLE}, or step "
                    f"outside of the graph; on a GPU pass capturable=True"
                )
            return f"it reads its step counter on the host: {_flags(group)}"
        if "capturable" not in group and not fused:
            if isinstance(group.get("lr"), torch.Tensor):
                own = not type(optimizer).__module__.startswith("torch.optim")
                say = ", or say capturable = True on the class if it does not" if own else ""
                return f"it reads a tensor lr on the host: {_flags(group)}{say}"
            if isinstance(optimizer, optim.Adagrad):
                return f"it reads its step counter on the host: {_flags(group)}"
    return None


def _flags(group: Mapping[str, Any]) -> str:
    flags = [f"{name}=True" for name in ("fused", "capturable") if name in group]
    return f"pass {', '.join(flags)}" if flags else f"use {_EXAMPLE}, or step outside of the graph"


class FirstStepState:
    """State that a trial run made. It is taken away until the first replay, which needs it.

    Until then the optimizer looks as if it had never run.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._before = [set(optimizer.state) for optimizer in optimizers]
        self._made: list[tuple[Optimizer, torch.Tensor, dict[str, Any]]] = []

    def check(self) -> None:
        """Checks that the state from which each optimizer starts is known.

        Raises:
            CaptureError: if it is not known.
        """
        for optimizer, before in zip(self._optimizers, self._before, strict=True):
            made = any(optimizer.state[p] for p in optimizer.state if p not in before)
            if made and not _starts_from_zeros(optimizer):
                raise CaptureError(
                    f"{type(optimizer).__name__} makes its state in its first step, which a graph "
                    f"would repeat: take one step before the capture"
                )

    def tensors(self) -> list[torch.Tensor]:
        """Tensors that the trial runs made."""
        made = [
            optimizer.state[parameter]
            for optimizer, before in zip(self._optimizers, self._before, strict=True)
            for parameter in optimizer.state
            if parameter not in before
        ]
        return [value for state in made for value in state.values() if _is_tensor(value)]

    def zero(self) -> None:
        """Sets the state to zeros, as before a first step."""
        for tensor in self.tensors():
            tensor.zero_()

    def take_away(self) -> None:
        self.zero()
        for optimizer, before in zip(self._optimizers, self._before, strict=True):
            for parameter in [p for p in optimizer.state if p not in before]:
                self._made.append((optimizer, parameter, optimizer.state.pop(parameter)))

    def put_in(self) -> None:
        """Gives the optimizers their state. Idempotent; state that was loaded meanwhile stays."""
        for optimizer, parameter, state in self._made:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = state
        self._made.clear()


def _starts_from_zeros(optimizer: Optimizer) -> bool:
    dampened = any(group.get("dampening") for group in optimizer.param_groups)
    known = type(optimizer) in _START_FROM_ZEROS or vars(type(optimizer)).get("starts_from_zeros")
    return bool(known) and not dampened


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# ---- hooks that run within a step but are not its code: hooks of gradients and of updates

_both_of = attrgetter(*OF_TENSORS)


class StepHooks:
    """Hooks of a step as they were at the capture; a graph runs these and no others.

    Args:
        parameters: by name. Their own hooks are compared, and those of the autograd nodes that add
            up their gradients.
        optimizers: the optimizers that update within the step.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._accumulators = Accumulators(self._parameters)
        self._of_updates = hooks_of_updates(optimizers) if optimizers else []
        self._before = self._now()
        self._as_they_were = _copies(map(_both_of, self._parameters))
        self._before_updates = _contents(self._of_updates)

    def mismatch(self) -> Mismatch | None:
        as_they_are = list(map(_both_of, self._parameters))
        if as_they_are != self._as_they_were:
            name = self._differing()
            if name is not None:
                message = f"{name} has other hooks now, which a replay does not run"
                return Mismatch("hooks", f"{message}: register them before the capture")
            self._as_they_were = _copies(as_they_are)
        if _contents(self._of_updates) != self._before_updates or self._accumulators.hooked():
            message = "the optimizer or a gradient accumulator has hooks now, which a replay does "
            return Mismatch("hooks", f"{message} not run: register them before the capture")
        return None

    def _differing(self) -> str | None:
        """The name of a parameter with other hooks than before, or None.

        The same hooks under other numbers are no difference.
        """
        rows = zip(self._names, self._before, self._now(), strict=True)
        return next((name for name, before, now in rows if before != now), None)

    def _now(self) -> list[list[tuple[Any, ...]]]:
        return [
            [tuple(hooks.values()) if hooks else () for hooks in both]
            for both in map(_both_of, self._parameters)
        ]


def _copies(dicts: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(None if hooks is None else dict(hooks) for hooks in both) for both in dicts]


def _contents(dicts: Iterable[dict[Any, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(hooks.values()) for hooks in dicts]


class ScalerStates:
    """Notes of torch's gradient scalers on their optimizers; a refused step leaves them half done.

    Guards do not follow objects of libraries, so all scalers of the process are looked up.
    """

    def __init__(self) -> None:
        scaler = torch.amp.GradScaler
        found = [each for each in gc.get_objects() if issubclass(type(each), scaler)]
        self._kept = [
            (each, {key: dict(noted) for key, noted in each._per_optimizer_states.items()})
            for each in found
            if hasattr(each, "_per_optimizer_states")
        ]

    def put_back(self) -> None:
        for scaler, noted in self._kept:
            scaler._per_optimizer_states.clear()
            scaler._per_optimizer_states.update({key: dict(each) for key, each in noted.items()})
