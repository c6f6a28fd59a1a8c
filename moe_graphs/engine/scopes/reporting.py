"""The report of the graphs of some scopes, from their counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.misses import Misses
from moe_graphs.engine.reasons import BACKWARD
from moe_graphs.engine.report import Report, ScopeReport, occupation_of
from moe_graphs.engine.scopes.captured import Captured
from moe_graphs.engine.scopes.graphed_scope import GraphedScope
from moe_graphs.engine.scopes.place import Place
from moe_graphs.portable_launches import portable_launches


def report_of(
    backend: Backend,
    model: nn.Module,
    state: str,
    scopes: Sequence[GraphedScope],
    captured: Captured | None,
    capture_seconds: float,
    misses: Misses,
    off_because: str | None = None,
) -> Report:
    places = captured.places if captured is not None else []
    of_scopes = tuple(_report_scope(graphed, places, misses) for graphed in scopes)
    eager_calls: Counter[str] = Counter()
    for scope in of_scopes:
        eager_calls.update(scope.eager_calls)
    return Report(
        backend=backend.name,
        state=state,
        scopes=of_scopes,
        captured=sum(place.forward is not None for place in places),
        replayed=sum(scope.replayed for scope in of_scopes),
        eager_calls=dict(eager_calls),
        static_bytes=sum(t.nbytes for t in captured.static_tensors()) if captured else 0,
        slots=tuple(len(chunk.slots) for chunk in captured.chunks) if captured else (),
        predicted_pool_bytes=captured.memory.pool_bytes if captured else 0,
        pool_bytes=sum(map(backend.pool_bytes, captured.pools)) if captured else 0,
        abandoned=captured.abandoned if captured else 0,
        capture_seconds=capture_seconds,
        occupation=occupation_of(model),
        portable_launches=portable_launches(),
        off_because=off_because,
    )


def _report_scope(graphed: GraphedScope, places: Sequence[Place], misses: Misses) -> ScopeReport:
    own_name = f"scope {graphed.scope.name!r}"
    of_scope = [place for place in places if place.name == graphed.scope.name]
    own = [place for place in of_scope if place.forward is not None]
    planned = {id(place.planned): place.planned for place in of_scope}.values()
    counts = [graph.kernels for place in own for graph in place.graphs()]
    exits = [place.forward.exit.reason for place in own if place.forward.exit is not None]
    backwards: Counter[str] = Counter()
    for call in planned:
        backwards.update({f"{BACKWARD}{r}": n for r, n in call.eager_backwards.items()})
    leases = [lease for place in own for lease in place.gradient_leases()]
    statics = [tensor for place in own for tensor in place.forward.static_tensors()]
    not_guarded = {n for place in own for n in place.forward.surroundings.guards.not_followed}
    return ScopeReport(
        name=graphed.scope.name,
        forward_graphs=len(own),
        backward_graphs=sum(p.backward is not None and p.backward.graph is not None for p in own),
        weight_graphs=sum(p.weights is not None and p.weights.graph is not None for p in own),
        kernels=None if None in counts else sum(counts),
        static_bytes=sum(tensor.nbytes for tensor in statics),
        boundary_bytes=sum(t.nbytes for place in own for t in place.forward.outputs),
        replayed=sum(place.replayed for place in own),
        eager_calls=dict(graphed.eager_calls + backwards),
        details={word: text for (name, word), text in misses.details.items() if name == own_name},
        interrupted=exits[0] if exits else None,
        refused=next((call.refused.message for call in planned if call.refused), None),
        not_reproducible=any(call.not_reproducible for call in planned),
        not_guarded=tuple(sorted(not_guarded)),
        gradients_in_place=sum(lease.in_place for lease in leases),
        copied_gradients=dict(sum((lease.copied for lease in leases), Counter())),
    )
