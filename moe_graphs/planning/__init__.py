"""What a layout needs, without allocating it: memory of a rank and bytes on the wire."""

from moe_graphs.planning.layout_plan import LayoutPlan, RankPlan, plan_layout
from moe_graphs.planning.microbatch_memory import MicrobatchMemory, microbatch_memory
from moe_graphs.planning.planned_step import PlannedStep

__all__ = [
    "LayoutPlan",
    "MicrobatchMemory",
    "PlannedStep",
    "RankPlan",
    "microbatch_memory",
    "plan_layout",
]
