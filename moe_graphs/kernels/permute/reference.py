"""Moving tokens into expert-sorted rows and back in plain torch: what the kernels are held against.

The three moves of ``permute_triton``, not differentiable. Rows of a gather are found by the order,
those of a sum by its inverse. With gaps, -1 marks a row without a pair and a pair without a row.

Shapes: T tokens, D model, K top-k, R rows (T*K without gaps).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_graphs.kernels.precision import accumulation_dtype, rounded
from moe_graphs.kernels.row_order import token_of


def spread_rows(
    source_TD: Tensor, order_R: Tensor, top_k: int, weights_TK: Tensor | None, has_gaps: bool
) -> Tensor:
    """``rows_RD``: every token's vector, times its weights, in its K rows; zero in gaps."""
    rows_RD = _gather(source_TD, token_of(order_R, top_k), order_R, has_gaps)
    if weights_TK is not None:
        # In place, the product is taken in fp32 and rounded once, without an fp32 [R, D].
        rows_RD.mul_(_gather(weights_TK.reshape(-1, 1), order_R, order_R, has_gaps))
    return rounded(rows_RD, source_TD.dtype)


def collect_rows(
    rows_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, has_gaps: bool
) -> Tensor:
    """``sum_k weights[t, k] * rows[inverse[t, k]]`` in fp32; one [T, D] temporary per k."""
    if weights_TK is None and inverse_TK.shape[1] == 1:
        return _gather(rows_RD, inverse_TK[:, 0], inverse_TK[:, 0], has_gaps)
    dtype = accumulation_dtype(rows_RD)
    total_TD = rows_RD.new_zeros(inverse_TK.shape[0], rows_RD.shape[1], dtype=dtype)
    for k, index_T in enumerate(inverse_TK.t().contiguous()):
        rows_TD = _gather(rows_RD, index_T, index_T, has_gaps)
        if weights_TK is None:
            total_TD.add_(rows_TD)
        else:
            total_TD.addcmul_(rows_TD, weights_TK[:, k : k + 1])
    return rounded(total_TD, rows_RD.dtype)


def dot_rows(rows_RD: Tensor, inverse_TK: Tensor, other_TD: Tensor, has_gaps: bool) -> Tensor:
    """``<rows[inverse[t, k]], other[t]>`` in fp32, ``[T, K]``."""
    other_TD = other_TD.to(accumulation_dtype(other_TD))
    dots = []
    for index_T in inverse_TK.t().contiguous():
        rows_TD = _gather(rows_RD, index_T, index_T, has_gaps)
        dots.append((other_TD * rows_TD).sum(1))
    return torch.stack(dots, 1)


def _gather(source: Tensor, index_R: Tensor, mark_R: Tensor, has_gaps: bool) -> Tensor:
    """``source[index]``; with gaps, zero where ``mark`` is negative."""
    if not has_gaps:
        return source.index_select(0, index_R)
    rows = source.index_select(0, index_R.clamp(min=0))
    return rows.masked_fill_((mark_R < 0).unsqueeze(1), 0)
