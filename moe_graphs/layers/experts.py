"""The routed experts: two grouped GEMMs around a SwiGLU.

Shapes: D model, F ffn, E experts of the layer, e experts of this rank, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs.kernels import grouped_gemm, swiglu


class GroupedExperts(nn.Module):
    """The SwiGLU experts of one rank, as two stacked weights.

    They are experts ``first_expert`` and following of ``num_experts`` (default: all of them).

    Attributes:
        w1: ``[e, D, 2F]``, gate and up side by side: rows are multiplied from the left.
        w2: ``[e, F, D]``.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        first_expert: int = 0,
        num_experts: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape1 = (num_local_experts, hidden_size, 2 * ffn_hidden_size)
        shape2 = (num_local_experts, ffn_hidden_size, hidden_size)
        self.w1 = nn.Parameter(torch.empty(shape1, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(shape2, device=device, dtype=dtype))
        self.local_experts = range(first_expert, first_expert + num_local_experts)
        self.num_experts = num_local_experts if num_experts is None else num_experts
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, out_std: float = 0.02) -> None:
        """Draws the weights of all experts in turn and keeps the local ones.

        So ranks that draw from one seed hold different experts, and together exactly those that
        a single rank would hold. Costs one expert's memory.
        """
        for weight, scale in ((self.w1, std), (self.w2, out_std)):
            if weight.is_meta:
                continue  # nothing to fill, and thousands of experts take their time
            scratch = torch.empty_like(weight[0])
            for expert in range(self.num_experts):
                scratch.normal_(std=scale)
                if expert in self.local_experts:
                    weight[expert - self.local_experts.start].copy_(scratch)

    def forward(self, rows_RD: Tensor, offsets_e: Tensor) -> Tensor:
        """``[R, D]`` to ``[R, D]``. The last offset is R: every dispatcher sees to that."""
        return swiglu_experts(rows_RD, self.w1, self.w2, offsets_e)


def swiglu_experts(rows_RD: Tensor, w1_eD2F: Tensor, w2_eFD: Tensor, offsets_e: Tensor) -> Tensor:
    """Rows of each expert through its own SwiGLU. ``offsets_e``: ends of the experts' rows, the
    last is R. Weights may be transposed views."""
    gate_up_R2F = grouped_gemm(rows_RD, w1_eD2F, offsets_e, zero_tail=False)
    return grouped_gemm(swiglu(gate_up_R2F), w2_eFD, offsets_e, zero_tail=False)
