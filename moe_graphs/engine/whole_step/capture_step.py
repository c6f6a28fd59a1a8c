"""Records a whole step: try it, capture it, verify it, and leave everything as it was."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import Audits
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.checkpointing import Checkpoints
from moe_graphs.engine.fp8 import Entry
from moe_graphs.engine.guards import bytecode_names
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.torch_state import TorchState
from moe_graphs.engine.ranks import Ranks
from moe_graphs.engine.side_outputs import Left
from moe_graphs.engine.snapshot import Snapshot, random_digest
from moe_graphs.engine.tensors import address, is_sharded_by_fsdp, is_wrapped, tensor_leaves
from moe_graphs.engine.tracing import (
    Operations,
    Origins,
    Trace,
    TrialRun,
    differing_op,
    explaining_errors,
)
from moe_graphs.engine.verify import ByFingerprint, Verdict
from moe_graphs.engine.whole_step import fsdp
from moe_graphs.engine.whole_step.fsdp import Sharding
from moe_graphs.engine.whole_step.grad_fields import (
    GradField,
    Gradients,
    GradUse,
    StaticGradients,
    check_hooks,
    check_streams,
    forget_accumulators,
    gradients_of,
    gradients_to_find,
    is_part,
    set_gradients,
)
from moe_graphs.engine.whole_step.optimizers import (
    FirstStepState,
    ScalerStates,
    StepHooks,
    check_optimizer,
)
from moe_graphs.engine.whole_step.recorded_step import RecordedStep, StaticBatch, StepDefinition
from moe_graphs.errors import CaptureError

_ROOM_FOR_GAPS = 12  # a piece of memory is by this share larger than what a run allocates at most


def record_step(
    definition: StepDefinition,
    batch: Any,
    accessed: AccessedNames | None,
    *,
    peak: int,
    trial_runs: int,
    verify: bool,
    ranks: Ranks,
    audits: Audits,
) -> tuple[RecordedStep, Verdict | None]:
    """Captures the step as it is called now, on all ranks; nothing that it touches is changed.

    Args:
        accessed: the Python that a real call has run, if there was one.
        peak: bytes that this call allocated at most; 0 if nobody knows.

    Raises:
        CaptureError: for what in the step cannot be captured, with its line.
    """
    backend = definition.backend
    with (
        explaining_errors("capture of the step", backend, then="it runs eagerly now"),
        contextlib.ExitStack() as failing,
    ):
        failing.callback(backend.release)
        fsdp.check_settings(definition.model)
        definition.sharding.reshard()
        gc.collect()  # garbage is not collected while a capture runs
        backend.make_room()  # memory cached by eager steps serves no other stream
        with StateBefore(definition, accessed) as before, backend.on_stream():
            with ranks.together():
                prepared = _prepare(definition, batch, peak, trial_runs, before)
            ranks.join(prepared.seen.groups)
            with ranks.together():
                fsdp.check_memory(ranks.group)
                verification = None
                if verify:
                    static, found = prepared.batch, prepared.found
                    verification = StepVerification(definition, before, ranks, static, found)
                    backend.cache_piece(_with_room_for_gaps(prepared.seen.peak))
                    verification.expect()
                operations = Operations(
                    origins_of_step(
                        definition, prepared.batch, prepared.batch.leaves, prepared.found
                    )
                    if audits.are_on
                    else None
                )
                recorded = _record(definition, prepared, before, operations)
                failing.callback(recorded.release)
                shared = recorded.mismatch_of_memory(pytree.tree_leaves(batch))
                if shared is not None:
                    raise CaptureError(shared.message)
                audit = None
                if audits.are_on:
                    audit = audits.of_call(operations, recorded.left(), "the step")
                    audit.origins = None  # its backward is in the same stream
                verdict = verification.check(recorded, operations) if verification else None
        # This comes after the context, which makes autograd forget its nodes: the nodes now are the
        # caller's.
        updating = definition.optimizers() if prepared.seen.optimizer_steps else []
        if recorded.gradients is not None:
            recorded.gradients.settled()
        hooks = StepHooks(definition.parameters(), updating)
        failing.pop_all()  # nothing has failed
        return replace(recorded, hooks=hooks, audit=audit), verdict


def origins_of_step(
    definition: StepDefinition, batch: StaticBatch, leaves: Sequence[Any], found: Gradients
) -> Origins:
    """Names for the memory that a step works on.

    Args:
        leaves: the leaves of the batch that the step gets.
        found: the gradients that the step finds.
    """
    model = definition.model
    # FSDP2 and DDP have memory whose addresses do not last.
    moves = bool(fsdp.wrappers(model)) or any(map(is_sharded_by_fsdp, model.modules()))
    origins = Origins(by_address=not moves)
    for tensor in (*model.parameters(), *model.buffers()):
        origins.stands_in(tensor, tensor)
    for number, (static, leaf) in enumerate(zip(batch.leaves, leaves, strict=True)):
        if isinstance(static, Tensor) and batch.signature.first[number] == number:
            origins.stands_in(leaf, static)
    for gradient in found:
        if gradient is not None:
            origins.call(gradient, "a gradient that the step finds")
    return origins


@dataclass(frozen=True)
class _Prepared:
    """The state from which the capture starts. ``found`` are the gradients that it finds."""

    batch: StaticBatch
    state: TorchState
    seen: TriedStep
    found: Gradients
    pool: Any
    entry: Entry | None


def _prepare(
    definition: StepDefinition, batch: Any, peak: int, trial_runs: int, before: StateBefore
) -> _Prepared:
    """Refuses everything that can be refused before the capture.

    Trial runs have one piece of memory. Tensors that outlive them are made before it or after it is
    freed, because one tensor in the piece would keep all of it.
    """
    state = TorchState(definition.backend.device.type)
    if state.has_autocast_cache:
        raise CaptureError(
            "called under autocast, whose cache of weights would go stale: enter autocast "
            "inside the step, or use torch.autocast(..., cache_enabled=False)"
        )
    entry = Entry.of_now()
    while True:  # trial runs may find attributes that are inputs, too
        static = StaticBatch.of(definition.given(batch), definition.backend.device)
        definition.backend.cache_piece(_with_room_for_gaps(peak))
        found_places = len(definition.assigned.places)
        seen = try_step(definition, static, before, trial_runs)
        parameters = list(definition.parameters().values())
        set_gradients(parameters, before.gradients)  # the runs' gradients lie in the piece
        _free_cached_memory(definition.backend)
        if len(definition.assigned.places) == found_places:
            break
    definition.assigned.tried()
    before.first_step_state.check()
    check_streams(definition.model, seen.stale)
    found: Gradients = before.gradients
    if seen.touches_gradients:
        found = gradients_to_find(parameters, before.gradients, seen.uses)
    set_gradients(parameters, found)
    # In one piece the allocator joins what is free; separate allocations leave gaps of all sizes.
    pool = definition.backend.new_pool(_with_room_for_gaps(seen.peak))
    return _Prepared(static, state, seen, found, pool, entry)


def _free_cached_memory(backend: Backend) -> None:
    """Frees what runs left in the allocator's cache; garbage would keep whole segments of it."""
    if backend.device.type == "cuda":
        gc.collect()
    backend.release()


def _with_room_for_gaps(peak: int) -> int:
    return peak + peak // _ROOM_FOR_GAPS


def without_room_for_gaps(piece: int) -> int:
    """The bytes that a run allocates at most, by the size of the piece that was made for it."""
    return piece * _ROOM_FOR_GAPS // (_ROOM_FOR_GAPS + 1)


def _record(
    definition: StepDefinition, prepared: _Prepared, before: StateBefore, operations: Operations
) -> RecordedStep:
    named, batch, seen = definition.parameters(), prepared.batch, prepared.seen
    tensors = [*definition.model.parameters(), *definition.model.buffers()]
    guards = definition.guards(
        seen.accessed,
        seen.read,
        constants=batch.constants(),
        optimizer=seen.optimizer_steps,
        schedulers=False,
    )
    guards.check_followable()
    for trace in seen.traces:
        trace.check_others(guards.tensors)
    tensors += before.others.tensors
    versions = [tensor._version for tensor in tensors]
    _free_cached_memory(definition.backend)  # it would lie beside the graph's own pool
    draws = definition.backend.new_draws(seen.traces[-1].checkpoint.begins)
    operations.checkpoint = Checkpoints(recorded=draws)
    with definition.backend.record(prepared.pool, draws) as graphs, operations:
        outputs = definition.run(batch.tree())
    both = zip(tensors, versions, strict=True)
    written = [tensor for tensor, version in both if tensor._version != version]
    modified = [*written, *(tensor for tensor in tensors if address(tensor) in seen.written)]
    leaves, structure = pytree.tree_flatten(outputs)
    parameters = list(named.values())
    count = len(pytree.tree_leaves(outputs.outputs)) if isinstance(outputs, Left) else len(leaves)
    left = gradients_of(parameters)
    gradients = None
    if seen.touches_gradients:
        rows = zip(named, parameters, seen.uses, prepared.found, left, strict=True)
        gradients = StaticGradients(GradField(*row) for row in rows)
    sharding = Sharding(definition.model)
    return RecordedStep(
        graph=graphs[0],
        pool=prepared.pool,
        batch=batch,
        outputs=[leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        output_structure=structure,
        with_history=[i for i, leaf in enumerate(leaves) if i >= count and _has_history(leaf)],
        gradients=gradients,
        guards=guards,
        first_step_state=before.first_step_state,
        context=prepared.state,
        grad_enabled=torch.is_grad_enabled(),
        written=written,
        modified=modified,
        entry=prepared.entry,
        sharding=sharding if sharding.groups else None,
    )


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


# ---- trial runs: the step runs eagerly, to find what cannot be in a graph


@dataclass
class TriedStep:
    """The findings of the trial runs.

    Attributes:
        accessed: which Python ran.
        read, written: addresses of the memory that was read, and of that which was written.
        uses: per parameter, what the step does with the ``.grad`` that it finds.
        stale: names of parameters whose gradients are accumulated on another stream.
        groups: process groups over which the step communicates.
        traces: the operations of each run.
        peak: bytes that the last run allocated at most.
    """

    accessed: AccessedNames
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    uses: list[GradUse] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    groups: set[dist.ProcessGroup] = field(default_factory=set)
    traces: list[Trace] = field(default_factory=list)
    touches_gradients: bool = False
    optimizer_steps: bool = False
    peak: int = 0


def try_step(
    definition: StepDefinition, batch: StaticBatch, before: StateBefore, runs: int
) -> TriedStep:
    """Runs the step on the batch, at least twice, and watches it.

    The last run finds the gradients that the run before it left. That shows which gradients the
    step drops.

    If a run assigns tensors to attributes that were not known, the step has to be tried again.

    Args:
        before: the state before, with what is known of the Python that runs.

    Raises:
        CaptureError: for what cannot be in a graph, or depends on state that Python keeps.
    """
    accessed = before.accessed
    accessed.check_impure_calls()
    unsupported = fp8.unsupported(definition.model)
    if unsupported is not None:
        raise CaptureError(unsupported)
    named = definition.parameters()
    parameters = list(named.values())
    entry, seen = gradients_of(parameters), TriedStep(accessed)
    streams: dict[str, Any] = {}
    versions = [parameter._version for parameter in parameters]
    strangers, places = _of_other_models(definition), len(definition.assigned.places)
    definition.guards(accessed, constants=batch.constants()).check_hooks()
    with _noting_streams({**named, **strangers}, streams), _noting_optimizers(definition, seen):
        for _ in range(max(1, runs - 1)):
            set_gradients(parameters, entry)
            trace = _run(definition, batch, seen, before.others)
            if len(definition.assigned.places) > places:
                return seen
        found_by_last = gradients_of(parameters)
        with definition.backend.meter() as meter:
            trace = _run(definition, batch, seen, before.others)
            seen.peak = meter.peak()
    if strangers.keys() & streams.keys():
        raise CaptureError(
            "the optimizer updates parameters that are not in model=...: pass all their modules, "
            "model=[model, criterion, ...], so that their gradients can be looked after"
        )
    after = gradients_of(parameters)
    if any(gradient is not None and gradient.requires_grad for gradient in after):
        raise CaptureError("backward(create_graph=True) leaves gradients that require grad")
    rows = zip(named, found_by_last, after, strict=True)
    seen.uses = [_use_of(old, new, trace, adds=name in streams) for name, old, new in rows]
    here = _current_stream(definition.backend.device)
    # FSDP2 runs these hooks itself, on its own stream, which it orders with the caller's.
    plain = (item for item in streams.items() if not is_wrapped(named[item[0]]))
    seen.stale = [name for name, stream in plain if stream != here]
    updated = versions != [parameter._version for parameter in parameters]
    found = [gradient for gradient in found_by_last if gradient is not None]
    touched = any(address(gradient) in trace.read for gradient in found)
    seen.touches_gradients = bool(streams) or updated or touched
    return seen


def _run(
    definition: StepDefinition, batch: StaticBatch, seen: TriedStep, others: Snapshot
) -> Trace:
    """Runs the step once; ``seen`` gets what its Python has read.

    The step must not change any value that was known before.
    """
    before = definition.guards(seen.accessed, constants=batch.constants())
    run, autocast = _trial_run(definition, batch, others), fp8.Autocast()
    with run:
        outputs = definition.run(batch.tree())
    run.trace.check_outputs(outputs)
    autocast.put_back()
    run.check(asked=bytecode_names.OF_VERSIONS)
    read = run.trace.read | set(map(address, tensor_leaves(outputs)))
    if definition.assigned.find(before, run.accessed, read):
        return run.trace
    changes = before.changes()
    if changes:
        raise CaptureError(
            f"it changes {changes[0]} within the step, and a replay runs no Python: keep it in a "
            f"tensor, or change it outside of the step (a scheduler's step() belongs there)"
        )
    seen.accessed = AccessedNames.together(seen.accessed, run.accessed)
    seen.read |= run.trace.read
    seen.written |= run.trace.written
    seen.groups |= run.trace.groups
    seen.traces.append(run.trace)
    return run.trace


def _trial_run(definition: StepDefinition, batch: StaticBatch, others: Snapshot) -> TrialRun:
    model = definition.model
    gradients = [g for g in gradients_of(list(model.parameters())) if g is not None]
    watched = definition.guards(AccessedNames()).tensors
    known = [*model.parameters(), *model.buffers(), *batch.tensors(), *watched, *gradients]
    known += (fp8.named_tensors() | fp8.tensors_of(model)).values()
    return TrialRun(
        definition.backend,  # no ``before``: ``StateBefore`` has what is known, on the host
        known,
        before_others=others,
        inputs=batch.named_tensors(),
        strict=not fsdp.wrappers(model),  # DDP reads its buckets, which nobody else knows
        in_step=True,
    )


def _use_of(old: Tensor | None, new: Tensor | None, trace: Trace, *, adds: bool) -> GradUse:
    """The use that the step made of a gradient; ``adds``: a backward has added to its ``.grad``.

    A gradient that was read went into the new gradient. Code of wrappers that keep gradients in
    buffers shows no operations, so the step does not ignore these.
    """
    is_read = old is not None and address(old) in trace.read
    if old is not None and new is not old and not is_read:
        return GradUse.DROPS
    if adds:
        return GradUse.ADDS
    if old is None or new is not old or is_read or is_wrapped(old) or is_part(old):
        return GradUse.NEEDS
    return GradUse.NEEDS if address(old) in trace.written else GradUse.IGNORES


def _of_other_models(definition: StepDefinition) -> dict[str, Tensor]:
    """Parameters of optimizers that do not belong to the model."""
    own = {id(parameter) for parameter in definition.model.parameters()}
    groups = [group for optimizer in definition.optimizers() for group in optimizer.param_groups]
    others = [p for group in groups for p in group["params"] if id(p) not in own]
    return {f"stranger {i}": p for i, p in enumerate(others) if p.requires_grad}


@contextlib.contextmanager
def _noting_streams(named: Mapping[str, Tensor], streams: dict[str, Any]) -> Iterator[None]:
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

    def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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


# ---- everything that a step touches, as it was before the capture


class StateBefore:
    """A context at whose end everything that the step touches is as it was at the beginning.

    Attributes:
        accessed: what is known of the Python that the step runs.
        gradients: ``.grad`` of the parameters, as it was found.
        first_step_state: state that the optimizers' first steps make.
        others: values of tensors that the step writes and that nobody knew before its trial runs.
    """

    def __init__(self, definition: StepDefinition, accessed: AccessedNames | None) -> None:
        self._definition = definition
        known = [] if accessed is None else [accessed]
        self.accessed = AccessedNames.together(
            AccessedNames.before_running(definition.step), *known
        )
        self._ran = accessed is not None
        self._all_accessed = AccessedNames.together(definition.names_before(), *known)
        self._parameters = list(definition.parameters().values())
        self.others = Snapshot()

    def __enter__(self) -> StateBefore:
        definition = self._definition
        self.gradients = gradients_of(self._parameters)
        guards = definition.guards(self._all_accessed)  # these cover more than is compared at calls
        if not self._ran:
            guards.check_followable()
        self.first_step_state = FirstStepState(definition.optimizers())
        self._scalers = ScalerStates()
        tensors = [
            *definition.model.parameters(),
            *definition.model.buffers(),
            *guards.tensors,
        ]
        tensors += [gradient for gradient in self.gradients if gradient is not None]
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        self._state = Snapshot(definition.backend, values=unique, on_host=True)
        self._python = Snapshot(
            guards=[guards],
            python_random=True,
            hooks_of=[*unique, definition.model, *definition.optimizers()],
        )
        check_hooks(definition.model)
        self._forget_accumulators()  # these belong to the caller's stream
        return self

    def tensors(self) -> list[Tensor]:
        """Everything that the step may change, except ``.grad``."""
        return [*self._state.tensors, *self.first_step_state.tensors(), *self.others.tensors]

    def put_back_values(self) -> None:
        """Puts values back for another run from the same state. Gradients stay as they are set."""
        self._state.put_back()
        self.others.put_back()
        self.first_step_state.zero()

    def __exit__(self, *exception: object) -> None:
        self._state.put_back()
        self.others.put_back()
        self.first_step_state.take_away()
        if exception[0] is not None:
            self._python.put_back()
            self._scalers.put_back()
        set_gradients(self._parameters, self.gradients)
        self._forget_accumulators()  # an exception's traceback may hold some

    def _forget_accumulators(self) -> None:
        gathered = self._definition.sharding.unsharded_parameters()
        forget_accumulators(self._definition.model, gathered)


class StepVerification:
    """Compares the graph's replay with eager runs from the same state.

    Args:
        found: the gradients that are set for the capture.
    """

    def __init__(
        self,
        definition: StepDefinition,
        before: StateBefore,
        ranks: Ranks,
        batch: StaticBatch,
        found: Gradients,
    ) -> None:
        self._definition, self._before, self._anywhere = definition, before, ranks.any
        self._parameters = list(definition.parameters().values())
        self._batch, self._found = batch, found
        self._entry = [None if g is None else g.detach().clone() for g in found]
        self._strategy = ByFingerprint(ranks.any)
        self._operations = Operations(checkpoint=Checkpoints(definition.backend.device))
        # Around the first run.
        self._watch: contextlib.AbstractContextManager[Any] = self._operations

    def expect(self) -> None:
        """Runs the step eagerly; afterwards everything is as before it."""
        self._strategy.expect(self._run_eagerly)
        self._put_back()

    def check(self, recorded: RecordedStep, operations: Operations) -> Verdict:
        """Replays the step and compares. The state afterwards is that after a replay.

        Raises:
            CaptureError: if the captured operations are not those of an eager run.
        """
        differing_ops = differing_op(self._operations, operations)
        if self._anywhere(differing_ops is not None):
            differing_ops = differing_ops or "on another rank"
            raise CaptureError(
                f"the capture does something else than a run: {differing_ops}: the step depends on "
                f"state that Python keeps (a counter, random, time), and a replay runs no Python"
            )
        replay, make_room = partial(self._replay, recorded), self._definition.backend.make_room
        return self._strategy.check(
            self._run_eagerly, replay, make_room, any_order=operations.rounding_of_any_order()
        )

    def _run_eagerly(self) -> dict[str, Any]:
        self._put_back()
        watch, self._watch = self._watch, contextlib.nullcontext()
        with watch:
            outputs = self._definition.run(self._batch.tree())
        return self._left(tensor_leaves(outputs))

    def _replay(self, recorded: RecordedStep) -> dict[str, Any]:
        self._put_back()
        recorded.run()
        return self._left(tensor_leaves(recorded.outputs))

    @torch.no_grad()
    def _put_back(self) -> None:
        self._before.put_back_values()
        for static, value in zip(self._found, self._entry, strict=True):
            if static is not None and value is not None:
                static.copy_(value)
        set_gradients(self._parameters, self._found)

    def _left(self, outputs: list[Tensor]) -> dict[str, Any]:
        random = random_digest(self._definition.backend)
        return {**dict(self._named(outputs)), "the random numbers drawn": random}

    def _named(self, outputs: list[Tensor]) -> Iterator[tuple[str, Tensor | None]]:
        names = {id(t): name for name, t in self._definition.model.named_parameters()}
        names |= {id(t): f"buffer {name}" for name, t in self._definition.model.named_buffers()}
        for number, output in enumerate(outputs):
            yield f"output {number}", output
        for number, tensor in enumerate(self._before.tensors()):
            yield names.get(id(tensor), f"tensor {number} of the optimizer or of state="), tensor
        for parameter, gradient in zip(
            self._parameters, gradients_of(self._parameters), strict=True
        ):
            yield f"the gradient of {names[id(parameter)]}", gradient
        yield from fp8.named_tensors().items()
