"""Cross entropy of logits of which only some columns are here: what a rank computes by itself.

The columns of all ranks together are the vocabulary. From every rank's logsumexp and the target's
logit follows a row's loss; with the logsumexp over all columns a rank knows its gradient.

Shapes: N rows (tokens), V columns that are here.
"""

from __future__ import annotations

from torch import Tensor

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.precision import accumulation_dtype

IGNORED, ELSEWHERE = -100, -1
"""Targets of rows that do not count, and of rows whose target is not among the columns here."""


def columns_here(targets_N: Tensor, first: int, columns: int, ignore_index: int) -> Tensor:
    """Targets as columns of the part that begins at ``first``, or ``ELSEWHERE`` or ``IGNORED``."""
    here_N = targets_N - first
    is_here = (here_N >= 0) & (here_N < columns)
    here_N = here_N.masked_fill(~is_here, ELSEWHERE)
    return here_N.masked_fill(targets_N == ignore_index, IGNORED)


def part_of_rows(logits_NV: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's logsumexp over these columns, and its target's logit.

    Both are fp32 (fp64 for fp64 logits). The logit is zero if the target is not here; the numbers
    of ignored rows mean nothing.

    Args:
        columns_N: targets as ``columns_here`` returns them.
    """
    at_N = logits_NV.gather(1, columns_N.clamp(min=0)[:, None]).squeeze(1)
    at_N = at_N.to(accumulation_dtype(logits_NV)).masked_fill(columns_N < 0, 0)
    if has_kernel(logits_NV):
        from moe_graphs.kernels.cross_entropy.triton_kernels import cross_entropy_rows

        return cross_entropy_rows(logits_NV, columns_N, IGNORED)[1], at_N
    return logits_NV.to(at_N.dtype).logsumexp(1), at_N


def gradient_of_part(
    logits_NV: Tensor,
    columns_N: Tensor,
    logsumexp_N: Tensor,
    grad: Tensor,
    *,
    in_place: bool = False,
) -> Tensor:
    """The gradient of the logits that are here, in their dtype.

    Args:
        logsumexp_N: over the columns of all ranks.
        grad: ``[N]`` or 0-dim, of the rows' losses.
        in_place: whether the logits may be overwritten, if that saves memory.
    """
    if has_kernel(logits_NV):
        from moe_graphs.kernels.cross_entropy import triton_kernels as kernels

        given = (logits_NV, columns_N, logsumexp_N, grad, None, IGNORED, True)
        if not in_place:
            return kernels.cross_entropy_backward(*given)
        kernels.cross_entropy_backward_in_place(*given)
        return logits_NV
    probability_NV = (logits_NV.to(logsumexp_N.dtype) - logsumexp_N[:, None]).exp_()
    is_here_N1 = (columns_N >= 0)[:, None].to(probability_NV.dtype)
    probability_NV.scatter_add_(1, columns_N.clamp(min=0)[:, None], -is_here_N1)
    grad_NV = probability_NV * (grad[:, None] if grad.dim() else grad)
    return grad_NV.masked_fill_((columns_N == IGNORED)[:, None], 0).to(logits_NV.dtype)
