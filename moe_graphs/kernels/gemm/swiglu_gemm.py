"""The experts' two grouped GEMMs with the SwiGLU between them in their epilogues.

Forward, the first GEMM writes gate, up and their product; backward, the gradient of the second
GEMM's rows becomes the gradients of gate and up before it is written. Where `variants` has no such
kernel (other GPUs, few long tiles) the same ops run a GEMM and `swiglu`, with the same bits.

Two nodes of autograd, as the two GEMMs have: so weights may have their backward apart. The second
one's gradient is that of gate and up; their product has none.

Shapes: R routed rows, D model, F ffn, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_triton
from moe_graphs.kernels.gemm import reference
from moe_graphs.kernels.gemm.op import (
    check_operands,
    grouped_gemm_dgrad,
    grouped_gemm_forward,
    grouped_gemm_wgrad,
    matmul_rows,
    to_autocast,
)
from moe_graphs.kernels.ops import define_op, wants_gradient
from moe_graphs.kernels.swiglu import swiglu_backward, swiglu_forward


def swiglu_gemms(rows_RD: Tensor, w1_ED2F: Tensor, w2_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """``grouped_gemm(swiglu(grouped_gemm(rows, w1, offsets)), w2, offsets)``; never syncs.

    Args:
        w1_ED2F: gate and up side by side. Both weights may be transposed views, as for
            ``grouped_gemm``, and are cast like its.
        offsets_E: int32 cumulative ends. Behind the last one anything may come out, in the rows and
            in their gradient.

    Raises:
        ValueError: shapes or dtypes do not fit, or the GPU path does not take them.
    """
    rows_RD, w1_ED2F = to_autocast(rows_RD, w1_ED2F)
    check_operands(rows_RD, w1_ED2F, offsets_E)
    _, w2_EFD = to_autocast(rows_RD, w2_EFD)
    if w2_EFD.dim() != 3 or w1_ED2F.shape[2] != 2 * w2_EFD.shape[1]:
        raise ValueError(
            f"swiglu_gemms wants w1 [E, D, 2F] and w2 [E, F, D], got {tuple(w1_ED2F.shape)} and "
            f"{tuple(w2_EFD.shape)}"
        )
    gate_up_R2F, h_RF = _SwiGLUGemm.apply(rows_RD, w1_ED2F, offsets_E)
    check_operands(h_RF, w2_EFD, offsets_E)
    return _GemmOfSwiGLU.apply(gate_up_R2F, h_RF, w2_EFD, offsets_E)


class _SwiGLUGemm(torch.autograd.Function):
    """Rows to gate and up, and to their product, which gradients do not flow through."""

    @staticmethod
    def forward(ctx, rows_RD, w1_ED2F, offsets_E):
        needs_rows, needs_w = ctx.needs_input_grad[:2]
        kept = rows_RD if needs_w else None, w1_ED2F if needs_rows else None
        ctx.save_for_backward(*kept, offsets_E)
        ctx.is_transposed = w1_ED2F.transpose(1, 2).is_contiguous()
        gate_up_R2F, h_RF = swiglu_gemm_forward(rows_RD, w1_ED2F, offsets_E)
        ctx.mark_non_differentiable(h_RF)
        ctx.set_materialize_grads(False)  # of the product: it would be zeros
        return gate_up_R2F, h_RF

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_R2F, _):
        rows_RD, w1_ED2F, offsets_E = ctx.saved_tensors
        grad_rows = grad_w = None
        if wants_gradient(ctx, 0):
            grad_rows = grouped_gemm_dgrad(grad_R2F, w1_ED2F, offsets_E, False)
        if wants_gradient(ctx, 1):
            grad_w = _weight_gradient(ctx, rows_RD, grad_R2F, offsets_E)
        return grad_rows, grad_w, None


class _GemmOfSwiGLU(torch.autograd.Function):
    """The product of gate and up to rows; backward from rows to gate and up."""

    @staticmethod
    def forward(ctx, gate_up_R2F, h_RF, w2_EFD, offsets_E):
        needs_rows, _, needs_w, _ = ctx.needs_input_grad
        kept = gate_up_R2F if needs_rows else None, h_RF if needs_w else None
        ctx.save_for_backward(*kept, w2_EFD if needs_rows else None, offsets_E)
        ctx.is_transposed = w2_EFD.transpose(1, 2).is_contiguous()
        return grouped_gemm_forward(h_RF, w2_EFD, offsets_E, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):
        gate_up_R2F, h_RF, w2_EFD, offsets_E = ctx.saved_tensors
        grad_gate_up = grad_w = None
        if wants_gradient(ctx, 0):
            grad_gate_up = swiglu_gemm_dgrad(grad_RD, w2_EFD, gate_up_R2F, offsets_E)
        if wants_gradient(ctx, 2):
            grad_w = _weight_gradient(ctx, h_RF, grad_RD, offsets_E)
        return grad_gate_up, None, grad_w, None


def _weight_gradient(ctx, x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Laid out like the weights, so that no copy follows."""
    if ctx.is_transposed:
        return grouped_gemm_wgrad(grad_RN, x_RK, offsets_E).transpose(1, 2)
    return grouped_gemm_wgrad(x_RK, grad_RN, offsets_E)


@define_op()
def swiglu_gemm_forward(
    rows_RD: Tensor, w1_ED2F: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    gate_up_R2F = reference.grouped_gemm(rows_RD, w1_ED2F, offsets_E)
    return gate_up_R2F, swiglu_forward(gate_up_R2F)


@define_op()
def swiglu_gemm_dgrad(
    grad_RD: Tensor, w2_EFD: Tensor, gate_up_R2F: Tensor, offsets_E: Tensor
) -> Tensor:
    grad_RF = reference.grouped_gemm_dgrad(grad_RD, w2_EFD, offsets_E)
    return swiglu_backward(gate_up_R2F, grad_RF)


@torch.library.impl("moe_graphs::swiglu_gemm_forward", "cuda")
def _(rows_RD, w1_ED2F, offsets_E):
    if has_triton():
        from moe_graphs.kernels.gemm import launch_swiglu

        if variant := launch_swiglu.forward_variant(rows_RD, w1_ED2F):
            return launch_swiglu.swiglu_rows(rows_RD, w1_ED2F, offsets_E, variant)
    gate_up_R2F = matmul_rows(rows_RD, w1_ED2F, offsets_E, False)
    return gate_up_R2F, swiglu_forward(gate_up_R2F)


@torch.library.impl("moe_graphs::swiglu_gemm_dgrad", "cuda")
def _(grad_RD, w2_EFD, gate_up_R2F, offsets_E):
    w2_EDF = w2_EFD.transpose(1, 2)
    if has_triton():
        from moe_graphs.kernels.gemm import launch_swiglu

        if variant := launch_swiglu.backward_variant(grad_RD, w2_EDF):
            return launch_swiglu.swiglu_back_rows(grad_RD, w2_EDF, gate_up_R2F, offsets_E, variant)
    grad_RF = matmul_rows(grad_RD, w2_EDF, offsets_E, False)
    return swiglu_backward(gate_up_R2F, grad_RF)


@torch.library.register_fake("moe_graphs::swiglu_gemm_forward")
def _(rows_RD, w1_ED2F, offsets_E):
    rows, columns = rows_RD.shape[0], w1_ED2F.shape[2]
    return rows_RD.new_empty(rows, columns), rows_RD.new_empty(rows, columns // 2)


@torch.library.register_fake("moe_graphs::swiglu_gemm_dgrad")
def _(grad_RD, w2_EFD, gate_up_R2F, offsets_E):
    return gate_up_R2F.new_empty(gate_up_R2F.shape)
