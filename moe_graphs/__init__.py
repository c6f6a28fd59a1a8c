"""MoE training on PyTorch with partial CUDA graphs."""

from moe_graphs.capture.ahead_of_time import capture
from moe_graphs.capture.errors import CaptureError, GraphError
from moe_graphs.capture.graphs import Graphs, graph
from moe_graphs.capture.interrupt import Stage, Staged, end_capture_here, record
from moe_graphs.capture.report import Report, ScopeReport
from moe_graphs.config import GraphConfig

__all__ = [
    "CaptureError",
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
    "record",
]
__version__ = "0.1.0"
