"""One place in the order of a slot: what was recorded there, and what its replays change."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_graphs.engine.backends.backend import Graph
from moe_graphs.engine.buffer_lease import BufferLease, Leases
from moe_graphs.engine.misses import Misses
from moe_graphs.engine.ranks import ALONE, Ranks
from moe_graphs.engine.reasons import BACKWARD
from moe_graphs.engine.scopes.open_call import BackwardRun, OpenCall
from moe_graphs.engine.scopes.recording import (
    Layouts,
    RecordedBackward,
    RecordedForward,
    versions_of,
)
from moe_graphs.engine.scopes.select import Scope
from moe_graphs.engine.scopes.trials import Tried
from moe_graphs.engine.signature import Mismatch, Signature
from moe_graphs.engine.static_memory import copy_to
from moe_graphs.engine.verify import Difference, warn
from moe_graphs.errors import GraphError


@dataclass
class PlannedCall:
    """What is known of a call, whatever the slot.

    tried: in the warm-up, until everything is captured.
    ranks: those that it communicates with: they capture and compare it when this one does.
    copied_outputs: handed out as copies, since somebody keeps views of them beyond the next replay.
    refused: why it is not replayed (any more).
    not_reproducible: whether eager runs themselves differ from one another, in their last bits.
    backward_runs_once: autograd's graph of its forward is used up by one backward.
    eager_backwards: reason -> backwards of replayed forwards that ran eagerly.
    copies_gradients: why no weight's gradient may become ``.grad`` as it is, None if they may.
    misses: of the graphs, which warn of eager backwards.
    """

    scope: Scope
    signature: Signature
    tried: Tried | None = None
    ranks: Ranks = ALONE
    copied_outputs: set[int] = field(default_factory=set)
    refused: Mismatch | None = None
    not_reproducible: bool = False
    backward_runs_once: bool = False
    eager_backwards: Counter[str] = field(default_factory=Counter)
    copies_gradients: str | None = "not_observed"
    misses: Misses = field(default_factory=Misses)

    def ran_backward_eagerly(self, reason: str) -> None:
        """Count a backward of a replayed forward that no graph served."""
        self.eager_backwards[reason] += 1
        self.misses.ran_eagerly(f"scope {self.scope.name!r}", f"{BACKWARD}{reason}")

    def differs(self, difference: Difference) -> None:
        """Replays do not compute what eager does: it runs eagerly from now on."""
        message = f"its replay differs from eager: {difference}"
        self.refused = Mismatch("differs_from_eager", message)
        warn(f"scope {self.scope.name!r} stays eager: {message}")


class Place:
    """A call in the order of a slot.

    Attributes:
        backward: computes all gradients or, if they are split, those of the inputs, and
            ``weights`` the rest.
        first: the same for the first microbatch of a step in which gradients are accumulated: they
            stay where they are, as ``.grad``.
        open: autograd's graph of the forward, until everything is recorded.
        run: the backward of it that was begun last.
        proven_layouts: of incoming gradients, with which a replay was compared with eager as well.
        leases: one for each storage that its outputs lie on, if they are not copied.
        out: those of the leases whose outputs were handed out.
    """

    def __init__(self, planned: PlannedCall, position: int) -> None:
        self.planned, self.position = planned, position
        self.clear()

    def clear(self) -> None:
        self.forward: RecordedForward | None = None
        self.backward: RecordedBackward | None = None
        self.first: RecordedBackward | None = None
        self.weights: RecordedBackward | None = None
        self.backward_position = -1
        self.proven_layouts: set[Layouts] = set()
        self.open: OpenCall | None = None
        self.run: BackwardRun | None = None
        self.sources: dict[int, tuple[Place, int]] = {}
        self.leases: list[BufferLease] = []
        self.out = Leases()
        self.replayed = 0

    @property
    def name(self) -> str:
        return self.planned.scope.name

    @property
    def is_recorded(self) -> bool:
        """Everything that its replays need."""
        if self.forward is None or not any(self.forward.differentiable):
            return self.forward is not None
        has_weights = self.weights is not None or not self.forward.is_split
        return self.backward is not None and has_weights

    def unused_inputs(self) -> list[str]:
        """The names of inputs that require a gradient and get none."""
        if self.backward is None:
            return []
        got = {
            self.forward.listed[use]
            for use, gradient in zip(self.backward.uses, self.backward.gradients, strict=True)
            if gradient is not None and isinstance(self.forward.listed[use], int)
        }
        return [
            self.forward.signature.leaves[i].name
            for i in self.forward.loaded
            if self.forward.inputs[i].requires_grad and i not in got
        ]

    def gradient_leases(self) -> list[BufferLease]:
        """The leases of the weights' gradients."""
        recorded = (self.first or self.backward, self.weights)
        return [row[-1] for each in recorded if each is not None for row in each.of_parameters]

    def graphs(self) -> list[Graph]:
        recorded = (self.forward, self.backward, self.first, self.weights)
        return [each.graph for each in recorded if each is not None and each.graph is not None]

    def opened(
        self,
        forward: RecordedForward,
        open: OpenCall,
        sources: dict[int, tuple[Place, int]],
        owned: set[int],
    ) -> None:
        """After the capture of its forward.

        sources: input -> whose static output it is, and which. owned: addresses of the model's
        own memory, which is not lent when it is an output.
        """
        self.forward, self.open, self.sources = forward, open, sources
        on_storage: dict[int, list[int]] = {}
        for index, output in enumerate(forward.outputs):
            storage = output.untyped_storage()
            if output.dim() > 0 and storage.data_ptr() not in owned:
                on_storage.setdefault(storage._cdata, []).append(index)
        self.leases = [
            BufferLease(forward.outputs[numbers[0]], outputs=numbers)
            for numbers in on_storage.values()
        ]

    def is_in_place(self, index: int, leaf: Tensor) -> bool:
        """Whether static memory has the values of an input already."""
        if leaf.data_ptr() == self.forward.inputs[index].data_ptr():
            return True
        if index not in self.sources:
            return False
        source, output = self.sources[index]  # which may be handed out as a copy
        return source.handed_as(leaf) == output and leaf._version == 0

    def needs_output(self, source: Place, output: int) -> bool:
        """Whether the backward may read the memory of an output of a place: it is that place, or
        the memory is a static input."""
        memory = source.forward.outputs[output].untyped_storage()._cdata
        inputs = (at.forward.outputs[number].untyped_storage()
                  for at, number in self.sources.values())  # fmt: skip
        return self is source or any(each._cdata == memory for each in inputs)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copies the inputs into place, except those that are already there."""
        for index, target in zip(self.forward.loaded, self.forward.targets, strict=True):
            if not self.is_in_place(index, leaves[index]):
                copy_to(target, leaves[index])

    def hand_out(self) -> list[Tensor]:
        """The outputs of this replay, as new tensor objects."""
        copied = self.planned.copied_outputs
        return [
            output.detach() if output.dim() and index not in copied else output.clone()
            for index, output in enumerate(self.forward.outputs)
        ]

    def note_handed(self, outputs: Sequence[Tensor]) -> None:
        """Leases the outputs, the tensors as they come out of autograd."""
        for lease in self.leases:
            lease.note_handed(map(outputs.__getitem__, lease.outputs))
        self.out.add(self.leases)

    def handed_as(self, leaf: Any) -> int | None:
        """The number of the output of the last replay that a tensor is, the very object that was
        handed out. None once its memory was reclaimed."""
        numbers = (lease.output_of(leaf) for lease in self.leases)
        return next((number for number in numbers if number is not None), None)

    def reclaim(self) -> bool:
        """Reclaims the outputs before they are overwritten. False if a view of one is held.

        Whoever holds a view once does it again (a pipeline's send that is waited for late), so from
        then on the output is handed out as a copy.
        """
        if self.out.reclaim():
            return True
        self.planned.copied_outputs.update(*(lease.outputs for lease in self.out))
        return False

    def release(self) -> None:
        for graph in self.graphs():
            graph.release()
        self.clear()


class PendingBackward:
    """One replayed forward until its backward. Lives as long as the autograd graph needs it.

    is_done: whether its backward, or the part for the inputs, has run; cancelled: it never will.
    weights: "with_backward" where one graph computes all gradients, else whether the second one,
        for the weights, is still to come ("pending") or was replayed ("done").
    random: where the generators stood before the forward, if it draws.
    kept: gradients of the weights that were computed with those of the inputs.
    is_first_in_fp8: of the modules under Transformer Engine's autocast it has the first one.
    """

    is_first_in_fp8 = False

    def __init__(self, place: Place, leaves: Sequence[Any], random: Any) -> None:
        self.place = place
        self.is_done = self.cancelled = False
        self.weights = "pending" if place.forward.is_split else "with_backward"
        self.random = random
        self.kept: list[Tensor | None] | None = None
        self._gradients: list[weakref.ref | None] = []
        forward = place.forward
        self._inputs = [(weakref.ref(leaves[i]), leaves[i]._version) for i in forward.saved_inputs]
        self._versions: list[int] = []

    @property
    def is_over(self) -> bool:
        return self.is_done and self.weights != "pending"

    def replayed(self) -> None:
        self._versions = list(map(versions_of, self.place.forward.saved))

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        if self.weights == "pending":
            self._gradients = [None if g is None else weakref.ref(g) for g in gradients]

    def check_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """The weights' part goes on from the very gradients that the first part was given."""
        if self.weights == "pending":
            known = [None if ref is None else ref() for ref in self._gradients]
            if any(a is not b for a, b in zip(known, gradients, strict=True)):
                raise GraphError(
                    f"scope {self.place.name!r}: the gradients of its weights are asked for with "
                    f"other output gradients than those of its inputs were: a graph's saved "
                    f"tensors serve one backward"
                )

    def check_unmodified(self) -> None:
        """What eager refuses as well: a tensor that the backward needs was modified in place."""
        forward = self.place.forward
        what, now = None, list(map(versions_of, forward.saved))
        if now != self._versions:
            outputs = len(forward.saved_outputs)
            what = "a parameter or buffer"
            if now[:outputs] != self._versions[:outputs]:
                what = "an output"
        elif any((t := ref()) is not None and t._version != v for ref, v in self._inputs):
            what = "an input"
        if what is not None:
            raise GraphError(
                f"scope {self.place.name!r}: {what} was modified in place before the backward that "
                f"needs it: clone it before modifying it"
            )
