"""SwiGLU, forward and backward, each one pass over the rows.

    h = silu(gate) * up,  x_R2F = [gate | up]
    dgate = dh * up * s * (1 + gate * (1 - s)),  dup = dh * gate * s,  s = sigmoid(gate)

The kernels compute in fp32 and round once.

R rows, F ffn.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch
from moe_graphs.kernels.ops import define_op

TILE = {"ROWS": 8, "COLS": 256}


@triton.jit
def _tile(rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Element numbers of this program's tile in [R, F] and in [R, 2F], and its mask."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    wide = row.to(tl.int64)
    return wide * F + column, wide * 2 * F + column, (row < rows) & (column < F)


@triton.jit
def silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def gradients_of(gate, up, dh):
    """Gradients of gate and up, in fp32."""
    s = tl.sigmoid(gate)
    return dh * up * s * (1 + gate * (1 - s)), dh * gate * s


@triton.jit
def swiglu_forward_kernel(
    x_ptr, h_ptr, rows, F,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    out, gate_at, live = _tile(rows, F, ROWS, COLS)
    gate = tl.load(x_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + gate_at + F, mask=live, other=0.0).to(tl.float32)
    h = silu_times(gate, up)
    tl.store(h_ptr + out, h.to(h_ptr.dtype.element_ty), mask=live)


@triton.jit
def swiglu_backward_kernel(
    x_ptr, dh_ptr, dx_ptr, h_ptr, rows, F,
    RESULT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    dh_at, gate_at, live = _tile(rows, F, ROWS, COLS)
    gate = tl.load(x_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + gate_at + F, mask=live, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + dh_at, mask=live, other=0.0).to(tl.float32)
    dgate, dup = gradients_of(gate, up, dh)
    tl.store(dx_ptr + gate_at, dgate.to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(dx_ptr + gate_at + F, dup.to(dx_ptr.dtype.element_ty), mask=live)
    if RESULT:
        h = silu_times(gate, up)
        tl.store(h_ptr + dh_at, h.to(h_ptr.dtype.element_ty), mask=live)


@define_op(device="default")
def swiglu_forward(x_R2F: torch.Tensor) -> torch.Tensor:
    """`[..., 2F] -> [..., F]`."""
    x_R2F = x_R2F.contiguous()
    h_RF = x_R2F.new_empty((*x_R2F.shape[:-1], x_R2F.shape[-1] // 2))
    if h_RF.numel():
        rows, F = _sizes(h_RF)
        launch(swiglu_forward_kernel, _grid(rows, F), (x_R2F, h_RF, rows, F), **TILE)
    return h_RF


@define_op(device="default")
def swiglu_backward(
    x_R2F: torch.Tensor, dh_RF: torch.Tensor, with_result: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `x_R2F`, and `swiglu_forward` again, else an empty tensor."""
    x_R2F, dh_RF = x_R2F.contiguous(), dh_RF.contiguous()
    made = _results_like(x_R2F, dh_RF, with_result)
    if dh_RF.numel():
        rows, F = _sizes(dh_RF)
        args = (x_R2F, dh_RF, *made, rows, F)
        launch(swiglu_backward_kernel, _grid(rows, F), args, RESULT=with_result, **TILE)
    return made


@torch.library.register_fake("moe_graphs::swiglu_forward")
def _(x_R2F):
    return x_R2F.new_empty((*x_R2F.shape[:-1], x_R2F.shape[-1] // 2))


@torch.library.register_fake("moe_graphs::swiglu_backward")
def _(x_R2F, dh_RF, with_result):
    return _results_like(x_R2F, dh_RF, with_result)


def _results_like(
    x_R2F: torch.Tensor, dh_RF: torch.Tensor, with_result: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x_R2F.new_empty(x_R2F.shape), x_R2F.new_empty(dh_RF.shape if with_result else (0,))


def _sizes(h_RF: torch.Tensor) -> tuple[int, int]:
    """R and F of `[..., F]`."""
    return h_RF.numel() // h_RF.shape[-1], h_RF.shape[-1]


def _grid(rows: int, F: int) -> tuple[int, int]:
    return cdiv(rows, TILE["ROWS"]), cdiv(F, TILE["COLS"])
