"""A tile is read by rows and written by columns; both are whole lines of memory."""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch

TILE = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}


@triton.jit
def transpose_kernel(x_ptr, y_ptr, M, N, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y_NM = x_MN.T * scale; grid (tiles of M, tiles of N)."""
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    live_m, live_n = m < M, n < N
    x = tl.load(x_ptr + m[:, None] * N + n[None, :], mask=live_m[:, None] & live_n[None, :])
    y = tl.trans(x.to(tl.float32) * scale)
    at = y_ptr + n[:, None] * M + m[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live_n[:, None] & live_m[None, :])


def transpose(x_MN: torch.Tensor, scale: float, y_NM: torch.Tensor) -> None:
    """Writes `x.T * scale` into `y`; both are contiguous."""
    M, N = x_MN.shape
    if x_MN.numel():
        grid = cdiv(M, TILE["ROWS"]), cdiv(N, TILE["COLUMNS"])
        launch(transpose_kernel, grid, (x_MN, y_NM, M, N, scale), **TILE)
