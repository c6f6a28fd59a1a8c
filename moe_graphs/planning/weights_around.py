"""Weights and gradients that FSDP2 holds besides a rank's shards, while a microbatch runs.

FSDP2 itself needs streams and collectives, which fake tensors do not have. So this module repeats
the order in which ``torch.distributed.fsdp`` gathers and reduces the parts of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from moe_graphs.kernels.local_part import local_part
from moe_graphs.planning.microbatch_memory import Moment, part_of, parts_of
from moe_graphs.planning.wire_bytes import ShardedWeights


@dataclass(frozen=True)
class Part:
    """Bytes of weights and gradients that FSDP2 gathers and reduces together.

    Attributes:
        gathered: weights of the whole part; 0 if nothing is sharded.
        stays: whether the gathered weights stay from forward to backward.
        unreduced: gradients of the whole part during their reduction, in the reduction's dtype.
        gradients: this rank's gradients after the reduction.
    """

    gathered: int = 0
    stays: bool = True
    unreduced: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class WeightsAround:
    """Function from a microbatch's ``Moment`` to the bytes of weights and gradients.

    While a part computes, the next part is gathered; in the backward, the gradients of the part
    that computed before are reduced meanwhile.

    Attributes:
        parts: the parts, in the order of the forward.
        groups: for each ``Moment.part``, the number of the part in ``parts`` that contains it.
        before: numbers of the parts that are gathered when the microbatch begins.
        accumulated: whether there are gradients of earlier microbatches.
        deferred: whether weights stay gathered after the backward and gradients stay whole until
            the end of the step, when they are reduced. Pipelines do that.
    """

    parts: Sequence[Part]
    groups: Sequence[int]
    before: frozenset[int] = frozenset()
    accumulated: bool = False
    deferred: bool = False

    def __call__(self, moment: Moment) -> int:
        total, moment = 0, moment._replace(part=self.groups[moment.part])
        for number, part in enumerate(self.parts):
            if self._is_gathered(number, moment):
                total += part.gathered
            total += self._gradients(number, moment)
        return total

    def _is_gathered(self, number: int, moment: Moment) -> bool:
        now, stays = moment.part, self.parts[number].stays
        if number == now:
            return True
        if not moment.backward:
            return stays if number < now else number == now + 1 or number in self.before
        if number > now:
            return self.deferred
        return stays or number in self.before or (moment.graded and number == now - 1)

    def _gradients(self, number: int, moment: Moment) -> int:
        part, now = self.parts[number], moment.part
        earlier = moment.graded and number > now
        if not part.gathered or not self.deferred:
            there = self.accumulated or earlier or (moment.graded and number == now)
            total = part.gradients if there else 0
            if moment.graded and number == now:
                total += part.gathered  # new gradients have the size of the gathered weights
            if moment.graded and number == now + 1:
                total += part.unreduced
            return total
        total = part.unreduced if self.accumulated or earlier else 0
        # New gradients are added in place, unless they are the first ones or have another dtype
        # than the reduction.
        if moment.graded and number == now:
            same = self.accumulated and part.gathered == part.unreduced
            total += 0 if same else part.gathered
        return total

    def between(self, reduced: bool) -> int:
        """Bytes between microbatches.

        Args:
            reduced: whether all gradients of the step have been reduced.
        """
        total = 0
        for number, part in enumerate(self.parts):
            whole = self.deferred and part.gathered and not reduced
            total += part.gathered if number in self.before else 0
            total += (part.unreduced if whole else part.gradients) if self.accumulated else 0
        return total

    def reducing(self) -> int:
        """Peak bytes while deferred gradients are reduced."""
        return self.between(False) + max(part.unreduced for part in self.parts)


def groups_of(model: nn.Module, layers_per_group: int) -> dict[str, int]:
    """Number of the group that is gathered together, for each name of ``parts_of``."""
    groups: dict[str, int] = {}
    layers = 0
    for part in parts_of(model):
        continues = part.startswith("layers.") and layers % layers_per_group
        groups[part] = max(groups.values(), default=-1) + (0 if continues else 1)
        layers += part.startswith("layers.")
    return groups


def fsdp_parts(
    model: nn.Module,
    weights: Mapping[str, ShardedWeights],
    groups: Mapping[str, int],
    gathered: int,
    reduced: int,
) -> list[Part]:
    """Parts of a model, in the order of the forward.

    Args:
        weights: the weights that FSDP2 shards, by name.
        groups: the result of ``groups_of``.
        gathered, reduced: bytes per element of a gathered weight, and of a reduced gradient.
    """
    parts = [Part()] * (1 + max(groups.values()))
    for name, parameter in model.named_parameters():
        number = groups[part_of(name)]
        before = parts[number]
        each = weights.get(name)
        numbers = each.numbers * each.ranks if each else 0
        parts[number] = Part(
            gathered=before.gathered + numbers * gathered,
            stays=not each.regathered if each else before.stays,
            unreduced=before.unreduced + numbers * reduced,
            gradients=before.gradients
            + (local_part(parameter).nbytes if parameter.requires_grad else 0),
        )
    return parts


def most_around(parts: Sequence[Part], *, deferred: bool) -> dict[str, int]:
    """Peak bytes of gathered weights and of unreduced gradients, by name."""
    whole = [part.gathered for part in parts]
    unreduced = [part.unreduced for part in parts]
    if deferred:
        return {
            "gathered weights": sum(whole),
            "gradients before their reduction": sum(unreduced) + max(unreduced),
        }
    freed = [0 if part.stays else part.gathered for part in parts]
    behind = [*unreduced[1:], 0]
    return {
        "gathered weights": sum(whole) - sum(freed) + _two(freed),
        "gradients before their reduction": max(map(sum, zip(whole, behind, strict=True))),
    }


def _two(sizes: list[int]) -> int:
    """Largest sum of two neighbours."""
    return max(sum(sizes[start : start + 2]) for start in range(len(sizes)))
