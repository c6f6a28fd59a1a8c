"""The sums of tokens, in a node behind the one that keeps what their backward needs.

Gradient checkpointing runs a forward again up to the last tensor that is kept, and autograd keeps a
node's tensors when the node's forward is over. So one node keeps the tensors and computes nothing,
and the node behind it computes the sums and keeps nothing. A forward that runs again ends between
both: activation, second product and sums are not repeated.

Shapes: T tokens, K top-k, R routed rows, D model, F ffn, E experts, r rank, M and N the two sides
of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_graphs.kernels.gemm import grouped_gemm_forward, grouped_gemm_with_lora, lora_gemm
from moe_graphs.kernels.packed_weights import PackedWeight, packed_gemm
from moe_graphs.kernels.permute import collect_rows
from moe_graphs.kernels.swiglu import ClampedGate, swiglu_forward


def multiplied(
    rows_RM: Tensor,
    w_EMN: Tensor | PackedWeight,
    offsets_E: Tensor,
    low_Rr: Tensor | None = None,
    b_ErN: Tensor | None = None,
) -> Tensor:
    """``rows @ w``, or ``rows @ w + low @ b`` as one sum, of a weight in few bits or not."""
    if isinstance(w_EMN, PackedWeight):
        return packed_gemm(rows_RM, w_EMN, offsets_E, low_Rr, b_ErN)
    if low_Rr is None:
        return grouped_gemm_forward(rows_RM, w_EMN, offsets_E, False)
    return grouped_gemm_with_lora(rows_RM, w_EMN, low_Rr, b_ErN, offsets_E)


def multiplied_with_lora(
    rows_RM: Tensor,
    w_EMN: Tensor | PackedWeight,
    a_EMr: Tensor,
    b_ErN: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """``rows @ w + low @ b`` as one sum, and ``low = rows @ a``, rounded."""
    if isinstance(w_EMN, Tensor):
        return lora_gemm(rows_RM, w_EMN, a_EMr, b_ErN, offsets_E)
    low_Rr = grouped_gemm_forward(rows_RM, a_EMr, offsets_E, False)
    return multiplied(rows_RM, w_EMN, offsets_E, low_Rr, b_ErN), low_Rr


def product(
    rows_RM: Tensor,
    w_EMN: Tensor | PackedWeight,
    a_EMr: Tensor | None,
    b_ErN: Tensor | None,
    offsets_E: Tensor,
    bias_EN: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``rows @ w + (rows @ a) @ b + bias``, which is one sum, and ``rows @ a``."""
    if a_EMr is None or b_ErN is None:
        beside = () if bias_EN is None else _bias_as_product(len(rows_RM), bias_EN)
        return multiplied(rows_RM, w_EMN, offsets_E, *beside), None
    if bias_EN is None:
        return multiplied_with_lora(rows_RM, w_EMN, a_EMr, b_ErN, offsets_E)
    low_Rr = grouped_gemm_forward(rows_RM, a_EMr, offsets_E, False)
    ones_R8, bias_E8N = _bias_as_product(len(rows_RM), bias_EN)
    beside = torch.cat((low_Rr, ones_R8), 1), torch.cat((b_ErN, bias_E8N), 1)
    return multiplied(rows_RM, w_EMN, offsets_E, *beside), low_Rr


def _bias_as_product(rows: int, bias_EN: Tensor) -> tuple[Tensor, Tensor]:
    """``[R, 8]`` with a column of ones and ``[E, 8, N]`` with the bias: rows of 16 bytes."""
    ones_R8 = functional.pad(bias_EN.new_ones(rows, 1), (0, 7))
    return ones_R8, functional.pad(bias_EN.unsqueeze(1), (0, 0, 0, 7))


def place_of_sums(gate_up_R2F: Tensor, weights_TK: Tensor, w2_EFD: Tensor | PackedWeight) -> Tensor:
    """``[T, D]`` without memory and values, for a node whose output ``sums_of_tokens`` takes."""
    return gate_up_R2F.new_empty(()).expand(len(weights_TK), w2_EFD.shape[2])


def sums_of_tokens(
    place_TD: Tensor,
    gate_up_R2F: Tensor,
    weights_TK: Tensor,
    a_EFr: Tensor | None,
    b_ErD: Tensor | None,
    w2_EFD: Tensor | PackedWeight,
    inverse_TK: Tensor,
    offsets_E: Tensor,
    has_gaps: bool,
    gate: ClampedGate,
) -> Tensor:
    """The sums of the rows' second products by token; their gradient is that of ``place_TD``."""
    given = gate_up_R2F, weights_TK, a_EFr, b_ErD, w2_EFD
    operands = (each.detach() if isinstance(each, Tensor) else each for each in given)
    return _Sums.apply(place_TD, *operands, inverse_TK, offsets_E, has_gaps, gate)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, place_TD, gate_up_R2F, weights_TK, a_EFr, b_ErD, w2_EFD, inverse_TK, offsets_E,
        has_gaps, gate,
    ):  # fmt: skip
        rows_RF = swiglu_forward(gate_up_R2F, gate)
        rows_RD, _ = product(rows_RF, w2_EFD, a_EFr, b_ErD, offsets_E)
        return collect_rows(rows_RD, inverse_TK, weights_TK, has_gaps)

    @staticmethod
    def backward(ctx, grad_TD):
        return grad_TD, *[None] * 9
