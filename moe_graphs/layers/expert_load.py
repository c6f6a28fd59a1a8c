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
        rows: rows of the batch, if some tokens at their ends may be padding that does not count;
            else None.
        real_length: 0-dim int64 on the device, tokens of a row that count; read with ``rows``.
    """

    rows: int | None = None
    real_length: Tensor

    def __init__(self, num_experts: int, has_aux_loss: bool, device: torch.device) -> None:
        self.pairs_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.aux_loss = torch.zeros((), device=device)
        self.has_aux_loss = has_aux_loss

    @torch.no_grad()
    def count(self, experts_TK: Tensor, counts_E: Tensor | None, aux_loss: Tensor | None) -> None:
        """Count a forward. ``counts_E``: its pairs per expert, if they are known."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self.rows is not None:
            counts_E = self._counts_of_real(experts_TK, self.rows)
        if counts_E is None:
            counts_E = pairs_per_expert(experts_TK, len(self.pairs_E))
        self.pairs_E.add_(counts_E)
        if aux_loss is not None and self.has_aux_loss:
            self.aux_loss.copy_(aux_loss)

    def _counts_of_real(self, experts_TK: Tensor, rows: int) -> Tensor:
        """Returns the pairs per expert without those of padding at the ends of rows."""
        place, length = torch.arange(len(experts_TK), device=experts_TK.device), len(experts_TK)
        real_T = (place % (length // rows) < self.real_length).to(torch.int64)
        pairs = real_T[:, None].expand_as(experts_TK).reshape(-1)
        return torch.zeros_like(self.pairs_E).index_add_(0, experts_TK.reshape(-1), pairs)

    def zero(self) -> None:
        self.pairs_E.zero_()
        self.aux_loss.zero_()
