"""MoE training on PyTorch with partial CUDA graphs.

``moe_graphs.capture`` is the function; the engine's modules lie in the folder of the same name and
are imported from there (``from moe_graphs.engine.scopes.plan import Plan``).
"""

from moe_graphs.config import GraphConfig
from moe_graphs.engine.callables.callables import make_graphed_callables
from moe_graphs.engine.report import Report, ScopeReport
from moe_graphs.engine.scopes.ahead_of_time import capture
from moe_graphs.engine.scopes.graphs import Graphs, graph
from moe_graphs.engine.whole_step.full_iteration import FullIteration, FullIterationReport
from moe_graphs.errors import CaptureError, GraphError
from moe_graphs.staged import Stage, Staged, end_capture_here, record

__all__ = [
    "CaptureError",
    "FullIteration",
    "FullIterationReport",
    "GraphConfig",
    "GraphError",
    "Graphs",
    "Report",
    "ScopeReport",
    "Stage",
    "Staged",
    "capture",
    "end_capture_here",
    "graph",
    "make_graphed_callables",
    "record",
]
__version__ = "0.1.0"
