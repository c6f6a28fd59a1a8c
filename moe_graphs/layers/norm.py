"""Root mean square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm of the last dimension; statistics in fp32, result in the input's dtype."""

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
