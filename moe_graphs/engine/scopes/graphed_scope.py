"""What stands in for the forward of a scope's module: observe, replay, or run eagerly and count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from moe_graphs.engine.fp8 import with_flag_on_device
from moe_graphs.engine.misses import Misses
from moe_graphs.engine.reads import Reads
from moe_graphs.engine.scopes.captured import Captured
from moe_graphs.engine.scopes.delayed_weights import DelayedWeights
from moe_graphs.engine.scopes.observation import Observation
from moe_graphs.engine.scopes.place import Place
from moe_graphs.engine.scopes.replay import replay
from moe_graphs.engine.scopes.select import Call, Scope
from moe_graphs.engine.scopes.slots import Slot
from moe_graphs.engine.scopes.trials import ScopeCall
from moe_graphs.engine.signature import Mismatch, flatten
from moe_graphs.errors import CaptureError, GraphError

_NEVER = object()


class Owner(Protocol):
    """What owns the graphs of some scopes."""

    observation: Observation
    misses: Misses

    @property
    def captured(self) -> Captured | None: ...

    def eager_reason(self) -> str | None:
        """Why every call runs eagerly just now, or None if calls are observed or replayed."""

    def try_out(self, call: ScopeCall, alike: int, linked: list[int], reads: Reads) -> None:
        """Looks for what cannot be captured. ``alike``: the number of the observed call."""

    def wants_trials(self, alike: int) -> bool: ...

    def mismatched(self, mismatch: Mismatch) -> None:
        """A call runs eagerly that was to be replayed."""


class GraphedScope:
    """Stands in for the forward of one scope's module, on that instance only.

    installed: the attributes that it has set on the module, itself among them.
    why_eager: asked at every call with the module. Where it gives a word, the call runs eagerly and
    is counted by that word.
    """

    def __init__(
        self, graphs: Owner, scope: Scope, on_mismatch: str, delayed: DelayedWeights
    ) -> None:
        self.graphs = graphs
        self.scope, self._name = scope, f"scope {scope.name!r}"
        self.on_mismatch = on_mismatch
        self.delayed = delayed  # where backwards wait for their weights' part
        self.eager_calls: Counter[str] = Counter()
        self.installed: dict[str, Any] = {}
        self.why_eager: Callable[[nn.Module], str | None] = lambda module: None

    def check_unpatched(self) -> None:
        """
        Raises:
            ValueError: if the module's forward is patched already.
        """
        attributes, name = self.scope.module.__dict__, self.scope.name
        if isinstance(attributes.get("forward"), GraphedScope):
            raise ValueError(f"scope {name!r} has graphs already: release() them first")
        if "forward" in attributes:
            raise ValueError(f"scope {name!r}: forward is patched on this instance: undo it")

    def install(self, **attributes: Any) -> None:
        """Takes the place of the module's forward. ``attributes``: to be set besides."""
        self.check_unpatched()
        # What copies and pickles carry: they are plain, eager modules.
        self.installed = {"forward": self, "__getstate__": self._state, **attributes}
        self.scope.module.__dict__.update(self.installed)

    def uninstall(self) -> None:
        attributes = self.scope.module.__dict__
        if attributes.get("forward") is self:
            for name in self.installed:
                attributes.pop(name, None)

    def _state(self) -> dict[str, Any]:
        module = self.scope.module
        of_class = getattr(type(module), "__getstate__", None)
        state = of_class(module) if of_class is not None else module.__dict__
        return {name: v for name, v in state.items() if v is not self.installed.get(name, _NEVER)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.scope.forward(*args, **kwargs)
        reason = self.graphs.eager_reason()
        if reason in (None, "saved_tensors_hooks"):  # checkpointing's hooks have a better name
            reason = self.why_eager(self.scope.module) or reason
        if reason is not None:
            self.eager_calls[reason] += 1
            self.graphs.misses.ran_eagerly(self._name, reason)
            return self.scope.forward(*args, **kwargs)
        call = Call(args, kwargs)
        inputs = self.scope.enter(call)
        planned = with_flag_on_device(inputs)
        if self.graphs.captured is None:
            return self._observe(inputs, planned, call)
        return self._replay(inputs, planned, call)

    def _observe(self, inputs: Any, planned: Any, call: Call) -> Any:
        self.eager_calls["warmup"] += 1
        observation = self.graphs.observation
        number, alike, _ = observation.forward(self.scope, planned)
        linked = observation.linked(planned)
        reads = Reads()
        if not self.graphs.wants_trials(alike):
            outputs, exit = self.scope.run(inputs, call, capturing=True)
        else:
            with reads:
                outputs, exit = self.scope.run(inputs, call, capturing=True)
            self.graphs.try_out(self._scope_call(planned, call, alike), alike, linked, reads)
        observation.produced(number, self.scope, outputs)
        return self.scope.leave(outputs, exit, call)

    def _scope_call(self, inputs: Any, call: Call, alike: int) -> ScopeCall:
        signature = self.graphs.observation.alike[alike].signature
        return ScopeCall(self.scope, signature, flatten(inputs)[0], call, {})

    def _replay(self, inputs: Any, planned: Any, call: Call) -> Any:
        """``planned``: the inputs as they are captured; an eager call gets those that came."""
        found = self.graphs.captured.next_place(self.scope.name)
        if isinstance(found, Mismatch):
            return self._mismatched(found, inputs, call)
        slot, place = found
        leaves, structure = flatten(planned)
        recorder = self.graphs.captured.recorder
        mismatch = slot.mismatch(place, structure, leaves)
        if slot.is_to_record(place):
            mismatch = recorder.mismatch(place, mismatch)
        if mismatch is None and place.forward is None:
            produced = self._first_replay(slot, place, leaves, call)
            mismatch = produced if isinstance(produced, Mismatch) else None
        elif mismatch is None:
            pending = slot.begin_replay(place, leaves)
            produced = replay(slot, pending, recorder, self.delayed, leaves)
        if mismatch is not None:
            slot.pass_by(place)
            return self._mismatched(mismatch, inputs, call)
        outputs = place.forward.build_outputs(produced)
        return self.scope.leave(outputs, place.forward.exit, call)

    def _first_replay(
        self, slot: Slot, place: Place, leaves: list[Any], arguments: Call
    ) -> list[Any] | Mismatch:
        """Captures the call, replays it, and compares that with eager."""
        recorder = self.graphs.captured.recorder
        signature = place.planned.signature
        lent = frozenset(i for i in signature.tensors() if slot.output_at(leaves[i]) is not None)
        call = ScopeCall(self.scope, signature, leaves, arguments, {}, lent)
        try:
            with place.planned.ranks.together():
                expected = recorder.record_forward(slot, place, call)
        except CaptureError as error:
            recorder.failure = error
            return Mismatch("capture_failed", str(error))
        pending = slot.begin_replay(place, leaves)
        produced = replay(slot, pending, recorder, self.delayed, leaves)
        difference = recorder.verification.difference_of_forward(place, call, expected, produced)
        if difference is None:
            return produced
        slot.cancel(pending)
        place.planned.differs(difference)
        return place.planned.refused

    def _mismatched(self, mismatch: Mismatch, inputs: Any, call: Call) -> Any:
        if self.on_mismatch == "error" and mismatch.reason != "capture_failed":
            raise GraphError(f"{self._name}: {mismatch.message}")
        self.graphs.mismatched(mismatch)
        self.eager_calls[mismatch.reason] += 1
        self.graphs.misses.ran_eagerly(self._name, mismatch.reason, mismatch.message)
        outputs, exit = self.scope.run(inputs, call, capturing=False)
        return self.scope.leave(outputs, exit, call)


def install_all(
    graphs: Owner, scopes: Sequence[Scope], on_mismatch: str, delayed: DelayedWeights
) -> list[GraphedScope]:
    """All of them, or none."""
    graphed: list[GraphedScope] = []
    try:
        for scope in scopes:
            each = GraphedScope(graphs, scope, on_mismatch, delayed)
            each.install()
            graphed.append(each)
    except BaseException:
        for each in graphed:
            each.uninstall()
        raise
    return graphed
