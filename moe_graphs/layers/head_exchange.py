"""Attention over sequences that are divided over ranks: all of a sequence for some of the heads.

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
    """DeepSpeed-Ulysses (arXiv 2309.14509): rank r has the r-th of W equal parts of every sequence,
    and in attention the r-th part of the heads of whole sequences.

    Sizes are static and every number is moved once each way, so results are those of one process,
    and NCCL and gloo can be captured. All ranks have to call it with the same shapes.

    Attributes:
        group: of the ranks; without one as much arrives as is sent, which is for plans.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> HeadExchange:
        """As the rank that this process is in ``group``."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """With whom calls are captured and replayed together."""
        return self.group

    def check_heads(self, heads: int) -> None:
        """Returns if the ranks can share so many query heads, and raises a ValueError if not."""
        if heads % self.ranks:
            raise ValueError(
                f"context parallelism: {self.ranks} ranks cannot share {heads} heads (with "
                f"tp, those of one of its ranks): choose a divisor of them for cp"
            )

    def whole_sequences(
        self, sent_WBsN: Tensor, heads: Sequence[tuple[int, int]]
    ) -> Sequence[Tensor]:
        """What was laid out for every rank (``kernels.split_heads_by_rank``), in one exchange.

        For a batch of one the results are views of what arrived, otherwise of a copy.

        Args:
            heads: of queries, keys and values on a rank: how many, and their size.

        Returns:
            ``[B, S, h, Q]`` each.
        """
        arrived_WBsN = _Exchange.apply(sent_WBsN, self)
        whole_BSN = arrived_WBsN.transpose(0, 1).flatten(1, 2)
        parts = whole_BSN.split([count * size for count, size in heads], dim=2)
        return [x.unflatten(2, shape) for x, shape in zip(parts, heads, strict=True)]

    def own_part(self, mixed_BShQ: Tensor) -> Tensor:
        """The way back: of this rank's part all heads' results, ``[B, s, H*Q]``."""
        mixed_BWsN = mixed_BShQ.flatten(2).unflatten(1, (self.ranks, -1))
        arrived_WBsN = _Exchange.apply(mixed_BWsN.transpose(0, 1), self)
        return arrived_WBsN.permute(1, 2, 0, 3).flatten(2)

    def swap(self, rows_WBsN: Tensor) -> Tensor:
        """What every rank has for this one, in their order."""
        if self.group is None:
            return rows_WBsN.clone(memory_format=torch.contiguous_format)
        rows_WBsN = rows_WBsN.contiguous()
        arrived_WBsN = torch.empty_like(rows_WBsN)
        dist.all_to_all_single(arrived_WBsN, rows_WBsN, group=self.group)
        return arrived_WBsN


class _Exchange(torch.autograd.Function):
    """Gradients go back the way that their values have come."""

    @staticmethod
    def forward(ctx: Any, rows_WBsN: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.swap(rows_WBsN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_WBsN: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.swap(grad_WBsN), None
