"""A plan as a table for a terminal."""

from __future__ import annotations

from rich.table import Table

from moe_graphs.planning.layout_plan import LayoutPlan
from moe_graphs.planning.planned_step import PlannedStep
from moe_graphs.report_tables import format_bytes


def plan_table(plan: LayoutPlan) -> Table:
    """Table of the memory and the traffic of the rank with the most memory, without zeros."""
    rank = plan.most
    which = f"rank {plan.ranks.index(rank)} of pp" if len(plan.ranks) > 1 else "a rank"
    title = f"{which}: its memory, and what it receives in a step"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for values, kind in ((rank.exact, "exact"), (rank.estimated, "in a step, at its most")):
        for name, size in values.items():
            if size:
                table.add_row(name, format_bytes(size), kind)
        table.add_section()
    table.add_row("most at once", format_bytes(rank.memory), "without fragments and NCCL's own")
    pool = format_bytes(rank.within_graph)
    table.add_row("of it in a graph's pool", pool, "--impl full_iteration")
    table.add_section()
    for part, size in rank.per_layer.items():
        which = "the" if part in ("embedding", "head") else "a"
        table.add_row(f"kept by {which} {part}", format_bytes(size), "by one microbatch")
    table.add_section()
    for name, size in rank.wire.items():
        if size:
            table.add_row(name, format_bytes(size), "received in a step")
    table.caption = (
        f"{plan.parameters:,} parameters, {rank.padding:.0%} of a rank's share of them padding; "
        f"{plan.expert_rows:,} expert rows in a layer and microbatch"
    )
    table.caption_justify = "left"
    return table


def ranks_table(plan: LayoutPlan, step: PlannedStep) -> Table:
    """Table with a row for each rank of a pipeline."""
    title = f"ranks of pp, {step.schedule} of {step.microbatches} microbatches"
    table = Table(title=title, title_justify="left")
    table.add_column("rank")
    table.add_column("layers")
    for name in ("in flight", "between steps", "most at once", "received in a step"):
        table.add_column(name, justify="right")
    for number, rank in enumerate(plan.ranks):
        kept = sum(rank.exact.values()) - rank.exact["gradients"]
        table.add_row(
            f"{number}",
            ", ".join(f"{first}-{first + count - 1}" for first, count in rank.layers),
            ", ".join(map(str, rank.in_flight)),
            *map(format_bytes, (kept, rank.memory, sum(rank.wire.values()))),
        )
    table.caption = (
        f"in flight: microbatches between forward and backward, of each stage; {plan.idle:.1%} of "
        f"the time is bubble, if stages take as long, backwards twice a forward, messages no time"
    )
    table.caption_justify = "left"
    return table
