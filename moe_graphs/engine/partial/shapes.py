"""The slots of one part of the model, for microbatches in flight and for several shapes.

A microbatch takes a free **lane** with its first forward. A lane has one slot for each shape of
microbatches. The slots of a lane share its memory pool, since one microbatch at a time is in it:
what the graphs of one shape work in, the graphs of another shape may overwrite. Outputs and
gradients that outlive a replay have memory of their own.

The observed steps give the first shape. A microbatch whose inputs differ from it in shapes and
strides alone brings another shape, and captures it at once, up to ``most`` shapes. Then a new shape
takes the place of the rarest one, if it came more often among the last microbatches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.partial.slots import CallSite, Slot
from moe_graphs.engine.reasons import EAGER_CALLS
from moe_graphs.engine.tensors import Mismatch, Signature, TensorSpec
from moe_graphs.errors import CaptureError

_RECENT = 64  # microbatches among which shapes are counted
_BY_SHAPE = frozenset({"shape", "stride"})
# Shapes and strides of the tensors that a call gets.
Layout = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass
class Shape:
    """The slots of one shape, one per lane.

    Attributes:
        layout: of the first call of its microbatches.
    """

    slots: tuple[Slot, ...]
    layout: Layout

    @property
    def is_closed(self) -> bool:
        return all(slot.is_closed for slot in self.slots)

    @property
    def in_flight(self) -> bool:
        return any(slot.in_flight() for slot in self.slots)

    @property
    def failure(self) -> CaptureError | None:
        return next((slot.failure for slot in self.slots if slot.failure is not None), None)


class Chunk:
    """The slots of one part of the model through which microbatches pass independently.

    Args:
        slots: those of the first shape, one per lane.
        most: how many shapes may have slots at once.

    Attributes:
        left: how many shapes have lost their graphs, because others came more often.
        counted: replays and audits of call sites that are gone, by scope.
    """

    def __init__(
        self, slots: Sequence[Slot], backend: Backend | None = None, most: int = 1
    ) -> None:
        self._backend, self._most = backend, most
        self.lanes = len(slots)
        self._calls = [replace(site.planned, tried=None) for site in slots[0].sites]
        # Further slots of a lane work in the pools of the first, also when that has left.
        self._first = tuple(slots)
        self._shapes = [Shape(self._first, _layout_of_signature(self._calls[0].signature))]
        self._recent: deque[Layout] = deque(maxlen=_RECENT)
        self._refused: set[Layout] = set()
        self._current: Slot | None = slots[0]
        self._lane = 0
        self._last = list(slots)  # the slot of each lane's last microbatch
        self.left = 0
        self.counted: dict[str, Counter[str]] = {}

    @property
    def slots(self) -> list[Slot]:
        """The slots of all shapes and lanes."""
        return [slot for shape in self._shapes for slot in shape.slots]

    @property
    def scopes(self) -> list[str]:
        return [call.scope.name for call in self._calls]

    @property
    def shapes(self) -> int:
        return len(self._shapes)

    @property
    def is_complete(self) -> bool:
        """Whether a shape has all of its graphs; others may come at any time."""
        return any(shape.is_closed for shape in self._shapes)

    def next_site(
        self, scope: str, structure: pytree.TreeSpec, leaves: Sequence[Any]
    ) -> tuple[Slot, CallSite] | Mismatch:
        """The slot and call site of the next call of ``scope``; a mismatch if slots are full.

        The call belongs to the microbatch whose forward is running, or it starts the next
        microbatch in a free lane.
        """
        site = self._current.next_site(scope) if self._current is not None else None
        if self._current is None or site is None or self._current.clock == -1:
            if site is None:  # else it is the first microbatch of a step
                free = [lane for lane in range(self.lanes) if not self._in_flight(lane)]
                if not free:
                    self._current = None
                    return self._full()
                self._lane = min(free, key=self._retains)
            self._current = self._begun(self._lane, scope, structure, leaves)
            site = self._current.next_site(scope)
        assert site is not None
        if not site.planned.is_signed:
            found = self._sign(site, structure, leaves)
            if found is not None:
                self._current.skip(site)
                return found
        return self._current, site

    def end_step(self) -> list[CaptureError]:
        """Ends a step. The failures are those of shapes whose graphs are gone therefore."""
        for slot in self.slots:
            slot.end_step()
        failures = []
        for shape in list(self._shapes):
            if shape.failure is not None:
                failures.append(shape.failure)
                self._refused.add(shape.layout)
                self._drop(shape)
        return failures

    def release(self) -> None:
        for slot in self.slots:
            slot.release()

    def _in_flight(self, lane: int) -> bool:
        return any(shape.slots[lane].in_flight() for shape in self._shapes)

    def _retains(self, lane: int) -> bool:
        return any(shape.slots[lane].retains() for shape in self._shapes)

    def _begun(
        self, lane: int, scope: str, structure: pytree.TreeSpec, leaves: Sequence[Any]
    ) -> Slot:
        """The slot that serves a new microbatch in a lane; that of another shape if none does."""
        shape = self._shapes[0] if self._most == 1 else self._shape(scope, structure, leaves)
        for each in self._shapes:
            each.slots[lane].begin()
        slot = (shape or self._shapes[0]).slots[lane]
        if self._last[lane] is not slot:
            slot.follows(self._last[lane])
            self._last[lane] = slot
        return slot

    def _shape(self, scope: str, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> Shape | None:
        """The shape of a microbatch that begins with this call, made now if it is to have one."""
        layout = _layout_of(leaves)
        self._recent.append(layout)
        found = next((each for each in self._shapes if each.layout == layout), None)
        if found is not None or layout in self._refused:
            return found
        call = next(call for call in self._calls if call.scope.name == scope)
        differences = {each.reason for each in call.signature.mismatches(structure, leaves)}
        if differences <= _BY_SHAPE and self._has_room(layout):
            found = Shape(self._more_slots(), layout)
            self._shapes.append(found)
        return found

    def _has_room(self, layout: Layout) -> bool:
        """Whether a new shape gets graphs. The rarest shape leaves if there are too many."""
        assert self._backend is not None
        count = Counter(self._recent)
        rarest = min(self._shapes, key=lambda shape: count[shape.layout])
        is_full = len(self._shapes) == self._most
        if is_full and (count[layout] <= count[rarest.layout] or rarest.in_flight):
            return False
        self._backend.make_room()
        if is_full:
            self.left += 1
            self._drop(rarest)
        return True

    def _more_slots(self) -> tuple[Slot, ...]:
        assert self._backend is not None
        calls = [call.of_another_shape() for call in self._calls]
        return tuple(
            Slot(
                calls,
                self._backend,
                first.pool,
                backward_pool=first.backward_pool,
                fails_alone=True,
            )
            for first in self._first
        )

    def _drop(self, shape: Shape) -> None:
        for site in (site for slot in shape.slots for site in slot.sites):
            counted = self.counted.setdefault(site.name, Counter())
            counted.update(replayed=site.replayed, audited=site.audited)
        for slot in shape.slots:
            slot.release()
        if len(self._shapes) > 1:
            self._shapes.remove(shape)

    def _sign(
        self, site: CallSite, structure: pytree.TreeSpec, leaves: Sequence[Any]
    ) -> Mismatch | None:
        """Notes the inputs of a call site of another shape at its first call.

        Returns the difference from the first shape that is none of shapes and strides, or None.
        """
        for found in site.planned.signature.mismatches(structure, leaves):
            if found.reason not in _BY_SHAPE:
                return found
        inputs = pytree.tree_unflatten(leaves, structure)
        site.planned.signature = Signature.of(inputs, site.planned.scope.name_input)
        site.planned.is_signed = True
        return None

    def _full(self) -> Mismatch:
        """The mismatch of a microbatch that found no lane; all of its calls run eagerly."""
        pending = next(p for shape in self._shapes for p in shape.slots[0].in_flight())
        message = (
            f"{self.lanes} microbatches are in flight (the backward of {pending.site.name!r} is "
            f"still to come), one more forward would make {self.lanes + 1}, and {self.lanes} were "
            f"captured, the most that the observed steps had: {EAGER_CALLS['slots_full'].remedy}"
        )
        return Mismatch("slots_full", message)


def _layout_of(leaves: Sequence[Any]) -> Layout:
    tensors = (x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided)
    return tuple((tuple(x.shape), x.stride()) for x in tensors)


def _layout_of_signature(signature: Signature) -> Layout:
    return tuple((x.shape, x.stride) for x in signature.leaves if isinstance(x, TensorSpec))
