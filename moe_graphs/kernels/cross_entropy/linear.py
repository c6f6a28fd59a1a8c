"""Cross entropy of a projection whose logits are never whole: a language model's output head.

The rows (tokens) are taken in chunks. Each chunk's logits are computed and give losses. If the loss
is a mean or a sum, they also give the gradients of hidden states and weight at once. Then the next
chunk takes their place. So the head costs the same three matrix products as always, and the memory
of one chunk instead of the memory of all logits and their gradient.

| gradient of | is summed in | is rounded |
|---|---|---|
| hidden states | one product | to their dtype, and once more when the backward scales it |
| weight | fp32 over chunks (one chunk: one product) | once, to its dtype |

With ``reduction="none"`` and in fp16 the backward computes the logits again. Without a reduction
the scale of each row is known only then, and in fp16 a gradient without its scale would vanish.

Shapes: N rows (tokens), D model, V vocabulary, or the part of it that is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.cross_entropy import REDUCTIONS, reference
from moe_graphs.kernels.cross_entropy.loss_rule import PLAIN, LossRule
from moe_graphs.kernels.cross_entropy.part import (
    columns_here,
    gradient_of_part,
    losses_of_ranks,
    part_of_rows,
)
from moe_graphs.kernels.launching import cdiv
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.precision import accumulation_dtype, product_in, to_autocast

CHUNK_BYTES = {True: 1 << 30, False: 1 << 28}
"""Size that the logits of one chunk may have, by whether the weight gets a gradient.

That gradient is read and written for every chunk. Without it small chunks cost nothing.
"""
_ROWS_AT_A_TIME = 128  # chunks have a multiple of it: tiles of a matrix product are then full


class SharedColumns(Protocol):
    """The vocabulary's columns that this rank has, if several ranks share them."""

    first: int
    """Number of the first column that is here."""
    columns: int
    """Number of columns of all ranks together."""

    def gathered(self, x: Tensor) -> Tensor:
        """``x`` of every rank, in a new first dimension."""


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    rule: LossRule = PLAIN,
    shared: SharedColumns | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """``cross_entropy(hidden @ weight.t(), targets)`` without the logits of more than a chunk.

    Under autocast hidden states and weight are cast as ``linear`` casts them. A weight that needs
    no gradient gets none, and without gradients none are computed. All sizes are static, so the op
    can be in a CUDA graph. Deterministic.

    Args:
        ignore_index, reduction: as in ``kernels.cross_entropy``.
        rule: scale and soft cap of the logits, label smoothing, z-loss.
        shared: the columns of this rank, if several ranks share the weight's rows. The gradient of
            the hidden states is then this rank's addend.
        chunk_bytes: size that the logits of one chunk may have; None takes ``CHUNK_BYTES``.

    Returns:
        fp32 (fp64 for fp64 operands), a scalar or ``[N]``.

    Raises:
        ValueError: other shapes, dtypes or devices than ``[N, D]``, ``[V, D]`` and int64 ``[N]`` on
            one device.
    """
    _check(hidden_ND, weight_VD, targets_N, reduction)
    hidden_ND, weight_VD = to_autocast(hidden_ND, weight_VD)
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES[weight_VD.requires_grad and torch.is_grad_enabled()]
    rows = _chunk_rows(hidden_ND, weight_VD, chunk_bytes)
    return _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, targets_N, ignore_index, reduction, rule, shared, rows,
        torch.is_grad_enabled(),
    )  # fmt: skip


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        ignore_index: int,
        reduction: str,
        rule: LossRule,
        shared: SharedColumns | None,
        rows: int,
        has_backward: bool,
    ) -> Tensor:
        losses_N = torch.empty(
            len(hidden_ND), dtype=accumulation_dtype(hidden_ND), device=hidden_ND.device
        )
        logsumexp_N = torch.empty_like(losses_N)
        count = (targets_N != ignore_index).sum()
        scale = losses_N.new_ones(()) / (count if reduction == "mean" else 1)
        later = reduction == "none" or hidden_ND.dtype == torch.float16
        first, columns = (0, len(weight_VD)) if shared is None else (shared.first, shared.columns)
        ctx.loss = rule, columns
        gradients = _Gradients(hidden_ND, weight_VD, rows, ctx.needs_input_grad, ctx.loss)
        columns_N = columns_here(targets_N, first, len(weight_VD), ignore_index)
        for part in _parts(len(hidden_ND), rows):
            logits_NV = hidden_ND[part] @ weight_VD.t()
            losses_N[part], logsumexp_N[part] = _losses(
                logits_NV, targets_N[part], columns_N[part], ignore_index, rule, shared
            )
            if has_backward and not later:
                gradients.add(part, logits_NV, columns_N[part], logsumexp_N[part], scale)
            del logits_NV  # before the next chunk is there
        ctx.is_later, ctx.rows = later, rows
        if later:
            ctx.save_for_backward(hidden_ND, weight_VD, columns_N, logsumexp_N, scale)
        else:
            ctx.save_for_backward(gradients.of_hidden, gradients.of_weight)
            ctx.dtypes = hidden_ND.dtype, weight_VD.dtype
        if reduction == "none":
            return losses_N
        return losses_N.sum() / (count if reduction == "mean" else 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = wants_gradient(ctx, 0), wants_gradient(ctx, 1)
        if not ctx.is_later:
            saved = zip(ctx.saved_tensors, ctx.dtypes, wanted, strict=True)
            found = [_scaled(each, grad, dtype) if wants else None for each, dtype, wants in saved]
            return *found, *[None] * 7
        hidden_ND, weight_VD, columns_N, logsumexp_N, scale = ctx.saved_tensors
        gradients = _Gradients(hidden_ND, weight_VD, ctx.rows, wanted, ctx.loss)
        scale_N = grad * scale
        for part in _parts(len(hidden_ND), ctx.rows):
            logits_NV = hidden_ND[part] @ weight_VD.t()
            of_rows = scale_N[part] if scale_N.dim() else scale_N
            gradients.add(part, logits_NV, columns_N[part], logsumexp_N[part], of_rows)
            del logits_NV
        of_weight = gradients.of_weight
        of_weight = None if of_weight is None else of_weight.to(weight_VD.dtype)
        return gradients.of_hidden, of_weight, *[None] * 7


class _Gradients:
    """The gradients of hidden states and weight, to which every chunk adds its own."""

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        rows: int,
        wanted: tuple[bool, ...],
        loss: tuple[LossRule, int],
    ) -> None:
        self._hidden_ND, self._weight_VD = hidden_ND, weight_VD
        self._rule, self._columns = loss
        self.of_hidden = torch.empty_like(hidden_ND) if wanted[0] else None
        self.of_weight: Tensor | None = None
        self._wants_weight, self._is_one = wanted[1], rows >= len(hidden_ND)

    def add(
        self, part: slice, logits_NV: Tensor, columns_N: Tensor, logsumexp_N: Tensor, scale: Tensor
    ) -> None:
        grad_NV = gradient_of_part(
            logits_NV, columns_N, logsumexp_N, scale,
            in_place=True, rule=self._rule, columns=self._columns,
        )  # fmt: skip
        if self.of_hidden is not None:
            torch.mm(grad_NV, self._weight_VD, out=self.of_hidden[part])
        if self._wants_weight:
            hidden_ND = self._hidden_ND[part]
            if self._is_one:
                self.of_weight = grad_NV.t() @ hidden_ND
            else:
                dtype = accumulation_dtype(hidden_ND)
                self.of_weight = product_in(dtype, grad_NV.t(), hidden_ND, self.of_weight)


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``(x * scale).to(dtype)`` in one pass."""
    if has_kernel(x):
        from moe_graphs.kernels.cross_entropy.triton_kernels import scaled

        return scaled(x, scale, dtype)
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def _losses(
    logits_NV: Tensor,
    targets_N: Tensor,
    columns_N: Tensor,
    ignore_index: int,
    rule: LossRule,
    shared: SharedColumns | None,
) -> tuple[Tensor, Tensor]:
    """Each row's loss, zero if it is ignored, and its logsumexp over all columns."""
    if shared is not None:
        here_KN = torch.stack(part_of_rows(logits_NV, columns_N, rule))
        all_RKN = shared.gathered(here_KN)
        return losses_of_ranks(all_RKN, targets_N, shared.columns, ignore_index, rule)
    if has_kernel(logits_NV):
        losses_N, logsumexp_N, mean_N = _rows_by_kernel(logits_NV, targets_N, ignore_index, rule)
        logsumexp_N = logsumexp_N.masked_fill(losses_N.isnan(), float("nan"))
    else:
        logits_NV = rule.applied(logits_NV)
        losses_N = reference.cross_entropy(logits_NV, targets_N, ignore_index, "none")
        logsumexp_N = logits_NV.logsumexp(1)
        mean_N = logits_NV.mean(1) if rule.label_smoothing else None
    if rule.label_smoothing or rule.z_loss:
        losses_N = rule.row_losses(losses_N, logsumexp_N, mean_N)
        losses_N = losses_N.masked_fill(targets_N == ignore_index, 0)
    return losses_N, logsumexp_N


def _rows_by_kernel(
    logits_NV: Tensor, targets_N: Tensor, ignore_index: int, rule: LossRule
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross entropy, logsumexp and mean of scaled and capped logits; no mean if all is plain."""
    from moe_graphs.kernels.cross_entropy import triton_kernels as kernels

    if rule.is_plain:
        return *kernels.cross_entropy_rows(logits_NV, targets_N, ignore_index), None
    columns = logits_NV.shape[1]
    *rows, sums_N = kernels.cross_entropy_rows_by_rule(
        logits_NV, targets_N, ignore_index, rule.numbers(columns)
    )
    return *rows, sums_N / columns


def _parts(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _chunk_rows(hidden_ND: Tensor, weight_VD: Tensor, chunk_bytes: int) -> int:
    """Number of rows of a chunk, so that all chunks are about as large."""
    most = max(1, chunk_bytes // (len(weight_VD) * hidden_ND.element_size()))
    chunks = cdiv(max(1, len(hidden_ND)), most)
    if chunks == 1:
        return max(1, len(hidden_ND))
    return cdiv(cdiv(len(hidden_ND), chunks), _ROWS_AT_A_TIME) * _ROWS_AT_A_TIME


def _check(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, reduction: str) -> None:
    shapes = tuple(hidden_ND.shape), tuple(weight_VD.shape), tuple(targets_N.shape)
    is_right = hidden_ND.dim() == weight_VD.dim() == 2 and targets_N.dim() == 1
    if not is_right or shapes[0] != (*shapes[2], shapes[1][1]):
        raise ValueError(
            f"linear_cross_entropy wants hidden states [N, D], a weight [V, D] and targets [N], "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}: flatten what is in front of D"
        )
    if not hidden_ND.is_floating_point() or targets_N.dtype != torch.int64:
        raise ValueError(
            f"linear_cross_entropy wants floating-point hidden states and int64 targets, got "
            f"{hidden_ND.dtype} and {targets_N.dtype}: targets.long()"
        )
    if len({hidden_ND.device, weight_VD.device, targets_N.device}) > 1:
        raise ValueError(
            f"linear_cross_entropy wants all on one device, got {hidden_ND.device}, "
            f"{weight_VD.device} and {targets_N.device}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}: known are {', '.join(REDUCTIONS)}")
