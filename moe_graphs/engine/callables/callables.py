"""Graphs of any callables ahead of time: a drop-in for torch's and Transformer Engine's helper."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_graphs.config import ON_MISMATCH
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.callables.arguments import (
    each_kwargs,
    hooks_of,
    layer_of_each_forward,
    layers_per_chunk,
    one_per_layer,
    order_of,
    plan_of,
)
from moe_graphs.engine.resources import Resources
from moe_graphs.engine.scopes.delayed_weights import DelayedWeights
from moe_graphs.engine.scopes.graphed_scope import GraphedScope, reason_of_autograd
from moe_graphs.engine.scopes.observation import Observation
from moe_graphs.engine.scopes.plan import Plan
from moe_graphs.engine.scopes.select import Call, Scope
from moe_graphs.engine.scopes.session import CaptureOptions, capture_plan
from moe_graphs.engine.scopes.slots import Captured
from moe_graphs.engine.signature import tensor_leaves
from moe_graphs.errors import GraphError
from moe_graphs.pipelines.schedule import Action, slots


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    warmup_steps: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    sample_kwargs: Any = None,
    schedule: Sequence[Action] | None = None,
    on_mismatch: str = "eager",
    generators: Sequence[torch.Generator] = (),
    capture_time_hooks: Sequence[Mapping[str, Any] | None] | None = None,
    pre_warmup_hook: Callable[[], None] | None = None,
    post_warmup_hook: Callable[[], None] | None = None,
    num_warmup_iters: int | None = None,
    retain_graph_in_backward: bool = False,
    _order: Sequence[int | float] | None = None,
    _num_layers_per_chunk: int | Sequence[int] | None = None,
    _reuse_graph_input_output_buffers: bool = False,
) -> Any:
    """Captures forward and backward of every callable, and returns what replays them.

    A call whose shapes, constants, flags or parameters' addresses differ from the samples' runs
    eagerly and is counted (``.graphs.eager_calls``), or raises. Gradients are the caller's own
    tensors. Whatever goes wrong here, nothing stays behind.

    Args:
        callables: a module or function, or a tuple of them in the order in which they are called.
        sample_args: positional arguments of each callable: a tuple, or a tuple of tuples. Tensors,
            nested structures, None and constants are fine. With ``_order``, one per forward, as
            Transformer Engine has it: those of a layer have to be alike.
        warmup_steps: eager runs of each callable before its capture (``num_warmup_iters``).
        allow_unused_input: whether an input that requires a gradient may get none.
        pool: a memory pool to capture into; only for one microbatch in flight.
        sample_kwargs: keyword arguments likewise: a dict, or a tuple of them.
        schedule: what this rank runs (``Schedule.local_order(rank)``): as many microbatches are
            captured as it has in flight. By default one.
        on_mismatch: "eager" or "error".
        generators: random number generators that the callables use, besides the default one.
        capture_time_hooks: per callable ``{"forward_pre_hooks": {id: hook}, ...}``, called in
            warm-up and capture, outside the graphs, and never at replay.
        retain_graph_in_backward, _reuse_graph_input_output_buffers: accepted; neither is needed.

    Returns:
        Modules, whose ``forward`` is replaced until their ``reset()``, and functions in the place
        of functions; with ``_order`` functions, one per forward. Where the order has weights'
        gradients of their own, ``backward_weight()`` of each (``backward_dw``) computes them.

    Raises:
        ValueError: for arguments that do not fit.
        CaptureError: if something cannot be captured, with the source line.
    """
    is_single = not isinstance(callables, (tuple, list))
    functions = (callables,) if is_single else tuple(callables)
    given_args = (sample_args,) if is_single and _order is None else tuple(sample_args)
    given_kwargs = each_kwargs(sample_kwargs, len(given_args))
    order = order_of(schedule, _order)
    layers = layers_per_chunk(order, _num_layers_per_chunk, len(functions))
    calls = [Call(a, k) for a, k in zip(given_args, given_kwargs, strict=True)]
    if on_mismatch not in ON_MISMATCH:
        raise ValueError(f"on_mismatch={on_mismatch!r}: accepted are {', '.join(ON_MISMATCH)}")
    if pool is not None and order is not None and max(slots(order).values()) > 1:
        raise ValueError("pool: microbatches in flight need pools of their own: leave it out")
    if _order is not None:
        calls = one_per_layer(calls, layers, 1 + max(a.microbatch for a in order))
    if len(calls) != len(functions):
        raise ValueError(f"sample_args: {len(calls)} for {len(functions)} callables: one for each")
    hooks = hooks_of(capture_time_hooks, len(functions))
    delays = [any(a.kind == "W" and a.chunk == chunk for a in order or ())
              for chunk, own in enumerate(layers) for _ in range(own)]  # fmt: skip
    options = CaptureOptions(
        split=any(delays),
        rehearsals=warmup_steps if num_warmup_iters is None else num_warmup_iters,
        pool=pool,
        hooks=dict(enumerate(hooks)),
        before_rehearsals=pre_warmup_hook,
        after_rehearsals=post_warmup_hook,
    )
    graphs = CallableGraphs(functions, calls, delays, on_mismatch, generators)
    graphs.capture(plan_of(order, layers), options, allow_unused_input)
    graphs.install()
    if _order is not None:
        return tuple(graphs.graphed[layer] for layer in layer_of_each_forward(order, layers))
    replaced = tuple(
        function if isinstance(function, nn.Module) else graphed
        for function, graphed in zip(functions, graphs.graphed, strict=True)
    )
    return replaced[0] if is_single else replaced


class CallableGraphs:
    """The graphs of the callables of one ``make_graphed_callables``: ``.graphs`` of each."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        calls: Sequence[Call],
        delays: Sequence[bool],
        on_mismatch: str,
        generators: Sequence[torch.Generator],
    ) -> None:
        names = [f"callable {number}" for number in range(len(functions))]
        owners = [f if isinstance(f, nn.Module) else _Closure(f) for f in functions]
        self.model = nn.ModuleList(owners)
        tensors = (*self.model.parameters(), *self.model.buffers(), *tensor_leaves(
            [(call.args, call.kwargs) for call in calls]))  # fmt: skip
        self.backend = backend_for(tensors, generators)
        self.calls = tuple(calls)
        self._resources = Resources[Captured](self.backend)
        self.graphed = [
            GraphedCallable(self, Scope(name, owner, _forward_of(function)), on_mismatch, delay)
            for name, owner, function, delay in zip(names, owners, functions, delays, strict=True)
        ]

    @property
    def captured(self) -> Captured | None:
        """What was captured, until it is released."""
        return self._resources.captured

    @property
    def eager_calls(self) -> dict[str, int]:
        """Why calls ran eagerly, and how many."""
        counts: Counter[str] = Counter()
        for graphed in self.graphed:
            counts.update(graphed.eager_calls)
        return dict(counts)

    def eager_reason(self) -> str | None:
        return reason_of_autograd()

    def capture(self, plan: Plan, options: CaptureOptions, allow_unused_input: bool) -> None:
        observation = Observation(self.backend.device)
        for graphed, call in zip(self.graphed, self.calls, strict=True):
            graphed.check_unpatched()
            observation.forward(graphed.scope, (call.args, call.kwargs), call)
        captured = capture_plan(self.model, self.backend, plan, observation, options)
        self._resources.captured = captured
        for chunk in captured.chunks:
            for recording in chunk.slots[0].recordings:
                unused = recording.unused_inputs()
                if unused and not allow_unused_input:
                    self.release()
                    raise GraphError(
                        f"{recording.scope.name}: input {unused[0]!r} requires a gradient and gets "
                        f"none: pass allow_unused_input=True, or a sample that requires none"
                    )

    def install(self) -> None:
        for graphed in self.graphed:
            module = graphed.scope.module
            if not isinstance(module, _Closure):
                module.forward = graphed
                module.reset, module.graphs = self.release, self
                module.backward_weight = module.backward_dw = graphed.backward_weight

    def release(self) -> None:
        """Gives modules their own forward back, and the graphs' memory. Idempotent."""
        for graphed in self.graphed:
            for name in ("forward", "reset", "graphs", "backward_weight", "backward_dw"):
                graphed.scope.module.__dict__.pop(name, None)
        self._resources.release()


class GraphedCallable(GraphedScope):
    """What replays one callable. ``delays``: its weights' gradients wait to be asked for."""

    def __init__(
        self, graphs: CallableGraphs, scope: Scope, on_mismatch: str, delays: bool
    ) -> None:
        super().__init__(graphs, scope, on_mismatch, DelayedWeights(each_by_itself=delays))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.graphs.captured is None:
            raise GraphError(f"{self.scope.name} was reset: make graphed callables again")
        return super().__call__(*args, **kwargs)

    def backward_weight(self) -> None:
        """Adds the weights' gradients of the oldest backward that waits for it to ``.grad``."""
        self.delayed.replay_oldest()

    backward_dw = backward_weight

    def reset(self) -> None:
        self.graphs.release()

    def check_unpatched(self) -> None:
        if "forward" in self.scope.module.__dict__:
            raise ValueError(
                f"{self.scope.name}: forward is patched on this instance (graphs, or something "
                f"else): undo it first"
            )


class _Closure(nn.Module):
    """The modules that a plain function reaches, so that their state is checked at every call."""

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


def _forward_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.forward if isinstance(function, nn.Module) else function
