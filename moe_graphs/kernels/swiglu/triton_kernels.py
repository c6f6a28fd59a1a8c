"""SwiGLU, forward and backward, each one pass over the rows.

    h = silu(gate) * up,  x_R2F = [gate | up]
    dgate = dh * up * s * (1 + gate * (1 - s)),  dup = dh * gate * s,  s = sigmoid(gate)

A clamped gate (`ClampedGate`) limits both, and may have them by turns:

    h = g * s * u,  s = sigmoid(alpha * g),  g = min(gate, limit),  u = offset + clamp(up)

A `limit` of zero stands for SwiGLU. The kernels compute in fp32 and round once.

R rows, F ffn.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch
from moe_graphs.kernels.ops import define_op

TILE = {"ROWS": 8, "COLS": 256}

# 1 / (1 + 2^(-x / ln 2)); what is below the least normal number is zero.
SIGMOID = tl.constexpr("""{
    .reg .f32 sum;
    mul.ftz.f32 sum, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 sum, sum;
    add.ftz.f32 sum, sum, 0f3F800000;
    rcp.approx.ftz.f32 $0, sum;
}""")


@triton.jit
def _tile(rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows, columns and mask of this program's tile of [R, F]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    return row.to(tl.int64), column, (row < rows) & (column < F)


@triton.jit
def gate_and_up_at(row, column, F, BY_TURNS: tl.constexpr):
    """Element numbers of gate and up in [R, 2F]."""
    if BY_TURNS:
        gate_at = row * 2 * F + 2 * column
        up_at = gate_at + 1
    else:
        gate_at = row * 2 * F + column
        up_at = gate_at + F
    return gate_at, up_at


@triton.jit
def sigmoid(x):
    """Triton's own takes twice the instructions, for numbers below the least normal one."""
    return tl.inline_asm_elementwise(SIGMOID, "=f,f", (x,), dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _limited(gate, up, limit, offset):
    """Both factors of a clamped gate; NaN stays NaN."""
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.where(gate > limit, limit, gate), up + offset


@triton.jit
def gated(gate, up, alpha, limit, offset, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate, up = _limited(gate, up, limit, offset)
        h = gate * sigmoid(alpha * gate) * up
    else:
        h = gate * sigmoid(gate) * up
    return h


@triton.jit
def gradients_of(gate, up, dh, alpha, limit, offset, CLAMPED: tl.constexpr):
    """Gradients of gate and up, in fp32."""
    if CLAMPED:
        g, u = _limited(gate, up, limit, offset)
        s = sigmoid(alpha * g)
        dgate = tl.where(gate > limit, 0.0, dh * u * s * (1 + alpha * g * (1 - s)))
        dup = tl.where(tl.abs(up) > limit, 0.0, dh * g * s)
    else:
        s = sigmoid(gate)
        dgate = dh * up * s * (1 + gate * (1 - s))
        dup = dh * gate * s
    return dgate, dup


@triton.jit(do_not_specialize=["rows"])
def swiglu_forward_kernel(
    x_ptr, h_ptr, rows, F, alpha, limit, offset,
    CLAMPED: tl.constexpr, BY_TURNS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, column, live = _tile(rows, F, ROWS, COLS)
    gate_at, up_at = gate_and_up_at(row, column, F, BY_TURNS)
    out = row * F + column
    gate = tl.load(x_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + up_at, mask=live, other=0.0).to(tl.float32)
    h = gated(gate, up, alpha, limit, offset, CLAMPED)
    tl.store(h_ptr + out, h.to(h_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(
    x_ptr, dh_ptr, dx_ptr, h_ptr, rows, F,
    RESULT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, column, live = _tile(rows, F, ROWS, COLS)
    gate_at, up_at = gate_and_up_at(row, column, F, False)
    dh_at = row * F + column
    gate = tl.load(x_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + up_at, mask=live, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + dh_at, mask=live, other=0.0).to(tl.float32)
    dgate, dup = gradients_of(gate, up, dh, 0.0, 0.0, 0.0, False)
    tl.store(dx_ptr + gate_at, dgate.to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(dx_ptr + up_at, dup.to(dx_ptr.dtype.element_ty), mask=live)
    if RESULT:
        h = gated(gate, up, 0.0, 0.0, 0.0, False)
        tl.store(h_ptr + dh_at, h.to(h_ptr.dtype.element_ty), mask=live)


@define_op(device="default")
def swiglu_forward(
    x_R2F: torch.Tensor, alpha: float, limit: float, offset: float, by_turns: bool
) -> torch.Tensor:
    """`[..., 2F] -> [..., F]`."""
    x_R2F = x_R2F.contiguous()
    h_RF = x_R2F.new_empty((*x_R2F.shape[:-1], x_R2F.shape[-1] // 2))
    if h_RF.numel():
        rows, F = _sizes(h_RF)
        args = (x_R2F, h_RF, rows, F, alpha, limit, offset)
        kind = {"CLAMPED": limit > 0, "BY_TURNS": by_turns}
        launch(swiglu_forward_kernel, _grid(rows, F), args, **kind, **TILE)
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
def _(x_R2F, alpha, limit, offset, by_turns):
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
