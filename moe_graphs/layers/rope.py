"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Llama and Qwen.

Shapes: B batch, S sequence, H heads, Q head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs.kernels.heads.reference import rotate
from moe_graphs.layers.head_exchange import HeadExchange
from moe_graphs.layers.model_config import TransformerConfig
from moe_graphs.layers.rope_scaling import Llama3Scaling, YarnScaling


class RotaryEmbedding(nn.Module):
    """Rotation of queries and keys by their position; one instance serves all layers of a model.

    The tables are buffers computed once, so a captured layer reads fixed addresses. The tables are
    not saved with the model.

    Args:
        doubled: hold every column of the tables twice, for ``doubled_tables``.
    """

    cos_SQ: Tensor
    sin_SQ: Tensor

    def __init__(
        self,
        head_dim: int,
        max_sequence_length: int,
        theta: float = 10_000.0,
        *,
        scaling: YarnScaling | Llama3Scaling | None = None,
        doubled: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.max_sequence_length, self.theta = head_dim, max_sequence_length, theta
        self.scaling, self.doubled = scaling, doubled
        columns = head_dim if doubled else head_dim // 2
        for name in ("cos_SQ", "sin_SQ"):
            empty = torch.empty(max_sequence_length, columns, device=device)
            self.register_buffer(name, empty, persistent=False)
        self.reset_tables()

    @classmethod
    def of(
        cls, config: TransformerConfig, device: torch.device | str | None = None
    ) -> RotaryEmbedding:
        """Build the embedding that ``config`` asks for."""
        length, theta = config.max_sequence_length, config.rope_theta
        latent = config.latent is not None
        return cls(
            config.rope_size,
            length,
            theta,
            scaling=config.rope_scaling,
            doubled=latent,
            device=device,
        )

    @torch.no_grad()
    def reset_tables(self) -> None:
        """Compute the tables in place; call it again after ``to_empty``."""
        device = self.cos_SQ.device
        exponent_Q = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        frequency_Q = self.theta ** (-exponent_Q / self.head_dim)
        factor = 1.0
        if self.scaling is not None:
            frequency_Q = self.scaling.scaled(frequency_Q, self.theta)
            factor = self.scaling.table_factor
        position_S = torch.arange(self.max_sequence_length, dtype=torch.float64, device=device)
        angle_SQ = torch.outer(position_S, frequency_Q)
        if self.doubled:
            angle_SQ = torch.cat((angle_SQ, angle_SQ), dim=-1)
        self.cos_SQ.copy_(angle_SQ.cos() * factor)
        self.sin_SQ.copy_(angle_SQ.sin() * factor)

    def tables(self, length: int, exchange: HeadExchange | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first ``length`` positions, ``[length, Q / 2]`` each.

        With an ``exchange``, ``length`` is the length of a rank's part of a sequence, and the
        positions are those of this rank's part.

        Raises:
            ValueError: the sequence is longer than the tables.
        """
        cos_SQ, sin_SQ = self._rows(length, exchange)
        if self.doubled:
            half = self.head_dim // 2
            return cos_SQ[:, :half], sin_SQ[:, :half]
        return cos_SQ, sin_SQ

    def doubled_tables(
        self, length: int, exchange: HeadExchange | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tables ``[1, length, Q]`` with every column twice, for ``kernels.apply_rotary``.

        Raises:
            ValueError: the sequence is longer than the tables, or the embedding was not built with
                ``doubled=True``.
        """
        cos_SQ, sin_SQ = self._rows(length, exchange)
        if not self.doubled:
            raise ValueError("these rotary tables are not doubled: build them with doubled=True")
        return cos_SQ[None], sin_SQ[None]

    def _rows(self, length: int, exchange: HeadExchange | None) -> tuple[Tensor, Tensor]:
        rank, ranks = (0, 1) if exchange is None else (exchange.rank, exchange.ranks)
        if length * ranks > self.max_sequence_length:
            raise ValueError(
                f"sequence length {length * ranks} is above max_sequence_length "
                f"({self.max_sequence_length}): raise it in the configuration"
            )
        rows = slice(rank * length, (rank + 1) * length)
        return self.cos_SQ[rows], self.sin_SQ[rows]

    def forward(self, x_BSHQ: Tensor) -> Tensor:
        """Rotate ``[B, S, H, Q]`` from position 0 on; in fp32, rounded to the input's dtype."""
        return rotate(x_BSHQ, *self.tables(x_BSHQ.shape[1]))
