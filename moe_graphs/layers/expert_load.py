"""Counters of the pairs that each expert of a layer gets, for reports."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_graphs.kernels.choose_experts.reference import pairs_per_expert


class ExpertLoad:
    """Pairs of tokens and experts of one layer, counted in place and on the device.

    Graphs count, too. Forwards in training mode count, once each: a forward that runs again for a
    backward does not.

    Attributes:
        pairs_E: int64, pairs of each expert since the last reset.
        aux_loss: 0-dim fp32, the router's losses of the last forward, coefficients applied.
        has_aux_loss: whether the router has losses of its own.
    """

    def __init__(self, num_experts: int, has_aux_loss: bool, device: torch.device) -> None:
        self.pairs_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.aux_loss = torch.zeros((), device=device)
        self.has_aux_loss = has_aux_loss

    @torch.no_grad()
    def count(self, experts_TK: Tensor, counts_E: Tensor | None, aux_loss: Tensor | None) -> None:
        """Count a forward. ``counts_E``: its pairs per expert, if they are known."""
        if torch._C._current_graph_task_id() != -1:
            return
        if counts_E is None:
            counts_E = pairs_per_expert(experts_TK, len(self.pairs_E))
        self.pairs_E.add_(counts_E)
        if aux_loss is not None and self.has_aux_loss:
            self.aux_loss.copy_(aux_loss)

    def zero(self) -> None:
        self.pairs_E.zero_()
        self.aux_loss.zero_()
