"""Observe, plan, capture, replay: the life of the graphs of one model.

    graphs = moe_graphs.graph(model, GraphConfig(scopes="attn,moe_router,moe_preprocess"))
    for batch in batches:
        with graphs.step():
            model(batch).loss.backward()
        optimizer.step()

The first ``warmup_steps`` steps run eagerly and are observed (``observation.py``). When the
last of them ends, the observed calls are planned (``plan.py``) and captured in one session
(``session.py``); from then on a call that matches its recording is replayed (``replay.py``), and
one that does not runs eagerly and is counted, or raises.
"""

from __future__ import annotations

import contextlib
import time
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moe_graphs.capture.backends.base import Backend
from moe_graphs.capture.backends.of_model import backend_of
from moe_graphs.capture.errors import GraphError
from moe_graphs.capture.observation import Observation
from moe_graphs.capture.plan import plan
from moe_graphs.capture.replay import Slot, replay
from moe_graphs.capture.report import Report, ScopeReport
from moe_graphs.capture.scopes import Call, Scope, find_scopes
from moe_graphs.capture.session import capture_slot
from moe_graphs.capture.signature import Mismatch
from moe_graphs.config import GraphConfig


def graph(model: nn.Module, config: GraphConfig | None = None) -> Graphs:
    """Installs graphs on the scopes of ``model`` and returns their handle.

    Nothing is captured yet: train under ``with graphs.step():``. Keep using ``model`` as before.

    Raises:
        ValueError: if the config does not fit the model; the message says what to change.
    """
    return Graphs(model, config or GraphConfig())


class GraphedScope:
    """Stands in for the forward of one scope's module, on that instance only."""

    def __init__(self, graphs: Graphs, scope: Scope) -> None:
        self.graphs = graphs
        self.scope = scope
        self.eager_calls: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = self.graphs.eager_reason()
        if reason is not None:
            self.eager_calls[reason] += 1
            return self.scope.forward(*args, **kwargs)
        call = Call(args, kwargs)
        inputs = self.scope.enter(call)
        if self.graphs.slot is None:
            return self._observe(inputs, call)
        return self._replay(inputs, call)

    def _observe(self, inputs: Any, call: Call) -> Any:
        self.eager_calls["warmup"] += 1
        observation = self.graphs.observation
        number = observation.forward(self.scope, inputs, call)
        outputs, exit = self.scope.run(inputs, call, capturing=True)
        observation.produced(number, outputs)
        return self.scope.leave(outputs, exit, call)

    def _replay(self, inputs: Any, call: Call) -> Any:
        slot = self.graphs.slot
        recording = slot.next_recording(self.scope.name)
        if recording is None:
            return self._mismatched(NOT_OBSERVED, inputs, call)
        leaves, structure = pytree.tree_flatten(inputs)
        mismatch = slot.mismatch(recording, structure, leaves)
        if mismatch is not None:
            return self._mismatched(mismatch, inputs, call)
        produced = replay(slot, recording, leaves)
        outputs = pytree.tree_unflatten(produced, recording.output_structure)
        return self.scope.leave(outputs, recording.exit, call)

    def _mismatched(self, mismatch: Mismatch, inputs: Any, call: Call) -> Any:
        if self.graphs.config.on_mismatch == "error":
            raise GraphError(f"scope {self.scope.name!r}, {mismatch.message}")
        self.eager_calls[mismatch.reason] += 1
        outputs, exit = self.scope.run(inputs, call, capturing=False)
        return self.scope.leave(outputs, exit, call)

    def __deepcopy__(self, memo: dict) -> Any:
        """A copied or unpickled model is a plain, eager one: its forward is its class's."""
        return _class_forward(memo[id(self.scope.module)])

    def __reduce__(self) -> Any:
        return _class_forward, (self.scope.module,)


def _class_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


NOT_OBSERVED = Mismatch("not_observed", "this call was not observed in warm-up: nothing to replay")


class Graphs:
    """The graphs of one model, and the counters of what ran how.

    Knows nothing of other models' graphs. Released at the latest at exit, and before that by
    ``release()``, which has to come before ``destroy_process_group()``.
    """

    def __init__(self, model: nn.Module, config: GraphConfig) -> None:
        self.model = model
        self.config = config
        self.backend = backend_of(model)
        self.observation = Observation(self.backend.device)
        self.state = "warmup" if config.impl == "local" else "off"
        self._in_step = self._paused = False
        self._warm_steps = 0
        self._capture_seconds = 0.0
        self.scopes = self._install() if config.impl == "local" else []
        self._resources = _Resources(self.backend)
        self._finalizer = weakref.finalize(self, self._resources.release)

    @property
    def slot(self) -> Slot | None:
        """What was captured, until it is released."""
        return self._resources.slot

    # ---- a training step

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around all forwards and backwards of one training step.

        Raises:
            CaptureError: at the end of the last warm-up step, if the capture failed. The model is
                eager then, and training may go on.
        """
        if self._in_step:
            raise GraphError("graphs.step() does not nest: one step is already open")
        self._in_step = True
        self.observation.clear()
        try:
            yield
            if self.state == "warmup" and self.observation.events:
                self._warm_steps += 1
                if self._warm_steps == self.config.warmup_steps:
                    self._capture()
        finally:
            self._in_step = False
            self.observation.clear()
            if self.slot is not None:
                self.slot.end_step()

    def eager_reason(self) -> str | None:
        """Why every call runs eagerly just now, or None if calls are observed or replayed."""
        if self.state not in ("warmup", "captured"):
            return self.state
        if self._paused:
            return "paused"
        if not torch.is_grad_enabled():
            return "no_grad"
        if not self._in_step:
            return "outside_step"
        if torch._C._current_graph_task_id() != -1:
            return "recompute"  # activation checkpointing runs a forward inside a backward
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "saved_tensors_hooks"  # they would not see what a graph saves
        return None

    def _capture(self) -> None:
        started = time.perf_counter()
        self.state = "capture_failed"
        planned = plan(self.observation.events)
        self._resources.slot = capture_slot(
            self.model, self.backend, planned, self.observation.calls
        )
        self.state = "captured"
        self._capture_seconds = time.perf_counter() - started

    # ---- control

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context the model is eager; its calls are counted as ``paused``."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def release(self) -> None:
        """Makes the model eager for good and gives the graphs' memory back. Idempotent."""
        if self.state == "released":
            return
        for graphed in self.scopes:
            if graphed.scope.module.__dict__.get("forward") is graphed:
                del graphed.scope.module.__dict__["forward"]
        self.state = "released"
        self._finalizer()

    def report(self) -> Report:
        """What was captured and what happened since. Does not synchronise."""
        recordings = self.slot.recordings if self.slot is not None else ()
        scopes = tuple(_report_scope(graphed, recordings) for graphed in self.scopes)
        eager_calls: Counter[str] = Counter()
        for graphed in self.scopes:
            eager_calls.update(graphed.eager_calls)
        return Report(
            backend=self.backend.name,
            state=self.state,
            scopes=scopes,
            captured=len(recordings),
            replayed=sum(scope.replayed for scope in scopes),
            eager_calls=dict(eager_calls),
            static_bytes=sum(t.nbytes for t in self._static_tensors()),
            pool_bytes=self.backend.pool_bytes(self.slot.pool) if self.slot else 0,
            abandoned=self.slot.abandoned if self.slot else 0,
            capture_seconds=self._capture_seconds,
        )

    def _static_tensors(self) -> list[torch.Tensor]:
        if self.slot is None:
            return []
        return [*self.slot.shared, *(t for r in self.slot.recordings for t in r.static_tensors())]

    def _install(self) -> list[GraphedScope]:
        graphed = [GraphedScope(self, scope) for scope in find_scopes(self.model, self.config)]
        for each in graphed:
            name = each.scope.name
            if isinstance(each.scope.module.__dict__.get("forward"), GraphedScope):
                raise ValueError(f"scope {name!r} has graphs already: release() them first")
            if "forward" in each.scope.module.__dict__:
                raise ValueError(f"scope {name!r}: forward is patched on this instance: undo it")
        for each in graphed:
            each.scope.module.forward = each
        return graphed


class _Resources:
    """What has to be released. Apart from ``Graphs``, so that a finalizer can hold it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.slot: Slot | None = None

    def release(self) -> None:
        if self.slot is not None:
            for recording in self.slot.recordings:
                recording.release()
            self.slot = None
            self.backend.release()


def _report_scope(graphed: GraphedScope, recordings: tuple) -> ScopeReport:
    own = [r for r in recordings if r.scope.name == graphed.scope.name]
    graphs = [g for r in own for g in (r.forward, r.backward) if g is not None]
    counts = [g.kernels for g in graphs]
    exits = [r.exit.reason for r in own if r.exit is not None]
    return ScopeReport(
        name=graphed.scope.name,
        forward_graphs=sum(r.forward is not None for r in own),
        backward_graphs=sum(r.backward is not None for r in own),
        kernels=None if None in counts else sum(counts),
        static_bytes=sum(t.nbytes for r in own for t in r.static_tensors()),
        boundary_bytes=sum(t.nbytes for r in own for t in r.own_outputs()),
        replayed=sum(r.replayed for r in own),
        eager_calls=dict(graphed.eager_calls),
        interrupted=exits[0] if exits else None,
    )
