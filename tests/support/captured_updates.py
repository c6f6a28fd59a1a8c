"""An optimizer's update as a graph, for the tests of several optimizers."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def captured_update(eager: Optimizer, graphed: Optimizer) -> torch.cuda.CUDAGraph:
    """Capture a step of ``graphed``, after a step of each that must not wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for optimizer in (eager, graphed):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    return graph
