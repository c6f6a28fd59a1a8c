"""Bytes that FSDP2 receives from other ranks in a step; rank 0 sends as many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
