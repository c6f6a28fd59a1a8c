"""What a layout needs, without allocating it: memory of a rank and bytes on the wire."""

from moe_graphs.planning.layout_plan import LayoutPlan, PlannedStep, plan_layout
from moe_graphs.planning.microbatch_memory import MicrobatchMemory, microbatch_memory

__all__ = ["LayoutPlan", "MicrobatchMemory", "PlannedStep", "microbatch_memory", "plan_layout"]
