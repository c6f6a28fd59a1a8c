"""What was captured and what happened since, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ScopeReport:
    """One scope.

    forward_graphs and so on: over all slots; weight_graphs only with ``split_backward``.
    kernels: kernels in its graphs (ops on the CPU recorder); None if they could not be counted.
    static_bytes: inputs and outputs that its graphs read and write in place.
    boundary_bytes: the outputs among them, which are handed to the eager rest.
    eager_calls: reason -> number of calls that ran eagerly.
    eager_calls has also backwards of replayed forwards that ran eagerly ("backward: ...").
    interrupted: why the graph ends before the scope's module does, or None.
    refused: why it is not replayed, though it was captured or planned, or None.
    not_reproducible: whether eager runs differ from one another, so that replays cannot be equal.
    not_guarded: what its Python can have read and nobody compares.
    """

    name: str
    forward_graphs: int
    backward_graphs: int
    weight_graphs: int
    kernels: int | None
    static_bytes: int
    boundary_bytes: int
    replayed: int
    eager_calls: dict[str, int]
    interrupted: str | None
    refused: str | None = None
    not_reproducible: bool = False
    not_guarded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All scopes of a ``Graphs``.

    captured: recordings (a forward and a backward graph each); replayed: their forwards replayed.
    slots: per chunk of the model, how many microbatches may be in flight at once.
    static_bytes: those of the scopes, and incoming gradients, which they share.
    pool_bytes: device memory held by the graphs' pools (0 on the CPU, which has none), next to what
        ``graphs.plan()`` predicted, without fragmentation.
    abandoned: forwards that were replayed and whose backward never came.
    """

    backend: str
    state: str
    scopes: tuple[ScopeReport, ...]
    captured: int
    slots: tuple[int, ...]
    replayed: int
    eager_calls: dict[str, int]
    static_bytes: int
    predicted_pool_bytes: int
    pool_bytes: int
    abandoned: int
    capture_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
