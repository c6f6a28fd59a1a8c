"""Matrices whose rows are sharded over ranks: gathered on one rank, and scattered again.

Shapes: R ranks, N rows, M columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Rows(NamedTuple):
    """Rows of a parameter's matrices that a rank has, as FSDP2 divides them.

    Attributes:
        shape: the whole parameter's shape.
        ranks: number of ranks that share the rows; 1 if a rank has its matrices whole.
        rank: this rank's number among them.
        group: process group of these ranks; None for one rank.
    """

    shape: tuple[int, ...]
    ranks: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def of(self, rank: int) -> range:
        """Rows of rank ``rank``, divided as by ``torch.chunk``."""
        rows, most = self.shape[0], -(-self.shape[0] // self.ranks)
        return range(min(rank * most, rows), min((rank + 1) * most, rows))

    @property
    def own(self) -> range:
        return self.of(self.rank)


def rows_of(parameter: Any) -> Rows | None:
    """Rows of ``parameter`` on this rank; None if its shard is neither whole matrices nor rows.

    Args:
        parameter: ``[N, M]``, or ``[E, N, M]`` with a matrix for each expert.
    """
    shape = tuple(parameter.shape)
    if not hasattr(parameter, "placements"):
        return Rows(shape)
    mesh = parameter.device_mesh
    divided = [
        (number, placement)
        for number, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(number) > 1
    ]
    if any(getattr(placement, "dim", None) != 0 for _, placement in divided):
        return None
    if len(shape) == 3 or not divided:
        return Rows(shape)
    (number, placement), *others = divided
    if others or not placement.is_shard(0):
        return None
    return Rows(shape, mesh.size(number), mesh.get_local_rank(number), mesh.get_group(number))


def in_turn(items: Sequence[T], rows: Callable[[T], Rows]) -> Iterator[list[T]]:
    """Batches of matrices that are gathered at once, one matrix per rank.

    The largest matrices come first, so that the matrices of a batch have similar sizes and ranks
    have about the same work.
    """
    shared: dict[Any, list[T]] = {}  # by group; all ranks have the same order
    for item in items:
        if rows(item).ranks == 1:
            yield [item]
        else:
            shared.setdefault(rows(item).group, []).append(item)
    for of_group in shared.values():
        of_group.sort(key=lambda item: -math.prod(rows(item).shape))
        ranks = rows(of_group[0]).ranks
        yield from (of_group[start : start + ranks] for start in range(0, len(of_group), ranks))


def received_bytes(rows: Sequence[Rows]) -> int:
    """Bytes that this rank receives in an update of parameters of one group."""
    found = 0
    for together in in_turn(rows, lambda each: each):
        for number, each in enumerate(together if together[0].ranks > 1 else ()):
            here, width = len(each.own), each.shape[1]
            others = each.shape[0] - here
            found += (others if number == each.rank else here) * width
    return found * torch.bfloat16.itemsize


def on_owners(
    parts: Sequence[Tensor], rows: Sequence[Rows], compute: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Gather matrices on their owners, compute there, and scatter the results' rows.

    Rank ``i`` owns matrix ``i`` and calls ``compute`` on it. All ranks of the group call this
    function alike.

    Args:
        parts: this rank's rows ``[n, M]`` of each matrix; at most as many matrices as ranks. If
            one rank has whole matrices, ``[E, X, Y]`` as well.
        rows: for each part, the rows that it holds.
        compute: returns another matrix of the same shape and dtype.

    Returns:
        This rank's rows of ``compute(matrix)``, for each matrix.
    """
    if rows[0].ranks == 1:
        return [compute(part) for part in parts]
    own, group = rows[0].rank, rows[0].group
    sent = torch.cat([part.reshape(-1) for part in parts])
    sizes = [part.numel() for part in parts]
    sizes += [0] * (rows[0].ranks - len(parts))
    pieces = [0] * rows[0].ranks
    mine = rows[own] if own < len(rows) else None
    if mine is not None:
        pieces = [len(mine.of(rank)) * mine.shape[1] for rank in range(mine.ranks)]
    arrived = sent.new_empty(sum(pieces))
    dist.all_to_all_single(arrived, sent, pieces, sizes, group=group)
    if mine is not None:
        arrived = compute(arrived.view(mine.shape)).reshape(-1)
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, arrived, sizes, pieces, group=group)
    results = back.split(sizes)
    return [result.view_as(part) for result, part in zip(results, parts, strict=False)]
