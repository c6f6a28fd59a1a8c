"""How much memory graphs will take, from trial runs, before anything is captured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moe_graphs.engine.scopes.plan import Plan


@dataclass(frozen=True)
class CallMemory:
    """Bytes of one call of a scope.

    inputs: static inputs of its own; linked: inputs that are another scope's output in place.
    outputs: of the graph; kept: outputs and what is saved for the backward.
    forward, backward: the most that is allocated at once while it runs, kept included in forward.
    gradients: incoming gradients, for which calls share buffers.
    weights: gradients of the weights that stay in place, as ``.grad``; included in backward, too.
    """

    scope: str
    inputs: int
    linked: int
    outputs: int
    kept: int
    forward: int
    backward: int
    gradients: int
    weights: int = 0


@dataclass(frozen=True)
class ChunkMemory:
    """One chunk: its calls in forward order, and how many slots it gets.

    shares_backwards: they work in a pool that all slots of all chunks share.
    first_gradients: bytes of the pool in which backwards of first microbatches work, where
        gradients are accumulated; those stay there, as ``.grad``.
    """

    calls: tuple[CallMemory, ...]
    slots: int
    split: bool
    shares_backwards: bool = False
    first_gradients: int = 0

    def pool(self) -> int:
        """Bytes that the pool of one slot needs at least: all forwards, then all backwards that do
        not work elsewhere."""
        kept, peak = 0, 0
        for call in self.calls:
            peak = max(peak, kept + call.forward)
            kept += call.kept
        for call in () if self.shares_backwards else reversed(self.calls):
            peak = max(peak, kept + call.backward)
            if not self.split:
                kept -= call.kept - call.outputs - call.weights
        return peak

    def piece(self) -> int:
        """Bytes that a pool begins with in one piece: weights' gradients that stay do not fit into
        what single activations leave, and the allocator joins free memory within a piece only."""
        return self.pool() if any(call.weights for call in self.calls) else 0

    def inputs(self) -> int:
        return sum(call.inputs for call in self.calls)

    def unshared(self) -> int:
        """Bytes of one slot if every call had a pool and buffers of its own."""
        return sum(
            c.inputs + c.linked + c.gradients + max(c.forward, c.kept + c.backward)
            for c in self.calls
        )


@dataclass(frozen=True)
class MemoryPlan:
    """What a capture is predicted to take. ``print`` shows it as a table.

    gradients: incoming gradients, shared by all slots (with split backward each has its own).
    """

    chunks: tuple[ChunkMemory, ...]
    gradients: int

    @property
    def backwards(self) -> int:
        """Bytes of the pool that backwards share."""
        sharing = (chunk.calls for chunk in self.chunks if chunk.shares_backwards)
        return max((call.backward for calls in sharing for call in calls), default=0)

    @property
    def pool_bytes(self) -> int:
        """At least: fragmentation and the allocator's rounding come on top."""
        own = (chunk.slots * chunk.pool() + chunk.first_gradients for chunk in self.chunks)
        return self.backwards + sum(own)

    @property
    def total_bytes(self) -> int:
        inputs = sum(chunk.slots * chunk.inputs() for chunk in self.chunks)
        return self.pool_bytes + inputs + self.gradients

    @property
    def saved_by_sharing(self) -> int:
        return sum(chunk.slots * chunk.unshared() for chunk in self.chunks) - self.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        totals = ("backwards", "pool_bytes", "total_bytes", "saved_by_sharing")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        """A line per scope, in MiB, and one per chunk."""
        headings = ("scope", "inputs", "linked", "outputs", "kept", "forward", "backward")
        calls = [call for chunk in self.chunks for call in chunk.calls]
        rows = [(c.scope, *(_mib(getattr(c, name)) for name in headings[1:])) for c in calls]
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in (headings, *rows)
        ]
        for number, chunk in enumerate(self.chunks):
            first = chunk.first_gradients
            lines.append(
                f"chunk {number}: {chunk.slots} slots of {_mib(chunk.pool())} pool and "
                f"{_mib(chunk.inputs())} inputs" + (f"; gradients {_mib(first)}" if first else "")
            )
        if self.backwards:
            lines.append(f"backwards, by turns {_mib(self.backwards)}")
        lines.append(
            f"incoming gradients {_mib(self.gradients)}; total {_mib(self.total_bytes)} MiB, with "
            f"{_mib(self.saved_by_sharing)} MiB saved by sharing"
        )
        return "\n".join(lines)


def memory_plan(
    plan: Plan,
    measured: Mapping[int, CallMemory],
    split: bool,
    copied: Collection[str] | None = None,
    *,
    accumulates: bool = False,
) -> MemoryPlan:
    """
    Args:
        measured: by the number of the calls alike.
        copied: names of scopes whose weights' gradients are copied; None: those of all.
        accumulates: microbatches of a step add to the gradients of the first.
    """
    chunks = []
    for chunk in plan.chunks:
        calls = [measured[n] for n in chunk.calls if n in measured]
        stay = copied is not None and chunk.slots == 1 and not split
        of_first = 0
        if stay and accumulates:
            temporaries = max((call.backward - call.weights for call in calls), default=0)
            of_first = temporaries + sum(call.weights for call in calls)
        at_once = set(copied or ()) if stay and not of_first else {c.scope for c in calls}
        calls = [replace(c, weights=0) if c.scope in at_once else c for c in calls]
        shares = copied is not None and chunk.slots > 1 and not split
        chunks.append(ChunkMemory(tuple(calls), chunk.slots, split, shares, of_first))
    gradients = [call.gradients for chunk in chunks for call in chunk.calls]
    own = sum(chunk.slots * call.gradients for chunk in chunks for call in chunk.calls)
    return MemoryPlan(tuple(chunks), own if split else max(gradients, default=0))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
