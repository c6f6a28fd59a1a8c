"""Experts as functions of rows, between ``dispatch`` and ``combine``, and modules called on rows.

Shapes: X tokens as a dispatcher has them, D model, R rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_graphs.dispatch import Dispatched
from moe_graphs.kernels import RowOrder, permute, unpermute


def rows_of(dispatched: Dispatched) -> Tensor:
    """The rows that the experts compute on, ``[R, D]``."""
    tokens_XD = dispatched.tokens_XD
    return tokens_XD if dispatched.is_sorted else permute(tokens_XD, dispatched.order)


def sums_of(dispatched: Dispatched, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The sums of experts that map rows and their ends to rows by ``run``."""
    rows_RD = run(rows_of(dispatched), dispatched.order.offsets_E)
    return unpermute(rows_RD, dispatched.order, dispatched.weights_XK)


def unchanged(dispatched: Dispatched) -> Tensor:
    """The sums of experts that leave rows as they are."""
    return sums_of(dispatched, lambda rows_RD, offsets_E: rows_RD)


def run_on_rows(experts: nn.Module, rows_RD: Tensor, ends_e: Tensor) -> Tensor:
    """The outputs of ``experts`` for rows that are sorted by expert."""
    row_R = torch.arange(rows_RD.shape[0], device=rows_RD.device)
    weights_R1 = torch.ones(len(row_R), 1, device=rows_RD.device)
    order = RowOrder(row_R, row_R, ends_e)
    return experts(rows_RD, order, weights_R1, is_sorted=True)
