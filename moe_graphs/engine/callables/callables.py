"""Graphs of any callables ahead of time: a drop-in for torch's and Transformer Engine's helper."""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.audit import Audits
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.backends.backend import Resources
from moe_graphs.engine.callables.arguments import (
    each_args,
    each_kwargs,
    hooks_of,
    layer_of_each_forward,
    layers_per_chunk,
    one_per_layer,
    order_of,
    plan_of,
)
from moe_graphs.engine.callables.order import Action, slots
from moe_graphs.engine.guards import torch_state
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.graphed_scope import Captured, DelayedWeights, GraphedScope
from moe_graphs.engine.partial.graphs import report_of
from moe_graphs.engine.partial.plan import CallMemory, Plan, memory_plan
from moe_graphs.engine.partial.recording import CallSite, PendingBackward, PlannedCall
from moe_graphs.engine.partial.scope import Call, Scope
from moe_graphs.engine.partial.slots import Chunk, Slot
from moe_graphs.engine.partial.trials import Hooks, ScopeCall, Trials
from moe_graphs.engine.ranks import ALONE, Ranks
from moe_graphs.engine.report import FallbackWarning, Report
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import Mismatch, Signature, leaves_of_outputs, tensor_leaves
from moe_graphs.engine.tracing import explaining_errors_of
from moe_graphs.errors import CaptureError, GraphError

C = TypeVar("C", bound="Callable[..., Any] | tuple[Callable[..., Any], ...]")


@overload
def make_graphed_callables(
    callables: C,
    sample_args: Any,
    warmup_steps: int = ...,
    allow_unused_input: bool = ...,
    pool: Any = ...,
    *,
    verify: bool = ...,
    sample_kwargs: Any = ...,
    schedule: Sequence[Action] | None = ...,
    on_mismatch: str = ...,
    audit_every: int | str | None = ...,
    on_audit: str = ...,
    generators: Sequence[torch.Generator] = ...,
    capture_time_hooks: Sequence[Mapping[str, Any] | None] | None = ...,
    pre_warmup_hook: Callable[[], None] | None = ...,
    post_warmup_hook: Callable[[], None] | None = ...,
    num_warmup_iters: int | None = ...,
    retain_graph_in_backward: bool = ...,
    enabled: bool = ...,
    recipe: Any = ...,
    amax_reduction_group: Any = ...,
    cache_quantized_params: bool = ...,
    _order: None = ...,
    _num_layers_per_chunk: int | Sequence[int] | None = ...,
    _reuse_graph_input_output_buffers: bool = ...,
) -> C: ...


@overload
def make_graphed_callables(
    callables: Any, sample_args: Any, *, _order: Sequence[int | float], **options: Any
) -> tuple[Callable[..., Any], ...]: ...


def make_graphed_callables(  # type: ignore[misc]  # the second's options are those of the first
    callables: Any,
    sample_args: Any,
    warmup_steps: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    verify: bool = True,
    sample_kwargs: Any = None,
    schedule: Sequence[Action] | None = None,
    on_mismatch: str = "eager",
    audit_every: int | str | None = "auto",
    on_audit: str = "eager",
    generators: Sequence[torch.Generator] = (),
    capture_time_hooks: Sequence[Mapping[str, Any] | None] | None = None,
    pre_warmup_hook: Callable[[], None] | None = None,
    post_warmup_hook: Callable[[], None] | None = None,
    num_warmup_iters: int | None = None,
    retain_graph_in_backward: bool = False,
    enabled: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool = False,
    _order: Sequence[int | float] | None = None,
    _num_layers_per_chunk: int | Sequence[int] | None = None,
    _reuse_graph_input_output_buffers: bool = False,
) -> Any:
    """Captures forward and backward of every callable, and returns what replays them.

    A call whose shapes, constants, flags or parameter addresses differ from the samples' runs
    eagerly and is counted (``.graphs.eager_calls``), or it raises. Gradients are the caller's own
    tensors. If anything goes wrong here, the callables are as they were before.

    Args:
        callables: a module or function, or a tuple of them in the order in which they are called.
        sample_args: positional arguments of each callable: a tuple, or a tuple of tuples. Tensors,
            nested structures, None and constants are fine. With ``_order`` there is one entry per
            forward, as in Transformer Engine; the entries of one layer have to be alike.
        warmup_steps: eager runs of each callable before its capture (``num_warmup_iters``).
        allow_unused_input: whether an input that requires a gradient may get none.
        pool: a memory pool to capture into; only for one microbatch in flight.
        sample_kwargs: keyword arguments of each callable: a dict, or a tuple of them.
        schedule: what this rank runs (``Schedule.local_order(rank)``). As many microbatches are
            captured as the schedule has in flight; by default one.
        on_mismatch: "eager" or "error". For "recapture" use ``moe_graphs.graph``: here the samples
            say what is captured, and a call that differs from them has no graph.
        audit_every, on_audit: audits, as in ``GraphConfig``. Calls of each callable are counted in
            place of steps.
        verify: compare the first replay of everything with an eager run, bit for bit.
        generators: random number generators that the callables use, besides the default one.
        capture_time_hooks: per callable ``{"forward_pre_hooks": {id: hook}, ...}``. They are called
            in warm-up and capture, outside the graphs, and never at replay.
        retain_graph_in_backward, _reuse_graph_input_output_buffers: accepted; neither is needed.
        enabled, recipe, amax_reduction_group: arguments of Transformer Engine's autocast, which is
            entered here. Or enter the autocast around this call, as around the later ones.
        cache_quantized_params: accepted; casts of weights are cached for calls that say
            ``is_first_microbatch``.

    Returns:
        Modules with a ``forward`` that is replaced until ``reset()``, and functions in place of
        functions. With ``_order``, one function per forward. If the order has weight gradients of
        their own, ``backward_weight()`` (``backward_dw``) of each function computes them.

    Raises:
        ValueError: for arguments that do not fit.
        CaptureError: if a callable cannot be captured, with the source line. No training runs yet
            that could go on eagerly, so this is always an error.
    """
    is_single = not isinstance(callables, (tuple, list))
    functions = (callables,) if is_single else tuple(callables)
    given_args = each_args(sample_args, is_single and _order is None)
    order = order_of(schedule, _order)
    layers = layers_per_chunk(order, _num_layers_per_chunk, len(functions))
    calls = list(map(Call, given_args, each_kwargs(sample_kwargs, len(given_args))))
    _check(on_mismatch, pool, order)
    calls = one_per_layer(calls, layers, order) if _order is not None else calls
    _check_number(len(calls), len(functions))
    delays = _delays(order, layers)
    audits = Audits(audit_every, on_audit)
    graphs = CallableGraphs(functions, calls, delays, on_mismatch, generators, audits)
    options = CaptureOptions(
        split=any(delays),
        verify=verify,
        trials=warmup_steps if num_warmup_iters is None else num_warmup_iters,
        pool=pool,
        hooks=hooks_of(capture_time_hooks, len(functions)),
        before_trials=pre_warmup_hook,
        after_trials=post_warmup_hook,
        allow_unused_input=allow_unused_input,
    )
    with fp8.autocast(enabled, recipe, amax_reduction_group):
        graphs.capture(plan_of(order, layers), options)
    graphs.install()
    if _order is not None:
        return tuple(graphs.graphed[layer] for layer in layer_of_each_forward(order or (), layers))
    replaced = tuple(
        function if isinstance(function, nn.Module) else graphed
        for function, graphed in zip(functions, graphs.graphed, strict=True)
    )
    return replaced[0] if is_single else replaced


def _delays(order: tuple[Action, ...] | None, layers: Sequence[int]) -> list[bool]:
    """Flags of the callables whose weights have a backward of their own."""
    return [any(a.kind == "W" and a.chunk == chunk for a in order or ())
            for chunk, own in enumerate(layers) for _ in range(own)]  # fmt: skip


def _check(on_mismatch: str, pool: Any, order: tuple[Action, ...] | None) -> None:
    if on_mismatch not in ("eager", "error"):
        raise ValueError(f"on_mismatch={on_mismatch!r}: accepted are 'eager', 'error'{_RECAPTURE}")
    if pool is not None and order is not None and max(slots(order).values()) > 1:
        raise ValueError("pool: microbatches in flight need pools of their own: leave it out")


def _check_number(samples: int, functions: int) -> None:
    if samples != functions:
        raise ValueError(f"sample_args: {samples} for {functions} callables: one for each")


@dataclass(frozen=True)
class CaptureOptions:
    """Options of a capture.

    ``hooks`` are per callable, see ``ScopeCall``. The others are as in ``make_graphed_callables``.
    """

    split: bool
    verify: bool
    trials: int
    pool: Any
    hooks: Sequence[Hooks]
    before_trials: Callable[[], None] | None
    after_trials: Callable[[], None] | None
    allow_unused_input: bool


class CallableGraphs:
    """The graphs of the callables of one ``make_graphed_callables``: ``.graphs`` of each."""

    # There are no warm-up steps, no pauses, and no steps that calls could lie outside of.
    state, in_step, paused_by = "captured", True, None

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        calls: Sequence[Call],
        delays: Sequence[bool],
        on_mismatch: str,
        generators: Sequence[torch.Generator],
        audits: Audits,
    ) -> None:
        names = [f"callable {number}" for number in range(len(functions))]
        owners = [f if isinstance(f, nn.Module) else _Closure(f) for f in functions]
        self.model = nn.ModuleList(owners)
        tensors = (*self.model.parameters(), *self.model.buffers(), *tensor_leaves(
            [(call.args, call.kwargs) for call in calls]))  # fmt: skip
        self.backend = backend_for(tensors, generators)
        self.calls, self.fallbacks = tuple(calls), FallbackWarning()
        self.resources = Resources[Captured](self.backend)
        self._audits = audits
        audits.ranks = Ranks(self.model)
        self.graphed = [
            GraphedCallable(self, _scope_of(name, owner, function), on_mismatch, delay)
            for name, owner, function, delay in zip(names, owners, functions, delays, strict=True)
        ]

    @property
    def captured(self) -> Captured | None:
        """The captured graphs, until they are released."""
        return self.resources.captured

    @property
    def eager_calls(self) -> dict[str, int]:
        """Numbers of calls that ran eagerly, by reason."""
        return self.report().eager_calls

    def mismatched(self, mismatch: Mismatch) -> None:
        """Counts a call that was to be replayed and runs eagerly."""

    def capture(self, plan: Plan, options: CaptureOptions) -> None:
        """Captures all callables.

        Raises:
            CaptureError: for what cannot be captured. Afterwards everything is as before.
        """
        started = time.perf_counter()
        reason = torch_state.reason_of_modes()
        if reason is not None:
            raise CaptureError(
                f"make_graphed_callables under {reason!r}: every call there runs eagerly: call it "
                f"outside of that context"
            )
        for graphed in self.graphed:
            graphed.check_unpatched()
        calls = [
            _sample_call(graphed.scope, call, hooks)
            for graphed, call, hooks in zip(self.graphed, self.calls, options.hooks, strict=True)
        ]
        gc.collect()  # garbage is not collected while a capture runs
        before = self._before(calls)
        try:
            self._capture(plan, calls, options)
        except BaseException:
            before.put_back()
            raise
        self.capture_seconds = time.perf_counter() - started

    def _before(self, calls: Sequence[ScopeCall]) -> Snapshot:
        """Snapshot of everything that the calls can reach, except tensors' values.

        Each run puts back the values of tensors by itself.

        Raises:
            CaptureError: if a call may use up something that nobody can put back, such as an
                iterator.
        """
        guards = self._guards(calls)
        for each in guards:
            each.check_followable()
        return Snapshot(
            self.backend,
            guards=guards,
            python_random=True,
            hooks_of=[*self.model.parameters(), self.model],
            gradients_of=self.model.parameters(),
        )

    def _guards(self, calls: Sequence[ScopeCall]) -> list[Guards]:
        return list(map(Trials(self.model, self.backend).guards_before_running, calls))

    def _capture(self, plan: Plan, calls: Sequence[ScopeCall], options: CaptureOptions) -> None:
        ranks = self._audits.ranks
        calls, measured, communicating = self._try(calls, options, ranks)
        ranks_of = dict.fromkeys(communicating, ranks)
        memory = memory_plan(plan, measured, options.split)
        eager_bytes = {number: each.eager_bytes for number, each in measured.items()}
        # Guards are made after a first run: a table that it makes is no change.
        tried = self._guards(calls)
        given: dict[str, Any] = {"verify": options.verify, "audits": self._audits}
        recorder = Recorder(self.model, self.backend, split=options.split, **given)
        chunks = [
            Chunk([
                Slot([
                    PlannedCall(calls[n].scope, calls[n].signature, fallbacks=self.fallbacks,
                                ranks=ranks_of.get(n, ALONE), eager_bytes=eager_bytes.get(n, 0))
                    for n in chunk.calls
                ], self.backend, options.pool)
                for _ in range(chunk.slots)
            ])
            for chunk in plan.chunks
        ]  # fmt: skip
        self.resources.captured = Captured(chunks, recorder, memory)
        try:
            self.backend.make_room()
            for planned, chunk in zip(plan.chunks, chunks, strict=True):
                for slot in chunk.slots:
                    _capture_slot(slot, [calls[number] for number in planned.calls], recorder)
                    _check_unused(slot, options.allow_unused_input)
            for call, guards in zip(calls, tried, strict=True):
                guards.check_unchanged(f"scope {call.scope.name!r}: ")
        except BaseException:
            self.resources.release()
            raise

    def _try(
        self, calls: Sequence[ScopeCall], options: CaptureOptions, ranks: Ranks
    ) -> tuple[list[ScopeCall], dict[int, CallMemory], set[int]]:
        """Trial runs of all calls.

        Gives the calls with all of their inputs, each one's memory, and the numbers of those that
        communicate.
        """
        calls = list(calls)
        measured: dict[int, CallMemory] = {}
        communicating = set()
        trials = Trials(self.model, self.backend)
        if options.before_trials is not None:
            options.before_trials()
        for number, call in enumerate(calls):
            if options.trials:
                with explaining_errors_of(call.scope.name, "forward", self.backend):
                    if fp8.is_enabled():
                        trials.make_ready(call)
                    tried = trials.forward_and_backward(call, runs=options.trials)
                calls[number], measured[number] = tried.call, tried.memory
                if tried.groups:
                    ranks.join(tried.groups)
                    communicating.add(number)
        if options.after_trials is not None:
            options.after_trials()
        return calls, measured, communicating

    def install(self) -> None:
        for graphed in self.graphed:
            if not isinstance(graphed.scope.module, _Closure):
                backward = graphed.backward_weight
                graphed.install(reset=self.release, graphs=self, backward_weight=backward,
                                backward_dw=backward)  # fmt: skip

    def report(self) -> Report:
        """Report of what was captured and what happened since. It waits for the device."""
        state = "captured" if self.captured is not None else "released"
        modules, took = nn.ModuleList(g.scope.module for g in self.graphed), self.capture_seconds
        return report_of(
            self.backend,
            modules,
            state,
            self.graphed,
            self.captured,
            took,
            self.fallbacks,
            audits=self._audits,
        )

    def check(self) -> None:
        """Waits for the outcomes of all checks of values (``assert``) in replays.

        Raises:
            CheckError: for the first one that has failed.
        """
        for graphed in self.graphed:
            graphed.scope.assigned.deferred.poll(waiting=True)

    def audit_soon(self) -> None:
        """Lets the next call of every callable be audited.

        Ranks that communicate call it before the same calls. With ``audit_every=None`` nothing
        happens.
        """
        for site, _ in self.captured.audited_sites() if self.captured is not None else ():
            site.audit_due = 0

    def called(self, count: int) -> None:
        """Notes that some callable is called for the ``count``-th time."""
        if count > self._audits.step and self.captured is not None:
            self._audits.step = count
            self.captured.look_for_occasions()

    def release(self) -> None:
        """Gives modules their own forward back and frees the graphs' memory. Idempotent."""
        for graphed in self.graphed:
            graphed.uninstall()
        self.resources.release()


class GraphedCallable(GraphedScope):
    """Replacement of one callable.

    ``delays`` says whether the gradients of its weights wait until they are asked for.
    """

    def __init__(
        self, graphs: CallableGraphs, scope: Scope, on_mismatch: str, delays: bool
    ) -> None:
        delayed = DelayedWeights(each_by_itself=delays)
        # This owner does not observe: nothing is called between the making and the capture.
        super().__init__(graphs, scope, on_mismatch, delayed)  # type: ignore[arg-type]
        self._release, self._called, self._calls = graphs.release, graphs.called, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        deferred = self.scope.assigned.deferred
        if deferred.now or deferred.waiting:
            deferred.poll()
        if self.graphs.resources.captured is None:
            raise GraphError(f"{self.scope.name} was reset: make graphed callables again")
        self._calls += 1
        self._called(self._calls)
        return super().__call__(*args, **kwargs)

    def backward_weight(self) -> None:
        """Adds the weight gradients of the oldest delayed backward to ``.grad``."""
        self.delayed.replay_oldest()

    backward_dw = backward_weight

    def reset(self) -> None:
        self._release()


class _Closure(nn.Module):
    """Modules that a plain function reaches; their state is checked at every call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        reached: list[Any] = [getattr(function, "__self__", None)]
        if isinstance(function, functools.partial):
            reached += [*function.args, *function.keywords.values()]
            function = function.func
            reached.append(getattr(function, "__self__", None))
        if inspect.isfunction(function):
            reached += inspect.getclosurevars(function).nonlocals.values()
            reached += inspect.getclosurevars(function).globals.values()
        self.reached = nn.ModuleList(dict.fromkeys(m for m in reached if isinstance(m, nn.Module)))


_RECAPTURE = (
    "; for other samples, reset() and make graphed callables again; moe_graphs.graph captures the "
    "calls that come, with GraphConfig(..., on_mismatch='recapture') anew where they differ"
)


def _scope_of(name: str, owner: nn.Module, function: Callable[..., Any]) -> Scope:
    return Scope(name, owner, function=None if owner is function else function)


def _sample_call(scope: Scope, call: Call, hooks: Hooks) -> ScopeCall:
    inputs = fp8.with_flag_on_device((call.args, call.kwargs))
    return ScopeCall(
        scope, Signature.of(inputs, scope.name_input), pytree.tree_leaves(inputs), call, hooks
    )


# ---- the capture of a slot on sample arguments


def _capture_slot(slot: Slot, calls: Sequence[ScopeCall], recorder: Recorder) -> None:
    """Captures all forwards, then all backwards in reverse, and compares each with eager.

    Afterwards everything else is as before.

    Raises:
        CaptureError: for what cannot be captured.
    """
    with Snapshot(recorder.backend, values=recorder.model.buffers()):
        while not slot.is_closed:  # it captures again if backwards turn out to run only once
            _capture_all(slot, calls, recorder)
            slot.end_step()


def _capture_all(slot: Slot, calls: Sequence[ScopeCall], recorder: Recorder) -> None:
    generator = torch.Generator(recorder.backend.device).manual_seed(0)
    backwards: list[PendingBackward] = []
    for site, call in zip(slot.sites, calls, strict=True):
        _capture_forward(slot, site, call, recorder)
    for site, call in reversed(list(zip(slot.sites, calls, strict=True))):
        forward = site.forward
        if not site.planned.refused and any(forward.differentiable):
            outputs = compress(forward.outputs, forward.differentiable)
            incoming = [_gradient(output, generator) for output in outputs]
            random = recorder.backend.random_position() if forward.draws else None
            pending = PendingBackward(site, call.leaves, random)
            backwards.append(pending)
            with explaining_errors_of(site.name, "backward", recorder.backend):
                with call.backward_hooks(incoming) as found:
                    found += recorder.backward(slot, pending, incoming).values()
            _raise(recorder)
    if recorder.split:
        for pending in backwards:
            if pending.site.run is not None:
                recorder.backward_of_weights(slot, pending)
                _raise(recorder)


def _capture_forward(slot: Slot, site: CallSite, call: ScopeCall, recorder: Recorder) -> None:
    expected = recorder.record_forward(slot, site, call)
    try:
        forward = site.forward
        forward.graph.replay()
        outputs = leaves_of_outputs(forward.output_leaves, forward.outputs, call.leaves)
        difference = recorder.verification.difference_of_forward(site, call, expected, outputs)
        if difference is not None:
            site.planned.differs(difference)
    finally:
        expected.before.put_back()


def _gradient(output: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(output.shape, generator=generator, dtype=torch.float32, device=output.device)
    return torch.empty_like(output, requires_grad=False).copy_(made)


def _raise(recorder: Recorder) -> None:
    if recorder.failure is not None:
        raise recorder.failure


def _check_unused(slot: Slot, allowed: bool) -> None:
    """Checks that every input that requires a gradient gets one.

    Raises:
        GraphError: for an input that requires a gradient and gets none, unless that is allowed.
    """
    for site in slot.sites:
        unused = site.unused_inputs()
        if unused and not allowed:
            raise GraphError(
                f"{site.name}: input {unused[0]!r} requires a gradient and gets none: pass "
                f"allow_unused_input=True, or a sample that requires none"
            )
