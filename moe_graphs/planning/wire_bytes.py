"""Bytes that a rank receives from other ranks in a step; rank 0 sends as many.

Shapes: T tokens of a rank in a microbatch, W ranks that share the experts, D model, K top-k,
E experts, e local experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moe_graphs.layers import MoEConfig, TransformerConfig


@dataclass(frozen=True)
class ShardedWeights:
    """Parameters that FSDP2 treats alike.

    Attributes:
        numbers: of a rank's share, padded as it travels.
        ranks, replicas: over which they are sharded, and copies of that (HSDP).
        regathered: freed between forward and backward, so gathered twice in a microbatch.
    """

    numbers: int
    ranks: int
    replicas: int
    regathered: bool


def fsdp_bytes(
    weights: Iterable[ShardedWeights], gathered: int, reduced: int, microbatches: int
) -> dict[str, int]:
    """All-gathers, reduce-scatters and HSDP's all-reduces of a step, each by ring.

    Args:
        gathered, reduced: bytes of a number of a weight, and of its gradient, on the wire.
    """
    gathers = scatters = reduces = 0
    for each in weights:
        others = each.ranks - 1
        gathers += others * each.numbers * gathered * (2 if each.regathered else 1)
        scatters += others * each.numbers * reduced
        reduces += 2 * (each.replicas - 1) * each.numbers * reduced // each.replicas
    return {
        "FSDP2 all-gather": gathers * microbatches,
        "FSDP2 reduce-scatter": scatters * microbatches,
        "HSDP all-reduce": reduces * microbatches,
    }


def exchange_bytes(config: TransformerConfig, tokens: int, ranks: int, itemsize: int) -> int:
    """Of attention in one layer and microbatch, forward and backward: queries, keys and values, and
    the way back of what attention gives.

    Args:
        tokens: T.
        ranks: that share a sequence.
        itemsize: of what attention computes with.
    """
    heads = config.num_heads
    kv_heads = heads if config.latent is not None else math.lcm(config.kv_heads, ranks)
    there = heads * config.head_size + kv_heads * (config.head_size + config.value_head_size)
    numbers = tokens * (there + heads * config.value_head_size)
    return 2 * numbers * itemsize * (ranks - 1) // ranks


def dispatch_bytes(
    dispatcher: str, config: MoEConfig, hidden_size: int, tokens: int, ranks: int, itemsize: int
) -> tuple[float, float]:
    """Of one layer in one microbatch, forward and backward: dispatch, and combine.

    Args:
        tokens: T.
        ranks: W.
        itemsize: of the rows.
    """
    others, top_k = ranks - 1, config.top_k
    row, pair = hidden_size * itemsize, 8 + 4  # expert number and weight
    if dispatcher == "all_to_all":
        # A balanced routing; and the counts of the rows.
        rows = 2.0 * tokens * top_k * row * others / ranks
        return rows + 8.0 * config.num_experts * others / ranks, rows
    # Weights have gradients, expert numbers have none.
    pairs = tokens * top_k * others * (pair + 4)
    if dispatcher == "all_gather":
        rows = 2.0 * tokens * others * row
        return rows + pairs, rows
    # symmetric: a token once to every rank that has any of its experts, chosen at random.
    elsewhere = config.num_experts - config.num_experts // ranks
    reached = 1 - math.comb(elsewhere, top_k) / math.comb(config.num_experts, top_k)
    rows = 2.0 * tokens * others * reached * row
    return rows + pairs, rows


def tensor_bytes(
    config: TransformerConfig, tokens: int, ranks: int, itemsize: int, weights_itemsize: int
) -> float:
    """Of tensor parallelism in one microbatch, forward and backward, each all-reduce by ring.

    Args:
        tokens: T.
        itemsize: of activations; of the embedding it is ``weights_itemsize``.
    """
    has_shared_expert = config.moe is not None and config.moe.shared_ffn_hidden_size > 0
    moe_layers = sum(config.is_moe_layer(index) for index in range(config.num_layers))
    halves = 2 * config.num_layers - (0 if has_shared_expert else moe_layers)
    # Every half forward and backward, the head backward, the embedding forward.
    row = config.hidden_size * ((2 * halves + 1) * itemsize + weights_itemsize)
    # Cross entropy gathers two fp32 numbers of a row.
    return tokens * (ranks - 1) * (2.0 * row / ranks + 8)


def peer_memory_bytes(
    config: MoEConfig, hidden_size: int, tokens: int, ranks: int, itemsize: int, halves: int
) -> int:
    """What ``symmetric`` shares with the other ranks, once for all layers. With ``one_barrier``
    it has two halves."""
    return halves * ranks * tokens * (hidden_size * itemsize + config.top_k * (8 + 4))
