"""Host side of the grouped GEMM kernels: check, make descriptors and work lists, launch.

Nothing here reads device memory. What is known on the host (shapes, the number of SMs) binds the
grid, the buffers and the variant; group sizes stay on the device. So a launch can be captured, and
its replay is right for any routing.

R rows, E experts, K and N columns of the operands.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moe_graphs.kernels.gemm.heuristics import (
    GLUON,
    LONG_SUM,
    Variant,
    check_variant,
    choose_rows,
    choose_weights,
    row_variant,
    sm_count,
    way_to_add,
    weight_variant,
)
from moe_graphs.kernels.gemm.portable_pointer import rows_pointer_kernel, weights_pointer_kernel
from moe_graphs.kernels.gemm.portable_tma import rows_tma_kernel, weights_tma_kernel
from moe_graphs.kernels.gemm.sm90_rows import gathered_rows_gluon_kernel, rows_gluon_kernel
from moe_graphs.kernels.gemm.sm90_weights import weights_gluon_kernel
from moe_graphs.kernels.gemm.tile_scheduler import (
    MAX_SLOTS,
    Tail,
    WorkList,
    add_partials_,
    add_tail_,
    expert_order,
    row_tiles,
    split_limit,
)
from moe_graphs.kernels.gpu_architectures import architecture_of
from moe_graphs.kernels.launching import (
    cdiv,
    launch,
    matrix_descriptor,
    ragged_descriptor,
)


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments, ready to run on the current stream."""

    kernel: Any
    grid: int
    args: tuple
    options: dict

    def run(self) -> None:
        launch(self.kernel, (self.grid,), self.args, **self.options)


def matmul_rows(
    x_RK: torch.Tensor,
    w_EKN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    transposed: bool = False,
    out: torch.Tensor | None = None,
    variant: Variant | None = None,
) -> torch.Tensor:
    """`out_RN[r] = x_RK[r] @ w[e]` for the rows of expert e: forward, and the input gradient.

    `w` is [E, K, N], or [E, N, K] with `transposed=True`. `offsets_E` int32 ends of the experts'
    rows, on the device. Rows past the last end are neither read nor written: without `out` they
    are uninitialised. bf16 or fp16 operands, fp32 accumulation. Does not synchronise.
    """
    check_operands(offsets_E, x=x_RK, w=w_EKN)
    rows, depth = x_RK.shape
    experts = w_EKN.shape[0]
    _check_equal("w", w_EKN.shape[2 if transposed else 1], "x columns", depth)
    _check_equal("offsets", offsets_E.numel(), "experts of w", experts)
    columns = w_EKN.shape[1 if transposed else 2]
    if out is None:
        out = x_RK.new_empty(rows, columns)
    check_memory("out", out)
    if rows == 0:
        return out
    if variant is None:
        gpu = architecture_of(x_RK.device)
        variant = row_variant(choose_rows(gpu, rows, experts), columns, gpu)
    _run_rows(variant, x_RK, w_EKN, out, offsets_E, transposed)
    return out


def _run_rows(
    variant: Variant,
    x_RK: torch.Tensor,
    w: torch.Tensor,
    out_RN: torch.Tensor,
    offsets_E: torch.Tensor,
    transposed: bool,
) -> None:
    """Work list, product, and the sum of the tiles that were cut along K."""
    v, grid = variant, sm_count(x_RK.device)
    (rows, K), N = x_RK.shape, out_RN.shape[1]
    tail, partials = None, None
    if v.name == "split" and K >= LONG_SUM:
        tail = Tail(cdiv(N, v.block_n), cdiv(K, v.block_k), grid)
        shape = (grid, v.block_m, v.block_n)
        partials = torch.empty(shape, dtype=torch.float32, device=x_RK.device)
    work = row_tiles(offsets_E, rows, v.block_m, tail)
    rows_launch(v, x_RK, w, out_RN, work, transposed, grid, partials).run()
    if tail is not None:
        add_tail_(out_RN, partials, work, tail)


def can_gather(x: torch.Tensor) -> bool:
    """Whether `matmul_gathered` takes these tokens: a Hopper GPU, and a width it copies whole."""
    return "gather" in architecture_of(x.device).gemms and x.shape[1] % 64 == 0


def matmul_gathered(
    x_TK: torch.Tensor,
    order_R: torch.Tensor,
    top_k: int,
    w_EKN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out_RN[r] = x_TK[order_R[r] // top_k] @ w[e]`, without a copy of the rows.

    Like `matmul_rows` otherwise; `order_R` int64 without gaps. See `can_gather`.
    """
    check_operands(offsets_E, x=x_TK, w=w_EKN)
    _check_equal("w", w_EKN.shape[1], "x columns", x_TK.shape[1])
    rows, columns = order_R.numel(), w_EKN.shape[2]
    if out is None:
        out = x_TK.new_empty(rows, columns)
    check_memory("out", out)
    if rows == 0:
        return out
    v, grid = row_variant("gather", columns), sm_count(x_TK.device)
    work = row_tiles(offsets_E, rows, v.block_m)
    gathered_launch(v, x_TK, order_R, top_k, w_EKN, out, work, grid).run()
    return out


def gathered_launch(
    variant: Variant,
    x_TK: torch.Tensor,
    order_R: torch.Tensor,
    top_k: int,
    w_EKN: torch.Tensor,
    out_RN: torch.Tensor,
    work: WorkList,
    grid: int,
) -> Launch:
    """The launch of the gathered rows kernel over `work`."""
    check_variant(variant, x_TK.device)
    v, (_, K, N) = variant, w_EKN.shape
    args = (
        x_TK, order_R, top_k, matrix_descriptor(w_EKN, (v.block_k, v.block_n), gluon=True),
        ragged_descriptor(out_RN, (v.block_m // 2, v.block_n // v.pieces), gluon=True),
        work.records, work.count, N, K,
    )  # fmt: skip
    tile = {"BLOCK_M": v.block_m, "BLOCK_N": v.block_n, "BLOCK_K": v.block_k, "GRID": grid}
    tile |= {"PIECES": v.pieces, "STAGES": v.stages, "num_warps": v.warps}
    return Launch(gathered_rows_gluon_kernel, grid, args, tile)


def matmul_weights(
    x_RK: torch.Tensor,
    dy_RN: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    variant: Variant | None = None,
) -> torch.Tensor:
    """`dw_EKN[e] = x[rows of e].T @ dy[rows of e]`: the weight gradient. Empty experts get zeros.

    `out` in the dtype of x or float32; `accumulate` adds to a float32 one in place.
    bf16 or fp16 operands, fp32 accumulation, deterministic. Does not synchronise.
    """
    check_operands(offsets_E, x=x_RK, dy=dy_RN)
    rows, experts = x_RK.shape[0], offsets_E.numel()
    _check_equal("dy", dy_RN.shape[0], "rows of x", rows)
    if accumulate and (out is None or out.dtype != torch.float32):
        given = "none" if out is None else str(out.dtype)
        raise ValueError(f"accumulate: needs a float32 out to add to, got {given}")
    shape = (experts, x_RK.shape[1], dy_RN.shape[1])
    if out is None:
        out = x_RK.new_empty(shape)
    _check_equal("out", tuple(out.shape), "(E, K, N)", shape)
    check_memory("out", out)
    if rows == 0:
        return out if accumulate else out.zero_()
    if variant is None:
        gpu = architecture_of(x_RK.device)
        variant = weight_variant(choose_weights(gpu, out.dtype), shape[2], out.dtype, gpu)
    _run_weights(variant, x_RK, dy_RN, out, offsets_E, accumulate)
    return out


def _run_weights(
    variant: Variant,
    x_RK: torch.Tensor,
    dy_RN: torch.Tensor,
    out: torch.Tensor,
    offsets_E: torch.Tensor,
    accumulate: bool,
) -> None:
    """Work list, product, and the sum of what long experts were split into."""
    grid, (_, K, N) = sm_count(x_RK.device), out.shape
    limit, partials = 0, None
    if variant.name in GLUON:
        tiles = cdiv(K, variant.block_m) * cdiv(N, variant.block_n)
        limit = split_limit(x_RK.shape[0], tiles, grid)
    work = expert_order(offsets_E, skip_empty=accumulate, limit=limit)
    if limit:
        slots = min(MAX_SLOTS, x_RK.shape[0] // limit)
        partials = torch.empty((slots, K, N), dtype=torch.float32, device=x_RK.device)
    weights_launch(variant, x_RK, dy_RN, out, work, accumulate, grid, partials).run()
    if partials is not None:
        add_partials_(out, partials, work, accumulate)


def rows_launch(
    variant: Variant,
    x_RK: torch.Tensor,
    w: torch.Tensor,
    out_RN: torch.Tensor,
    work: WorkList,
    transposed: bool,
    grid: int,
    partials: torch.Tensor | None = None,
) -> Launch:
    """The launch of a rows kernel over `work`, whose row tiles must have `variant.block_m` rows.

    `partials` fp32 [grid, BLOCK_M, BLOCK_N] takes what `work` cuts along K; split only.
    """
    check_variant(variant, x_RK.device)
    v = variant
    K, N = x_RK.shape[1], out_RN.shape[1]
    tile = {"TRANSPOSED": transposed, "BLOCK_M": v.block_m, "BLOCK_N": v.block_n}
    tile |= {"BLOCK_K": v.block_k, "GRID": grid, "num_warps": v.warps}
    if v.name == "pointer":
        operands, kernel, extra = (x_RK, w, out_RN), rows_pointer_kernel, {"num_stages": v.stages}
    else:
        box = (v.block_n, v.block_k) if transposed else (v.block_k, v.block_n)
        out_rows, gluon = v.block_m // 2 if v.name == "split" else v.block_m, v.name in GLUON
        operands = (
            ragged_descriptor(x_RK, (v.block_m, v.block_k), gluon=gluon),
            matrix_descriptor(w, box, gluon=gluon),
            ragged_descriptor(out_RN, (out_rows, v.block_n), gluon=gluon),
        )
        kernel, extra = rows_tma_kernel, {"num_stages": v.stages}
        if gluon:
            kernel, extra = rows_gluon_kernel, {"STAGES": v.stages}
            extra |= {"PINGPONG": v.name == "pingpong", "SPLITS": partials is not None}
            operands = (*operands, out_RN if partials is None else partials)
    return Launch(kernel, grid, (*operands, work.records, work.count, N, K), tile | extra)


def weights_launch(
    variant: Variant,
    x_RK: torch.Tensor,
    dy_RN: torch.Tensor,
    dw_EKN: torch.Tensor,
    work: WorkList,
    accumulate: bool,
    grid: int,
    partials: torch.Tensor | None = None,
) -> Launch:
    """The launch of a weight-gradient kernel over `work`, an expert order.

    `partials` fp32 [slots, K, N] takes what `work` splits; the Gluon kernels know how to.
    """
    check_variant(variant, x_RK.device)
    v = variant
    _, M, N = dw_EKN.shape
    tile = {"ADD": accumulate, "BLOCK_M": v.block_m, "BLOCK_N": v.block_n, "BLOCK_R": v.block_k}
    tile |= {"GRID": grid, "num_warps": v.warps}
    if v.name == "pointer":
        operands, kernel = (x_RK, dy_RN, dw_EKN), weights_pointer_kernel
        extra = {"num_stages": v.stages}
    else:
        out_rows, gluon = v.block_m // 2 if v.name == "split" else v.block_m, v.name in GLUON
        operands = (
            ragged_descriptor(x_RK, (v.block_k, v.block_m), gluon=gluon),
            ragged_descriptor(dy_RN, (v.block_k, v.block_n), gluon=gluon),
            matrix_descriptor(dw_EKN, (out_rows, v.block_n // v.pieces), gluon=gluon),
        )
        kernel, extra = weights_tma_kernel, {"num_stages": v.stages, "PIECES": v.pieces}
        if gluon:
            kernel = weights_gluon_kernel
            operands = (*operands, dw_EKN, dw_EKN if partials is None else partials)
            extra = {"STAGES": v.stages, "PIECES": v.pieces, "BUFFERS": v.buffers}
            extra |= {"PINGPONG": v.name == "pingpong", "SPLITS": partials is not None}
            tile["ADD"] = way_to_add(x_RK.shape[0], dw_EKN.shape[0]) if accumulate else ""
    return Launch(kernel, grid, (*operands, work.records, work.count, M, N), tile | extra)


def check_operands(offsets_E: torch.Tensor, **operands: torch.Tensor) -> None:
    """Raises before anything is launched; names the argument, what was given, what is accepted."""
    dtypes = {t.dtype for t in operands.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        given = ", ".join(f"{name} {t.dtype}" for name, t in operands.items())
        raise ValueError(f"operands: got {given}; accepted: all bfloat16 or all float16")
    for name, t in operands.items():
        check_memory(name, t)
    first = next(iter(operands.values()))
    if offsets_E.device != first.device:
        raise ValueError(
            f"offsets: on {offsets_E.device}, operands on {first.device}; keep them on one device"
        )
    if offsets_E.dtype != torch.int32 or offsets_E.dim() != 1 or not offsets_E.is_contiguous():
        raise ValueError(
            f"offsets: {offsets_E.dtype} of shape {tuple(offsets_E.shape)}; "
            "accepted: contiguous int32 cumulative ends, one per expert"
        )
    if not 1 <= offsets_E.numel() <= 1024:
        raise ValueError(f"offsets: {offsets_E.numel()} experts; accepted: 1 to 1024")


def check_memory(name: str, t: torch.Tensor) -> None:
    if not t.is_contiguous():
        raise ValueError(f"{name}: strides {t.stride()} of {tuple(t.shape)}; must be contiguous")
    if any(size % 8 for size in t.shape[1:]):
        raise ValueError(f"{name}: shape {tuple(t.shape)}; columns must be multiples of 8")
    if t.data_ptr() % 16:
        raise ValueError(
            f"{name}: begins at an address that 16 bytes do not divide, as a view into the middle "
            f"of a tensor may; clone it"
        )


def _check_equal(name: str, given: Any, meaning: str, expected: Any) -> None:
    if given != expected:
        raise ValueError(f"{name}: {given} does not match {meaning} {expected}")
