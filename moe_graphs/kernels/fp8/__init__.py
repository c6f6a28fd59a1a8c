"""Rows and weights as blocks of FP8, as DeepSeek-V3 trains, and their grouped GEMM.

Codes are e4m3. A block of rows (activations and gradients) is 128 numbers of a row, a block of
weights is 128x128, and each has a scale in fp32. A product that adds up rows takes their columns: a
block is 128x128 there, too, and no block has rows of two experts. Rows and columns are quantized by
the kernels that make them; on the CPU by the op itself with `reference.quantized_rows` behind it,
to the same bits.

On CUDA the kernels need a Hopper GPU. Nothing here is differentiable.

Shapes: R rows, K columns, E experts, M and N the two sides of a weight, T tokens, D model, F ffn, G
blocks of a row, P rows of experts that each begin at a multiple of 128.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from moe_graphs import weight_codes
from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.fp8 import reference
from moe_graphs.kernels.fp8.few_rows import tell_if_few
from moe_graphs.kernels.fp8.reference import BLOCK
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.permute import spread_rows
from moe_graphs.kernels.routed_experts import weighted_swiglu_backward
from moe_graphs.kernels.swiglu import NO_CLAMP, swiglu_forward


class Options(TypedDict):
    """Options of ``routed_experts_fp8`` and ``linear_fp8``."""

    weight_gradients: bool
    powers: bool


# By the name of a layer's precision.
PRECISIONS: dict[str, Options] = {
    "fp8": {"weight_gradients": True, "powers": False},
    "fp8_powers": {"weight_gradients": True, "powers": True},
    "fp8_rows": {"weight_gradients": False, "powers": False},
}


class Rows(NamedTuple):
    """Rows in FP8: codes ``[R, K]``, and scales ``[G, R]``, which lie block by block."""

    codes: Tensor
    scales: Tensor


class Columns(NamedTuple):
    """Transposed rows in FP8: codes ``[K, P]``, scales ``[K / 128, P / 128]``.

    An expert's rows are filled up with zeros to a multiple of 128.
    """

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

        given = x_R2F, grad_RF, weights_TK, order_R, has_gaps
        made = fp8_triton.fp8_weighted_swiglu_backward(
            *given, "values" if with_result else "none", powers
        )
        return *made[:3], Rows(*made[3:5])
    made = weighted_swiglu_backward(
        x_R2F, grad_RF, weights_TK, order_R, inverse_TK, has_gaps, NO_CLAMP, with_result=with_result
    )
    return *made, quantized(made[0], powers)


def weighted_swiglu_backward_all_quantized(
    x_R2F: Tensor,
    grad_RF: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    inverse_TK: Tensor,
    has_gaps: bool,
    *,
    powers: bool = False,
) -> tuple[Tensor, Rows, Rows]:
    """The gradient of ``weights_TK``, that of ``x_R2F`` in FP8, and the weighted result in FP8."""
    if has_kernel(x_R2F):
        from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

        given = x_R2F, grad_RF, weights_TK, order_R, has_gaps, "codes", powers
        made = fp8_triton.fp8_weighted_swiglu_backward(*given)
        return made[1], Rows(*made[3:5]), Rows(*made[5:])
    grad_R2F, grad_TK, weighted_RF = weighted_swiglu_backward(
        x_R2F, grad_RF, weights_TK, order_R, inverse_TK, has_gaps, NO_CLAMP, with_result=True
    )
    return grad_TK, quantized(grad_R2F, powers), quantized(weighted_RF, powers)


def columns_of(rows: Rows, offsets_E: Tensor) -> Columns:
    """The columns of sorted rows, whose scales are powers of two."""
    made = fp8_columns(*rows, None, offsets_E, rows.codes.shape[0], 1, False)
    return Columns(*made[:2])


def spread_columns(
    tokens: Rows, order_R: Tensor, inverse_TK: Tensor, offsets_E: Tensor, *, with_rows: bool
) -> tuple[Columns, Rows]:
    """The columns of every token's vector in its rows, and these rows, or empty ones.

    The scales of the tokens are powers of two.
    """
    top_k = inverse_TK.shape[1]
    made = fp8_columns(*tokens, order_R, offsets_E, order_R.numel(), top_k, with_rows)
    return Columns(*made[:2]), Rows(*made[2:])


@define_op()
def fp8_columns(
    codes_XK: Tensor,
    scales_GX: Tensor,
    order_R: Tensor | None,
    offsets_E: Tensor,
    rows: int,
    top_k: int,
    spread: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Columns of X rows in FP8, or of tokens in the order of their pairs; `spread` tokens, too.

    Rows past the last end and pairs that are missing have zeros, or on CUDA what lies there.
    """
    codes_RK, scales_GR = codes_XK, scales_GX
    if order_R is not None:
        live = torch.arange(rows, device=order_R.device) < offsets_E[-1]
        missing_R = ~live | (order_R < 0)
        source_R = order_R.masked_fill(missing_R, 0).long() // top_k
        codes_RK = codes_XK.view(torch.uint8)[source_R].masked_fill_(missing_R.unsqueeze(1), 0)
        codes_RK = codes_RK.view(codes_XK.dtype)
        scales_GR = scales_GX[:, source_R].masked_fill_(missing_R, 0)
    made = reference.columns(codes_RK, scales_GR, offsets_E)
    return *made, *((codes_RK, scales_GR) if spread else _no_rows(codes_XK, scales_GX))


@torch.library.impl("moe_graphs::fp8_columns", "cuda")
def _(codes_XK, scales_GX, order_R, offsets_E, rows, top_k, spread):
    from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton

    made = _columns_like(codes_XK, scales_GX, offsets_E, rows, spread)
    given = codes_XK, scales_GX, order_R, offsets_E, rows, top_k, spread
    fp8_triton.columns(*given, made)
    return made


@torch.library.register_fake("moe_graphs::fp8_columns")
def _(codes_XK, scales_GX, order_R, offsets_E, rows, top_k, spread):
    return _columns_like(codes_XK, scales_GX, offsets_E, rows, spread)


def _columns_like(
    codes_XK: Tensor, scales_GX: Tensor, offsets_E: Tensor, rows: int, spread: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    K, P = codes_XK.shape[1], reference.padded_rows(rows, offsets_E.shape[0])
    codes, scales = codes_XK.new_empty(K, P), scales_GX.new_empty(K // BLOCK, P // BLOCK)
    if not spread:
        return codes, scales, *_no_rows(codes_XK, scales_GX)
    return codes, scales, codes_XK.new_empty(rows, K), scales_GX.new_empty(K // BLOCK, rows)


def _no_rows(codes_XK: Tensor, scales_GX: Tensor) -> tuple[Tensor, Tensor]:
    K = codes_XK.shape[1]
    return codes_XK.new_empty(0, K), scales_GX.new_empty(K // BLOCK, 0)


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
    """A weight in FP8, and its transpose, in one pass over it.

    Within ``unchanged_weights()`` they are made once.
    """
    return weight_codes.once(w_EKN, lambda: _both(w_EKN, powers), powers)


def _both(w_EKN: Tensor, powers: bool) -> tuple[Weights, Weights]:
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


def gradient_of_weights(
    x: Columns, grad: Columns, offsets_E: Tensor, rows: int, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """The columns of x times those of the gradient, ``[E, K, N]`` in ``dtype``; never syncs.

    Every block of 128 rows is summed apart, scaled and added in fp32.

    Args:
        rows: R.
        transposed: the result is the transpose of a contiguous one.
    """
    if transposed:
        return grouped_gemm_fp8_wgrad(*grad, *x, offsets_E, rows, dtype).mT
    return grouped_gemm_fp8_wgrad(*x, *grad, offsets_E, rows, dtype)


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


@define_op()
def grouped_gemm_fp8_wgrad(
    codes_MP: Tensor,
    scales_x: Tensor,
    codes_NP: Tensor,
    scales_dy: Tensor,
    offsets_E: Tensor,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    return reference.grouped_gemm_wgrad(codes_MP, scales_x, codes_NP, scales_dy, offsets_E, dtype)


@torch.library.impl("moe_graphs::grouped_gemm_fp8_wgrad", "cuda")
def _(codes_MP, scales_x, codes_NP, scales_dy, offsets_E, rows, dtype):
    from moe_graphs.kernels.gemm.launch import matmul_weights_fp8

    return matmul_weights_fp8(codes_MP, scales_x, codes_NP, scales_dy, offsets_E, rows, dtype)


@torch.library.register_fake("moe_graphs::grouped_gemm_fp8_wgrad")
def _(codes_MP, scales_x, codes_NP, scales_dy, offsets_E, rows, dtype):
    shape = offsets_E.shape[0], codes_MP.shape[0], codes_NP.shape[0]
    return codes_MP.new_empty(shape, dtype=dtype)


def check_sizes(**sizes: int) -> None:
    """Check that blocks divide sizes of a layer.

    Raises:
        ValueError: with the name of a size that they do not divide.
    """
    for name, size in sizes.items():
        if size % BLOCK:
            raise ValueError(
                f"precision='fp8' has blocks of {BLOCK}x{BLOCK}, so {BLOCK} must divide {name}, "
                f"got {size}: choose another size, or leave it in its weights' precision"
            )


def rows_for_products(x: Tensor, rows: int, experts: int) -> Tensor:
    """Rows as products in FP8 take them: cast under autocast. Few rows on CUDA are told.

    Args:
        x: rows, or the tokens that rows are copies of.
        rows, experts: numbers of the rows of products, and of the weights that share them.

    Raises:
        ValueError: they are on CUDA in another dtype than bf16 and fp16.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.is_cuda and x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"precision='fp8' takes tokens of bfloat16 or float16 on CUDA, got {x.dtype}: run the "
            f'model under torch.autocast("cuda", torch.bfloat16, cache_enabled=False)'
        )
    if x.is_cuda and not torch.compiler.is_compiling():
        tell_if_few(rows, experts)
    return x
