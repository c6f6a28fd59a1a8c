"""Which backend serves a model."""

from __future__ import annotations

import torch
from torch import nn

from moe_graphs.capture.backends.base import Backend
from moe_graphs.capture.backends.cpu import CpuRecorder
from moe_graphs.capture.backends.cuda import CudaGraphs


def backend_of(model: nn.Module, stream: torch.cuda.Stream | None = None) -> Backend:
    """``stream``: for the captures; CUDA only. A new one by default."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"the model's tensors are on devices {found}: graphs need exactly one")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on {device}: graphs exist for 'cuda' and 'cpu'")
    return CudaGraphs(device, stream) if device.type == "cuda" else CpuRecorder()
