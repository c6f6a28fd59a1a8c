"""The nodes that add gradients up, and the streams that they belong to.

Such a node belongs to the stream of its first use. While somebody holds a loss of an eager step it
lives on, and a captured backward would pull that stream into the capture, which CUDA refuses for
the default one (``cudaErrorStreamCaptureImplicit``). Data-parallel wrappers hold them for good.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_graphs.errors import CaptureError

_HOLDERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def forget_accumulators(model: nn.Module) -> None:
    """Lets the next forward make new nodes; a loss that is held keeps its own.

    Assigning data of another dtype is what makes autograd forget them. Nothing else changes. Does
    nothing within a wrapper whose hooks hang on these nodes.
    """
    if _holder(model) is not None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            data = parameter.data
            other = torch.float32 if data.dtype is torch.float64 else torch.float64
            parameter.data = torch.empty(0, dtype=other, device=data.device)
            parameter.data = data


def check_streams(model: nn.Module, stale: list[str]) -> None:
    """``stale``: parameters whose gradients are not added up on the stream of the capture.

    Raises:
        CaptureError: if there are any, with what to change.
    """
    if stale:
        kind = _holder(model) or "whatever holds their gradient accumulators"
        raise CaptureError(
            f"{kind} was built on another stream, where the gradients of {', '.join(stale[:3])} "
            f"and {max(0, len(stale) - 3)} more are accumulated: build it within 'with "
            f"torch.cuda.stream(stream):' and pass the same stream=stream to FullIteration"
        )


def _holder(model: nn.Module) -> str | None:
    """The name of a wrapper (torch's or another's) whose hooks hang on accumulators."""
    kinds = (type(module).__name__ for module in model.modules())
    return next((kind for kind in kinds if kind in _HOLDERS), None)
