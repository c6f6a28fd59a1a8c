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
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from moe_graphs.config import GraphConfig
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.backends.base import Backend
from moe_graphs.engine.report import Report, ScopeReport
from moe_graphs.engine.resources import Resources
from moe_graphs.engine.scopes.delayed_weights import DelayedWeights
from moe_graphs.engine.scopes.graphed_scope import GraphedScope, reason_of_autograd
from moe_graphs.engine.scopes.memory import MemoryPlan
from moe_graphs.engine.scopes.observation import Observation
from moe_graphs.engine.scopes.plan import Plan, plan
from moe_graphs.engine.scopes.recording import Recording
from moe_graphs.engine.scopes.select import find_scopes
from moe_graphs.engine.scopes.session import CaptureOptions, capture_plan, predict_memory
from moe_graphs.engine.scopes.slots import Captured
from moe_graphs.errors import GraphError


def graph(
    model: nn.Module,
    config: GraphConfig | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Graphs:
    """Installs graphs on the scopes of ``model`` and returns their handle.

    Nothing is captured yet: train under ``with graphs.step():``. Keep using ``model`` as before.
    ``generators``: random number generators that scopes draw from, besides the default one.

    Raises:
        ValueError: if the config does not fit the model; the message says what to change.
    """
    return Graphs(model, config or GraphConfig(), generators)


class Graphs:
    """The graphs of one model, and the counters of what ran how.

    Knows nothing of other models' graphs. Released at the latest at exit, and before that by
    ``release()``, which has to come before ``destroy_process_group()``.
    """

    def __init__(
        self, model: nn.Module, config: GraphConfig, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.model = model
        self.config = config
        self.backend = backend_for((*model.parameters(), *model.buffers()), generators)
        self.observation = Observation(self.backend.device)
        self.delayed = DelayedWeights()
        self.state = "warmup" if config.impl == "local" else "off"
        self._in_step = self._paused = False
        self._warm_steps = 0
        self._capture_seconds = 0.0
        self._memory: MemoryPlan | None = None
        self.scopes = self._install() if config.impl == "local" else []
        self._resources = Resources[Captured](self.backend)
        self._finalizer = weakref.finalize(self, self._resources.release)

    @property
    def captured(self) -> Captured | None:
        """What was captured, until it is released."""
        return self._resources.captured

    # ---- a training step

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around all forwards and backwards of one training step.

        Raises:
            CaptureError: at the end of the first warm-up step, if something cannot be captured or
                would take more than ``memory_limit``, and of the last, if the capture failed.
                The model is eager then, and training may go on.
            GraphError: if a ``backward_weight()`` is missing.
        """
        if self._in_step:
            raise GraphError("graphs.step() does not nest: one step is already open")
        self._in_step = True
        self.observation.clear()
        try:
            yield
            self._check_weights_are_done()
            if self.state == "warmup" and self.observation.events:
                self._warm_steps += 1
                if self._warm_steps == self.config.warmup_steps:
                    self._capture()
                elif self._warm_steps == 1:
                    self._predict()
        finally:
            self._in_step = False
            self.observation.clear()
            self.delayed.clear()
            if self.captured is not None:
                self.captured.end_step()

    def eager_reason(self) -> str | None:
        """Why every call runs eagerly just now, or None if calls are observed or replayed."""
        if self.state not in ("warmup", "captured"):
            return self.state
        if self._paused:
            return "paused"
        if torch.is_grad_enabled() and not self._in_step:
            return "outside_step"
        return reason_of_autograd()

    def _predict(self) -> None:
        """After the first of several warm-up steps: what cannot be captured is refused early."""
        self.state = "capture_failed"
        self._memory = predict_memory(*self._session_arguments())
        self.state = "warmup"

    def _capture(self) -> None:
        started = time.perf_counter()
        self.state = "capture_failed"
        self._resources.captured = capture_plan(*self._session_arguments())
        self._memory = self._resources.captured.memory
        self.state = "captured"
        self._capture_seconds = time.perf_counter() - started

    def _session_arguments(self) -> tuple[nn.Module, Backend, Plan, Observation, CaptureOptions]:
        config = self.config
        options = CaptureOptions(split=config.split_backward, memory_limit=config.memory_limit)
        planned = plan(self.observation.events)
        return self.model, self.backend, planned, self.observation, options

    # ---- weight gradients apart, for zero-bubble schedules

    @contextlib.contextmanager
    def delayed_weights(self) -> Iterator[None]:
        """Around the backward of one microbatch: replayed scopes leave their weights' gradients
        for a ``backward_weight()``, which has to follow within the step. Eager calls do not.

        torch's own zero-bubble schedules need neither of the two.
        """
        if not self.config.split_backward:
            raise GraphError("delayed_weights() needs GraphConfig(split_backward=True)")
        if not self._in_step or self.delayed.is_collecting:
            raise GraphError("delayed_weights() belongs inside 'with graphs.step()', not nested")
        with self.delayed.collecting(), self.observation.delaying():
            yield

    def backward_weight(self) -> None:
        """Adds the weights' gradients of the oldest backward that waits for it to ``.grad``.

        Raises:
            GraphError: if none does.
        """
        self.delayed.replay_oldest()
        if self.state == "warmup":
            self.observation.weights()

    def _check_weights_are_done(self) -> None:
        missing = len(self.delayed)
        if missing:
            raise GraphError(
                f"the step ended with {missing} backward(s) whose weight gradients are missing: "
                f"call backward_weight() once for every 'with graphs.delayed_weights()'"
            )

    # ---- control

    def plan(self) -> MemoryPlan:
        """Bytes that the graphs are predicted to take, per scope and slot; ``print`` it.

        Known from the end of the first warm-up step on, so with ``warmup_steps`` of two or more
        before anything is captured. ``report()`` has what they do take.

        Raises:
            GraphError: before that.
        """
        if self._memory is None:
            raise GraphError("no step was observed yet: plan() knows sizes after the first one")
        return self._memory

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
        captured = self.captured
        recordings = captured.recordings if captured is not None else []
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
            static_bytes=sum(t.nbytes for t in captured.static_tensors()) if captured else 0,
            slots=tuple(len(chunk.slots) for chunk in captured.chunks) if captured else (),
            predicted_pool_bytes=captured.memory.pool_bytes if captured else 0,
            pool_bytes=sum(map(self.backend.pool_bytes, captured.pools)) if captured else 0,
            abandoned=captured.abandoned if captured else 0,
            capture_seconds=self._capture_seconds,
        )

    def _install(self) -> list[GraphedScope]:
        scopes, on_mismatch = find_scopes(self.model, self.config), self.config.on_mismatch
        graphed = [GraphedScope(self, scope, on_mismatch, self.delayed) for scope in scopes]
        for each in graphed:
            name = each.scope.name
            if isinstance(each.scope.module.__dict__.get("forward"), GraphedScope):
                raise ValueError(f"scope {name!r} has graphs already: release() them first")
            if "forward" in each.scope.module.__dict__:
                raise ValueError(f"scope {name!r}: forward is patched on this instance: undo it")
        for each in graphed:
            each.scope.module.forward = each
        return graphed


def _report_scope(graphed: GraphedScope, recordings: list[Recording]) -> ScopeReport:
    own = [r for r in recordings if r.scope.name == graphed.scope.name]
    counts = [graph.kernels for recording in own for graph in recording.graphs()]
    exits = [r.exit.reason for r in own if r.exit is not None]
    return ScopeReport(
        name=graphed.scope.name,
        forward_graphs=sum(r.forward is not None for r in own),
        backward_graphs=sum(r.backward is not None for r in own),
        weight_graphs=sum(r.weights is not None for r in own),
        kernels=None if None in counts else sum(counts),
        static_bytes=sum(t.nbytes for r in own for t in r.static_tensors()),
        boundary_bytes=sum(t.nbytes for r in own for t in r.own_outputs()),
        replayed=sum(r.replayed for r in own),
        eager_calls=dict(graphed.eager_calls),
        interrupted=exits[0] if exits else None,
    )
