"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Llama and Qwen.

Shapes: B batch, S sequence, H heads, Q head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs.kernels.heads_reference import rotate


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their position. One instance serves all layers of a model.

    The tables are buffers computed once, so a captured layer reads fixed addresses. They are not
    saved with the model.
    """

    cos_SQ: Tensor
    sin_SQ: Tensor

    def __init__(
        self,
        head_dim: int,
        max_sequence_length: int,
        theta: float = 10_000.0,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.max_sequence_length, self.theta = head_dim, max_sequence_length, theta
        for name in ("cos_SQ", "sin_SQ"):
            empty = torch.empty(max_sequence_length, head_dim // 2, device=device)
            self.register_buffer(name, empty, persistent=False)
        self.reset_tables()

    @torch.no_grad()
    def reset_tables(self) -> None:
        """Computes the tables in place; after ``to_empty`` it has to be called again."""
        device = self.cos_SQ.device
        exponent_Q = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        frequency_Q = self.theta ** (-exponent_Q / self.head_dim)
        position_S = torch.arange(self.max_sequence_length, dtype=torch.float64, device=device)
        angle_SQ = torch.outer(position_S, frequency_Q)
        self.cos_SQ.copy_(angle_SQ.cos())
        self.sin_SQ.copy_(angle_SQ.sin())

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first ``length`` positions, ``[length, Q / 2]``.

        Raises:
            ValueError: the sequence is longer than the tables.
        """
        if length > self.max_sequence_length:
            raise ValueError(
                f"sequence length {length} is above max_sequence_length "
                f"({self.max_sequence_length}): raise it in the configuration"
            )
        return self.cos_SQ[:length], self.sin_SQ[:length]

    def forward(self, x_BSHQ: Tensor) -> Tensor:
        """Rotates ``[B, S, H, Q]`` from position 0 on, in fp32, back in the input's dtype."""
        return rotate(x_BSHQ, *self.tables(x_BSHQ.shape[1]))
