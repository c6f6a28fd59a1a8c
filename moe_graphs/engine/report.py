"""Reports of what was captured and what happened since, and warnings of calls that run eagerly."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from moe_graphs.engine.guards.introspection import attribute_of
from moe_graphs.engine.reasons import reason_for
from moe_graphs.engine.verify import warn
from moe_graphs.report_tables import explanation_of, text_of


class CountedCalls:
    """Counts of calls that matched their capture."""

    replayed: int
    audited: int

    @property
    def matched(self) -> int:
        """The number of calls that matched their capture: they were replayed or audited."""
        return self.replayed + self.audited


class PrintedReport(CountedCalls):
    """Base of all reports: ``print`` shows a table, and why calls ran eagerly."""

    def __str__(self) -> str:
        return text_of(self)

    def explain(self) -> str:
        """Explanation of every column of the table and every reason in it, in plain sentences."""
        return explanation_of(self)


@dataclass(frozen=True)
class ScopeReport(CountedCalls):
    """Report of one scope, over all slots.

    Attributes:
        weight_graphs: graphs of weight gradients; only with ``split_backward``.
        kernels: kernels in its graphs (operations on the CPU recorder); None if they could not be
            counted.
        static_bytes: inputs and outputs that its graphs read and write in place.
        boundary_bytes: the outputs among them that the eager rest of the layer reads.
        eager_calls: reason -> number of calls that ran eagerly. Backwards that ran eagerly after a
            replayed forward are counted, too ("backward: ...").
        details: reason -> what differed in the last such call, and what to do.
        interrupted: why the graph ends before the scope's module does, or None.
        refused: why a captured or planned scope is not replayed, or None.
        not_reproducible: whether eager runs differ from one another; replays cannot be equal then.
        not_guarded: values that the scope's Python can have read and that no guard compares.
        audited: how many calls ran eagerly in place of a replay, to be compared with the capture.
        recomputed_bytes: memory that its forwards do not keep for their backwards, because these
            run the forward again (``GraphConfig(recompute=...)``, gradient checkpointing).
        gradients_in_place: how many weight gradients its graphs leave where ``.grad`` finds them.
        copied_gradients: reason -> how many weight gradients are copied. A lasting reason counts a
            gradient once: "grad_never_none", "several_slots", "several_shapes", "split",
            "used_twice", "shared_memory", "other_layout", "freed_in_backward". The other reasons
            count each copy of a gradient that otherwise stays in place: "hooks", "asked_for"
            (``autograd.grad``), "still_held" (moved away before the memory was written again),
            "view_held" (from then on it is always copied).
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
    audited: int = 0
    recomputed_bytes: int = 0


@dataclass(frozen=True)
class Report(PrintedReport):
    """All scopes of a ``Graphs``; ``print`` shows a table, ``explain()`` what its columns mean.

    Attributes:
        captured: number of recordings (a forward and a backward graph each).
        replayed: number of their forwards that were replayed.
        slots: per chunk of the model, how many microbatches may be in flight at once.
        shapes: how many shapes of microbatches have graphs (``GraphConfig(shapes=...)``).
        shapes_left: how many have lost theirs, because others came more often.
        static_bytes: static buffers of the scopes, and incoming gradients, which the scopes share.
        pool_bytes: device memory held by the graphs' pools (0 on the CPU, which has none), to be
            compared with the prediction of ``graphs.plan()``, which has no fragmentation.
        abandoned: number of replayed forwards whose backward never came.
        occupancy: ``occupancy_of`` the model.
        portable_launches: kernel and architecture -> launches in this process on a GPU for which
            the kernels have no tuned row (``docs/development/architectures.md``); also forwards
            of layers in FP8 with so few rows that bf16 may be faster.
        off_because: why there are no graphs, for instance after a failed capture; None if there
            are.
        audited: number of calls that ran eagerly in place of a replay, to be compared with the
            capture.
        audits_passed: number of those among them that did what was captured.
        audit_seconds: time of all audited calls, on the host.
        audits_skipped: reason -> number of audits that could not be made: "memory" (an eager call
            does not fit now, or memory ran out in it), "fp8" and "split_backward" (such a scope is
            never audited), "often" (models are switched or loaded too often for an audit each
            time).
        audits_missed_bytes: the most bytes that were missing for such an audit, as far as known.
        last_audited_step: number of the last step in which an audit passed; None before the first.
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
    audited: int = 0
    audits_passed: int = 0
    audit_seconds: float = 0.0
    audits_skipped: dict[str, int] = field(default_factory=dict)
    audits_missed_bytes: int = 0
    last_audited_step: int | None = None
    shapes: int = 1
    shapes_left: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return asdict(self)


def occupancy_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Occupancy of bounded buffers by the names of modules, such as an MoE layer's rows.

    Each entry has the largest amount that was asked for, and the amount that there is. If the first
    is above the second, the buffer overflowed. A module reports by its method ``occupancy``, which
    waits for the device.
    """
    told = {
        name: module.occupancy()
        for name, module in model.named_modules()
        if callable(attribute_of(module, "occupancy"))
    }
    return {name: found for name, found in told.items() if found is not None}


# ---- calls that run eagerly, though nothing has failed: counts and warnings


class FallbackWarning:
    """Counts eager calls of what was to be replayed: one ``GraphWarning`` per name and reason.

    If several scopes would warn of the same thing (an input of another shape in every layer), one
    warning says it.

    Attributes:
        details: name and reason -> the message of the last such call.
    """

    def __init__(self) -> None:
        self.details: dict[tuple[str, str], str] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._said: set[tuple[str, str]] = set()

    def ran_eagerly(self, name: str, word: str, message: str | None = None) -> None:
        """Counts an eager call of ``name`` for the reason ``word``, and warns if it is time to."""
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
