"""Autograd's side of a recorded forward, until the backward of it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_graphs.engine.autograd import LeafUses
from moe_graphs.engine.scopes.recording import layouts_of
from moe_graphs.engine.scopes.split_backward import SplitBackward


@dataclass(frozen=True)
class OpenCall:
    """
    Attributes:
        outputs: the differentiable ones, with their history.
        numbers, inputs: static leaves that require grad, and which inputs they are.
        parameters: leaves, mostly stand-ins of the model's.
        uses: of inputs and parameters, in this order.
    """

    outputs: list[Tensor]
    numbers: tuple[int, ...]
    inputs: list[Tensor]
    parameters: list[Tensor]
    uses: LeafUses


class BackwardRun:
    """The backward of an open call for one pattern of incoming gradients, to be run as often as is
    needed: eagerly, and into a graph. It reads static memory.

    Attributes:
        given: gradients per output, None where none comes in.
        incoming: those of them that are there.
        first_uses, second_uses: the numbers of the uses that each part computes.
    """

    def __init__(self, open: OpenCall, given: Sequence[Tensor | None], split: bool) -> None:
        used = [(o, g) for o, g in zip(open.outputs, given, strict=True) if g is not None]
        outputs, self.incoming = ([pair[i] for pair in used] for i in range(2))
        self.given, self.layouts = tuple(given), layouts_of(given)
        self._open, self._outputs = open, outputs
        self._leaves = [*open.inputs, *open.parameters]
        count = len(open.inputs)
        of_inputs = tuple(n for n, leaf in enumerate(open.uses.of) if leaf < count)
        of_parameters = tuple(n for n, leaf in enumerate(open.uses.of) if leaf >= count)
        self._split = SplitBackward(outputs, open.inputs, open.parameters) if split else None
        self.first_uses = of_inputs if split else (*of_inputs, *of_parameters)
        self.second_uses = of_parameters if split else ()

    def first_part(self, incoming: Sequence[Tensor], *, last: bool = False) -> list[Tensor | None]:
        """``last``: autograd's graph is not needed any more."""
        uses = self._open.uses
        if not self._outputs:
            return [None] * len(self.first_uses)
        if self._split is None:
            return uses.gradients(self._outputs, incoming, retain_graph=not last)
        with uses.kept_apart() as addends:
            gradients = self._split.input_gradients(incoming)
        rest = [None] * len(self._open.parameters)
        spread = uses.spread([*gradients, *rest], addends)
        return [spread[use] for use in self.first_uses]

    def close(self) -> None:
        """Lets go of autograd's graph, whoever still holds this."""
        self._open = self._split = None
        self._outputs, self._leaves = [], []

    def second_part(self) -> list[Tensor | None]:
        """Goes on from where the last first part has come to."""
        if not self._outputs:
            return [None] * len(self.second_uses)
        uses = self._open.uses
        with uses.kept_apart() as addends:
            gradients = self._split.parameter_gradients()
        spread = uses.spread([*[None] * len(self._open.inputs), *gradients], addends)
        return [spread[use] for use in self.second_uses]
