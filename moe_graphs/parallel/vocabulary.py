"""Logits whose columns ranks share: their cross-entropy, and their gathering.

Shapes: N rows (tokens), V columns of this rank, W vocabulary, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_graphs.kernels import cross_entropy
from moe_graphs.kernels.cross_entropy import REDUCTIONS
from moe_graphs.kernels.cross_entropy.part import (
    columns_here,
    gradient_of_part,
    losses_of_ranks,
    part_of_rows,
)


def vocabulary_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Ranks that share the columns of ``model``'s logits; None if this rank has all columns."""
    return getattr(getattr(model, "head", None), "process_group", None)


def vocabulary_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    group: dist.ProcessGroup | None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of logits whose columns the ranks of ``group`` share, in the order of ranks.

    All ranks get the same loss, each with the gradient of its columns. The forward has one
    all-gather of two numbers per row, the backward has none, and no logit is copied. Without a
    group the logits are whole.

    Args:
        targets_N: numbers in the whole vocabulary, the same on all ranks.
        ignore_index, reduction: as in ``kernels.cross_entropy``.

    Returns:
        fp32 (fp64 for fp64 logits), a scalar or ``[N]``; NaN in rows whose target is outside of the
        vocabulary.

    Raises:
        ValueError: another reduction.
    """
    if group is None:
        return cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction=reduction)
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}: known are {', '.join(REDUCTIONS)}")
    losses_N = _VocabularyCrossEntropy.apply(logits_NV, targets_N, group, ignore_index)
    if reduction == "mean":
        return losses_N.sum() / (targets_N != ignore_index).sum()
    return losses_N.sum() if reduction == "sum" else losses_N


def whole_vocabulary(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather all columns ``[..., W]`` from ``[..., V]``, without a gradient; all ranks call it."""
    if group is None:
        return logits
    ranks = dist.get_world_size(group)
    return torch.cat(_gathered(logits.detach(), ranks, group).chunk(ranks), dim=-1)


class ColumnsOfGroup:
    """The columns of this rank's logits among those of all ranks of a group (``SharedColumns``)."""

    def __init__(self, group: dist.ProcessGroup, columns: int) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)
        self.first, self.columns = dist.get_rank(group) * columns, self._ranks * columns

    def gathered(self, x: Tensor) -> Tensor:
        return _gathered(x, self._ranks, self._group).unflatten(0, (self._ranks, len(x)))


def _gathered(x: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    every = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    later = getattr(dist, "all_gather_single", None)  # the name since torch 2.13
    (later or dist.all_gather_into_tensor)(every, x.contiguous(), group=group)
    return every


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        group: dist.ProcessGroup,
        ignore_index: int,
    ) -> Tensor:
        shared = ColumnsOfGroup(group, logits_NV.shape[1])
        columns_N = columns_here(targets_N, shared.first, logits_NV.shape[1], ignore_index)
        here_2N = torch.stack(part_of_rows(logits_NV, columns_N))
        everywhere = shared.gathered(here_2N), targets_N, shared.columns, ignore_index
        losses_N, logsumexp_N = losses_of_ranks(*everywhere)
        ctx.save_for_backward(logits_NV, columns_N, logsumexp_N)
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, columns_N, logsumexp_N = ctx.saved_tensors
        return gradient_of_part(logits_NV, columns_N, logsumexp_N, grad_N), None, None, None
