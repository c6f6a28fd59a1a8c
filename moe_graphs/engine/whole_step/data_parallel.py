"""What a captured step asks of data parallelism: settings that hang or corrupt are found before."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_graphs.errors import CaptureError

EAGER_FORWARDS = 11
"""On a GPU. DDP times its first ten forwards with events it waits for, and rebuilds its buckets
after the first: what torch's notes on CUDA graphs mean by eleven warm-up iterations."""

_NEVER = 2**31 - 1


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def check_settings(model: nn.Module) -> None:
    """Before a capture that will hold collectives.

    Raises:
        CaptureError: with the line to change.
    """
    for wrapper in wrappers(model):
        if wrapper.find_unused_parameters:
            raise CaptureError(
                "DistributedDataParallel(find_unused_parameters=True) reads on the host which "
                "parameters were used: pass find_unused_parameters=False"
            )
        # Otherwise every hundredth forward waits for events, and so would an unlucky capture.
        if hasattr(wrapper, "_set_ddp_runtime_logging_sample_rate"):
            wrapper._set_ddp_runtime_logging_sample_rate(_NEVER)


def check_memory(group: dist.ProcessGroup | None) -> None:
    """Before a capture with collectives of the group.

    Raises:
        CaptureError: with the line to change.
    """
    if group is None or dist.get_backend(group) != "nccl":
        return
    if os.environ.get("NCCL_GRAPH_REGISTER") != "0" and _has_expandable_segments():
        raise CaptureError(
            "NCCL registers the memory of graphs, and hangs or crashes on expandable segments: set "
            "NCCL_GRAPH_REGISTER=0 before init_process_group, or take expandable_segments:True "
            "out of PYTORCH_CUDA_ALLOC_CONF"
        )


def _has_expandable_segments() -> bool:
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
