"""Cross entropy of logits of which only some columns are here: what a rank computes by itself.

The columns of all ranks together are the vocabulary. From every rank's logsumexp and the target's
logit follows a row's loss; with the logsumexp over all columns a rank knows its gradient.

Shapes: N rows (tokens), V columns that are here, R ranks, K numbers of a row.
"""

from __future__ import annotations

from torch import Tensor

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.cross_entropy.loss_rule import PLAIN, LossRule

IGNORED, ELSEWHERE = -100, -1
"""Targets of rows that do not count, and of rows whose target is not among the columns here."""


def columns_here(targets_N: Tensor, first: int, columns: int, ignore_index: int) -> Tensor:
    """Targets as columns of the part that begins at ``first``, or ``ELSEWHERE`` or ``IGNORED``."""
    here_N = targets_N - first
    is_here = (here_N >= 0) & (here_N < columns)
    here_N = here_N.masked_fill(~is_here, ELSEWHERE)
    return here_N.masked_fill(targets_N == ignore_index, IGNORED)


def part_of_rows(
    logits_NV: Tensor, columns_N: Tensor, rule: LossRule = PLAIN
) -> tuple[Tensor, ...]:
    """Each row's logsumexp over these columns, its target's logit, for label smoothing the sum.

    All are fp32 (fp64 for fp64 logits) and of scaled and capped logits. The logit is zero if the
    target is not here; the numbers of ignored rows mean nothing.

    Args:
        columns_N: targets as ``columns_here`` returns them.
    """
    at_N = rule.applied(logits_NV.gather(1, columns_N.clamp(min=0)[:, None]).squeeze(1))
    at_N = at_N.masked_fill(columns_N < 0, 0)
    if not has_kernel(logits_NV):
        logits_NV = rule.applied(logits_NV)
        sums = (logits_NV.sum(1),) if rule.label_smoothing else ()
        return logits_NV.logsumexp(1), at_N, *sums
    from moe_graphs.kernels.cross_entropy import triton_kernels as kernels

    if rule.is_plain:
        return kernels.cross_entropy_rows(logits_NV, columns_N, IGNORED)[1], at_N
    given = logits_NV, columns_N, IGNORED, rule.numbers(logits_NV.shape[1])
    _, logsumexp_N, sums_N = kernels.cross_entropy_rows_by_rule(*given)
    return logsumexp_N, at_N, *((sums_N,) if rule.label_smoothing else ())


def losses_of_ranks(
    all_RKN: Tensor,
    targets_N: Tensor,
    columns: int,
    ignore_index: int,
    rule: LossRule = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Losses and logsumexp of rows from what every rank knows of them (``part_of_rows``).

    Rows whose target is outside of the vocabulary are NaN.
    """
    logsumexp_N, at_target_N = all_RKN[:, 0].logsumexp(0), all_RKN[:, 1].sum(0)
    unknown_N = (targets_N < 0) | (targets_N >= columns)
    logsumexp_N = logsumexp_N.masked_fill(unknown_N, float("nan"))
    mean_N = all_RKN[:, 2].sum(0) / columns if rule.label_smoothing else None
    losses_N = rule.row_losses(logsumexp_N - at_target_N, logsumexp_N, mean_N)
    return losses_N.masked_fill(targets_N == ignore_index, 0), logsumexp_N


def gradient_of_part(
    logits_NV: Tensor,
    columns_N: Tensor,
    logsumexp_N: Tensor,
    grad: Tensor,
    *,
    in_place: bool = False,
    rule: LossRule = PLAIN,
    columns: int | None = None,
) -> Tensor:
    """The gradient of the logits that are here, in their dtype.

    Args:
        logsumexp_N: over the columns of all ranks.
        grad: ``[N]`` or 0-dim, of the rows' losses.
        in_place: whether the logits may be overwritten, if that saves memory.
        columns: number of columns of all ranks (default: the logits that are here are all).
    """
    columns = columns or logits_NV.shape[1]
    if has_kernel(logits_NV):
        from moe_graphs.kernels.cross_entropy import triton_kernels as kernels

        numbers = None if rule.is_plain else rule.numbers(columns)
        given = (logits_NV, columns_N, logsumexp_N, grad, None, IGNORED, True, numbers)
        if not in_place:
            return kernels.cross_entropy_backward(*given)
        kernels.cross_entropy_backward_in_place(*given)
        return logits_NV
    applied_NV = rule.applied(logits_NV)
    grad_NV = (applied_NV - logsumexp_N[:, None]).exp_()
    if rule.z_loss:
        grad_NV *= 1 + 2 * rule.z_loss * logsumexp_N[:, None]
    is_here_N1 = (columns_N >= 0)[:, None].to(grad_NV.dtype) * (1 - rule.label_smoothing)
    grad_NV.scatter_add_(1, columns_N.clamp(min=0)[:, None], -is_here_N1)
    if rule.label_smoothing:
        grad_NV -= rule.label_smoothing / columns
    grad_NV *= rule.slope(applied_NV) * (grad[:, None] if grad.dim() else grad)
    return grad_NV.masked_fill_((columns_N == IGNORED)[:, None], 0).to(logits_NV.dtype)
