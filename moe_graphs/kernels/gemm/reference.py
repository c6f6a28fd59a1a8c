"""Grouped GEMM in plain torch: what the kernels are held against, and the path of the CPU.

A loop over the experts with sizes on the host; the ops that call it hide that from a recorder.

Shapes: R routed rows, E experts, K and N the two sides of a GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Rows ``offsets[e-1]:offsets[e]`` of ``x`` times ``w[e]``; rows past the last end are zero.

    Example: offsets ``[2, 2, 3]`` over four rows: expert 0 has rows 0 and 1, expert 1 none,
    expert 2 has row 2, and row 3 is past the end.
    """
    out_RN = x_RK.new_zeros(x_RK.shape[0], w_EKN.shape[2])
    for expert, rows in groups(offsets_E):
        torch.mm(x_RK[rows], w_EKN[expert], out=out_RN[rows])
    return out_RN


def grouped_gemm_with_lora(
    x_RK: Tensor, w_EKN: Tensor, low_Rr: Tensor, b_ErN: Tensor, offsets_E: Tensor
) -> Tensor:
    """``grouped_gemm(x, w) + grouped_gemm(low, b)`` in one sum, which is rounded once."""
    out_RN = x_RK.new_zeros(x_RK.shape[0], w_EKN.shape[2])
    for expert, rows in groups(offsets_E):
        both = torch.cat((x_RK[rows], low_Rr[rows]), 1)
        torch.mm(both, torch.cat((w_EKN[expert], b_ErN[expert])), out=out_RN[rows])
    return out_RN


def grouped_gemm_dgrad(grad_RN: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Gradient of ``grouped_gemm`` with respect to its rows, ``[R, K]``."""
    return grouped_gemm(grad_RN, w_EKN.transpose(1, 2), offsets_E)


def grouped_gemm_wgrad(x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Gradient of ``grouped_gemm`` with respect to its weights, ``[E, K, N]``.

    Zero for an expert without rows; rows past the last end take no part.
    """
    out_EKN = x_RK.new_zeros(offsets_E.shape[0], x_RK.shape[1], grad_RN.shape[1])
    for expert, rows in groups(offsets_E):
        torch.mm(x_RK[rows].t(), grad_RN[rows], out=out_EKN[expert])
    return out_EKN


def groups(offsets_E: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, each with its rows. Reads the offsets on the host."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = max(start, end)
