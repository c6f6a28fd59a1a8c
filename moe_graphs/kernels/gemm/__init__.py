"""Grouped GEMM: one matrix product per expert over expert-sorted rows, sizes on the device.

Forward, dgrad and wgrad are torch ops, so that a recorder sees each as one call with static shapes.
On CUDA they are the Triton kernels of ``gemm.launch``, which read the offsets on the device
(without Triton, ``torch._grouped_mm``); on the CPU they are the reference, which loops over the
experts with host sizes inside the op.

Shapes: R routed rows, E experts, K and N the two sides of the product.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_graphs.kernels.availability import has_triton
from moe_graphs.kernels.gemm import reference
from moe_graphs.kernels.ops import define_op, wants_gradient
from moe_graphs.kernels.precision import to_autocast

MOST_EXPERTS = 1024  # a program of the work lists looks at the sizes of all of them


def grouped_gemm(
    x_RK: Tensor,
    w_EKN: Tensor,
    offsets_E: Tensor,
    *,
    zero_tail: bool = True,
    main_grad_EKN: Tensor | None = None,
) -> Tensor:
    """Rows ``offsets[e-1]:offsets[e]`` of ``x_RK`` times ``w_EKN[e]``; never syncs.

    Under autocast both operands are cast to the autocast dtype first, visibly to autograd. On CUDA
    products of float32 have the precision of ``torch.backends.cuda.matmul.fp32_precision``, and
    take several times as long as those of bfloat16.

    Args:
        w_EKN: contiguous, or the transpose of a contiguous ``[E, N, K]``. Either is read without a
            copy, and its gradient has its layout.
        offsets_E: int32 cumulative ends on the rows' device. Empty experts are allowed, and get
            zero weight gradients.
        zero_tail: rows past the last end come out as zero, in the output and in the gradient of
            ``x_RK``. False promises that there are none: it saves a launch on CUDA.
        main_grad_EKN: float32; the backward adds the weights' gradient to it in place, in fp32,
            and ``w_EKN`` gets none through autograd. No hook of ``w_EKN`` fires then.

    Raises:
        ValueError: shapes or dtypes do not fit, or the GPU path does not take them.
    """
    x_RK, w_EKN = to_autocast(x_RK, w_EKN)
    check_operands(x_RK, w_EKN, offsets_E)
    if main_grad_EKN is not None and (
        main_grad_EKN.dtype != torch.float32 or main_grad_EKN.shape != w_EKN.shape
    ):
        raise ValueError(
            f"main_grad wants float32 {tuple(w_EKN.shape)} like w, got {main_grad_EKN.dtype} "
            f"{tuple(main_grad_EKN.shape)}"
        )
    return _GroupedGemm.apply(x_RK, w_EKN, offsets_E, zero_tail, main_grad_EKN)


def is_transposed(w_EKN: Tensor) -> bool:
    return w_EKN.transpose(1, 2).is_contiguous()


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK, w_EKN, offsets_E, zero_tail, main_grad):
        needs_x, needs_w = ctx.needs_input_grad[:2]
        # Rows are kept only for the weights' gradient, weights only for that of the rows.
        ctx.save_for_backward(x_RK if needs_w else None, w_EKN if needs_x else None, offsets_E)
        # The buffer changes between microbatches, so autograd must not check its version.
        ctx.zero_tail, ctx.main_grad = zero_tail, main_grad
        ctx.is_transposed = is_transposed(w_EKN)
        return grouped_gemm_forward(x_RK, w_EKN, offsets_E, zero_tail)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RN):
        x_RK, w_EKN, offsets_E = ctx.saved_tensors
        grad_x = grad_w = None
        if wants_gradient(ctx, 0):
            grad_x = grouped_gemm_dgrad(grad_RN, w_EKN, offsets_E, ctx.zero_tail)
        if wants_gradient(ctx, 1):
            if ctx.main_grad is not None:
                grouped_gemm_wgrad_add(x_RK, grad_RN, offsets_E, ctx.main_grad)
            else:
                grad_w = gradient_of_weights(x_RK, grad_RN, offsets_E, ctx.is_transposed)
        return grad_x, grad_w, None, None, None


def gradient_of_weights(
    x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, is_transposed: bool
) -> Tensor:
    """``[E, K, N]``, laid out like the weights, so that no copy follows."""
    if is_transposed:
        return grouped_gemm_wgrad(grad_RN, x_RK, offsets_E).transpose(1, 2)
    return grouped_gemm_wgrad(x_RK, grad_RN, offsets_E)


@define_op()
def grouped_gemm_forward(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor, zero_tail: bool) -> Tensor:
    return reference.grouped_gemm(x_RK, w_EKN, offsets_E)


@define_op()
def grouped_gemm_dgrad(
    grad_RN: Tensor, w_EKN: Tensor, offsets_E: Tensor, zero_tail: bool
) -> Tensor:
    return reference.grouped_gemm_dgrad(grad_RN, w_EKN, offsets_E)


@define_op()
def grouped_gemm_with_lora(
    x_RK: Tensor, w_EKN: Tensor, low_Rr: Tensor, b_ErN: Tensor, offsets_E: Tensor
) -> Tensor:
    return reference.grouped_gemm_with_lora(x_RK, w_EKN, low_Rr, b_ErN, offsets_E)


@define_op()
def lora_gemm(
    x_RK: Tensor, w_EKN: Tensor, a_EKr: Tensor, b_ErN: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    low_Rr = reference.grouped_gemm(x_RK, a_EKr, offsets_E)
    return reference.grouped_gemm_with_lora(x_RK, w_EKN, low_Rr, b_ErN, offsets_E), low_Rr


@define_op()
def grouped_gemm_wgrad(x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    return reference.grouped_gemm_wgrad(x_RK, grad_RN, offsets_E)


@define_op(mutates_args=("out_EKN",))
def grouped_gemm_wgrad_add(
    x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, out_EKN: Tensor
) -> None:
    out_EKN.add_(reference.grouped_gemm_wgrad(x_RK.float(), grad_RN.float(), offsets_E))


@torch.library.impl("moe_graphs::grouped_gemm_forward", "cuda")
def _(x_RK, w_EKN, offsets_E, zero_tail):
    return rows_on_gpu(x_RK, w_EKN, offsets_E, zero_tail)


@torch.library.impl("moe_graphs::grouped_gemm_dgrad", "cuda")
def _(grad_RN, w_EKN, offsets_E, zero_tail):
    return rows_on_gpu(grad_RN, w_EKN.transpose(1, 2), offsets_E, zero_tail)


@torch.library.impl("moe_graphs::grouped_gemm_with_lora", "cuda")
def _(x_RK, w_EKN, low_Rr, b_ErN, offsets_E):
    return rows_on_gpu(x_RK, w_EKN, offsets_E, False, (low_Rr, b_ErN))


@torch.library.impl("moe_graphs::lora_gemm", "cuda")
def _(x_RK, w_EKN, a_EKr, b_ErN, offsets_E):
    if not has_triton():
        low_Rr = _grouped_mm(x_RK, a_EKr, offsets_E, False)
        return rows_on_gpu(x_RK, w_EKN, offsets_E, False, (low_Rr, b_ErN)), low_Rr
    from moe_graphs.kernels.gemm import launch

    transposed = not w_EKN.is_contiguous()
    w, a, b = ((each.mT if transposed else each).contiguous() for each in (w_EKN, a_EKr, b_ErN))
    return launch.matmul_with_lora(x_RK.contiguous(), w, a, b, offsets_E, transposed=transposed)


@torch.library.impl("moe_graphs::grouped_gemm_wgrad_add", "cuda")
def _(x_RK, grad_RN, offsets_E, out_EKN):
    if not has_triton():
        out_EKN.add_(torch._grouped_mm(x_RK.t(), grad_RN.contiguous(), offs=offsets_E))
        return
    from moe_graphs.kernels.gemm.launch import matmul_weights

    x_RK, grad_RN = x_RK.contiguous(), grad_RN.contiguous()
    matmul_weights(x_RK, grad_RN, offsets_E, out=out_EKN, accumulate=True)


@torch.library.impl("moe_graphs::grouped_gemm_wgrad", "cuda")
def _(x_RK, grad_RN, offsets_E):
    if has_triton():
        from moe_graphs.kernels.gemm.launch import matmul_weights

        return matmul_weights(x_RK.contiguous(), grad_RN.contiguous(), offsets_E)
    if x_RK.shape[0] == 0:
        return x_RK.new_zeros(offsets_E.shape[0], x_RK.shape[1], grad_RN.shape[1])
    return torch._grouped_mm(x_RK.t(), grad_RN.contiguous(), offs=offsets_E)


def rows_on_gpu(
    x_RK: Tensor,
    w_EKN: Tensor,
    offsets_E: Tensor,
    zero_tail: bool,
    beside: tuple[Tensor, Tensor] | None = None,
    **part: Any,
) -> Tensor:
    """Rows times ``w_EKN``, which may be a transposed view: the kernels read either as it lies.

    Args:
        beside: rows ``[R, r]`` and matrices ``[E, r, N]``, whose product is added. Matrices that
            lie otherwise than ``w_EKN`` are copied.
        part: ``out`` and ``first`` of ``launch.matmul_rows``.
    """
    if not has_triton():
        out_RN = _grouped_mm(x_RK, w_EKN, offsets_E, zero_tail)
        return out_RN if beside is None else out_RN.add_(_grouped_mm(*beside, offsets_E, zero_tail))
    from moe_graphs.kernels.gemm import launch
    from moe_graphs.kernels.gemm.tile_scheduler import zero_tail_

    transposed = not w_EKN.is_contiguous()

    def as_they_lie(rows: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        matrices = matrices.transpose(1, 2) if transposed else matrices
        return rows.contiguous(), matrices.contiguous()

    out_RN = launch.matmul_rows(
        *as_they_lie(x_RK, w_EKN),
        offsets_E,
        transposed=transposed,
        beside=None if beside is None else as_they_lie(*beside),
        **part,
    )
    return zero_tail_(out_RN, offsets_E) if zero_tail else out_RN


def rows_of_experts(
    x_RK: Tensor,
    w_eKN: Tensor,
    offsets_E: Tensor,
    first: int,
    out_RN: Tensor,
    beside: tuple[Tensor, Tensor] | None,
) -> None:
    """The rows of experts ``first`` to ``first + e`` of a product; ``add_beside`` completes it.

    Args:
        w_eKN: the weights of these experts. On a GPU without Triton they are those of all.
        beside: as in ``rows_on_gpu``, of all experts.
    """
    end = first + len(w_eKN)
    if not x_RK.is_cuda:
        ends = offsets_E.tolist()
        rows = slice(ends[first - 1] if first else 0, ends[end - 1])
        offsets_e = offsets_E[first:end] - rows.start
        if beside is None:
            found_rN = reference.grouped_gemm(x_RK[rows], w_eKN, offsets_e)
        else:
            second = beside[0][rows], beside[1][first:end]
            found_rN = reference.grouped_gemm_with_lora(x_RK[rows], w_eKN, *second, offsets_e)
        out_RN[rows] = found_rN
    elif has_triton():
        if beside is not None:
            beside = (beside[0], beside[1][first:end]) if _adds_beside(x_RK, offsets_E) else None
        rows_on_gpu(x_RK, w_eKN, offsets_E, False, beside, out=out_RN, first=first)
    else:
        out_RN.copy_(_grouped_mm(x_RK, w_eKN, offsets_E, False))


def add_beside(out_RN: Tensor, offsets_E: Tensor, beside: tuple[Tensor, Tensor] | None) -> Tensor:
    """Adds the second product to all rows, where kernels do not add it within the first one."""
    if beside is not None and out_RN.is_cuda and not _adds_beside(beside[0], offsets_E):
        out_RN += rows_on_gpu(*beside, offsets_E, False)
    return out_RN


def _adds_beside(x: Tensor, offsets_E: Tensor) -> bool:
    if not has_triton():
        return False
    from moe_graphs.kernels.gemm.launch import rows_variant

    return rows_variant(x, len(offsets_E), x.shape[1]).adds_beside


def _grouped_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor, zero_tail: bool) -> Tensor:
    if x_RK.shape[0] == 0:
        return x_RK.new_zeros(0, w_EKN.shape[2])
    out_RN = torch._grouped_mm(x_RK.contiguous(), w_EKN, offs=offsets_E)
    if zero_tail:
        # torch leaves these rows uninitialised (pytorch#193633): overwritten, never multiplied
        # by a mask, since NaN times zero is NaN.
        row_R = torch.arange(x_RK.shape[0], device=x_RK.device)
        out_RN.masked_fill_((row_R >= offsets_E[-1]).unsqueeze(1), 0)
    return out_RN


@torch.library.register_fake("moe_graphs::grouped_gemm_forward")
def _(x_RK, w_EKN, offsets_E, zero_tail):
    return x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])


@torch.library.register_fake("moe_graphs::grouped_gemm_dgrad")
def _(grad_RN, w_EKN, offsets_E, zero_tail):
    return grad_RN.new_empty(grad_RN.shape[0], w_EKN.shape[1])


@torch.library.register_fake("moe_graphs::grouped_gemm_with_lora")
def _(x_RK, w_EKN, low_Rr, b_ErN, offsets_E):
    return x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])


@torch.library.register_fake("moe_graphs::lora_gemm")
def _(x_RK, w_EKN, a_EKr, b_ErN, offsets_E):
    rows = x_RK.shape[0]
    return x_RK.new_empty(rows, w_EKN.shape[2]), x_RK.new_empty(rows, a_EKr.shape[2])


@torch.library.register_fake("moe_graphs::grouped_gemm_wgrad")
def _(x_RK, grad_RN, offsets_E):
    return x_RK.new_empty(offsets_E.shape[0], x_RK.shape[1], grad_RN.shape[1])


@torch.library.register_fake("moe_graphs::grouped_gemm_wgrad_add")
def _(x_RK, grad_RN, offsets_E, out_EKN):
    return None


class Weight(Protocol):
    """Attributes of a weight that checks read; tensors and packed weights have them."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def dim(self) -> int: ...


def check_operands(x_RK: Tensor, w_EKN: Weight, offsets_E: Tensor) -> None:
    """Check all that does not depend on where the memory lies; ``launch.check_memory`` does.

    Raises:
        ValueError: with the shapes or dtypes that were given, and those that are accepted.
    """
    if x_RK.dim() != 2 or w_EKN.dim() != 3 or x_RK.shape[1] != w_EKN.shape[1]:
        raise ValueError(
            f"grouped_gemm wants x [R, K] and w [E, K, N], got {tuple(x_RK.shape)} and "
            f"{tuple(w_EKN.shape)}"
        )
    fits = offsets_E.shape == w_EKN.shape[:1] and offsets_E.is_contiguous()
    if not fits or offsets_E.dtype != torch.int32:
        raise ValueError(
            f"grouped_gemm wants contiguous offsets int32 [{w_EKN.shape[0]}], one cumulative end "
            f"per expert, got {offsets_E.dtype} {tuple(offsets_E.shape)}"
        )
    if x_RK.dtype != w_EKN.dtype:
        raise ValueError(
            f"grouped_gemm wants one dtype, got x {x_RK.dtype} and w {w_EKN.dtype}: cast one, or "
            f"run under torch.autocast"
        )
    if offsets_E.device != x_RK.device or w_EKN.device != x_RK.device:
        raise ValueError(
            f"grouped_gemm wants one device, got x {x_RK.device}, w {w_EKN.device}, offsets "
            f"{offsets_E.device}: sizes are read on the device, without a copy"
        )
    if x_RK.is_cuda:
        _check_cuda(x_RK, w_EKN)


def _check_cuda(x_RK: Tensor, w_EKN: Weight) -> None:
    accepted = [torch.bfloat16]
    if has_triton():
        accepted += [torch.float16, torch.float32]
    if x_RK.dtype not in accepted:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise ValueError(
            f"grouped_gemm on CUDA takes {names}, got {x_RK.dtype}: run the model under "
            f'torch.autocast("cuda", torch.bfloat16, cache_enabled=False), or build it with '
            f"dtype=torch.bfloat16"
        )
    experts, K, N = w_EKN.shape
    if K % 8 or N % 8:
        raise ValueError(
            f"grouped_gemm on CUDA wants K and N in multiples of 8 (16-byte rows), got w "
            f"{tuple(w_EKN.shape)}: choose hidden_size and ffn_hidden_size so"
        )
    if not 1 <= experts <= MOST_EXPERTS and has_triton():
        raise ValueError(f"grouped_gemm on CUDA takes 1 to {MOST_EXPERTS} experts, got {experts}")
