"""Static shapes over several ranks: every rank has the same number of tokens, or it is refused."""

from __future__ import annotations

import datetime
import functools

import torch.distributed as dist

from moe_graphs.dispatch.expert_group import rank_and_size

PATIENCE = 300.0  # seconds, for the other ranks to come with a new number of tokens, too


@functools.cache
def check_equal_tokens(group: dist.ProcessGroup, tokens: int, dispatcher: str) -> None:
    """Once per group and number of tokens: on every rank it is the same number.

    The n-th number that a rank comes with is compared with the n-th of every other rank, through
    the group's store.

    Raises:
        ValueError: the numbers differ, or some rank brings no new one within five minutes.
    """
    rank, world_size = rank_and_size(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    nth = store.add(f"{dispatcher} numbers of rank {rank}", 1)
    keys = [f"{dispatcher} tokens {nth} of rank {each}" for each in range(world_size)]
    store.set(keys[rank], str(tokens))
    remedy = (
        f"{dispatcher} has static shapes and takes equal numbers of tokens: pad the batches, or "
        f"choose dispatcher 'all_to_all', which takes any"
    )
    try:
        store.wait(keys, datetime.timedelta(seconds=PATIENCE))
    except RuntimeError as error:  # of every kind of store
        raise ValueError(
            f"rank {rank} has {tokens} tokens for the first time, and not all of the other ranks "
            f"of its expert-parallel group have a new number, too. {remedy}"
        ) from error
    found = [int(store.get(key)) for key in keys]
    if set(found) != {tokens}:
        raise ValueError(f"the ranks of the expert-parallel group have {found} tokens. {remedy}")
