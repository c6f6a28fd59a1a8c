"""Context parallelism: every rank has a contiguous part of every sequence.

All modules but attention work on the rank's own tokens. Attention exchanges queries, keys and
values by heads (``layers.head_exchange``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_graphs.layers import HeadExchange, LanguageModel, TransformerConfig
from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.degrees import Degree
from moe_graphs.parallel.model_stage import ModelStage


class ContextParallel(Degree):
    has_tokens = hides_documents = True
    messages = "context exchange"

    @classmethod
    def check(
        cls, layout: ParallelConfig, model: TransformerConfig, sequence_length: int | None = None
    ) -> None:
        heads, length = model.num_heads // layout.tp, sequence_length or 0
        if heads % layout.cp == length % layout.cp == 0:
            return
        of_tp = f" (of {model.num_heads}, shared by tp {layout.tp})" if layout.tp > 1 else ""
        sequences = f"sequences of {length} tokens and " if sequence_length else ""
        raise ValueError(
            f"cp: {layout.cp} ranks cannot share {sequences}{heads} heads{of_tp} equally: choose a "
            f"divisor"
        )

    @classmethod
    def share(cls, model: LanguageModel | ModelStage, ranks: DeviceMesh) -> None:
        apply_context_parallel(model, HeadExchange.over(ranks.get_group()))


def apply_context_parallel(model: nn.Module, exchange: HeadExchange) -> nn.Module:
    """Make ``model`` take this rank's part of every sequence (``part_of_sequences``), in place.

    Every module with an attribute ``exchange`` gets it; no parameter changes. A rank's gradients
    are those of its own loss: sum them over ``exchange.group``, as between data-parallel ranks.
    Graphs of scopes and of whole steps can hold the exchange.

    Raises:
        ValueError: the ranks cannot share the heads, or the model has no such attention.
    """
    found = list(_attentions(model))
    if not found:
        raise ValueError("cp: the model has no attention that takes an exchange of heads")
    for attention in found:
        exchange.check_heads(attention.num_heads)
    for attention in found:
        attention.exchange = exchange
    return model


def part_of_sequences(tokens_BS: Tensor, group: dist.ProcessGroup, *, overlap: int = 0) -> Tensor:
    """Part of this rank in sequences ``[B, S]``, which are the same on all ranks of ``group``.

    Args:
        overlap: number of columns at a part's end that belong to the next part as well: 1 if the
            inputs are all tokens but the last and the targets all tokens but the first.

    Raises:
        ValueError: the ranks do not divide the columns without the last ``overlap``.
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
    """Context in which every rank computes whole sequences of any length by itself.

    It is meant for a few sequences, such as prompts. A model without an exchange does not change.
    """
    before = [(attention, attention.exchange) for attention in _attentions(model)]
    for attention, _ in before:
        attention.exchange = None
    try:
        yield
    finally:
        for attention, exchange in before:
            attention.exchange = exchange


def _attentions(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "exchange"))
