"""MoE training on PyTorch with partial CUDA graphs.

The engine's modules are in ``moe_graphs.engine`` and are imported from there
(``from moe_graphs.engine.partial.plan import Plan``). The names of this module are imported at
their first use, so that ``moe-graphs --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_graphs.config import GraphConfig
    from moe_graphs.engine.callables.callables import make_graphed_callables
    from moe_graphs.engine.callables.order import Action
    from moe_graphs.engine.partial.graphs import Graphs, graph
    from moe_graphs.engine.partial.plan import CallMemory, ChunkMemory, MemoryPlan
    from moe_graphs.engine.report import Report, ScopeReport
    from moe_graphs.engine.whole_step.full_iteration import FullIteration, FullIterationReport
    from moe_graphs.errors import CaptureError, CheckError, GraphError, GraphWarning, NonFiniteError
    from moe_graphs.pipelines.schedule import Schedule, Span
    from moe_graphs.profiling.floors import Floor, Rates, measure_rates
    from moe_graphs.profiling.profiler import profile_graphs, profile_step
    from moe_graphs.profiling.step_profile import GroupTimes, StepProfile, TracedStep
    from moe_graphs.profiling.timeline import Timeline
    from moe_graphs.staged import Stage, Staged, end_capture_here, record
    from moe_graphs.training.capturable import load_optimizer_state, tensor_hyperparameters
    from moe_graphs.training.device_step import DeviceStep, StepResult
    from moe_graphs.training.ema import ExponentialMovingAverage
    from moe_graphs.training.forward_backward import GraphedForwardBackward
    from moe_graphs.training.grad_scaler import GradScaler
    from moe_graphs.training.static_loader import StaticBatches, StaticLoader

__all__ = [
    "Action",
    "CallMemory",
    "CaptureError",
    "CheckError",
    "ChunkMemory",
    "DeviceStep",
    "ExponentialMovingAverage",
    "Floor",
    "FullIteration",
    "FullIterationReport",
    "GradScaler",
    "GraphConfig",
    "GraphError",
    "GraphWarning",
    "GraphedForwardBackward",
    "Graphs",
    "GroupTimes",
    "MemoryPlan",
    "NonFiniteError",
    "Rates",
    "Report",
    "Schedule",
    "ScopeReport",
    "Span",
    "Stage",
    "Staged",
    "StaticBatches",
    "StaticLoader",
    "StepProfile",
    "StepResult",
    "Timeline",
    "TracedStep",
    "end_capture_here",
    "graph",
    "load_optimizer_state",
    "make_graphed_callables",
    "measure_rates",
    "profile_graphs",
    "profile_step",
    "record",
    "tensor_hyperparameters",
]
__version__ = "0.1.0"

# The same names as in the imports above, for `__getattr__`; a test compares the two lists.
_HOMES = {
    "config": ("GraphConfig",),
    "engine.callables.callables": ("make_graphed_callables",),
    "engine.report": ("Report", "ScopeReport"),
    "engine.partial.graphs": ("Graphs", "graph"),
    "engine.partial.plan": ("CallMemory", "ChunkMemory", "MemoryPlan"),
    "engine.whole_step.full_iteration": ("FullIteration", "FullIterationReport"),
    "errors": ("CaptureError", "CheckError", "GraphError", "GraphWarning", "NonFiniteError"),
    "engine.callables.order": ("Action",),
    "pipelines.schedule": ("Schedule", "Span"),
    "profiling.floors": ("Floor", "Rates", "measure_rates"),
    "profiling.profiler": ("profile_graphs", "profile_step"),
    "profiling.step_profile": ("GroupTimes", "StepProfile", "TracedStep"),
    "profiling.timeline": ("Timeline",),
    "staged": ("Stage", "Staged", "end_capture_here", "record"),
    "training.capturable": ("load_optimizer_state", "tensor_hyperparameters"),
    "training.device_step": ("DeviceStep", "StepResult"),
    "training.ema": ("ExponentialMovingAverage",),
    "training.forward_backward": ("GraphedForwardBackward",),
    "training.grad_scaler": ("GradScaler",),
    "training.static_loader": ("StaticBatches", "StaticLoader"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = found  # so that the next use does not call __getattr__
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
