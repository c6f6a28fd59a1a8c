"""SwiGLU, forward and backward, each one pass over the rows.

    h = silu(gate) * up,  x_R2F = [gate | up]
    dgate = dh * up * s * (1 + gate * (1 - s)),  dup = dh * gate * s,  s = sigmoid(gate)

fp32 inside, rounded once. With `offsets_E`, rows past the last end are neither read nor written.

R rows, F ffn, E experts.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch
from moe_graphs.kernels.ops import define_op


@triton.jit
def _tile(offsets_ptr, rows, F, last, ROWS: tl.constexpr, COLS: tl.constexpr, TAIL: tl.constexpr):
    """Element numbers of this program's tile in [R, F] and in [R, 2F], and its mask."""
    if TAIL:
        rows = tl.load(offsets_ptr + last)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    wide = row.to(tl.int64)
    return wide * F + column, wide * 2 * F + column, (row < rows) & (column < F)


@triton.jit
def swiglu_forward_kernel(
    x_ptr, h_ptr, offsets_ptr, rows, F, last,
    ROWS: tl.constexpr, COLS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    out, gate_at, live = _tile(offsets_ptr, rows, F, last, ROWS, COLS, TAIL)
    gate = tl.load(x_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + gate_at + F, mask=live, other=0.0).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up
    tl.store(h_ptr + out, h.to(h_ptr.dtype.element_ty), mask=live)


@triton.jit
def swiglu_backward_kernel(
    x_ptr, dh_ptr, dx_ptr, offsets_ptr, rows, F, last,
    ROWS: tl.constexpr, COLS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    dh_at, gate_at, live = _tile(offsets_ptr, rows, F, last, ROWS, COLS, TAIL)
    gate = tl.load(x_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + gate_at + F, mask=live, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + dh_at, mask=live, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate = dh * up * s * (1 + gate * (1 - s))
    tl.store(dx_ptr + gate_at, dgate.to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(dx_ptr + gate_at + F, (dh * gate * s).to(dx_ptr.dtype.element_ty), mask=live)


@define_op(device="default")
def swiglu_forward(x_R2F: torch.Tensor, offsets_E: torch.Tensor | None = None) -> torch.Tensor:
    """`[..., 2F] -> [..., F]`. Rows past the last end of `offsets_E`, if given, are left alone."""
    x_R2F = x_R2F.contiguous()
    h_RF = x_R2F.new_empty((*x_R2F.shape[:-1], x_R2F.shape[-1] // 2))
    if h_RF.numel():
        grid, arguments, tile = _shape(h_RF, offsets_E)
        launch(swiglu_forward_kernel, grid, (x_R2F, h_RF, *arguments), **tile)
    return h_RF


@define_op(device="default")
def swiglu_backward(
    x_R2F: torch.Tensor, dh_RF: torch.Tensor, offsets_E: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of `x_R2F`."""
    x_R2F, dh_RF = x_R2F.contiguous(), dh_RF.contiguous()
    dx_R2F = x_R2F.new_empty(x_R2F.shape)
    if dh_RF.numel():
        grid, arguments, tile = _shape(dh_RF, offsets_E)
        launch(swiglu_backward_kernel, grid, (x_R2F, dh_RF, dx_R2F, *arguments), **tile)
    return dx_R2F


@torch.library.register_fake("moe_graphs::swiglu_forward")
def _(x_R2F, offsets_E=None):
    return x_R2F.new_empty((*x_R2F.shape[:-1], x_R2F.shape[-1] // 2))


@torch.library.register_fake("moe_graphs::swiglu_backward")
def _(x_R2F, dh_RF, offsets_E=None):
    return x_R2F.new_empty(x_R2F.shape)


def _shape(h_RF: torch.Tensor, offsets_E: torch.Tensor | None) -> tuple[tuple, tuple, dict]:
    """Grid, trailing arguments and tile for an [R, F] output."""
    F = h_RF.shape[-1]
    rows, tile = h_RF.numel() // F, {"ROWS": 8, "COLS": 256, "TAIL": offsets_E is not None}
    grid = (cdiv(rows, tile["ROWS"]), cdiv(F, tile["COLS"]))
    offsets, last = (h_RF, 0) if offsets_E is None else (offsets_E, offsets_E.numel() - 1)
    return grid, (offsets, rows, F, last), tile
