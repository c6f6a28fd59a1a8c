"""The dense feed-forward network.

Shapes: D model, F ffn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.kernels import swiglu, swiglu_linear
from moe_graphs.layers.linear import build_linear, is_plain_linear


class SwiGLU(nn.Module):
    """``w2(silu(gate) * up)``, gate and up in one projection (arXiv 2002.05202).

    Keeps its input and the output of ``w1`` for the backward, if ``w2`` is a plain linear layer.
    Otherwise (hooks, LoRA, another library's projection) the input of ``w2`` is kept as well.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        linear: str = "torch",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w1 = build_linear(linear, hidden_size, 2 * ffn_hidden_size, **factory)
        self.w2 = build_linear(linear, ffn_hidden_size, hidden_size, **factory)

    def matrices(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Weights between hidden states, with the rows of each matrix if a weight holds several."""
        return {self.w1.weight: (len(self.w1.weight) // 2,) * 2, self.w2.weight: ()}

    def forward(self, hidden: Tensor) -> Tensor:
        gate_up = self.w1(hidden)
        if is_plain_linear(self.w2):
            return swiglu_linear(gate_up, self.w2.weight)
        return self.w2(swiglu(gate_up))
