"""Plans of parallel layouts: a rank's memory and its traffic, without allocating anything."""

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
