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
    weights: Mapping[str, ShardedWeights],
    gathered: int,
    reduced: int,
    gathers: Mapping[str, int],
    reductions: int,
) -> dict[str, int]:
    """All-gathers, reduce-scatters and HSDP's all-reduces of a step, each by ring.

    Args:
        weights: by name.
        gathered, reduced: bytes of a number of a weight, and of its gradient, on the wire.
        gathers: how often the weight of a name is gathered in a step.
        reductions: how often gradients are reduced.
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


def peer_memory_bytes(
    config: MoEConfig, hidden_size: int, tokens: int, ranks: int, itemsize: int
) -> int:
    """What ``symmetric`` shares with the other ranks, once for all layers."""
    return ranks * tokens * (hidden_size * itemsize + config.top_k * (8 + 4))
