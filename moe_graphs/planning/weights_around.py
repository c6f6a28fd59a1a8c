"""Weights and gradients that FSDP2 holds beside a rank's share, while a microbatch goes by.

The order in which it gathers and reduces parts of a model is written down here from
``torch.distributed.fsdp``: it needs streams and collectives, which fake tensors do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor import DTensor

from moe_graphs.layers import LanguageModel
from moe_graphs.planning.wire_bytes import ShardedWeights


@dataclass
class Part:
    """What is gathered and reduced together; bytes.

    Attributes:
        gathered: weights of the whole part, 0 where nothing is sharded.
        stays: whether they stay from forward to backward.
        unreduced: gradients of the whole part on their way, in the dtype of the reduction.
        gradients: what is left of them on this rank.
    """

    gathered: int = 0
    stays: bool = True
    unreduced: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class WeightsAround:
    """Called with the name of a parameter and whether the backward runs: bytes at that time.

    While a part computes, the next one is gathered, and in the backward the gradients of the one
    before are reduced. Gradients of earlier microbatches are there all the time.
    """

    parts: Mapping[str, Part]
    microbatches: int
    layers_per_group: int = 1

    def __call__(self, name: str, backward: bool) -> int:
        parts = list(self.parts.values())
        now = list(self.parts).index(part_of(name, self.layers_per_group))
        next_one = now - 1 if backward else now + 1
        total = 0
        for index, part in enumerate(parts):
            staying = part.stays and index <= max(now, next_one)
            if staying or index in (now, next_one):
                total += part.gathered
            if backward and index == now:
                total += part.gathered  # its gradients, as they are made
            if backward and index == now + 1:
                total += part.unreduced
            if self.microbatches > 1 or (backward and index >= now):
                total += part.gradients
        return total


def fsdp_parts(
    model: LanguageModel,
    weights: Mapping[str, ShardedWeights],
    gathered: int,
    reduced: int,
    layers_per_group: int,
) -> dict[str, Part]:
    """In the order of the forward.

    Args:
        weights: by name; empty for a model that is not sharded.
        gathered, reduced: bytes of a number of a weight, and of its gradient, on the wire.
    """
    parts: dict[str, Part] = {}
    for name, parameter in model.named_parameters():
        part = parts.setdefault(part_of(name, layers_per_group), Part())
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part.gradients += local.nbytes if parameter.requires_grad else 0
        if name in weights:
            each = weights[name]
            part.stays = not each.regathered
            part.gathered += each.numbers * each.ranks * gathered
            part.unreduced += each.numbers * each.ranks * reduced
    return parts


def most_around(parts: Mapping[str, Part]) -> dict[str, int]:
    """Each at its most, by name."""
    every = list(parts.values())
    freed = [0 if part.stays else part.gathered for part in every]
    staying = sum(part.gathered for part in every if part.stays)
    return {
        "gathered weights": staying + _two(freed),
        "gradients before their reduction": max(
            each.gathered + before.unreduced
            for each, before in zip(every, [*every[1:], Part()], strict=True)
        ),
    }


def part_of(name: str, layers_per_group: int) -> str:
    """As ``parallelize`` groups them: the norm at the end goes with the head."""
    first, *rest = name.split(".")
    if first != "layers":
        return first.replace("norm", "head")
    return f"layers.{int(rest[0]) // layers_per_group}"


def _two(sizes: list[int]) -> int:
    """Of two neighbours."""
    return max(sum(sizes[start : start + 2]) for start in range(len(sizes)))
