"""SwiGLU in plain torch: what the kernels are held against, and what runs where there are none.

Shapes: leading dims of any number, F ffn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moe_graphs.kernels.precision import accumulation_dtype, rounded


def swiglu(x_R2F: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold gate and up side by side; fp32 inside, rounded once."""
    gate_RF, up_RF = x_R2F.to(accumulation_dtype(x_R2F)).chunk(2, dim=-1)
    return (functional.silu(gate_RF) * up_RF).to(x_R2F.dtype)


def halves(x_R2F: Tensor, by_turns: bool) -> Sequence[Tensor]:
    """Gate and up, which stand by turns or side by side."""
    return (x_R2F[..., ::2], x_R2F[..., 1::2]) if by_turns else x_R2F.chunk(2, dim=-1)


def limited(gate_RF: Tensor, up_RF: Tensor, limit: float, offset: float) -> tuple[Tensor, Tensor]:
    """Both factors of a clamped gate."""
    return gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit) + offset


def clamped_gate(
    x_R2F: Tensor, alpha: float, limit: float, offset: float, by_turns: bool
) -> Tensor:
    """``ClampedGate``; fp32 inside, rounded once."""
    wide_R2F = x_R2F.to(accumulation_dtype(x_R2F))
    gate_RF, up_RF = halves(wide_R2F, by_turns)
    gate_RF, up_RF = limited(gate_RF, up_RF, limit, offset)
    return (gate_RF * torch.sigmoid(alpha * gate_RF) * up_RF).to(x_R2F.dtype)


def swiglu_forward(x_R2F: Tensor) -> Tensor:
    """``swiglu`` in place: one fp32 temporary instead of four; not differentiable."""
    gate_RF, up_RF = x_R2F.chunk(2, dim=-1)
    gate_RF = gate_RF.to(accumulation_dtype(x_R2F), copy=True)
    return rounded(functional.silu(gate_RF, inplace=True).mul_(up_RF), x_R2F.dtype)


def swiglu_backward(x_R2F: Tensor, dh_RF: Tensor, with_result: bool) -> tuple[Tensor, Tensor]:
    """The gradient of ``x_R2F``, and ``swiglu_forward`` again, else an empty tensor."""
    dtype = accumulation_dtype(x_R2F)
    gate_RF, up_RF = x_R2F.chunk(2, dim=-1)
    gate_RF = gate_RF.to(dtype)
    dx_R2F = torch.empty_like(x_R2F)
    dgate_RF, dup_RF = dx_R2F.chunk(2, dim=-1)
    dup_RF.copy_(functional.silu(gate_RF).mul_(dh_RF))
    dsilu_RF = up_RF.to(dtype, copy=True).mul_(dh_RF)
    dgate_RF.copy_(torch.ops.aten.silu_backward(dsilu_RF, gate_RF))
    return dx_R2F, swiglu_forward(x_R2F) if with_result else x_R2F.new_empty(0)
