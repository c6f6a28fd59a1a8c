"""Data parallelism around a captured step: FSDP2's state in Python, and settings that do harm.

A captured step holds FSDP2's communication like everything else. A replay does not run FSDP2's
Python, so its state has to be where it was: parameters sharded, nothing left over from an open
accumulation, the same settings. Settings that would make a captured step hang or compute wrong
results are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_graphs.engine.tensors import Mismatch, is_sharded_by_fsdp
from moe_graphs.errors import CaptureError

# Settings of a group of parameters, of its state, and of what all states share. Each is asked for
# by name, because versions of torch differ in which they have.
_OF_GROUPS = (
    "reduce_grads", "all_reduce_grads", "reshard_after_backward", "_reshard_after_forward",
    "gradient_divide_factor", "force_sum_reduction_for_comms", "unshard_async_op",
    "unshard_in_backward", "reduce_scatter_unused_params", "mp_policy", "_partial_reduce_output",
)  # fmt: skip


class Sharding:
    """The modules of a model that ``fully_shard`` has sharded, and their settings as they are.

    Attributes:
        groups: FSDP2's groups of parameters; none if it does not shard the model.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded: list[Any] = [module for module in model.modules() if is_sharded_by_fsdp(module)]
        states = {id(state): state for state in (each._get_fsdp_state() for each in sharded)}
        self.groups = [group for state in states.values() for group in _groups_of(state)]
        self._contexts = {id(c): c for s in states.values() if (c := _context_of(s)) is not None}
        self._states = list(states.values())
        self._before = self._settings()

    def reshard(self) -> None:
        """Frees gathered parameters and forgets the order of forwards, as a backward's end does.

        A forward without a backward leaves both. The next backward would gather parameters by the
        order that is left, which no captured step does.
        """
        for group in self.groups:
            if not group.is_sharded:
                group.reshard()
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()

    def unsharded_parameters(self) -> Iterator[Tensor]:
        """Parameters in which gradients are accumulated, after first steps. They may be freed."""
        for group in self.groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    yield parameter._unsharded_param

    def mismatch(self) -> Mismatch | None:
        if self._settings() == self._before:
            return None
        message = (
            "settings of fully_shard (set_requires_gradient_sync and its kin, prefetching) are not "
            "those of the capture, or gradients wait to be reduced: set them within the step"
        )
        return Mismatch("sharding", message)

    def _settings(self) -> list[Any]:
        found: list[Any] = [context.is_last_backward for context in self._contexts.values()]
        for state in self._states:
            for name in ("_states_to_forward_prefetch", "_states_to_backward_prefetch"):
                found.append(list(map(id, getattr(state, name, ()))))
        for group in self.groups:
            found.append([getattr(group, name, None) for name in _OF_GROUPS])
            found.append(any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params))
        return found


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters of a state; torch 2.11 has one per state."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:
        several = [state._fsdp_param_group]
    return [group for group in several if group is not None]


def _context_of(state: Any) -> Any:
    return getattr(state, "_state_ctx", None)


# ---- settings of data parallelism that would hang or corrupt a captured step

EAGER_FORWARDS = 11
"""Warm-up steps of DDP on a GPU.

DDP times its first ten forwards with events that it waits for, and rebuilds its buckets after the
first. torch's notes on CUDA graphs ask for eleven warm-up iterations for this reason.
"""

_NEVER = 2**31 - 1


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def check_settings(model: nn.Module) -> None:
    """Checks settings before a capture that will hold collectives.

    Raises:
        CaptureError: for a setting that must be changed, with the line to change.
    """
    for wrapper in wrappers(model):
        if wrapper.find_unused_parameters:
            raise CaptureError(
                "DistributedDataParallel(find_unused_parameters=True) reads on the host which "
                "parameters were used: pass find_unused_parameters=False"
            )
        # By default every hundredth forward waits for events; a capture must not be such a forward.
        if hasattr(wrapper, "_set_ddp_runtime_logging_sample_rate"):
            wrapper._set_ddp_runtime_logging_sample_rate(_NEVER)


def check_memory(group: dist.ProcessGroup | None) -> None:
    """Checks the allocator before a capture with collectives of the group.

    Raises:
        CaptureError: for a setting that must be changed, with the line to change.
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
