"""Backends: CUDA graphs, and a recorder for the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.backends.cpu import CpuRecorder
from moe_graphs.engine.backends.cuda import CudaGraphs


def backend_for(
    tensors: Iterable[torch.Tensor],
    generators: Sequence[torch.Generator] = (),
    stream: torch.cuda.Stream | None = None,
) -> Backend:
    """The backend for the device on which all of ``tensors`` lie.

    ``stream`` is the stream that a CUDA backend captures on; by default its own.

    Raises:
        ValueError: if there is more than one such device, or none, or another kind of device, or
            torch allocates with cudaMallocAsync.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"the model's tensors are on devices {found}: graphs need exactly one")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on {device}: graphs exist for 'cuda' and 'cpu'")
    if device.type == "cuda":
        if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
            raise ValueError(
                "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync: its first capture ends the "
                "process (torch 2.11): use the native allocator, with expandable_segments:True "
                "against fragmentation"
            )
        return CudaGraphs(device, generators, stream)
    return CpuRecorder(generators)
