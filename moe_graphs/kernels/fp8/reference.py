"""Blocks in FP8 in plain torch: what the kernels are held against, and the path of the CPU.

A block's scale is its largest magnitude over 448, the largest number of e4m3. All steps are exact
or rounded as IEEE says, so every device has the same bits. NaN and infinity make a block's product
NaN; which of its codes are NaN is left open.

Shapes: R rows, K columns, E experts, M and N the two sides of a weight, G blocks along K, P rows of
experts that each begin at a multiple of 128.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from moe_graphs.kernels.gemm.reference import groups

CODE = torch.float8_e4m3fn
BLOCK = 128
LARGEST = 448.0  # of e4m3
TINY = 1e-30  # no block counts as smaller, so that the factor of a block of zeros is finite
SMALLEST = 2.0**-120  # smaller than the scale of a block of zeros; that of a missing row is 0


def factors(largest: Tensor, powers: bool) -> tuple[Tensor, Tensor]:
    """The factor of a block's numbers and the scale of its codes, from its largest magnitude.

    Args:
        powers: the scale is a power of two, the least one that keeps codes in range.
    """
    largest = largest.clamp(min=TINY)
    if not powers:
        factor = largest.reciprocal() * LARGEST  # as torch divides a number by a tensor
        return factor, factor.reciprocal()
    bits = (largest / LARGEST).view(torch.int32)
    scale = (bits + 0x7FFFFF).bitwise_and(0x7F800000).view(torch.float32)
    return scale.reciprocal(), scale


def quantized_rows(x_RK: Tensor, powers: bool) -> tuple[Tensor, Tensor]:
    """Codes ``[R, K]`` of blocks of 128 along rows, and their scales ``[G, R]``."""
    rows, columns = x_RK.shape
    blocks = x_RK.float().reshape(rows, columns // BLOCK, BLOCK)
    factor, scales = factors(blocks.abs().amax(-1), powers)
    codes = (blocks * factor.unsqueeze(-1)).to(CODE).view(rows, columns)
    return codes, scales.t().contiguous()


def padded_rows(rows: int, experts: int) -> int:
    """P, which is enough for every division of the rows among the experts."""
    return BLOCK * (-(-rows // BLOCK) + experts)


def columns(codes_RK: Tensor, scales_GR: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of transposed rows ``[K, P]``, and scales ``[K / 128, P / 128]`` of 128x128 blocks.

    An expert's rows are filled up with zeros to a multiple of 128, and so are all of them to P. The
    scales of rows are powers of two. That of a block is the largest of its rows', so a code is at
    most that of its row, and rounded only where it is too small for e4m3.
    """
    (R, K), experts = codes_RK.shape, offsets_E.numel()
    P, start = padded_rows(R, experts), 0
    row_codes_PK, row_scales_GP = torch.zeros(P, K), torch.zeros(K // BLOCK, P)
    for _, rows in groups(offsets_E):
        own = slice(start, start + rows.stop - rows.start)
        row_codes_PK[own] = codes_RK[rows].float()
        row_scales_GP[:, own] = scales_GR[:, rows]
        start += -(-(rows.stop - rows.start) // BLOCK) * BLOCK
    of_rows = row_scales_GP.view(K // BLOCK, P // BLOCK, BLOCK)
    scales = of_rows.amax(2).clamp(min=SMALLEST)
    exponents = ((bits.view(torch.int32) >> 23) for bits in (of_rows, scales.unsqueeze(2)))
    smaller = (127 + operator.sub(*exponents)).clamp(min=0) << 23
    smaller_PG = smaller.view(torch.float32).view(K // BLOCK, P).t()
    values = row_codes_PK * smaller_PG.repeat_interleave(BLOCK, 1)
    return values.t().contiguous().to(CODE), scales


def quantized_weights(w_EMN: Tensor, flip: bool, powers: bool) -> tuple[Tensor, Tensor]:
    """Codes of blocks of 128x128 and their scales; with ``flip`` both are transposed.

    Returns:
        ``[E, M, N]`` and ``[E, M / 128, N / 128]``, or ``[E, N, M]`` and ``[E, N / 128, M / 128]``.
    """
    experts, M, N = w_EMN.shape
    codes = torch.empty((experts, N, M) if flip else (experts, M, N), dtype=CODE)
    sides = (N // BLOCK, M // BLOCK) if flip else (M // BLOCK, N // BLOCK)
    scales = torch.empty((experts, *sides))
    for w_MN, codes_XY, scales_XY in zip(w_EMN, codes, scales, strict=True):
        blocks = w_MN.float().view(M // BLOCK, BLOCK, N // BLOCK, BLOCK)
        factor, found = factors(blocks.abs().amax((1, 3)), powers)
        whole = (blocks * factor[:, None, :, None]).view(M, N)
        codes_XY.copy_((whole.t() if flip else whole).to(CODE))
        scales_XY.copy_(found.t() if flip else found)
    return codes, scales


def grouped_gemm_wgrad(
    codes_MP: Tensor,
    scales_x: Tensor,
    codes_NP: Tensor,
    scales_dy: Tensor,
    offsets_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """``[E, M, N]``, the columns of x times those of dy; every 128 rows are scaled, summed in fp32.

    Zero for an expert without rows.
    """
    M, N = codes_MP.shape[0], codes_NP.shape[0]
    out_EMN, block = torch.zeros(offsets_E.numel(), M, N, dtype=dtype), 0
    scales_MG = scales_x.repeat_interleave(BLOCK, 0)
    scales_NG = scales_dy.repeat_interleave(BLOCK, 0)
    for expert, rows in groups(offsets_E):
        total_MN, part_MN = torch.zeros(M, N), torch.empty(M, N)
        for _ in range(rows.start, rows.stop, BLOCK):
            own = slice(block * BLOCK, (block + 1) * BLOCK)
            # With `out`, since autocast would round it.
            torch.mm(codes_MP[:, own].float(), codes_NP[:, own].float().t(), out=part_MN)
            total_MN += part_MN.mul_(scales_MG[:, block, None] * scales_NG[:, block])
            block += 1
        out_EMN[expert] = total_MN.to(dtype)
    return out_EMN


def grouped_gemm(
    codes_RK: Tensor,
    scales_GR: Tensor,
    w_codes_ENK: Tensor,
    w_scales: Tensor,
    offsets_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Rows of each expert times its transposed codes; every block of K is scaled, summed in fp32.

    Rows past the last end are zero.
    """
    out_RN = torch.zeros(codes_RK.shape[0], w_codes_ENK.shape[1], dtype=dtype)
    for expert, rows in groups(offsets_E):
        total_RN = torch.zeros(rows.stop - rows.start, w_codes_ENK.shape[1])
        part_RN, w_NK = torch.empty_like(total_RN), w_codes_ENK[expert].float()
        x_RK = codes_RK[rows].float()
        for block, scale_N in enumerate(w_scales[expert].t()):
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            # With `out`, since autocast would round it.
            torch.mm(x_RK[:, columns], w_NK[:, columns].t(), out=part_RN)
            part_RN *= scales_GR[block, rows].unsqueeze(1) * scale_N.repeat_interleave(BLOCK)
            total_RN += part_RN
        out_RN[rows] = total_RN.to(dtype)
    return out_RN
