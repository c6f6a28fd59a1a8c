"""What stands in for the forward of a scope's module: observe, replay, or run eagerly and count."""

from __future__ import annotations

import types
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moe_graphs.engine.scopes.delayed_weights import DelayedWeights
from moe_graphs.engine.scopes.replay import replay
from moe_graphs.engine.scopes.select import Call, Scope
from moe_graphs.engine.signature import Mismatch
from moe_graphs.errors import GraphError

if TYPE_CHECKING:
    from moe_graphs.engine.callables.callables import CallableGraphs
    from moe_graphs.engine.scopes.graphs import Graphs


class GraphedScope:
    """Stands in for the forward of one scope's module, on that instance only."""

    def __init__(
        self,
        graphs: Graphs | CallableGraphs,
        scope: Scope,
        on_mismatch: str,
        delayed: DelayedWeights,
    ) -> None:
        self.graphs = graphs
        self.scope = scope
        self.on_mismatch = on_mismatch
        self.delayed = delayed  # where backwards wait for their weights' part
        self.eager_calls: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = self.graphs.eager_reason()
        if reason is not None:
            self.eager_calls[reason] += 1
            return self.scope.forward(*args, **kwargs)
        call = Call(args, kwargs)
        inputs = self.scope.enter(call)
        if self.graphs.captured is None:
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
        found = self.graphs.captured.next_recording(self.scope.name)
        if isinstance(found, Mismatch):
            return self._mismatched(found, inputs, call)
        slot, recording = found
        leaves, structure = pytree.tree_flatten(inputs)
        mismatch = slot.mismatch(recording, structure, leaves)
        if mismatch is not None:
            slot.pass_by(recording)
            return self._mismatched(mismatch, inputs, call)
        produced = replay(slot, recording, leaves, self.delayed)
        outputs = pytree.tree_unflatten(produced, recording.output_structure)
        return self.scope.leave(outputs, recording.exit, call)

    def _mismatched(self, mismatch: Mismatch, inputs: Any, call: Call) -> Any:
        if self.on_mismatch == "error":
            raise GraphError(f"scope {self.scope.name!r}, {mismatch.message}")
        self.eager_calls[mismatch.reason] += 1
        outputs, exit = self.scope.run(inputs, call, capturing=False)
        return self.scope.leave(outputs, exit, call)

    def __deepcopy__(self, memo: dict) -> Any:
        """A copied or unpickled model is a plain, eager one: its forward is its class's."""
        return _class_forward(memo[id(self.scope.module)])

    def __reduce__(self) -> Any:
        return _class_forward, (self.scope.module,)


def reason_of_autograd() -> str | None:
    """Why autograd, as it is just now, asks for an eager call, or None."""
    if not torch.is_grad_enabled():
        return "no_grad"
    if torch._C._current_graph_task_id() != -1:
        return "recompute"  # activation checkpointing runs a forward inside a backward
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved_tensors_hooks"  # they would not see what a graph saves
    return None


def _class_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)
