"""Static shapes over several ranks: every rank has the same number of tokens, or it is refused."""

from __future__ import annotations

import functools

import torch.distributed as dist

from moe_graphs.dispatch.expert_group import exchange

PATIENCE = 300.0  # seconds, for the other ranks to come with a new number of tokens, too


@functools.cache
def check_equal_tokens(group: dist.ProcessGroup, tokens: int, dispatcher: str) -> None:
    """Once per group and number of tokens: on every rank it is the same number.

    The n-th number that a rank comes with is compared with the n-th of every other rank, through
    the group's store.

    Raises:
        ValueError: the numbers differ, or some rank brings no new one within five minutes.
    """
    remedy = (
        f"{dispatcher} has static shapes and takes equal numbers of tokens: pad the batches, or "
        f"choose dispatcher 'all_to_all', which takes any"
    )
    try:
        said = exchange(group, f"{dispatcher} tokens", str(tokens), PATIENCE)
    except RuntimeError as error:  # of every kind of store
        raise ValueError(
            f"rank {dist.get_rank(group)} has {tokens} tokens for the first time, and not all of "
            f"the other ranks of its expert-parallel group have a new number, too. {remedy}"
        ) from error
    found = list(map(int, said.values()))
    if set(found) != {tokens}:
        raise ValueError(f"the ranks of the expert-parallel group have {found} tokens. {remedy}")
