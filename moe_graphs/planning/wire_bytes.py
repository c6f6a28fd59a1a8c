"""Bytes that a rank receives from other ranks in a step; rank 0 sends as many.

Shapes: T tokens of a rank in a microbatch, W ranks that share the experts, D model, K top-k,
E experts, e local experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moe_graphs.layers import MoEConfig


@dataclass(frozen=True)
class ShardedWeights:
    """Size of weights that FSDP2 shards.

    Attributes:
        numbers: number of elements of a rank's shard, with the padding of the collectives.
        ranks: number of ranks over which the weights are sharded.
        replicas: number of copies of the sharded weights (HSDP).
        regathered: whether the weights are freed between forward and backward, and so gathered
            twice in a microbatch.
    """

    numbers: int
    ranks: int
    replicas: int
    regathered: bool


def fsdp_bytes(
    weights: Mapping[str, ShardedWeights],
    gathered: int,
    reduced: int,
    gathers: Mapping[str, int],
    reductions: int,
) -> dict[str, int]:
    """Bytes of all-gathers, reduce-scatters and HSDP's all-reduces of a step, all taken as rings.

    Args:
        weights: the sharded weights, by name.
        gathered, reduced: bytes per element of a gathered weight, and of a reduced gradient.
        gathers: for each name, how often a step gathers the weight.
        reductions: how often a step reduces gradients.
    """
    gathering = scatters = reduces = 0
    for name, each in weights.items():
        others = each.ranks - 1
        gathering += others * each.numbers * gathered * gathers[name]
        scatters += others * each.numbers * reduced
        reduces += 2 * (each.replicas - 1) * each.numbers * reduced // each.replicas
    return {
        "FSDP2 all-gather": gathering,
        "FSDP2 reduce-scatter": scatters * reductions,
        "HSDP all-reduce": reduces * reductions,
    }


def dispatch_bytes(
    dispatcher: str, config: MoEConfig, hidden_size: int, tokens: int, ranks: int, itemsize: int
) -> tuple[float, float]:
    """Bytes of dispatch and of combine, for one layer's forward and backward of one microbatch.

    Args:
        tokens: T.
        ranks: W.
        itemsize: bytes per element of the rows.
    """
    others, top_k = ranks - 1, config.top_k
    row, pair = hidden_size * itemsize, 8 + 4  # a pair has an int64 expert number and a weight
    if dispatcher == "all_to_all":
        # The rows of a balanced routing, and their counts.
        rows = 2.0 * tokens * top_k * row * others / ranks
        return rows + 8.0 * config.num_experts * others / ranks, rows
    # Gradients of weights travel back; expert numbers have none.
    pairs = tokens * top_k * others * (pair + 4)
    if dispatcher == "all_gather":
        rows = 2.0 * tokens * others * row
        return rows + pairs, rows
    # `symmetric` sends a token once to every rank with any of its experts, here taken as random.
    elsewhere = config.num_experts - config.num_experts // ranks
    reached = 1 - math.comb(elsewhere, top_k) / math.comb(config.num_experts, top_k)
    rows = 2.0 * tokens * others * reached * row
    return rows + pairs, rows


def peer_memory_bytes(
    config: MoEConfig, hidden_size: int, tokens: int, ranks: int, itemsize: int
) -> int:
    """Bytes that ``symmetric`` shares with the other ranks, once for all layers."""
    return ranks * tokens * (hidden_size * itemsize + config.top_k * (8 + 4))
