"""What the scopes of a model did in one eager step."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.capture.call_capture import Link, ObservedCall
from moe_graphs.capture.plan import Event
from moe_graphs.capture.scopes import Call, Scope
from moe_graphs.capture.signature import Signature


class Observation:
    """The calls of a step with their inputs, and the order of forwards and backwards.

    Holds the inputs by reference until ``clear``: they are the values that a capture starts from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.calls: list[ObservedCall] = []
        self.events: list[Event] = []
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], Link]] = {}

    def forward(self, scope: Scope, inputs: Any, call: Call) -> int:
        """Notes a call; returns its number in this step."""
        number = len(self.calls)
        leaves = pytree.tree_leaves(inputs)
        links = {i: link for i, leaf in enumerate(leaves) if (link := self._link(leaf)) is not None}
        signature = Signature.of(inputs, self._device.type, scope.name_input)
        detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in leaves)
        arguments = call.without_tensors()
        self.calls.append(ObservedCall(scope, signature, detached, links, arguments))
        self.events.append(Event("F", scope.name, number))
        return number

    def produced(self, number: int, outputs: Any) -> None:
        """Notes the outputs of a call, and listens for its backward."""
        event = Event("B", self.calls[number].scope.name, number)
        for index, leaf in enumerate(pytree.tree_leaves(outputs)):
            if not isinstance(leaf, torch.Tensor):
                continue
            self._outputs[id(leaf)] = (weakref.ref(leaf), Link(number, index))
            if leaf.grad_fn is not None:
                leaf.register_hook(partial(_note, self.events, event))

    def clear(self) -> None:
        self.calls, self.events, self._outputs = [], [], {}

    def _link(self, leaf: Any) -> Link | None:
        reference, link = self._outputs.get(id(leaf), (None, None))
        return link if reference is not None and reference() is leaf else None


def _note(events: list[Event], event: Event, gradient: torch.Tensor) -> None:
    """A hook on an output: its gradient is there, so the backward of the call runs now."""
    if event not in events:
        events.append(event)
