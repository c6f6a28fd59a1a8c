"""What a captured step asks of data parallelism: settings that hang or corrupt are found before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_graphs.engine.signature import Mismatch
from moe_graphs.errors import CaptureError

EAGER_FORWARDS = 11
"""DDP times its first ten forwards with events it waits for, and rebuilds its buckets after the
first: what torch's notes on CUDA graphs mean by eleven warm-up iterations."""

_NEVER = 2**31 - 1


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def process_group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The group over which the model's gradients are reduced, None without DDP."""
    found = wrappers(model)
    return found[0].process_group if found else None


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
    group = process_group_of(model)
    if group is None or dist.get_backend(group) != "nccl":
        return
    if os.environ.get("NCCL_GRAPH_REGISTER") != "0" and _has_expandable_segments():
        raise CaptureError(
            "NCCL registers the memory of graphs, and hangs or crashes on expandable segments: set "
            "NCCL_GRAPH_REGISTER=0 before init_process_group, or take expandable_segments:True "
            "out of PYTORCH_CUDA_ALLOC_CONF"
        )


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """A piece of work that succeeds on all ranks or raises on all of them."""
    try:
        yield
    except Exception:
        _all_succeeded(False, group, device)
        raise
    if not _all_succeeded(True, group, device):
        raise CaptureError("it failed on another rank")


class Agreement:
    """Ranks tell each other before every call whether theirs matches what was captured, over a
    group of processes on the host: a rank that replays would wait for ever for one that raises.

    group: None where there is nobody to agree with.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            # Ranks of other groups need not be here.
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def on(self, mismatch: Mismatch | None) -> Mismatch | None:
        """The mismatch of this rank, or of another one."""
        if self._group is None:
            return mismatch
        flag = torch.tensor(int(mismatch is not None))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        if flag and mismatch is None:
            return Mismatch(
                "another_rank", "the call of another rank differs from the captured one"
            )
        return mismatch


def on_any_rank(here: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether it is so on this rank or on another one."""
    return not _all_succeeded(not here, group, device)


def _all_succeeded(here: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    if group is None:
        return here
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _has_expandable_segments() -> bool:
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
