"""Norm of all gradients of a model, however its parameters are sharded, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_graphs.kernels.local_part import local_part
from moe_graphs.optim.gradient_factor import by_dtype, multiply


@torch.no_grad()
def total_norm(
    gradients: Sequence[Tensor],
    shard_group: dist.ProcessGroup | None = None,
    stage_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """2-norm of all gradients as one vector, 0-dim and fp32 for gradients of any dtype.

    Sharded gradients (DTensor: FSDP2, tensor and expert parallelism) count as whole tensors, and
    replicated gradients count once; all ranks get the same norm. In contrast,
    ``torch.nn.utils.get_total_norm`` rounds every tensor's norm to the tensor's dtype and takes
    DTensors of one mesh only.

    Args:
        shard_group: ranks that hold disjoint parts of the gradients that are no DTensors.
        stage_group: ranks of a pipeline, each with gradients of other parameters. All ranks of the
            group call this function.

    Raises:
        ValueError: a DTensor whose values have yet to be summed (Partial).
    """
    alike: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[_holders(gradient, shard_group)].append(local_part(gradient))
    norms = [_over_ranks(_norm_of(each), groups) for groups, each in alike.items()]
    norm = _norm_of(norms) if len(norms) > 1 else (norms or [torch.zeros(())])[0]
    return _over_ranks(norm, () if stage_group is None else (stage_group,))


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    stage_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, for parameters on several meshes.

    Args:
        stage_group: as in ``total_norm``.

    Returns:
        The norm before clipping, by ``total_norm``: fp32, 0-dim, no DTensor.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients, stage_group=stage_group)
    multiply(gradients, clip_factor(max_norm, norm))
    return norm


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """Factor that brings gradients of norm ``norm`` to a norm of at most ``max_norm``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _norm_of(tensors: Sequence[Tensor]) -> Tensor:
    norms = [
        norm
        for same in by_dtype(tensors)
        for norm in torch._foreach_norm(same, 2.0, dtype=torch.float32)
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


def _over_ranks(norm: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    if not groups:
        return norm
    squared = norm.square()
    for group in groups:
        dist.all_reduce(squared, group=group)
    return squared.sqrt()


def _holders(
    gradient: Tensor, shard_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, ...]:
    """Groups of ranks that together hold the gradient."""
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        return () if shard_group is None else (shard_group,)
    placements: Any = getattr(gradient, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a gradient is {placements}, not yet summed over its ranks: reduce it")
    sharded = (dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in sharded if mesh.size(dim) > 1)
