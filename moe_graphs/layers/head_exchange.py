"""Exchange between ranks that share sequences: whole sequences for some heads, and back.

Shapes: W ranks, B batch, s tokens of this rank's part, S = W * s, H heads, h = H / W, Q head dim,
N numbers of a token that go to one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class HeadExchange:
    """Exchange of DeepSpeed-Ulysses (arXiv 2309.14509).

    Rank r has the r-th of W equal parts of every sequence. In attention it has the r-th part of
    the heads, over whole sequences. Sizes are static, so NCCL and gloo can be captured. No number
    is computed on the way, so results are those of one process. All ranks call the exchange with
    the same shapes.

    Attributes:
        group: the ranks' process group. Without a group an exchange copies what it is given, which
            has the right shapes for planning.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> HeadExchange:
        """Build the exchange of this process in ``group``."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Ranks that capture and replay calls together with this one."""
        return self.group

    def check_heads(self, heads: int) -> None:
        """Check that the ranks can share ``heads`` query heads.

        Raises:
            ValueError: the number of ranks does not divide ``heads``.
        """
        if heads % self.ranks:
            raise ValueError(
                f"context parallelism: {self.ranks} ranks cannot share {heads} heads (with "
                f"tp, those of one of its ranks): choose a divisor of them for cp"
            )

    def whole_sequences(
        self, sent_WBsN: Tensor, heads: Sequence[tuple[int, int]]
    ) -> Sequence[Tensor]:
        """Exchange parts of all heads for whole sequences of this rank's heads, in one collective.

        For a batch of one the results are views of the receive buffer, otherwise of a copy.

        Args:
            sent_WBsN: the numbers for every rank, as ``kernels.split_heads_by_rank`` lays them out.
            heads: number and size of a rank's heads, for queries, keys and values.

        Returns:
            Queries, keys and values, ``[B, S, h, Q]`` each.
        """
        arrived_WBsN = _Exchange.apply(sent_WBsN, self)
        whole_BSN = arrived_WBsN.transpose(0, 1).flatten(1, 2)
        parts = whole_BSN.split([count * size for count, size in heads], dim=2)
        return [x.unflatten(2, shape) for x, shape in zip(parts, heads, strict=True)]

    def own_part(self, mixed_BShQ: Tensor) -> Tensor:
        """Exchange whole sequences back for this rank's part of all heads, ``[B, s, H*Q]``."""
        mixed_BWsN = mixed_BShQ.flatten(2).unflatten(1, (self.ranks, -1))
        arrived_WBsN = _Exchange.apply(mixed_BWsN.transpose(0, 1), self)
        return arrived_WBsN.permute(1, 2, 0, 3).flatten(2)

    def swap(self, rows_WBsN: Tensor) -> Tensor:
        """Send row w to rank w; return what every rank has sent here, in the order of ranks."""
        if self.group is None:
            return rows_WBsN.clone(memory_format=torch.contiguous_format)
        rows_WBsN = rows_WBsN.contiguous()
        arrived_WBsN = torch.empty_like(rows_WBsN)
        dist.all_to_all_single(arrived_WBsN, rows_WBsN, group=self.group)
        return arrived_WBsN


def check_exchange(exchange: HeadExchange | None, document_ids_BS: Tensor | None) -> None:
    """Check that a rank which is told of documents has whole rows.

    Raises:
        ValueError: it has a part of every row.
    """
    if exchange is not None and document_ids_BS is not None:
        raise ValueError(
            "document_ids: with context parallelism a rank has a part of every row and does not "
            "know the documents of the others: drop them, or cp"
        )


class _Exchange(torch.autograd.Function):
    """``HeadExchange.swap`` with a gradient, which travels back by the same exchange."""

    @staticmethod
    def forward(ctx: Any, rows_WBsN: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.swap(rows_WBsN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_WBsN: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.swap(grad_WBsN), None
