"""Check that all ranks have the same number of tokens, which static shapes need."""

from __future__ import annotations

import functools

import torch.distributed as dist

from moe_graphs.dispatch.expert_group import exchange

PATIENCE = 300.0  # seconds to wait for the other ranks' new number of tokens


@functools.cache
def check_equal_tokens(group: dist.ProcessGroup, tokens: int, dispatcher: str) -> None:
    """Check once per group and number of tokens that every rank has this number.

    The n-th new number of this rank is compared with the n-th new number of every other rank,
    through the group's store.

    Args:
        group: the ranks of expert parallelism.
        tokens: number of tokens of this rank.
        dispatcher: name of the dispatcher, for the message.

    Raises:
        ValueError: the numbers differ, or some rank has no new number within five minutes.
    """
    remedy = (
        f"{dispatcher} has static shapes and takes equal numbers of tokens: pad the batches, or "
        f"choose dispatcher 'all_to_all', which takes any"
    )
    try:
        said = exchange(group, f"{dispatcher} tokens", str(tokens), PATIENCE)
    except RuntimeError as error:  # every kind of store raises this one
        raise ValueError(
            f"rank {dist.get_rank(group)} has {tokens} tokens for the first time, and not all of "
            f"the other ranks of its expert-parallel group have a new number, too. {remedy}"
        ) from error
    found = list(map(int, said.values()))
    if set(found) != {tokens}:
        raise ValueError(f"the ranks of the expert-parallel group have {found} tokens. {remedy}")
