"""The routed experts: two grouped GEMMs around a SwiGLU.

Shapes: D model, F ffn, e experts of this rank, X tokens or sorted rows, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs import weight_codes
from moe_graphs.kernels import RowOrder, routed_experts
from moe_graphs.kernels.fp8 import PRECISIONS
from moe_graphs.kernels.local_part import local_part
from moe_graphs.kernels.routed_experts.fp8 import routed_experts_fp8
from moe_graphs.layers.expert_backends import ExpertsBackend


class GroupedExperts(ExpertsBackend):
    """The SwiGLU experts of one rank, as two stacked weights.

    Attributes:
        w1: ``[e, D, 2F]``, gate and up side by side; the experts compute ``rows @ w1``.
        w2: ``[e, F, D]``.
    """

    takes_tail = True
    recomputes = True
    computes_fp8 = True

    def make_weights(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        num_local_experts = len(self.local_experts)
        shape1 = (num_local_experts, hidden_size, 2 * ffn_hidden_size)
        shape2 = (num_local_experts, ffn_hidden_size, hidden_size)
        self.w1 = nn.Parameter(torch.empty(shape1, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(shape2, device=device, dtype=dtype))

    def init_weights(self, std: float = 0.02, out_std: float = 0.02) -> None:
        self.draw_experts(self.w1, std)
        self.draw_experts(self.w2, out_std)

    def forward(
        self, tokens_XD: Tensor, order: RowOrder, weights_XK: Tensor, is_sorted: bool = False
    ) -> Tensor:
        w1_eD2F, w2_eFD = local_part(self.w1), local_part(self.w2)
        given, recompute = (tokens_XD, order, weights_XK, w1_eD2F, w2_eFD), self.recompute
        if self.precision == "weights":
            return routed_experts(*given, is_sorted=is_sorted, recompute=recompute)
        return routed_experts_fp8(
            *given,
            is_sorted=is_sorted,
            recompute=recompute,
            keep_codes=self.keeps_codes and (weight_codes.is_open() or not recompute),
            **PRECISIONS[self.precision],
        )

    def matrices(self) -> dict[nn.Parameter, tuple[int, ...]]:
        return {self.w1: (self.w1.shape[-1] // 2,) * 2, self.w2: ()}

    def stacked_weights(self) -> tuple[Tensor, Tensor]:
        return self.w1.detach(), self.w2.detach()

    @torch.no_grad()
    def load_stacked_weights(self, w1_eD2F: Tensor, w2_eFD: Tensor) -> None:
        self.w1.copy_(w1_eD2F)
        self.w2.copy_(w2_eFD)
