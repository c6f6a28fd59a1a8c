"""Tables of the engine's report and of a comparison, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from moe_graphs.engine.report import Report, ScopeReport
    from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
    from moe_graphs.lm.compare import Comparison, Side


def capture_table(report: Report) -> Table:
    """Table with a row per scope of a capture ``Report``, and a caption with the totals."""
    table = Table(title="captured scopes", title_justify="left", caption_justify="left")
    table.add_column("scope", overflow="fold")
    headings = ("graphs", "kernels", "static", "boundary", "replays", "eager calls")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "eager calls" else "right")
    for scope in report.scopes:
        table.add_row(
            scope.name,
            "+".join(map(str, _graphs(scope))),
            "?" if scope.kernels is None else f"{scope.kernels:,}",
            format_bytes(scope.static_bytes),
            format_bytes(scope.boundary_bytes),
            f"{scope.replayed:,}",
            format_reasons(scope.eager_calls),
        )
    table.caption = (
        f"graphs: forward + backward (+ weights apart); kernels: recorded ops on the CPU; captured "
        f"{report.captured}, for {' + '.join(map(str, report.slots)) or 0} microbatches in flight, "
        f"replayed {report.replayed:,}, pool {format_bytes(report.pool_bytes)} (predicted "
        f"{format_bytes(report.predicted_pool_bytes)}), static "
        f"{format_bytes(report.static_bytes)}; eager calls: {format_reasons(report.eager_calls)}"
    )
    return table


def full_iteration_table(report: FullIterationReport) -> Table:
    """Table with one row, for the graph of a whole step."""
    table = Table(title="captured step", title_justify="left", caption_justify="left")
    headings = ("state", "kernels", "static", "pool", "capture", "replays", "eager calls")
    for heading in headings:
        words = heading in ("state", "eager calls")
        table.add_column(heading, justify="left" if words else "right")
    table.add_row(
        report.state,
        "?" if report.kernels is None else f"{report.kernels:,}",
        format_bytes(report.static_bytes),
        format_bytes(report.pool_bytes),
        f"{report.capture_seconds:.2f} s",
        f"{report.replayed:,}",
        format_reasons(report.eager_calls),
    )
    table.caption = f"kernels: recorded ops on the CPU; captured {report.captures} times"
    return table


def _graphs(scope: ScopeReport) -> list[int]:
    counts = [scope.forward_graphs, scope.backward_graphs]
    return [*counts, scope.weight_graphs] if scope.weight_graphs else counts


def comparison_table(comparison: Comparison) -> Table:
    """Table of eager and graphed, side by side."""
    table = Table(title="eager and graphed, same seed", title_justify="left")
    for heading in ("", "eager", "graphed", "graphed / eager"):
        table.add_column(heading, justify="right" if heading else "left")
    eager, graphed = comparison.eager, comparison.graphed
    ratio = f"{graphed.step_ms / eager.step_ms:.3f}"
    table.add_row("time per step, median", _ms(eager), _ms(graphed), ratio)
    table.add_row("p10 to p90", _spread(eager), _spread(graphed), "")
    table.add_row(
        f"memory ({eager.memory_kind})",
        format_bytes(eager.reserved_bytes),
        format_bytes(graphed.reserved_bytes),
        f"{graphed.reserved_bytes / eager.reserved_bytes:.3f}",
    )
    if eager.dropped is not None:
        table.add_row("dropped", f"{eager.dropped:,}", f"{graphed.dropped:,}", "")
    table.caption = verdict(comparison)
    table.caption_justify = "left"
    return table


def verdict(comparison: Comparison) -> str:
    """Sentence that says whether the two runs agree bit for bit."""
    steps = len(comparison.eager.losses)
    first = comparison.first_difference
    if first is not None:
        pair = [side.losses[first - 1] for side in (comparison.eager, comparison.graphed)]
        return f"losses DIFFER, first at step {first} of {steps}: {pair[0]!r} and {pair[1]!r}"
    others = {
        "gradient norms": comparison.grad_norms_bitwise_equal,
        "final parameters": comparison.parameters_bitwise_equal,
    }
    equal = ["losses", *(name for name, same in others.items() if same)]
    unequal = [name for name, same in others.items() if not same]
    text = f"{', '.join(equal)} bitwise equal over {steps} steps"
    return f"{text}; {', '.join(unequal)} DIFFER" if unequal else text


def format_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value, units = float(count), iter("KMGT")
    unit = ""
    while value >= 1024:
        value, unit = value / 1024, next(units)
    return f"{value:,.1f} {unit}iB"


def format_reasons(reasons: Mapping[str, int]) -> str:
    """Write ``{"warm-up": 12}`` as ``12 warm-up``, and no reasons as ``none``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "none"


def _ms(side: Side) -> str:
    return f"{side.step_ms:,.2f} ms"


def _spread(side: Side) -> str:
    return f"{side.p10_ms:,.2f} to {side.p90_ms:,.2f} ms"
