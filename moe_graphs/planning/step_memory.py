"""Memory of a step on one rank, whose microbatches run in the order of the schedule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_graphs.planning.microbatch_memory import MicrobatchMemory
from moe_graphs.planning.weights_around import Part, WeightsAround

Action = tuple[str, int]
"""Kind of an action, and the number of its stage on the rank, from 0.

The kind is ``F``, ``B``, ``UNSHARD`` (the whole stage is gathered) or ``RESHARD`` (it is freed).
"""


@dataclass(frozen=True)
class StageCosts:
    """Bytes of a stage; the last two are tensors that variables of torch's schedules hold.

    Attributes:
        parts, groups: as in ``WeightsAround``.
        sending: gradient that is being sent, from the end of a backward to the end of the next one.
        sent: messages of a microbatch, from the end of its backward to the end of the step.
    """

    memory: MicrobatchMemory
    parts: Sequence[Part]
    groups: Sequence[int]
    sending: int = 0
    sent: int = 0


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step.

    Attributes:
        peak: peak bytes besides those held between steps, gradients included.
        in_flight: for each stage, the largest number of microbatches between forward and backward.
        activations, weight_copies: peak bytes over all microbatches in flight.
        gathers: for each stage and part, how often a step gathers it.
    """

    peak: int
    in_flight: tuple[int, ...]
    activations: int
    weight_copies: int
    gathers: tuple[tuple[int, ...], ...]


def step_memory(
    actions: Sequence[Action], stages: Sequence[StageCosts], *, deferred: bool
) -> StepMemory:
    """Follow the actions of a step and add up its memory.

    Args:
        deferred: as in ``WeightsAround``.
    """
    states = [_Stage(each, deferred) for each in stages]
    left = Counter(stage for kind, stage in actions if kind == "B")
    peak, flights = 0, []
    for kind, number in actions:
        stage = states[number]
        others = sum(each.between() for each in states if each is not stage)
        if kind in ("F", "B"):
            peak = max(peak, others + stage.run(kind == "B"))
            flights.append([each.in_flight for each in states])
        else:
            stage.gather(set(range(len(stage.costs.parts))) if kind == "UNSHARD" else set())
        left[number] -= kind == "B"
        if kind == "B" and not left[number]:
            peak = max(peak, others + stage.reduce())
    memories = [each.memory for each in stages]

    def most(name: str) -> int:
        sizes = [getattr(memory, name) for memory in memories]
        return max(sum(n * size for n, size in zip(f, sizes, strict=True)) for f in flights)

    return StepMemory(
        peak=peak,
        in_flight=tuple(max(counts) for counts in zip(*flights, strict=True)),
        activations=most("activations"),
        weight_copies=most("weight_copies"),
        gathers=tuple(
            tuple(each.gathers[part] for part in range(len(each.costs.parts))) for each in states
        ),
    )


@dataclass
class _Stage:
    costs: StageCosts
    deferred: bool
    in_flight: int = 0
    around: WeightsAround = field(init=False)
    reduced: bool = False
    over: int = 0
    gathers: Counter[int] = field(default_factory=Counter)
    _known: dict[tuple[bool, WeightsAround], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts, groups = tuple(self.costs.parts), tuple(self.costs.groups)
        self.around = WeightsAround(parts, groups, deferred=self.deferred)

    def gather(self, parts: set[int]) -> None:
        self.gathers.update(parts - self.around.before)
        self.around = dataclasses.replace(self.around, before=frozenset(parts))

    def between(self) -> int:
        """Bytes while another stage computes."""
        return self._kept() + self.around.between(self.reduced)

    def run(self, backward: bool) -> int:
        """Finish a microbatch's forward or backward; return the peak bytes within it."""
        self.in_flight -= backward
        beside = self.costs.sending if self.over else 0
        peak = self._kept() + beside + self._within(backward)
        every = range(len(self.costs.parts))
        self.gather(set(every))
        if backward:
            self.over += 1
            self.around = dataclasses.replace(self.around, accumulated=True)
            self.gather(set(every) if self.deferred else set())
        else:
            self.in_flight += 1
            self.gather({number for number in every if self.costs.parts[number].stays})
        return peak

    def reduce(self) -> int:
        """Reduce the gradients at the end of the step; return the peak bytes meanwhile."""
        peak = self._kept() + self.around.reducing()
        self.reduced = True
        self.gather(set())
        return peak

    def _kept(self) -> int:
        return self.in_flight * self.costs.memory.kept + self.over * self.costs.sent

    def _within(self, backward: bool) -> int:
        found = self._known.get((backward, self.around))
        if found is None:
            moments = self.costs.memory.moments
            here = [moment for moment in moments if moment.backward == backward]
            found = max(moments[moment] + self.around(moment) for moment in here)
            self._known[backward, self.around] = found
        return found
