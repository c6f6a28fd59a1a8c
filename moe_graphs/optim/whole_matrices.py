"""Matrices of which ranks hold some rows each: put together on one of them, and taken apart again.

R ranks, N rows, M columns.
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
    """Which rows of a parameter's matrices a rank has: of rank ``rank`` of ``ranks``, as FSDP2
    divides them.

    Attributes:
        ranks: 1 if a rank has its matrices whole.
        group: of these ranks, None if there is one.
    """

    shape: tuple[int, ...]
    ranks: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def of(self, rank: int) -> range:
        """Those of one of the ranks: as torch.chunk."""
        rows, most = self.shape[0], -(-self.shape[0] // self.ranks)
        return range(min(rank * most, rows), min((rank + 1) * most, rows))

    @property
    def own(self) -> range:
        return self.of(self.rank)


def rows_of(parameter: Any) -> Rows | None:
    """None if the rank's part is neither whole matrices nor rows of one.

    Args:
        parameter: ``[N, M]``, or ``[E, ...]``, a matrix for each expert.
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
    """What is put together at once: as many matrices as there are ranks, one for each of them, the
    largest first, so that ranks have about as much to do."""
    shared: dict[Any, list[T]] = {}  # by group, in an order that is that of all ranks
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
    """What a rank receives in an update of parameters of one group."""
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
    """Of every matrix this rank's rows of ``compute(matrix)``, which one rank calls: matrix ``i``
    is that of rank ``i``. All ranks of the group call it alike.

    Args:
        parts: this rank's rows, ``[n, M]`` each; of at most as many matrices as there are ranks.
        compute: gives back another matrix of the same shape and dtype. Without ranks to share with
            ``[E, X, Y]`` is welcome, too.
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
