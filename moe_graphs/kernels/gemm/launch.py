"""Host side of the grouped GEMM kernels: choose a variant, make its work list, launch.

Nothing here reads device memory. What is known on the host (shapes, the number of SMs) binds the
grid, the buffers and the variant; group sizes stay on the device. So a launch can be captured, and
its replay is right for any routing.

Shapes, dtypes and devices have been checked where users call (``gemm.check_operands``). Here only
the memory is looked at, whose addresses nobody knows before.

R rows, T tokens, E experts, K and N columns of the operands.
"""

from dataclasses import replace

import torch

from moe_graphs.kernels.gemm import portable_pointer
from moe_graphs.kernels.gemm.heuristics import (
    GATHERING_PROGRAMS,
    LONG_SUM,
    Pair,
    Variant,
    accumulate_mode,
    choose_rows,
    choose_weights,
    gathered_weight_variant,
    kernels_of,
    row_variant,
    sm_count,
    weight_variant,
)
from moe_graphs.kernels.gemm.tile_scheduler import (
    MAX_SLOTS,
    LastRound,
    add_cut_tiles_,
    add_partials_,
    expert_order,
    padded_tiles,
    row_tiles,
    split_limit,
)
from moe_graphs.kernels.gpu_architectures import architecture_of
from moe_graphs.kernels.launching import cdiv


def matmul_rows(
    x_RK: torch.Tensor,
    w_EKN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    transposed: bool = False,
    out: torch.Tensor | None = None,
    variant: Variant | None = None,
    beside: Pair | None = None,
    first: int = 0,
) -> torch.Tensor:
    """``out_RN[r] = x_RK[r] @ w[e]`` for the rows of expert e: forward, and the input gradient.

    bf16, fp16 or fp32 operands, fp32 accumulation. Does not synchronise.

    Args:
        w_EKN: [E, K, N], or [E, N, K] with ``transposed=True``.
        offsets_E: int32 ends of the experts' rows, on the device.
        out: [R, N]. Rows past the last end are neither read nor written: without ``out`` they are
            uninitialised.
        variant: the kernel and its tile; chosen from static averages if it is None.
        beside: rows [R, r] and matrices laid out as w, whose product is added. Kernels add it
            within their sum. The variant tma alone sums two products that were rounded, also in
            the rows past the last end.
        first: the number of the expert that w (and what is beside) begins with. w may have fewer
            experts than there are ends: the rows of the others are neither read nor written.

    Raises:
        ValueError: memory that the kernels do not take, or a variant that the GPU does not run.
    """
    (rows, K), device = x_RK.shape, x_RK.device
    experts, N = w_EKN.shape[0], w_EKN.shape[1 if transposed else 2]
    is_part = experts < offsets_E.numel()
    if out is None:
        out = x_RK.new_empty(rows, N)
    check_memory(x=x_RK, w=w_EKN, out=out)
    if beside is not None:
        check_memory(low=beside[0], b=beside[1])
    if rows == 0:
        return out
    if variant is None:
        variant = rows_variant(x_RK, offsets_E.numel(), N)
    v, grid, last_round, partials = variant, sm_count(device), None, None
    kernels = kernels_of(v, device)
    if beside is not None and not v.adds_beside:
        assert not is_part
        matmul_rows(x_RK, w_EKN, offsets_E, transposed=transposed, out=out, variant=v)
        return out.add_(matmul_rows(*beside, offsets_E, transposed=transposed, variant=v))
    if v.partial_sums and K >= LONG_SUM:
        steps = v.steps((x_RK, w_EKN)) + v.steps(beside)
        last_round = LastRound(cdiv(N, v.block_n), steps, grid)
        shape = (grid, v.block_m, v.block_n)
        partials = torch.empty(shape, dtype=torch.float32, device=device)
    work = row_tiles(offsets_E[first : first + experts], rows, v.block_m, last_round, bool(first))
    kernels.rows_launch(v, x_RK, w_EKN, out, work, transposed, grid, partials, beside).run()
    if last_round is not None and partials is not None:
        add_cut_tiles_(out, partials, work, last_round)
    return out


def matmul_with_lora(
    x_RK: torch.Tensor,
    w_EKN: torch.Tensor,
    a_EKr: torch.Tensor,
    b_ErN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x @ w + low @ b`` as one sum, and ``low = x @ a``; all matrices lie alike.

    One kernel computes both where ``adds_lora`` says so, else one after the other.
    """
    rows, N = len(x_RK), w_EKN.shape[1 if transposed else 2]
    rank = a_EKr.shape[1 if transposed else 2]
    v = rows_variant(x_RK, len(offsets_E), N)
    if not v.adds_lora(x_RK.shape[1], rank):
        low_Rr = matmul_rows(x_RK, a_EKr, offsets_E, transposed=transposed)
        beside = low_Rr, b_ErN
        return matmul_rows(x_RK, w_EKN, offsets_E, transposed=transposed, beside=beside), low_Rr
    out_RN, low_Rr = x_RK.new_empty(rows, N), x_RK.new_empty(rows, rank)
    check_memory(x=x_RK, w=w_EKN, a=a_EKr, b=b_ErN)
    if rows:
        work, grid = row_tiles(offsets_E, rows, v.block_m), sm_count(x_RK.device)
        kernels = kernels_of(replace(v, file="sm90_lora"), x_RK.device)
        operands = x_RK, w_EKN, a_EKr, b_ErN
        kernels.lora_rows_launch(v, *operands, out_RN, low_Rr, work, transposed, grid).run()
    return out_RN, low_Rr


def rows_variant(x_RK: torch.Tensor, experts: int, columns: int) -> Variant:
    """The variant of ``matmul_rows`` for these rows, all experts and the columns of ``out``."""
    gpu = architecture_of(x_RK.device)
    return row_variant(choose_rows(gpu, x_RK.dtype, len(x_RK), experts), columns, gpu)


def matmul_rows_fp8(
    codes_RK: torch.Tensor,
    scales_GR: torch.Tensor,
    w_codes_ENK: torch.Tensor,
    w_scales: torch.Tensor,
    offsets_E: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    variant: Variant | None = None,
) -> torch.Tensor:
    """``matmul_rows`` of operands in FP8 (`kernels.fp8`), which both lie along K; Hopper alone.

    Args:
        scales_GR: fp32 [K / 128, R]. Of rows past the last end it may hold anything.
        w_scales: fp32 [E, N / 128, K / 128].
        dtype: bf16 or fp16, of ``out``.
    """
    (rows, _), device = codes_RK.shape, codes_RK.device
    N = w_codes_ENK.shape[1]
    v = variant or row_variant("fp8", N)
    kernels = kernels_of(v, device)
    if out is None:
        out = torch.empty(rows, N, dtype=dtype, device=device)
    check_memory(codes=codes_RK, scales=scales_GR, w=w_codes_ENK, w_scales=w_scales, out=out)
    if rows:
        grid = sm_count(device)
        work = row_tiles(offsets_E, rows, v.block_m)
        operands = codes_RK, scales_GR, w_codes_ENK, w_scales
        kernels.fp8_rows_launch(v, *operands, out, work, grid).run()
    return out


def can_gather_weights(x: torch.Tensor, columns: int) -> bool:
    """Whether ``matmul_weights_gathered`` takes these tokens: narrow, and 16 to 64 columns beside.

    Rows of 16 bytes, which are those of rank 8, would not be loaded ahead.
    """
    return x.dtype != torch.float32 and columns <= 64 and columns % 16 == 0


def matmul_weights_gathered(
    x_TK: torch.Tensor,
    order_R: torch.Tensor,
    top_k: int,
    dy_RN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """``dw_EKN[e] = x_TK[order_R[rows of e] // top_k].T @ dy_RN[rows of e]``, without a copy.

    Like ``matmul_weights`` otherwise; ``order_R`` has no gaps. See ``can_gather_weights``.

    Args:
        transposed: the result is [E, N, K].
    """
    rows, K, N, experts = len(dy_RN), x_TK.shape[1], dy_RN.shape[1], offsets_E.numel()
    out = x_TK.new_empty((experts, N, K) if transposed else (experts, K, N))
    check_memory(x=x_TK, dy=dy_RN, out=out)
    if rows == 0:
        return out.zero_()
    v, grid = gathered_weight_variant(N), GATHERING_PROGRAMS * sm_count(x_TK.device)
    limit = split_limit(rows, cdiv(K, v.block_m), grid)
    partials = _partial_sums(out, limit, rows, K, N)
    work = expert_order(offsets_E, skip_empty=False, limit=limit)
    operands = x_TK, order_R, top_k, dy_RN
    portable_pointer.gathered_weights_launch(
        v, *operands, out, work, transposed, grid, partials
    ).run()
    if partials is not None:
        add_partials_(out, partials, work, False)
    return out


def matmul_weights(
    x_RK: torch.Tensor,
    dy_RN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    variant: Variant | None = None,
) -> torch.Tensor:
    """``dw_EKN[e] = x[rows of e].T @ dy[rows of e]``: the weight gradient. Empty experts get zeros.

    bf16, fp16 or fp32 operands, fp32 accumulation, deterministic. Does not synchronise.

    Args:
        out: [E, K, N] in the dtype of x or float32.
        accumulate: add to ``out``, which is then float32, in place.
        variant: the kernel and its tile; chosen from the output if it is None.

    Raises:
        ValueError: memory that the kernels do not take, or a variant that the GPU does not run.
    """
    (rows, K), N, device = x_RK.shape, dy_RN.shape[1], x_RK.device
    experts = offsets_E.numel()
    if out is None:
        out = x_RK.new_empty(experts, K, N)
    check_memory(x=x_RK, dy=dy_RN, out=out)
    if rows == 0:
        return out if accumulate else out.zero_()
    if variant is None:
        gpu = architecture_of(device)
        variant = weight_variant(choose_weights(gpu, x_RK.dtype, out.dtype), N, out.dtype, gpu)
    v, grid, limit = variant, sm_count(device), 0
    kernels = kernels_of(v, device)
    if v.partial_sums:
        limit = split_limit(rows, cdiv(K, v.block_m) * cdiv(N, v.block_n), grid)
    partials = _partial_sums(out, limit, rows, K, N)
    add = accumulate_mode(rows, experts) if accumulate else ""
    work = expert_order(offsets_E, skip_empty=accumulate, limit=limit)
    kernels.weights_launch(v, x_RK, dy_RN, out, work, add, grid, partials).run()
    if partials is not None:
        add_partials_(out, partials, work, accumulate)
    return out


def _partial_sums(out: torch.Tensor, limit: int, rows: int, K: int, N: int) -> torch.Tensor | None:
    """Slots for the partial sums of experts of twice ``limit`` rows or more; 0 splits none."""
    if not limit:
        return None
    return out.new_empty((min(MAX_SLOTS, rows // limit), K, N), dtype=torch.float32)


def matmul_weights_fp8(
    x_MP: torch.Tensor,
    x_scales: torch.Tensor,
    dy_NP: torch.Tensor,
    dy_scales: torch.Tensor,
    offsets_E: torch.Tensor,
    rows: int,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    variant: Variant | None = None,
) -> torch.Tensor:
    """``matmul_weights`` of columns in FP8 (`kernels.fp8.Columns`); Hopper alone.

    Args:
        x_scales: fp32 [M / 128, P / 128], ``dy_scales`` [N / 128, P / 128]. Of columns past the
            last padded group they may hold anything, and so may the codes.
        rows: R, that of the rows without padding.
        dtype: bf16 or fp16, of ``out`` [E, M, N].
    """
    M, N, experts, device = x_MP.shape[0], dy_NP.shape[0], offsets_E.numel(), x_MP.device
    v = variant or weight_variant("fp8", N, dtype)
    kernels = kernels_of(v, device)
    if out is None:
        out = torch.empty(experts, M, N, dtype=dtype, device=device)
    check_memory(x=x_MP, x_scales=x_scales, dy=dy_NP, dy_scales=dy_scales, out=out)
    if rows == 0:
        return out.zero_()
    _, padded_E = padded_tiles(offsets_E, rows, v.block_k)
    work = expert_order(padded_E, skip_empty=False)
    operands = x_MP, x_scales, dy_NP, dy_scales
    kernels.fp8_weights_launch(v, *operands, out, work, sm_count(device)).run()
    return out


def check_memory(**operands: torch.Tensor) -> None:
    """Check what TMA and wide loads need, and name the operand that does not have it.

    Raises:
        ValueError: an operand is not contiguous, or 16 bytes do not divide its address.
    """
    for name, t in operands.items():
        if not t.is_contiguous():
            raise ValueError(
                f"{name}: strides {t.stride()} of {tuple(t.shape)}; must be contiguous"
            )
        if t.data_ptr() % 16:
            raise ValueError(
                f"{name}: begins at an address that 16 bytes do not divide, as a view into the "
                f"middle of a tensor may; clone it"
            )
