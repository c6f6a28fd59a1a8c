"""Context parallelism: ranks that share every sequence, a contiguous part each.

Everything but attention works on a rank's own tokens; attention exchanges queries, keys and values
by heads (``layers.head_exchange``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from moe_graphs.layers import Attention, HeadExchange, LatentAttention


def divide_sequences(model: nn.Module, exchange: HeadExchange) -> nn.Module:
    """From now on ``model`` takes this rank's part of every sequence (``part_of_sequences``).

    In place, of all our attention in it, without touching a parameter. Gradients are those of the
    rank's own loss with respect to all ranks' weights together: sum them over ``exchange.group``
    as between data-parallel ranks. Scopes and whole steps hold the exchange.

    Raises:
        ValueError: the ranks cannot share the heads, or there is no attention of ours.
    """
    found = list(_attentions(model))
    if not found:
        raise ValueError("cp: the model has no Attention or LatentAttention to divide")
    for attention in found:
        exchange.check_heads(attention.num_heads)
    for attention in found:
        attention.exchange = exchange
    return model


def part_of_sequences(tokens_BS: Tensor, group: dist.ProcessGroup, *, overlap: int = 0) -> Tensor:
    """This rank's columns of what is the same on all ranks of ``group``.

    Args:
        overlap: columns at the end that belong to the next part as well: 1 for windows of which
            inputs are all but the last token and targets all but the first.

    Raises:
        ValueError: the ranks do not divide the rest of the columns.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    length, rest = divmod(tokens_BS.shape[1] - overlap, ranks)
    if rest:
        raise ValueError(
            f"cp: {ranks} ranks cannot share sequences of {tokens_BS.shape[1] - overlap} tokens "
            f"equally: choose a multiple of {ranks}"
        )
    return tokens_BS[:, rank * length : (rank + 1) * length + overlap]


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Within it every rank computes whole sequences by itself, of any length, without an exchange:
    for a few of them, such as prompts. Nothing changes in a model that is not divided."""
    before = [(attention, attention.exchange) for attention in _attentions(model)]
    for attention, _ in before:
        attention.exchange = None
    try:
        yield
    finally:
        for attention, exchange in before:
            attention.exchange = exchange


def _attentions(model: nn.Module) -> Iterator[Attention | LatentAttention]:
    return (m for m in model.modules() if isinstance(m, (Attention, LatentAttention)))
