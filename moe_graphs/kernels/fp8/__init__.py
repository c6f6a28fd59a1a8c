"""Rows and weights as blocks of FP8, as DeepSeek-V3 trains, and their grouped GEMM.

Codes are e4m3. A block of rows (activations and gradients) is 128 numbers of a row, a block of
weights is 128x128, and each has a scale in fp32. Rows are quantized by the kernels that make them;
on the CPU by the op itself with `reference.quantized_rows` behind it, to the same bits.

On CUDA the kernels need a Hopper GPU. Nothing here is differentiable.

Shapes: R rows, K columns, E experts, M and N the two sides of a weight, T tokens, D model, F ffn, G
blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.fp8 import reference
from moe_graphs.kernels.fp8.reference import BLOCK
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.permute import spread_rows
from moe_graphs.kernels.routed_experts import weighted_swiglu_backward
from moe_graphs.kernels.swiglu import NO_CLAMP, swiglu_forward


class Rows(NamedTuple):
    """Rows in FP8: codes ``[R, K]``, and scales ``[G, R]``, which lie block by block."""

    codes: Tensor
    scales: Tensor


class Weights(NamedTuple):
    """A weight in FP8 for ``rows @ w``: codes ``[E, N, K]``, scales ``[E, N / 128, K / 128]``."""

    codes: Tensor
    scales: Tensor


def quantized(x_RK: Tensor, powers: bool = False) -> Rows:
    """Rows of any float dtype in FP8.

    Args:
        powers: scales are powers of two.
    """
    if has_kernel(x_RK):
        from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

        return Rows(*fp8_triton.fp8_quantize(x_RK, powers))
    return Rows(*reference.quantized_rows(x_RK, powers))


def spread_quantized(
    source_TD: Tensor,
    order_R: Tensor,
    inverse_TK: Tensor,
    has_gaps: bool,
    *,
    with_rows: bool,
    powers: bool = False,
) -> tuple[Rows, Tensor]:
    """Every token's vector in its rows, in FP8, and the rows themselves, or an empty tensor."""
    if has_kernel(source_TD):
        from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

        given = source_TD, inverse_TK, order_R.numel(), has_gaps, with_rows, powers
        codes, scales, rows_RD = fp8_triton.fp8_spread(*given)
        return Rows(codes, scales), rows_RD
    rows_RD = spread_rows(source_TD, order_R, inverse_TK, None, has_gaps)
    return quantized(rows_RD, powers), rows_RD


def swiglu_quantized(x_R2F: Tensor, powers: bool = False) -> Rows:
    """The result of ``swiglu`` in FP8."""
    if has_kernel(x_R2F):
        from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

        return Rows(*fp8_triton.fp8_swiglu(x_R2F, powers))
    return quantized(swiglu_forward(x_R2F, NO_CLAMP), powers)


def weighted_swiglu_backward_quantized(
    x_R2F: Tensor,
    grad_RF: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    inverse_TK: Tensor,
    has_gaps: bool,
    *,
    with_result: bool,
    powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Results of ``weighted_swiglu_backward`` for SwiGLU, and the gradient of ``x_R2F`` in FP8.

    Without ``with_result`` that gradient in its own dtype and the result may be empty.
    """
    if has_kernel(x_R2F):
        from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

        given = x_R2F, grad_RF, weights_TK, order_R, has_gaps, with_result, powers
        *made, codes, scales = fp8_triton.fp8_weighted_swiglu_backward(*given)
        return *made, Rows(codes, scales)
    made = weighted_swiglu_backward(
        x_R2F, grad_RF, weights_TK, order_R, inverse_TK, has_gaps, NO_CLAMP, with_result=with_result
    )
    return *made, quantized(made[0], powers)


def quantized_weights(w_EKN: Tensor, powers: bool = False) -> Weights:
    """A weight, or the transpose of a contiguous one, in FP8; for a gradient give ``w.mT``.

    Blocks of a weight and of its transpose are the same, so both have the same codes.
    """
    flip = w_EKN.is_contiguous()
    w_EMN = w_EKN if flip else w_EKN.mT.contiguous()
    if has_kernel(w_EMN):
        from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

        lying, flipped = _pairs(fp8_triton.fp8_weights(w_EMN, not flip, flip, powers))
        return flipped if flip else lying
    return Weights(*reference.quantized_weights(w_EMN, flip, powers))


def quantized_twice(w_EKN: Tensor, powers: bool = False) -> tuple[Weights, Weights]:
    """A weight in FP8, and its transpose, in one pass over it."""
    flip = w_EKN.is_contiguous()
    w_EMN = w_EKN if flip else w_EKN.mT.contiguous()
    if has_kernel(w_EMN):
        from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

        lying, flipped = _pairs(fp8_triton.fp8_weights(w_EMN, True, True, powers))
        return (flipped, lying) if flip else (lying, flipped)
    return quantized_weights(w_EKN, powers), quantized_weights(w_EKN.mT, powers)


def _pairs(made: tuple[Tensor, ...]) -> tuple[Weights, Weights]:
    return Weights(*made[:2]), Weights(*made[2:])


def product(rows: Rows, weights: Weights, offsets_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of each expert times its weights ``[K, N]``, in ``dtype``; never syncs.

    Every block of K is summed apart, scaled and added in fp32. Rows past the last end are
    undefined.
    """
    return grouped_gemm_fp8(*rows, *weights, offsets_E, dtype)


@define_op()
def grouped_gemm_fp8(
    codes_RK: Tensor,
    scales_GR: Tensor,
    w_codes_ENK: Tensor,
    w_scales: Tensor,
    offsets_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return reference.grouped_gemm(codes_RK, scales_GR, w_codes_ENK, w_scales, offsets_E, dtype)


@torch.library.impl("moe_graphs::grouped_gemm_fp8", "cuda")
def _(codes_RK, scales_GR, w_codes_ENK, w_scales, offsets_E, dtype):
    from moe_graphs.kernels.gemm.launch import matmul_rows_fp8

    return matmul_rows_fp8(codes_RK, scales_GR, w_codes_ENK, w_scales, offsets_E, dtype)


@torch.library.register_fake("moe_graphs::grouped_gemm_fp8")
def _(codes_RK, scales_GR, w_codes_ENK, w_scales, offsets_E, dtype):
    return codes_RK.new_empty(codes_RK.shape[0], w_codes_ENK.shape[1], dtype=dtype)


def check_sizes(**sizes: int) -> None:
    """Check that blocks divide sizes of a layer.

    Raises:
        ValueError: with the name of a size that they do not divide.
    """
    for name, size in sizes.items():
        if size % BLOCK:
            raise ValueError(
                f"precision='fp8' has blocks of {BLOCK}x{BLOCK}, so {BLOCK} must divide {name}, "
                f"got {size}: choose another size, or leave the experts in their weights' precision"
            )
