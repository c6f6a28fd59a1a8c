"""Host side of the grouped GEMMs with SwiGLU in their epilogue: as `launch`, for Hopper only.

R rows, E experts, D model, F ffn.
"""

import torch

from moe_graphs.kernels.gemm.gluon_swiglu import swiglu_back_gluon_kernel, swiglu_gluon_kernel
from moe_graphs.kernels.gemm.launch import Launch, check_memory, check_operands
from moe_graphs.kernels.gemm.tiles import WorkList, row_tiles
from moe_graphs.kernels.gemm.variants import Variant, choose_swiglu, sm_count
from moe_graphs.kernels.launching import matrix_descriptor, ragged_descriptor


def forward_variant(x_RD: torch.Tensor, w_ED2F: torch.Tensor) -> Variant | None:
    """The tile of `swiglu_rows`, or None where a GEMM and a kernel for SwiGLU are to be taken."""
    (experts, depth, columns), rows = w_ED2F.shape, x_RD.shape[0]
    return choose_swiglu(x_RD.device, rows, experts, depth, columns // 2, back=False)


def backward_variant(dy_RD: torch.Tensor, w_EDF: torch.Tensor) -> Variant | None:
    """The same for `swiglu_back_rows`."""
    return choose_swiglu(dy_RD.device, dy_RD.shape[0], *w_EDF.shape, back=True)


def swiglu_rows(
    x_RD: torch.Tensor, w_ED2F: torch.Tensor, offsets_E: torch.Tensor, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_up[r] = x_RD[r] @ w[e]`, and `silu(gate) * up` of it, `[R, F]`.

    `w` contiguous, or the transpose of a contiguous [E, 2F, D]. Rows past the last end are neither
    read nor written. Does not synchronise.
    """
    x_RD, transposed, w = x_RD.contiguous(), *_as_it_lies(w_ED2F)
    check_operands(offsets_E, x=x_RD, w=w)
    rows, columns = x_RD.shape[0], w_ED2F.shape[2]
    gate_up_R2F, h_RF = x_RD.new_empty(rows, columns), x_RD.new_empty(rows, columns // 2)
    check_memory("product", h_RF)
    if rows:
        work, grid = row_tiles(offsets_E, rows, variant.block_m), sm_count(x_RD.device)
        swiglu_launch(variant, x_RD, w, gate_up_R2F, h_RF, work, transposed, grid).run()
    return gate_up_R2F, h_RF


def swiglu_back_rows(
    dy_RD: torch.Tensor,
    w_EDF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    offsets_E: torch.Tensor,
    variant: Variant,
) -> torch.Tensor:
    """The gradient of `gate_up_R2F`, where `dy_RD[r] @ w[e]` is that of `silu(gate) * up`.

    Like `swiglu_rows` otherwise.
    """
    dy_RD, gate_up_R2F = dy_RD.contiguous(), gate_up_R2F.contiguous()
    transposed, w = _as_it_lies(w_EDF)
    check_operands(offsets_E, dy=dy_RD, w=w, gate_up=gate_up_R2F)
    dgate_up_R2F, rows = torch.empty_like(gate_up_R2F), dy_RD.shape[0]
    if rows:
        work, grid = row_tiles(offsets_E, rows, variant.block_m), sm_count(dy_RD.device)
        swiglu_back_launch(
            variant, dy_RD, w, gate_up_R2F, dgate_up_R2F, work, transposed, grid
        ).run()
    return dgate_up_R2F


def _as_it_lies(w_EKN: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """Whether it is a transposed view, and the memory it is a view of."""
    transposed = not w_EKN.is_contiguous()
    return transposed, (w_EKN.transpose(1, 2) if transposed else w_EKN).contiguous()


def swiglu_launch(
    variant: Variant,
    x_RD: torch.Tensor,
    w: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    h_RF: torch.Tensor,
    work: WorkList,
    transposed: bool,
    grid: int,
) -> Launch:
    """The launch of the forward kernel over `work`; `w` [E, D, 2F], or [E, 2F, D] transposed."""
    v, F = variant, h_RF.shape[1]
    half, out_rows = v.block_n // 2, _consumer_rows(v)
    box = (half, v.block_k) if transposed else (v.block_k, half)
    args = (
        ragged_descriptor(x_RD, (v.block_m, v.block_k), gluon=True),
        matrix_descriptor(w, box, gluon=True),
        *_halves(gate_up_R2F, (out_rows, half)),
        ragged_descriptor(h_RF, (out_rows, half), gluon=True),
        work.records, work.count, F, x_RD.shape[1],
    )  # fmt: skip
    return Launch(swiglu_gluon_kernel, grid, args, _tile(v, transposed, grid))


def swiglu_back_launch(
    variant: Variant,
    dy_RD: torch.Tensor,
    w: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    dgate_up_R2F: torch.Tensor,
    work: WorkList,
    transposed: bool,
    grid: int,
) -> Launch:
    """The launch of the backward kernel over `work`; `w` [E, D, F], or [E, F, D] transposed."""
    v, F = variant, gate_up_R2F.shape[1] // 2
    box = (v.block_n, v.block_k) if transposed else (v.block_k, v.block_n)
    piece = (_consumer_rows(v), v.block_n // v.pieces)
    args = (
        ragged_descriptor(dy_RD, (v.block_m, v.block_k), gluon=True),
        matrix_descriptor(w, box, gluon=True),
        *_halves(gate_up_R2F, piece), *_halves(dgate_up_R2F, piece),
        work.records, work.count, F, dy_RD.shape[1],
    )  # fmt: skip
    tile = _tile(v, transposed, grid) | {"PIECES": v.pieces, "PAIRS": v.buffers}
    return Launch(swiglu_back_gluon_kernel, grid, args, tile)


def _consumer_rows(variant: Variant) -> int:
    return variant.block_m if variant.name == "pingpong" else variant.block_m // 2


def _halves(rows_R2F: torch.Tensor, box: tuple[int, int]) -> tuple:
    """Descriptors of gate's and up's columns: a store past gate's last one is dropped."""
    return tuple(ragged_descriptor(x, box, gluon=True) for x in rows_R2F.chunk(2, dim=1))


def _tile(v: Variant, transposed: bool, grid: int) -> dict:
    tile = {"PINGPONG": v.name == "pingpong", "TRANSPOSED": transposed, "BLOCK_M": v.block_m}
    tile |= {"BLOCK_N": v.block_n, "BLOCK_K": v.block_k, "STAGES": v.stages, "GRID": grid}
    return tile | {"num_warps": v.warps}
