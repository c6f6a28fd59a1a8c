"""Cross entropy that keeps the logits themselves and one number a row, nothing in fp32 beside them.

Shapes: N rows (tokens), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.cross_entropy import reference as cross_entropy_reference

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """``functional.cross_entropy(logits.float(), targets)``, in fp32 and in nats.

    On a GPU one kernel reads the logits once forward, one reads them and writes their gradient in
    their dtype backward; written plainly, fp32 copies and a log-softmax move 28 bytes a logit and
    stay until the backward. The logits are left as they are. Deterministic.

    Args:
        ignore_index: rows with this target do not count: no loss, zero gradient.
        reduction: mean over the rows that count (NaN if there are none), sum, or none.

    Returns:
        fp32 (fp64 for fp64 logits), a scalar or ``[N]``. A target outside ``0..V-1`` is an
        ``IndexError`` on the CPU; on a GPU its row's loss and gradient are NaN, since the host does
        not wait to see it.

    Raises:
        ValueError: other shapes, dtypes or devices than ``[N, V]`` and int64 ``[N]`` on one device.
    """
    _check(logits_NV, targets_N, reduction)
    if has_kernel(logits_NV):
        return _CrossEntropy.apply(logits_NV, targets_N, ignore_index, reduction)
    return cross_entropy_reference.cross_entropy(logits_NV, targets_N, ignore_index, reduction)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV, targets_N, ignore_index, reduction):
        from moe_graphs.kernels.cross_entropy import triton_kernels as kernels

        loss, logsumexp_N = kernels.cross_entropy_rows(logits_NV, targets_N, ignore_index)
        count = None
        if reduction == "mean":
            loss, count = kernels.mean_of_counted(loss, targets_N, ignore_index)
        elif reduction == "sum":
            loss = loss.sum()
        ctx.save_for_backward(logits_NV, targets_N, logsumexp_N, count)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from moe_graphs.kernels.cross_entropy import triton_kernels as kernels

        logits_NV, targets_N, logsumexp_N, count = ctx.saved_tensors
        grad_NV = kernels.cross_entropy_backward(
            logits_NV, targets_N, logsumexp_N, grad, count, ctx.ignore_index
        )
        return grad_NV, None, None, None


def _check(logits_NV: Tensor, targets_N: Tensor, reduction: str) -> None:
    if logits_NV.dim() != 2 or targets_N.shape != logits_NV.shape[:1]:
        raise ValueError(
            f"cross_entropy wants logits [N, V] and targets [N], got {tuple(logits_NV.shape)} and "
            f"{tuple(targets_N.shape)}: flatten what is in front of the vocabulary"
        )
    if not logits_NV.is_floating_point() or targets_N.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy wants floating-point logits and int64 targets, got {logits_NV.dtype} "
            f"and {targets_N.dtype}: targets.long()"
        )
    if logits_NV.device != targets_N.device:
        raise ValueError(
            f"cross_entropy wants logits and targets on one device, got {logits_NV.device} and "
            f"{targets_N.device}: targets.to(logits.device)"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}: known are {', '.join(REDUCTIONS)}")
