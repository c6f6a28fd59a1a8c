"""Ranks of an expert-parallel group, and the experts that each rank holds."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist

from moe_graphs.dispatch.dispatcher import Dispatcher


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and size in ``group`` (default: the world); 0 and 1 without a process group."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def exchange(
    group: dist.ProcessGroup, topic: str, value: str, patience: float | None = None
) -> dict[int, str]:
    """Exchange a string with all ranks of ``group`` through its store.

    The n-th call of this rank about ``topic`` meets the n-th call of every other rank.

    Returns:
        The strings of all ranks, by rank.

    Raises:
        RuntimeError: some rank has not called within ``patience`` seconds (default: the store's
            timeout).
    """
    rank, world_size = rank_and_size(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    nth = store.add(f"{topic} said by rank {rank}", 1)
    keys = [f"{topic} {nth} of rank {each}" for each in range(world_size)]
    store.set(keys[rank], value)
    store.wait(keys, *([] if patience is None else [datetime.timedelta(seconds=patience)]))
    return {each: store.get(key).decode() for each, key in enumerate(keys)}


def block_of_experts(num_experts: int, group: dist.ProcessGroup | None) -> range:
    """Contiguous block of experts that this rank holds; all ranks' blocks have the same size.

    Raises:
        ValueError: the ranks do not divide ``num_experts``.
    """
    rank, world_size = rank_and_size(group)
    if num_experts % world_size:
        raise ValueError(
            f"num_experts ({num_experts}) must be divisible by the ranks of the "
            f"expert-parallel group ({world_size}): every rank holds an equal block"
        )
    count = num_experts // world_size
    return range(rank * count, (rank + 1) * count)


@dataclass(frozen=True)
class ExpertParallel(Dispatcher):
    """Abstract dispatcher over the ranks of ``group`` (default: the world, or this process)."""

    group: dist.ProcessGroup | None = None
    between_ranks: ClassVar[bool] = True

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        if rank_and_size(self.group)[1] == 1:
            return None
        return dist.group.WORLD if self.group is None else self.group

    def local_experts(self, num_experts: int) -> range:
        return block_of_experts(num_experts, self.group)
