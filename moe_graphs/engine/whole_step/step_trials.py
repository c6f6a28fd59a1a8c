"""Trial runs of a whole step before its capture, to find what cannot be in a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moe_graphs.engine import doors, fp8
from moe_graphs.engine.reads import Reads
from moe_graphs.engine.stand_for import stands_for_another
from moe_graphs.engine.tracing import Trace, address
from moe_graphs.engine.trial_run import TrialRun
from moe_graphs.engine.whole_step import data_parallel
from moe_graphs.engine.whole_step.batch import StaticBatch
from moe_graphs.engine.whole_step.grad_fields import gradients_of, set_gradients
from moe_graphs.engine.whole_step.optimizers import check_optimizer
from moe_graphs.engine.whole_step.step_definition import StepDefinition
from moe_graphs.errors import CaptureError


@dataclass
class TriedStep:
    """The findings of the trial runs.

    Attributes:
        reads: which Python ran; read: addresses of the memory that was read.
        dropped: per parameter, whether the step forgets the ``.grad`` it finds.
        stale: names of parameters whose gradients are accumulated on another stream.
        groups: of processes, over which it communicates.
    """

    reads: Reads
    read: set[int] = field(default_factory=set)
    dropped: list[bool] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    groups: set[dist.ProcessGroup] = field(default_factory=set)
    touches_gradients: bool = False
    optimizer_steps: bool = False


def try_step(definition: StepDefinition, batch: StaticBatch, reads: Reads, runs: int) -> TriedStep:
    """Runs the step on the batch, at least twice, under the eyes of ``Trace``.

    The last run finds the gradients that the one before left, which shows what the step drops.

    reads: what is known of the Python that runs.

    Raises:
        CaptureError: for what cannot be in a graph, or depends on state that Python keeps.
    """
    reads.check_doors()
    unsupported = fp8.unsupported(definition.model)
    if unsupported is not None:
        raise CaptureError(unsupported)
    named = definition.parameters()
    parameters = list(named.values())
    entry, streams, seen = gradients_of(parameters), {}, TriedStep(reads)
    versions = [parameter._version for parameter in parameters]
    strangers = _of_other_models(definition)
    definition.guards(reads, constants=batch.constants()).check_hooks()
    with _noting_streams({**named, **strangers}, streams), _noting_optimizers(definition, seen):
        for _ in range(max(1, runs - 1)):
            set_gradients(parameters, entry)
            trace = _run(definition, batch, seen)
        before = gradients_of(parameters)
        trace = _run(definition, batch, seen)
    if strangers.keys() & streams.keys():
        raise CaptureError(
            "the optimizer updates parameters that are not in model=...: pass all their modules, "
            "model=[model, criterion, ...], so that their gradients can be looked after"
        )
    after = gradients_of(parameters)
    if any(gradient is not None and gradient.requires_grad for gradient in after):
        raise CaptureError("backward(create_graph=True) leaves gradients that require grad")
    seen.dropped = [_is_dropped(*pair, trace) for pair in zip(before, after, strict=True)]
    here = _current_stream(definition.backend.device)
    # FSDP2 runs these hooks itself, on its own stream, which it orders with the caller's.
    plain = (item for item in streams.items() if not stands_for_another(named[item[0]]))
    seen.stale = [name for name, stream in plain if stream != here]
    updated = versions != [parameter._version for parameter in parameters]
    found = [gradient for gradient in before if gradient is not None]
    touched = any(address(gradient) in trace.read for gradient in found)
    seen.touches_gradients = bool(streams) or updated or touched
    return seen


def _run(definition: StepDefinition, batch: StaticBatch, seen: TriedStep) -> Trace:
    """Runs the step once. ``seen`` gets what it has read in Python; the step must not have changed
    any of what was known before."""
    before = definition.guards(seen.reads, constants=batch.constants())
    run, autocast = _trial_run(definition, batch), fp8.Autocast()
    with run:
        definition.run(batch.tree())
    autocast.put_back()
    run.check(asked=doors.OF_VERSIONS)
    changes = before.changes()
    if changes:
        raise CaptureError(
            f"it changes {changes[0]} within the step, and a replay runs no Python: keep it in a "
            f"tensor, or change it outside of the step (a scheduler's step() belongs there)"
        )
    seen.reads = Reads.together(seen.reads, run.reads)
    seen.read |= run.trace.read
    seen.groups |= run.trace.groups
    return run.trace


def _trial_run(definition: StepDefinition, batch: StaticBatch) -> TrialRun:
    model = definition.model
    gradients = [g for g in gradients_of(list(model.parameters())) if g is not None]
    watched = definition.guards(Reads()).tensors
    known = [*model.parameters(), *model.buffers(), *batch.tensors(), *watched, *gradients]
    known += (fp8.named_tensors() | fp8.tensors_of(model)).values()
    return TrialRun(
        definition.backend,  # no ``before``: ``StateBefore`` has everything, on the host
        known,
        inputs=batch.named_tensors(),
        strict=not data_parallel.wrappers(model),  # DDP reads its buckets, which nobody else knows
        in_step=True,
    )


def _is_dropped(old: Tensor | None, new: Tensor | None, trace: Trace) -> bool:
    """A gradient that was replaced, but looked at before, went into its successor."""
    return old is not None and new is not old and address(old) not in trace.read


def _of_other_models(definition: StepDefinition) -> dict[str, Tensor]:
    """Parameters of optimizers that do not belong to the model."""
    own = {id(parameter) for parameter in definition.model.parameters()}
    groups = [group for optimizer in definition.optimizers() for group in optimizer.param_groups]
    others = [p for group in groups for p in group["params"] if id(p) not in own]
    return {f"stranger {i}": p for i, p in enumerate(others) if p.requires_grad}


@contextlib.contextmanager
def _noting_streams(named: Mapping[str, nn.Parameter], streams: dict[str, Any]) -> Iterator[None]:
    """Notes on which stream each parameter's gradient is accumulated, by its name."""

    def note(name: str, parameter: Tensor) -> None:
        streams[name] = _current_stream(parameter.device)

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
        for name, parameter in named.items()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _noting_optimizers(definition: StepDefinition, seen: TriedStep) -> Iterator[None]:
    known = definition.optimizers()

    def check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not any(optimizer is each for each in known):
            raise CaptureError(
                f"the step calls step() of a {type(optimizer).__name__} that FullIteration does "
                f"not know: pass optimizer=..., so that its state can be put back and watched"
            )
        check_optimizer(optimizer, definition.backend.device)
        seen.optimizer_steps = True

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
