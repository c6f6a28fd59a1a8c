"""A plan as a table for a terminal."""

from __future__ import annotations

from rich.table import Table

from moe_graphs.planning.layout_plan import LayoutPlan
from moe_graphs.tables import format_bytes


def plan_table(plan: LayoutPlan) -> Table:
    """Memory, exact and estimated, then the wire; without what is zero."""
    table = Table(title="a rank's memory, and what it receives in a step", title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for values, kind in ((plan.exact, "exact"), (plan.estimated, "in a microbatch, at its most")):
        for name, size in values.items():
            if size:
                table.add_row(name, format_bytes(size), kind)
        table.add_section()
    table.add_row("most at once", format_bytes(plan.memory), "without fragments and NCCL's own")
    table.add_row(
        "of it in a graph's pool",
        format_bytes(plan.within_graph),
        "--impl full_iteration",
    )
    table.add_section()
    for name, size in plan.wire.items():
        if size:
            table.add_row(name, format_bytes(size), "received in a step")
    table.caption = (
        f"{plan.parameters:,} parameters, {plan.padding:.0%} of a rank's share of them padding; "
        f"{plan.expert_rows:,} rows of experts in a layer and microbatch"
    )
    table.caption_justify = "left"
    return table
