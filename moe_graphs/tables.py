"""Tables of a comparison, for a terminal, beside those of the engine's reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from moe_graphs.report_tables import (
    capture_table,
    format_bytes,
    format_reasons,
    full_iteration_table,
)

if TYPE_CHECKING:
    from moe_graphs.lm.compare import Comparison, Side

__all__ = [
    "capture_table",
    "comparison_table",
    "format_bytes",
    "format_reasons",
    "full_iteration_table",
    "verdict",
]


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


def _ms(side: Side) -> str:
    return f"{side.step_ms:,.2f} ms"


def _spread(side: Side) -> str:
    return f"{side.p10_ms:,.2f} to {side.p90_ms:,.2f} ms"
