"""Running a whole step eagerly before its capture, to find what cannot be in a graph."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moe_graphs.engine.backends.base import Backend
from moe_graphs.engine.module_state import ModuleState
from moe_graphs.engine.rehearsal import capturable_only
from moe_graphs.engine.whole_step import data_parallel
from moe_graphs.engine.whole_step.optimizers import check_optimizer
from moe_graphs.engine.whole_step.static_inputs import StaticInputs
from moe_graphs.engine.whole_step.step_gradients import Gradients, gradients_of, set_gradients
from moe_graphs.engine.whole_step.watched import Watched
from moe_graphs.errors import CaptureError


@dataclass(frozen=True)
class Subject:
    """What is captured. ``state``: objects besides model and optimizer that the step changes."""

    step: Callable[[Any], Any]
    model: nn.Module
    optimizer: Optimizer | None
    state: tuple[Any, ...]
    backend: Backend

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def optimizers(self) -> list[Optimizer]:
        """Also those within ``state`` (the optimizer of a ``DeviceStep``)."""
        candidates = [self.optimizer, *self.state]
        candidates += [v for s in self.state if hasattr(s, "__dict__") for v in vars(s).values()]
        return list({id(c): c for c in candidates if isinstance(c, Optimizer)}.values())

    def watch(self, *, optimizer: bool = True, schedulers: bool = True) -> Watched:
        """Schedulers change between steps, and must not within them."""
        roots = {
            f"state[{i}]": each
            for i, each in enumerate(self.state)
            if schedulers or not isinstance(each, LRScheduler)
        }
        if optimizer and self.optimizer is not None:
            roots["optimizer"] = self.optimizer
        return Watched(roots, {id(p): name for name, p in self.model.named_parameters()})


@dataclass
class Rehearsal:
    """What was seen.

    Attributes:
        dropped: per trainable parameter, whether the step forgets the ``.grad`` it finds.
        stale: names of parameters whose gradients are accumulated on another stream.
    """

    dropped: list[bool] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    touches_gradients: bool = False
    optimizer_steps: bool = False


def rehearse(subject: Subject, inputs: StaticInputs, modules: ModuleState, runs: int) -> Rehearsal:
    """Runs the step on the inputs, at least twice, under the eyes of ``capturable_only``.

    The last run finds the gradients that the one before left, which shows what the step drops.
    """
    named = subject.trainable()
    parameters = list(named.values())
    entry, streams, seen = gradients_of(parameters), {}, Rehearsal()
    versions = [parameter._version for parameter in parameters]
    strangers = _strangers(subject)
    with _noting_streams({**named, **strangers}, streams), _noting_optimizers(subject, seen):
        for _ in range(max(1, runs - 1)):
            set_gradients(parameters, entry)
            _run(subject, inputs, modules)
        before = gradients_of(parameters)
        _run(subject, inputs, modules)
    changed = modules.mismatch()
    if changed is not None:
        raise CaptureError(
            f"{changed.message}: the step changes it, and a replay runs no Python: keep it in a "
            f"buffer, or change it outside the step"
        )
    if strangers.keys() & streams.keys():
        raise CaptureError(
            "the optimizer updates parameters that are not in model=...: pass all their modules, "
            "model=[model, criterion, ...], so that their gradients can be looked after"
        )
    after = gradients_of(parameters)
    if any(gradient is not None and gradient.requires_grad for gradient in after):
        raise CaptureError("backward(create_graph=True) leaves gradients that require grad")
    pairs = zip(before, after, strict=True)
    seen.dropped = [old is not None and new is not old for old, new in pairs]
    here = _current_stream(subject.backend.device)
    seen.stale = [name for name, stream in streams.items() if stream != here]
    updated = versions != [parameter._version for parameter in parameters]
    seen.touches_gradients = bool(streams) or updated
    return seen


def _run(subject: Subject, inputs: StaticInputs, modules: ModuleState) -> None:
    watched, drawn = subject.watch(), random.getstate()
    modules.freeze()
    known = _known(subject, inputs, watched)
    with capturable_only(subject.backend.device, known):
        subject.step(inputs.tree())
    watched.check_unchanged()
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise CaptureError(
            "the step draws from Python's random, which a replay does not: draw with torch"
        )


def _strangers(subject: Subject) -> dict[str, torch.Tensor]:
    """Parameters of optimizers that do not belong to the model."""
    own = {id(parameter) for parameter in subject.model.parameters()}
    groups = [group for optimizer in subject.optimizers() for group in optimizer.param_groups]
    others = [p for group in groups for p in group["params"] if id(p) not in own]
    return {f"stranger {i}": p for i, p in enumerate(others) if p.requires_grad}


def _known(subject: Subject, inputs: StaticInputs, watched: Watched) -> list[torch.Tensor] | None:
    if data_parallel.wrappers(subject.model):
        return None  # DDP reads its buckets, which nobody else knows
    model = subject.model
    gradients: Gradients = gradients_of(list(model.parameters()))
    tensors = [*model.parameters(), *model.buffers(), *inputs.tensors(), *watched.tensors]
    return [*tensors, *(gradient for gradient in gradients if gradient is not None)]


@contextlib.contextmanager
def _noting_streams(named: Mapping[str, nn.Parameter], streams: dict[str, Any]) -> Iterator[None]:
    """Notes on which stream each parameter's gradient is accumulated, by its name."""

    def note(name: str, parameter: torch.Tensor) -> None:
        streams[name] = _current_stream(parameter.device)

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
        for name, parameter in named.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _noting_optimizers(subject: Subject, seen: Rehearsal) -> Iterator[None]:
    known = subject.optimizers()

    def check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not any(optimizer is each for each in known):
            raise CaptureError(
                f"the step calls step() of a {type(optimizer).__name__} that FullIteration does "
                f"not know: pass optimizer=..., so that its state can be put back and watched"
            )
        check_optimizer(optimizer, subject.backend.device)
        seen.optimizer_steps = True

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
