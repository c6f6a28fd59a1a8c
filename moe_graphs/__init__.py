"""MoE training on PyTorch with partial CUDA graphs.

A user needs these names. All others are imported from their modules
(``from moe_graphs.profiling.profiler import profile_step``). The names of this module are imported
at their first use, so that ``moe-graphs --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_graphs.config import GraphConfig
    from moe_graphs.engine.callables.callables import make_graphed_callables
    from moe_graphs.engine.partial.graphs import Graphs, graph
    from moe_graphs.engine.whole_step.full_iteration import FullIteration
    from moe_graphs.errors import CaptureError, GraphError, GraphWarning
    from moe_graphs.staged import Staged
    from moe_graphs.training.device_step import DeviceStep
    from moe_graphs.training.static_loader import StaticLoader

__all__ = [
    "CaptureError",
    "DeviceStep",
    "FullIteration",
    "GraphConfig",
    "GraphError",
    "GraphWarning",
    "Graphs",
    "Staged",
    "StaticLoader",
    "graph",
    "make_graphed_callables",
]
__version__ = "0.1.0"

# The same names as in the imports above, for `__getattr__`; a test compares the two lists.
_HOMES = {
    "config": ("GraphConfig",),
    "engine.callables.callables": ("make_graphed_callables",),
    "engine.partial.graphs": ("Graphs", "graph"),
    "engine.whole_step.full_iteration": ("FullIteration",),
    "errors": ("CaptureError", "GraphError", "GraphWarning"),
    "staged": ("Staged",),
    "training.device_step": ("DeviceStep",),
    "training.static_loader": ("StaticLoader",),
}
# Names that were here before, for the error.
_MOVED = {
    "engine.callables.order": ("Action",),
    "engine.partial.plan": ("CallMemory", "ChunkMemory", "MemoryPlan"),
    "engine.report": ("Report", "ScopeReport"),
    "engine.whole_step.full_iteration": ("FullIterationReport",),
    "errors": ("CheckError", "NonFiniteError"),
    "pipelines.schedule": ("Schedule", "Span"),
    "profiling.floors": ("Floor", "Rates", "measure_rates"),
    "profiling.profiler": ("profile_graphs", "profile_step"),
    "profiling.step_profile": ("GroupTimes", "StepProfile", "TracedStep"),
    "profiling.timeline": ("Timeline",),
    "staged": ("Stage", "end_capture_here", "record"),
    "training.capturable": ("load_optimizer_state", "tensor_hyperparameters"),
    "training.device_step": ("StepResult",),
    "training.ema": ("ExponentialMovingAverage",),
    "training.forward_backward": ("GraphedForwardBackward",),
    "training.grad_scaler": ("GradScaler",),
    "training.static_loader": ("StaticBatches",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = found  # so that the next use does not call __getattr__
            return found
    for module, names in _MOVED.items():
        if name in names:
            raise AttributeError(f"{name} is in {__name__}.{module}: import it from there")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
