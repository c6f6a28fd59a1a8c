"""Reports of what was captured and what happened since; warnings of calls that run eagerly."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from moe_graphs.engine.guards.introspection import attribute_of
from moe_graphs.engine.reasons import reason_for
from moe_graphs.engine.verify import warn
from moe_graphs.report_tables import explanation_of, text_of


class PrintedReport:
    """Base of all reports: ``print`` shows a table, and why calls ran eagerly."""

    def __str__(self) -> str:
        return text_of(self)

    def explain(self) -> str:
        """Every column of the table, and every reason that occurs, in plain sentences."""
        return explanation_of(self)


@dataclass(frozen=True)
class ScopeReport:
    """One scope.

    forward_graphs and so on: over all slots; weight_graphs only with ``split_backward``.
    kernels: kernels in its graphs (ops on the CPU recorder); None if they could not be counted.
    static_bytes: inputs and outputs that its graphs read and write in place.
    boundary_bytes: the outputs among them, which are handed to the eager rest.
    eager_calls: reason -> number of calls that ran eagerly.
    details: reason -> what the last such call differed in, and what to do.
    eager_calls has also backwards of replayed forwards that ran eagerly ("backward: ...").
    interrupted: why the graph ends before the scope's module does, or None.
    refused: why it is not replayed, though it was captured or planned, or None.
    not_reproducible: whether eager runs differ from one another, so that replays cannot be equal.
    not_guarded: what its Python can have read and nobody compares.
    gradients_in_place: how many gradients of weights its graphs leave where ``.grad`` finds them.
    copied_gradients: reason -> how many others are copied, once each ("grad_never_none",
        "several_slots", "split", "used_twice", "shared_memory", "other_layout"), and how often
        one of the former was: "hooks", "asked_for" (``autograd.grad``), "still_held" (moved away
        before the memory was written again), "view_held" (from then on it is always copied).
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
    gradients_in_place: int = 0
    copied_gradients: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report(PrintedReport):
    """All scopes of a ``Graphs``; ``print`` shows a table, ``explain()`` what its columns mean.

    captured: recordings (a forward and a backward graph each); replayed: their forwards replayed.
    slots: per chunk of the model, how many microbatches may be in flight at once.
    static_bytes: those of the scopes, and incoming gradients, which they share.
    pool_bytes: device memory held by the graphs' pools (0 on the CPU, which has none), next to what
        ``graphs.plan()`` predicted, without fragmentation.
    abandoned: forwards that were replayed and whose backward never came.
    occupancy: as ``occupancy_of`` the model.
    portable_launches: kernel and architecture -> launches in this process on a GPU for which the
        kernels have no tuned row (``docs/development/architectures.md``).
    off_because: why there are no graphs at all, where there are none, as after a failed capture.
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
    occupancy: dict[str, tuple[int, int]] = field(default_factory=dict)
    portable_launches: dict[str, int] = field(default_factory=dict)
    off_because: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return asdict(self)


def occupancy_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Occupancy of bounded buffers by the names of modules (an MoE layer's rows, an activation
    stack's): how much of it was asked for at most, and how much there is. If the first is above the
    second, it overflowed. Modules report by a method ``occupancy``, which waits for the device.
    """
    told = {
        name: module.occupancy()
        for name, module in model.named_modules()
        if callable(attribute_of(module, "occupancy"))
    }
    return {name: found for name, found in told.items() if found is not None}


# ---- calls that run eagerly, though nothing has failed: counts and warnings


class FallbackWarning:
    """Eager calls of what was to be replayed: one ``GraphWarning`` per name and reason.

    Scopes that have the same to say (an input of another shape in every layer) say it once.

    Attributes:
        details: name and reason -> the message of the last such call.
    """

    def __init__(self) -> None:
        self.details: dict[tuple[str, str], str] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._said: set[tuple[str, str]] = set()

    def ran_eagerly(self, name: str, word: str, message: str | None = None) -> None:
        """Count an eager call of ``name`` for the reason ``word``, and warn if it is time to."""
        reason, key = reason_for(word), (name, word)
        if message is not None:
            self.details[key] = message
        if reason.warns_at is None:
            return
        self._calls[key] += 1
        said = (word, message or "")
        if self._calls[key] == reason.warns_at and said not in self._said:
            self._said.add(said)
            often = "" if reason.warns_at == 1 else f" {reason.warns_at} times"
            warn(f"{name} ran eagerly{often} ({word}): {message or reason}")
